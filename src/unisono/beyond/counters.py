"""Counters and locks that the ranks of a group share, on the store of the group.

Both need only the store: the ranks that use them make no call together, and the other ranks may do
anything else meanwhile.
"""

from __future__ import annotations

from typing import Any

from unisono.core.base.deadline import Deadline, Timeout
from unisono.core.groups.world import require_group
from unisono.core.stores import PrefixStore, Store
from unisono.core.stores.api import check_integer
from unisono.errors import (
    ArgumentTypeError,
    ClosedError,
    CollectiveTimeoutError,
    Context,
    InvalidArgumentError,
    PeerLostError,
    StoreTimeoutError,
    UsageError,
)

# Seconds between two checks of a rank that waits for a lock whether the holder is alive. A smaller
# value costs requests to the store; a larger value delays the report of a lost holder.
_CHECK_S = 0.5


class _Named:
    """Keys in the store of a group that its members find by a name."""

    def __init__(self, group: Any, name: str | None, settings: str) -> None:
        self._group = pg = require_group(group)
        kind = type(self).__name__
        if name is not None and not isinstance(name, str):
            raise ArgumentTypeError(f"{kind}: name must be str, got {type(name).__name__}")
        self.name: str | int = name if name is not None else pg.counts[kind]
        if name is None:
            pg.counts[kind] += 1
            pg.agree(f"{kind}({settings})")

    @property
    def _store(self) -> Store:
        if not self._group.backends:
            raise ClosedError(f"{self!r}, which was destroyed")
        key = f"{self.name}" if isinstance(self.name, int) else f"named/{self.name}"
        return PrefixStore(f"{type(self).__name__}/{key}", self._group.store)

    def __repr__(self) -> str:
        return f"{type(self).__name__} {self.name!r} of group '{self._group.name}'"


class Counter(_Named):
    """A number that any member of a group reads and increases at any time, each value once.

        tasks = dist.Counter(name="tasks")
        while (task := tasks.fetch_add()) < 100:
            work_on(task)

    All counters of a group with the same name are the same counter. The ranks are served in the
    order in which their requests reach the store. A new group has no counters.

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
        One request to the store for each call. All ranks of one host together draw about 20,000
        values per second from a TCPStore, and 5,000 from a FileStore, which mpiexec's ranks use.
    """

    def __init__(self, group: Any = None, name: str | None = None, start: int = 0) -> None:
        self._start = check_integer(start, "start")
        super().__init__(group, name, f"start={self._start}")
        mine = str(self._start)
        given = self._store.compare_set("start", "", mine).decode()
        if given != mine:
            raise InvalidArgumentError(f"{self!r} starts at {given} on another rank, not at {mine}")

    def fetch_add(self, n: int = 1) -> int:
        """Add `n`, which may be negative, and return the value before.

        Raises:
            ArgumentTypeError: `n` is not an int.
            ClosedError: The group was destroyed.
            StoreError: The store cannot be reached.
        """
        n = check_integer(n, "n")
        return self._start + self._store.add("value", n) - n

    def value(self) -> int:
        """Return the value, which other ranks may change at any time."""
        return self.fetch_add(0)


