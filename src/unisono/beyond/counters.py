"""Counters and locks that the ranks of a group share.

Those with a name are in the store of the group: the ranks that use them make no call together, and
the other ranks may do anything else meanwhile. Those without a name, which all ranks make together,
are in shared memory if the group has one host and C++.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

import numpy as np

from unisono.beyond.windows.memory import shared_part
from unisono.core.base.deadline import Deadline, Timeout
from unisono.core.c10d.arguments import reporting_bad_arguments
from unisono.core.groups.world import require_group
from unisono.core.stores import PrefixStore, Store
from unisono.core.stores.api import INT64_MAX, INT64_MIN, check_integer
from unisono.errors import (
    ArgumentTypeError,
    ClosedError,
    CollectiveTimeoutError,
    Context,
    InvalidArgumentError,
    PeerLostError,
    StoreKeyError,
    StoreTimeoutError,
    UnisonoError,
    UsageError,
)

# Seconds between two checks of a rank that waits for a lock whether the holder is alive. A smaller
# value costs requests to the store; a larger value delays the report of a lost holder.
_CHECK_S = 0.5
# The same in shared memory, where a check costs no request.
_CHECK_MEMORY_S = 0.02


class _Cells:
    """Integers of 64 bits that all ranks of a group map, and a signal for each rank.

    Every change is an atomic exchange, so that it publishes what the rank has written before.
    """

    def __init__(self, me: int, size: int, part: Any, is_crowded: bool) -> None:
        self.me, self.size, self.part, self.is_crowded = me, size, part, is_crowded

    def read(self, at: int, count: int = 1) -> list[int]:
        found = np.empty(count, np.int64)
        self.part.get(found, at)
        return found.tolist()

    def swap(self, at: int, expected: int, desired: int) -> bool:
        """Set a cell if it is `expected`; return whether it was."""
        cell = np.array([expected], np.int64)
        self.part.compare_and_swap(cell, np.array([desired], np.int64), at)
        return bool(cell[0] == expected)

    def add(self, at: int, n: int) -> int:
        """Add to a cell, and return the sum."""
        while INT64_MIN <= (after := (before := self.read(at)[0]) + n) <= INT64_MAX:
            if self.swap(at, before, after):
                return after
        raise StoreKeyError(f"a counter at {before}: the sum {after} does not fit into 64 bits")


class _Named:
    """Keys in the store of a group that its members find by a name, or cells without a name."""

    def __init__(self, group: Any, name: str | None, start: int | None, cells: int = 1) -> None:
        self._group = pg = require_group(group)
        kind, settings = type(self).__name__, ""
        alone = isinstance(name, str)
        with contextlib.nullcontext() if alone else reporting_bad_arguments(pg, kind):
            if name is not None and not alone:
                raise ArgumentTypeError(f"{kind}: name must be str, got {type(name).__name__}")
            if start is not None:
                self._start = check_integer(start, "start")
                settings = f"start={self._start}"
        self.name: str | int = name if name is not None else pg.counts[kind]
        self._cells: _Cells | None = None
        if name is None:
            pg.agree(f"{kind}({settings})")
            pg.counts[kind] += 1  # not before: after a mismatch the ranks would count differently
            if (part := shared_part(pg, kind, cells)) is not None:
                cpu: Any = pg.backends["cpu"]
                crowded = cpu.comm.transport.is_crowded
                self._cells = _Cells(pg.rank(), pg.size(), part, crowded)

    def _check_open(self) -> Any:
        """Return the first backend of the group."""
        backends = [*self._group.backends.values()]
        if not backends:
            raise ClosedError(f"{self!r}, which was destroyed")
        return backends[0]

    @property
    def _store(self) -> Store:
        self._check_open()
        key = f"{self.name}" if isinstance(self.name, int) else f"named/{self.name}"
        return PrefixStore(f"{type(self).__name__}/{key}", self._group.store)

    def __repr__(self) -> str:
        return f"{type(self).__name__} {self.name!r} of group '{self._group.name}'"


class Counter(_Named):
    """A number that any member of a group reads and increases at any time, each value once.

        tasks = dist.Counter(name="tasks")
        while (task := tasks.fetch_add()) < 100:
            work_on(task)

    All counters of a group with the same name are the same counter. A new group has no counters.

    Args:
        group: The default group if None.
        name: Name of the counter. If None, the counter is new: all members must call, in the same
            order as their other collective calls.
        start: The first value; equal on all members.

    Raises:
        ArgumentTypeError: `name` is not a str, or `start` not an int.
        InvalidArgumentError: This rank is no member, or another rank gave another `start`.
        CollectiveMismatchError: Without a name, if members make different calls.

    Cost:
        With a name, or if the group has several hosts: one request to the store for each call. All
        ranks of one host together draw about 20,000 values per second from a TCPStore, and 5,000
        from a FileStore, which mpiexec's ranks use. Else 3 us, in shared memory.
    """

    def __init__(self, group: Any = None, name: str | None = None, start: int = 0) -> None:
        super().__init__(group, name, start)
        if self._cells is not None:
            return
        mine = str(self._start)
        given = self._store.compare_set("start", "", mine).decode()
        if given != mine:
            raise InvalidArgumentError(f"{self!r} starts at {given} on another rank, not at {mine}")

    def fetch_add(self, n: int = 1) -> int:
        """Add `n`, which may be negative, and return the value before.

        Raises:
            ArgumentTypeError: `n` is not an int.
            ClosedError: The group was destroyed.
            StoreError: The store cannot be reached, or the sum of all `n` leaves 64 bits.
        """
        n = check_integer(n, "n")
        if self._cells is not None:
            self._check_open()
            return self._start + self._cells.add(0, n) - n
        return self._start + self._store.add("value", n) - n

    def value(self) -> int:
        """Return the value, which other ranks may change at any time."""
        return self.fetch_add(0)


class Lock(_Named):
    """A lock that one member of a group holds at a time; the members get it in turn.

        with dist.Lock(name="log"):
            append_to_file()

    All locks of a group with the same name are the same lock. The ranks get it in the order in
    which they ask. A Lock object serves one thread; other threads of the rank need an object of
    their own, of the same name. A lock without a name thus serves one thread of each rank.

    If a rank is lost while it holds the lock, or waits for it, the lock is never free again. The
    other ranks raise PeerLostError, because the lost rank may have left its work undone. If Ctrl-C
    cuts short the request for a lock with a name, they may time out.

    Args:
        group: The default group if None.
        name: Name of the lock. If None, the lock is new, as in `Counter`.

    Raises:
        ArgumentTypeError: `name` is not a str.
        InvalidArgumentError: This rank is no member.
        CollectiveMismatchError: Without a name, if members make different calls.
    """

    def __init__(self, group: Any = None, name: str | None = None) -> None:
        pg = require_group(group)
        super().__init__(pg, name, None, cells=_ASKS + pg.size())
        self._pid = os.getpid()
        # The turn for which a thread waits, or which it has. An entry is set by one atomic
        # `setdefault`, so that an interrupt leaves no doubt whose it is.
        self._user: dict[str, _StoreTurn | _MemoryTurn] = {}

    def acquire(self, timeout: Timeout | None = None) -> None:
        """Wait until all ranks that asked before have released the lock, and take it.

        Args:
            timeout: The group's if None.

        Raises:
            CollectiveTimeoutError: The lock was not free in time; names the rank that holds it.
            PeerLostError: The rank whose turn it is has ended, or has left the default group. If it
                destroyed only a sub-group, the call times out and names it.
            UsageError: This object holds the lock already, or another thread waits with it.
            ClosedError: The group was destroyed, or this process is a fork of the rank.
        """
        deadline = Deadline(self._group.timeout_s if timeout is None else timeout)
        self._check_own()
        turn: _StoreTurn | _MemoryTurn
        if self._cells is not None:
            turn = _MemoryTurn(self._cells)
        else:
            turn = _StoreTurn(self._store, self._group.rank())
        try:
            if (user := self._user.setdefault("turn", turn)) is not turn:
                doing = "holds" if user.has_come else "waits for"
                raise UsageError(
                    f"acquire: this rank {doing} {self!r} already",
                    hint="give each thread a Lock object of its own, of the same name",
                )
            turn.ask()
            while not turn.wait(deadline.remaining()):
                self._check_holder(turn, deadline)
            turn.has_come = True
        except BaseException:
            self._leave(turn, turn.give_up)
            raise

    def release(self) -> None:
        """Pass the lock on to the rank that has waited longest.

        Raises:
            UsageError: This object does not hold the lock.
            ClosedError: The group was destroyed, or this process is a fork of the rank.
        """
        turn = self._user.get("turn")
        if turn is None or not turn.has_come:
            raise UsageError(f"release: this rank does not hold {self!r}")
        self._check_own()
        self._leave(turn, turn.pass_on)

    def _check_own(self) -> None:
        self._check_open()
        if os.getpid() != self._pid:
            raise ClosedError(f"{self!r}, which belongs to the parent of this fork")

    def _leave(self, turn: _StoreTurn | _MemoryTurn, step: Callable[[], None]) -> None:
        """Take the last step of a turn. What cuts it short, such as Ctrl-C, comes after it."""
        if self._user.get("turn") is not turn:
            return
        try:
            step()
        except UnisonoError:
            raise
        except BaseException:
            step()
            raise
        finally:
            self._user.pop("turn", None)

    def _check_holder(self, turn: _StoreTurn | _MemoryTurn, deadline: Deadline) -> None:
        """Raise an error if the time is over, or if the rank that has its turn is lost."""
        pg, backend = self._group, self._check_open()
        me, (rank, holder), reason = pg.ranks[pg.rank()], turn.holder(), None
        peers: tuple[int, ...] = ()
        if rank >= 0:
            peers = (pg.ranks[rank],)
            holder = f"rank {peers[0]}"
            reason = backend.lost(rank)
            if reason is not None and turn.holder()[0] != rank:
                return  # it has passed the lock on before it left
        context = Context(rank=me, group=pg.name, op="acquire", peers=peers, usable=True)
        if reason is not None:
            raise PeerLostError(
                f"acquire of {self!r} failed on rank {me}: {holder}, whose turn it is, was lost: "
                f"{reason}",
                context=context,
                hint="this lock stays taken; other ranks can go on with another lock",
            )
        if deadline.expired():
            raise CollectiveTimeoutError(
                f"acquire of {self!r} timed out after {deadline} on rank {me}: {holder} holds it",
                context=context,
            )

    def __enter__(self) -> Lock:
        self.acquire()
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


class _StoreTurn:
    """The turn of a rank at a lock in a store: the ranks draw tickets."""

    has_come = False

    def __init__(self, store: Store, rank: int) -> None:
        self._store, self._rank, self._ticket = store, rank, -1

    def ask(self) -> None:
        self._ticket = self._store.add("next", 1) - 1
        self._store.set(f"rank/{self._ticket}", str(self._rank))

    def wait(self, limit_s: float) -> bool:
        """Wait for the turn, but not for long; return whether it has come."""
        if not self._ticket:
            return True  # at once, because no release is before it
        try:
            self._store.wait([f"turn/{self._ticket}"], min(_CHECK_S, limit_s))
        except StoreTimeoutError:
            return False
        return True

    def holder(self) -> tuple[int, str]:
        """Return the rank that has its turn, -1 if it is not known, and words for it."""
        ticket = self._store.add("serving", 0)
        # Stores nothing if there is no value.
        rank = int(self._store.compare_set(f"rank/{ticket}", "-1", "-1"))
        return rank, f"the rank with ticket {ticket}"

    def give_up(self) -> None:
        ticket, store = self._ticket, self._store
        if ticket < 0:
            return
        if (
            self.has_come
            or not ticket
            or store.compare_set(f"turn/{ticket}", "", "gone") != b"gone"
        ):
            self.has_come = True  # meanwhile
            self.pass_on()

    def pass_on(self) -> None:
        """Give the turn to the first later ticket whose rank has not given up.

        Each step may be done twice, so that the call can be made again if it was cut short.
        """
        given, store = b"", self._store
        while given != b"given":
            ticket = self._ticket
            given = store.compare_set(f"turn/{ticket + 1}", "", "given")
            self._serve(ticket + 1)
            store.delete_key(f"turn/{ticket}")
            # Last: if this rank is killed here, the other ranks can still name it.
            store.delete_key(f"rank/{ticket}")
            if given == b"gone":
                self._ticket = ticket + 1

    def _serve(self, ticket: int) -> None:
        """Set the ticket whose turn it is, unless a later rank was here before this one."""
        before, after = str(ticket - 1), str(ticket)
        while int(found := self._store.compare_set("serving", before, after).decode()) < ticket:
            before = "" if found == before else found  # the same: there is no value yet


# Cells of a lock: how many tickets were drawn; whose turn it is; and for each rank the ticket with
# which it waits, 0 if it does not. The turn is 0 if the lock is free, rank + 1 if it is offered to
# a rank, and -(rank + 1) if the rank has taken it.
_DRAWN, _TURN, _ASKS = 0, 1, 2


class _MemoryTurn:
    """The turn of a rank at a lock in shared memory."""

    has_come = False

    def __init__(self, cells: _Cells) -> None:
        self._cells, self._mine = cells, cells.me + 1

    def ask(self) -> None:
        cells, drawn = self._cells, -1
        while drawn < 0 or not cells.swap(_DRAWN, drawn, drawn + 1):
            drawn = cells.read(_DRAWN)[0]
            # Before it is drawn: no later ticket may be served while this one is not seen.
            self._set_ask(drawn + 1)

    def wait(self, limit_s: float) -> bool:
        """Wait for the turn, but not for long; return whether it has come."""
        cells = self._cells
        signals = cells.part.signals(cells.me)
        # Again in each wait, because a rank may have set the lock free without seeing this one.
        if cells.swap(_TURN, 0, -self._mine):
            self.pass_on()
        if not self._take():
            limit_s = min(_CHECK_MEMORY_S, limit_s)
            cells.part.wait_signal(cells.me, signals, limit_s, cells.is_crowded)
            if not self._take():
                return False
        self._set_ask(0)
        return True

    def _take(self) -> bool:
        return self._cells.swap(_TURN, self._mine, -self._mine)

    def holder(self) -> tuple[int, str]:
        """Return the rank that has its turn, -1 if none has, and words for it."""
        return abs(self._cells.read(_TURN)[0]) - 1, "no rank"

    def give_up(self) -> None:
        self._set_ask(0)
        self._take()
        if self._cells.read(_TURN)[0] == -self._mine:
            self.pass_on()  # the turn has come meanwhile

    def pass_on(self) -> None:
        """Offer the turn, which this rank has taken, to the rank with the lowest ticket.

        The call can be made again if it was cut short.
        """
        cells, held = self._cells, -self._mine
        while True:
            turn, *tickets = cells.read(_TURN, 1 + cells.size)
            if turn > 0 and not tickets[turn - 1]:
                cells.swap(_TURN, turn, held)  # this call, cut short, did not take it back
            asks = [(ticket, rank) for rank, ticket in enumerate(tickets) if ticket]
            if not asks:
                cells.swap(_TURN, held, 0)
                # A rank that has asked meanwhile has seen that the turn was taken.
                if not any(cells.read(_ASKS, cells.size)) or not cells.swap(_TURN, 0, held):
                    return
                continue
            ticket, rank = min(asks)
            cells.swap(_TURN, held, rank + 1)
            cells.part.signal(rank)
            # A rank that has given up meanwhile does not take it. Exchanged, not read: a read may
            # come before the offer.
            is_asking = cells.swap(_ASKS + rank, ticket, ticket)
            if is_asking or not cells.swap(_TURN, rank + 1, held):
                return

    def _set_ask(self, ticket: int) -> None:
        at = _ASKS + self._cells.me
        self._cells.swap(at, self._cells.read(at)[0], ticket)
