"""The base of stores on a service (etcd, Redis): all operations, by compare-and-swap.

A name begins with its kind: "k/" a value, "q/" a queue, "b/" a barrier, "m/" the mark of a
client, "u" the users. Waiting calls poll, at least every 50 ms.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import random
import struct
import threading
import time
import uuid
from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

from unisono.core.base.deadline import Deadline, Timeout
from unisono.core.base.net.unencrypted import check_call
from unisono.core.stores.api import (
    changed_too_often,
    check_integer,
    check_key,
    require_outside,
)
from unisono.core.stores.table import Change, ChangeKind, StoreTable
from unisono.core.stores.table_store import T, TableStore
from unisono.errors import (
    InvalidArgumentError,
    StoreConnectionError,
    StoreError,
    StoreTimeoutError,
    UnsupportedError,
)

_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.001, 0.05
_LENGTH = struct.Struct("<I")
_PLAIN_HINT = "use TLS (rediss://, etcds://, or the options of the store), or a server at localhost"
_KINDS = {
    **{ChangeKind.PUSH: "q", ChangeKind.POP: "q"},
    **{ChangeKind.ARRIVE: "b", ChangeKind.WITHDRAW: "b"},
}


class VersionedValue(NamedTuple):
    """The value under a name; `version` differs after each change."""

    value: bytes | None
    version: Any


class Swap(NamedTuple):
    """One change: `name` gets the value `after` (None: is deleted), if it still is `before`."""

    name: str
    before: VersionedValue | None
    after: bytes | None


def import_client(store: str, package: str, extra: str, *modules: str) -> list[Any]:
    """Return the modules of a service's client.

    Raises:
        UnsupportedError: The package is not installed.
    """
    try:
        return [importlib.import_module(name) for name in modules]
    except ImportError as error:
        raise UnsupportedError(
            f"{store} needs the package {package}: {error}",
            hint=f"pip install 'unisono[{extra}]'",
        ) from error


class Unreachable(Exception):
    """The service did not answer, or it is unknown whether it did; the text has the reason."""


class ServiceStore(TableStore):
    """A store on a service that outlives the ranks.

    Every change also swaps the client's mark. After a broken connection the mark shows whether the
    change was made. A change that arrives late finds another mark and is void, so no change is
    made twice.

    Args:
        prefix: Start of all names; different for every run unless `world_size` is given.
        timeout: Default for every blocking call.
        world_size: Number of ranks. The last of them to close the store deletes its keys. A
            prefix that another world still uses is a StoreTimeoutError. -1: keys stay.
    """

    patience_s = 1.0
    """Seconds for which a request is retried if the service does not answer."""

    _most_swaps = 1 << 30
    """The largest number of changes in one `_swap`."""

    def __init__(self, prefix: str, timeout: Timeout, world_size: int) -> None:
        super().__init__(timeout)
        world_size = check_integer(world_size, "world_size")
        if world_size == 0 or world_size < -1:
            raise InvalidArgumentError(f"world_size of a store cannot be {world_size}")
        self.prefix = check_key(prefix)
        self.world_size = world_size
        self._mark_name = f"m/{uuid.uuid4().hex}"
        self._mark = VersionedValue(None, None)
        self._change_lock = threading.RLock()
        self._pid = os.getpid()
        self._joined = False

    @abstractmethod
    def _fetch(self, names: Sequence[str]) -> list[VersionedValue]:
        """Return all entries as they are at one moment."""

    @abstractmethod
    def _swap(self, swaps: Sequence[Swap]) -> Any:
        """Make all changes if each name is still as in `before` (always true if that is None).

        Returns the new version of the changed names; None if nothing was changed.
        """

    @abstractmethod
    def _names(self, start: str) -> list[str]:
        """Return the names that begin with `start`."""

    @abstractmethod
    def _clear(self) -> None:
        """Delete everything below the prefix."""

    @abstractmethod
    def _hang_up(self) -> None:
        """Close all connections that no thread uses; several threads may do so at once."""

    def _change(self, changes: Sequence[Change]) -> list[Any]:
        if len(changes) == 1 and changes[0].kind is not ChangeKind.SET:
            return [self._update(_name(changes[0]), partial(_applied, changes[0]))]
        # If a key occurs twice, its last value counts.
        values = {_name(change): change.first for change in changes}
        swaps = [Swap(name, None, value) for name, value in values.items()]
        most = self._most_swaps - 1
        for start in range(0, len(swaps), most):
            self._write(swaps[start : start + most])
        return [None for _ in changes]

    def _look(self, question: Callable[[StoreTable], T]) -> T:
        return question(_ServiceTable(self))

    def _check_open(self) -> None:
        super()._check_open()
        if self._pid != os.getpid():
            self._reset_after_fork()

    def _reset_after_fork(self) -> None:
        """Reset the state in a forked child: lock, mark and membership are the parent's."""
        self._pid = os.getpid()
        self._joined = False
        self._mark_name, self._mark = f"m/{uuid.uuid4().hex}", VersionedValue(None, None)
        self._change_lock = threading.RLock()

    def close(self) -> None:
        """Close the connections; the last of `world_size` ranks deletes the keys."""
        if self._closed:
            return
        try:
            super().close()
            if self._pid == os.getpid():
                self._part()
        finally:
            # A call that a signal handler interrupted to close the store ends, too.
            self._closer = None
            self._hang_up()

    def _part(self) -> None:
        with contextlib.suppress(StoreError):
            if self._joined and self._update("u", self._leave):
                self._request(self._clear)
            elif self._mark.value is not None:
                self._request(lambda: self._swap([Swap(self._mark_name, None, None)]))

    def _open(self, probe: Callable[[], object], plain: Iterable[tuple[str, int]]) -> None:
        """Make a first request, then join the users; close the store if that fails.

        Args:
            probe: Makes the request.
            plain: Host and port of each server that the client calls without TLS.
        """
        try:
            for host, port in plain:
                check_call(repr(self), host, port, _PLAIN_HINT, is_shared=True)
            probe()
            self._join()
        except BaseException:
            self.close()
            raise

    def _join(self) -> None:
        """Add this process to the `world_size` users, after the previous world has left."""
        if self.world_size < 1:
            return
        deadline = self._deadline(None)

        def enter(old: bytes | None) -> tuple[bytes | None, bool]:
            came, left = map(int, (old or b"0 0").split())
            if came >= self.world_size:
                return old, False
            return b"%d %d" % (came + 1, left), True

        if not self._poll(deadline, lambda _: self._update("u", enter)):
            raise StoreTimeoutError(
                f"{self!r} still belongs to another run of {self.world_size} ranks after "
                f"{deadline.timeout_s:g} s",
                hint="use another prefix for every run, or delete its keys if that run is dead",
            )
        self._joined = True

    def _leave(self, old: bytes | None) -> tuple[bytes | None, bool]:
        came, left = map(int, (old or b"0 0").split())
        return b"%d %d" % (came, left + 1), left + 1 >= self.world_size

    def _entries(self, names: list[str]) -> list[VersionedValue]:
        return self._request(lambda: self._fetch(names)) if names else []

    def _update(self, name: str, change: Callable[[bytes | None], tuple[bytes | None, T]]) -> T:
        """Replace the value of a name by `change(value)[0]`; return `change(value)[1]`."""
        deadline = Deadline(self._timeout_s)
        pause_s = _FIRST_PAUSE_S
        while True:
            (before,) = self._entries([name])
            after, result = change(before.value)
            # Leaving a barrier is always written, so that an earlier arrival that is still on its
            # way is void.
            same = after == before.value and not name.startswith("b/")
            if same or self._try_change([Swap(name, before, after)]):
                return result
            self._pause(pause_s, deadline, name)
            pause_s = min(2 * pause_s, _LAST_PAUSE_S)

    def _write(self, swaps: list[Swap]) -> None:
        deadline = Deadline(self._timeout_s)
        while not self._try_change(swaps):
            self._pause(_FIRST_PAUSE_S, deadline, swaps[0].name)

    def _pause(self, pause_s: float, deadline: Deadline, name: str) -> None:
        if deadline.expired():
            raise changed_too_often(self, name, deadline)
        time.sleep(random.uniform(0, pause_s))

    def _try_change(self, swaps: list[Swap]) -> bool:
        """Make changes exactly once; return False if an entry differs from its `before`."""
        mark = uuid.uuid4().bytes

        def attempt() -> bool:
            version = self._swap([*swaps, Swap(self._mark_name, self._mark, mark)])
            if version is not None:
                self._mark = VersionedValue(mark, version)
                return True
            # An earlier attempt without an answer may have made the change.
            (self._mark,) = self._fetch([self._mark_name])
            return self._mark.value == mark

        require_outside(self, self._change_lock)
        lock = self._change_lock
        if not lock.acquire(timeout=min(self._timeout_s, threading.TIMEOUT_MAX)):
            raise StoreTimeoutError(
                f"{self!r} was in use by other threads of this process for {self._timeout_s:g} s"
            )
        try:
            if self._mark.value is None:
                (self._mark,) = self._entries([self._mark_name])
            return self._request(attempt)
        finally:
            lock.release()

    def _poll(self, deadline: Deadline, question: Callable[[StoreTable], bool]) -> bool:
        pause_s = _FIRST_PAUSE_S
        while not self._look(question):
            if deadline.expired():
                return False
            time.sleep(min(pause_s * random.uniform(0.5, 1.0), deadline.remaining()))
            pause_s = min(2 * pause_s, _LAST_PAUSE_S)
        return True

    def _request(self, call: Callable[[], T]) -> T:
        """Make a request, and retry it while the service does not answer."""
        deadline = Deadline(min(self._timeout_s, self.patience_s))
        pause_s = _FIRST_PAUSE_S
        while True:
            self._check_change()
            try:
                return call()
            except Unreachable as error:
                if deadline.expired():
                    raise StoreConnectionError(
                        f"no answer from {self!r} within {deadline.timeout_s:g} s: {error}",
                        hint="is the service running there, and is the port open?",
                    ) from error
            finally:
                if self._closed and self._closer != threading.get_ident():
                    # `close` could not close the connection of this call.
                    self._hang_up()
            time.sleep(min(pause_s, deadline.remaining()))
            pause_s = min(2 * pause_s, _LAST_PAUSE_S)