class Lock(_Named):
    """A lock that one member of a group holds at a time; the members get it in turn.

        with dist.Lock(name="log"):
            append_to_file()

    All locks of a group with the same name are the same lock. The ranks get it in the order in
    which their requests reach the store. A Lock object serves one thread; other threads of the rank
    need an object of their own.

    If a rank is lost while it holds the lock, or waits for it, the lock is never free again. The
    other ranks raise PeerLostError, because the lost rank may have left its work undone.

    Args:
        group: The default group if None.
        name: Name of the lock. If None, the lock is new, as in `Counter`.

    Raises:
        ArgumentTypeError: `name` is not a str.
        InvalidArgumentError: This rank is no member.
        CollectiveMismatchError: Without a name, if members make different calls.
    """

    def __init__(self, group: Any = None, name: str | None = None) -> None:
        super().__init__(group, name, "")
        self._ticket: int | None = None

    def acquire(self, timeout: Timeout | None = None) -> None:
        """Wait until all ranks that asked before have released the lock, and take it.

        Args:
            timeout: The group's if None.

        Raises:
            CollectiveTimeoutError: The lock was not free in time; names the rank that holds it.
            PeerLostError: The rank whose turn it is has ended, or has left the default group. If it
                destroyed only a sub-group, the call times out and names it.
            UsageError: This object holds the lock already.
            ClosedError: The group was destroyed.
        """
        deadline = Deadline(self._group.timeout_s if timeout is None else timeout)
        if self._ticket is not None:
            raise UsageError(
                f"acquire: this rank holds {self!r} already",
                hint="give each thread a Lock object of its own",
            )
        store = self._store
        ticket = store.add("next", 1) - 1
        try:
            store.set(f"rank/{ticket}", str(self._group.rank()))
            # Ticket 0 has its turn at once, because no release is before it.
            while ticket and not self._wait_for_turn(store, ticket, deadline):
                self._check_holder(store, deadline)
        except BaseException:
            if not ticket or store.compare_set(f"turn/{ticket}", "", "gone") != b"gone":
                _pass_on(store, ticket)  # the turn has come meanwhile
            raise
        self._ticket = ticket

    def release(self) -> None:
        """Pass the lock on to the rank that has waited longest.

        Raises:
            UsageError: This object does not hold the lock.
            ClosedError: The group was destroyed.
        """
        if self._ticket is None:
            raise UsageError(f"release: this rank does not hold {self!r}")
        ticket, self._ticket = self._ticket, None
        _pass_on(self._store, ticket)

    def _wait_for_turn(self, store: Store, ticket: int, deadline: Deadline) -> bool:
        """Wait for the turn of a ticket, but not for long; return whether it has come."""
        try:
            store.wait([f"turn/{ticket}"], min(_CHECK_S, deadline.remaining()))
        except StoreTimeoutError:
            return False
        return True

    def _check_holder(self, store: Store, deadline: Deadline) -> None:
        """Raise an error if the time is over, or if the rank that has its turn is lost."""
        pg, ticket = self._group, store.add("serving", 0)
        me, holder, reason = pg.ranks[pg.rank()], f"the rank with ticket {ticket}", None
        peers: tuple[int, ...] = ()
        rank = _rank_with(store, ticket)
        if rank >= 0:
            peers = (pg.ranks[rank],)
            holder = f"rank {peers[0]}"
            reason = next(iter(pg.backends.values())).lost(rank)
            if reason is not None and _rank_with(store, ticket) < 0:
                return  # it has passed the lock on before it left
        context = Context(rank=me, group=pg.name, op="acquire", peers=peers, usable=True)
        if reason is not None:
            raise PeerLostError(
                f"acquire of {self!r} failed on rank {me}: {holder}, whose turn it is, was lost: "
                f"{reason}",
                context=context,
                hint="this lock stays taken; other ranks can go on with a lock of another name",
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


def _rank_with(store: Store, ticket: int) -> int:
    """Return the rank that has a ticket; -1 if it is not written yet, or deleted already."""
    # Stores nothing if there is no value.
    return int(store.compare_set(f"rank/{ticket}", "-1", "-1"))


def _pass_on(store: Store, ticket: int) -> None:
    """Give the turn to the first later ticket whose rank has not given up."""
    given = b""
    while given != b"given":
        given = store.compare_set(f"turn/{ticket + 1}", "", "given")
        # A sum, because the next rank may pass the lock on before this line.
        store.add("serving", 1)
        store.delete_key(f"turn/{ticket}")
        # Last: if this rank is killed here, the other ranks can still name it.
        store.delete_key(f"rank/{ticket}")
        ticket += 1