class _ServiceTable(StoreTable):
    """The table in a service: it reads what it is asked."""

    def __init__(self, store: ServiceStore) -> None:
        super().__init__()
        self._store = store

    def found(self, keys: Iterable[str]) -> list[bytes | None]:
        return self._read("k", keys)

    def names(self) -> list[str]:
        found = self._store._request(lambda: self._store._names("k/"))
        return [name.removeprefix("k/") for name in found]

    def missing(self, keys: Iterable[str]) -> list[str]:
        found = self._read("kq", keys := list(keys))
        pairs = zip(keys, found[::2], found[1::2], strict=True)
        return [key for key, value, queue in pairs if value is queue is None]

    def queue_len(self, key: str) -> int:
        queue = self._read("q", [key])[0] or b""
        count = place = 0
        while place < len(queue):
            place, count = _end(queue, place), count + 1
        return count

    def inside(self, key: str, member: Hashable) -> bool:
        return _table("b", key, self._read("b", [key])[0]).inside(key, member)

    def _read(self, kinds: str, keys: Iterable[str]) -> list[bytes | None]:
        names = [f"{kind}/{key}" for key in keys for kind in kinds]
        return [entry.value for entry in self._store._entries(names)]


def _kind(change: Change) -> str:
    return _KINDS.get(change.kind, "k")


def _name(change: Change) -> str:
    return f"{_kind(change)}/{change.key}"


def _applied(change: Change, entry: bytes | None) -> tuple[bytes | None, Any]:
    """Return the value of a name after a change, and the result of the change."""
    if change.kind is ChangeKind.PUSH:
        return (entry or b"") + _LENGTH.pack(len(change.first)) + change.first, None
    if change.kind is ChangeKind.POP:
        if entry is None:
            return None, None
        end = _end(entry, 0)
        return entry[end:] or None, entry[_LENGTH.size : end]
    table = _table(_kind(change), change.key, entry)
    result = table.apply(change)
    made = table.changes()
    if made and made[0].kind is ChangeKind.ARRIVE:
        return b" ".join([made[0].first, *(each.second for each in made)]), result
    return made[0].first if made else None, result


def _end(queue: bytes, start: int) -> int:
    """Return where the value of a queue that begins at `start` ends."""
    return start + _LENGTH.size + int(_LENGTH.unpack_from(queue, start)[0])


def _table(kind: str, key: str, entry: bytes | None) -> StoreTable:
    """Return a table with one value or barrier of a service."""
    table = StoreTable()
    if entry is not None and kind == "k":
        table.set(key, entry)
    elif entry is not None:
        size, *members = entry.split(b" ")
        for member in members:
            table.apply(Change(ChangeKind.ARRIVE, key, size, member))
    return table
