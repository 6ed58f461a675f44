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
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from unisono.base.deadline import Deadline, Timeout
from unisono.errors import (
    InvalidArgumentError,
    QueueEmptyError,
    StoreConnectionError,
    StoreError,
    StoreTimeoutError,
    UnsupportedError,
)
from unisono.stores.api import (
    Store,
    Value,
    barrier_timeout,
    changed_too_often,
    check_integer,
    check_key,
    check_keys,
    check_value,
    check_world_size,
    keys_timeout,
    require_outside,
)
from unisono.stores.table import checked_sum

T = TypeVar("T")
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.001, 0.05
_LENGTH = struct.Struct("<I")


class Entry(NamedTuple):
    """The value under a name; `version` differs after each change."""

    value: bytes | None
    version: Any


class Swap(NamedTuple):
    """One change: `name` gets the value `after` (None: is deleted), if it still is `before`."""

    name: str
    before: Entry | None
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


class ServiceStore(Store):
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
        self._mark = Entry(None, None)
        self._change_lock = threading.RLock()
        self._pid = os.getpid()
        self._joined = False

    @abstractmethod
    def _fetch(self, names: Sequence[str]) -> list[Entry]:
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
        """Close all connections."""

    def set(self, key: str, value: Value) -> None:
        """Store `value` under `key`."""
        self._write([Swap(_value(key), None, check_value(value))])

    def multi_set(self, keys: Sequence[str], values: Sequence[Value]) -> None:
        """Store each value under the key at the same position, all at once."""
        # If a key occurs twice, its last value counts.
        values_of = dict(self._pairs(keys, values))
        self._write([Swap(_value(key), None, value) for key, value in values_of.items()])

    def _write(self, swaps: list[Swap]) -> None:
        self._check_open()
        most = self._most_swaps - 1
        for start in range(0, len(swaps), most):
            self._change(swaps[start : start + most])

    def append(self, key: str, value: Value) -> None:
        """Append `value` to what `key` holds."""
        more = check_value(value)
        self._update(_value(key), lambda old: ((old or b"") + more, None))

    def add(self, key: str, amount: int) -> int:
        """Add to the number stored under `key` and return the sum."""
        number = check_integer(amount, "amount")

        def change(old: bytes | None) -> tuple[bytes, int]:
            total = checked_sum(key, old, number)
            return b"%d" % total, total

        return self._update(_value(key), change)

    def compare_set(self, key: str, expected: Value, desired: Value) -> bytes:
        """Store `desired` if `key` holds `expected`; see Store.compare_set."""
        old, new = check_value(expected), check_value(desired)

        def change(present: bytes | None) -> tuple[bytes | None, bytes]:
            if present == old or (present is None and not old):
                return new, new
            return present, old if present is None else present

        return self._update(_value(key), change)

    def get(self, key: str, timeout: Timeout | None = None) -> bytes:
        """Return the value of `key`, waiting until there is one."""
        return self._get("get", [check_key(key)], timeout)[0]

    def multi_get(self, keys: Sequence[str], timeout: Timeout | None = None) -> list[bytes]:
        """Return the values of all keys, waiting until each has one."""
        return self._get("multi_get", check_keys(keys), timeout)

    def _get(self, operation: str, keys: list[str], timeout: Timeout | None) -> list[bytes]:
        deadline = self._deadline(timeout)
        names = [_value(key) for key in keys]
        found: list[bytes | None] = []

        def look() -> bool:
            found[:] = [entry.value for entry in self._entries(names)]
            return None not in found

        if not self._poll(deadline, look):
            missing = [key for key, value in zip(keys, found, strict=True) if value is None]
            raise keys_timeout(self, operation, keys, missing, deadline.timeout_s)
        return [value for value in found if value is not None]

    def check(self, keys: Sequence[str], timeout: Timeout | None = None) -> bool:
        """Return whether every key has a value."""
        self._check_open()
        return not self._missing(check_keys(keys))

    def wait(self, keys: Sequence[str], timeout: Timeout | None = None) -> None:
        """Block until every key has a value."""
        names = check_keys(keys)
        deadline = self._deadline(timeout)
        if not self._poll(deadline, lambda: not self._missing(names)):
            raise keys_timeout(self, "wait", names, self._missing(names), deadline.timeout_s)

    def _missing(self, keys: list[str]) -> list[str]:
        entries = self._entries([name for key in keys for name in (_value(key), _queue(key))])
        pairs = zip(keys, entries[::2], entries[1::2], strict=True)
        return [key for key, value, queue in pairs if value.value is None and queue.value is None]

    def delete_key(self, key: str) -> bool:
        """Remove the value of `key`; return whether there was one."""
        name = _value(key)
        return self._update(name, lambda old: (None, old is not None))

    def num_keys(self) -> int:
        """Return the number of keys with a value."""
        return len(self.list_keys())

    def list_keys(self) -> list[str]:
        """Return all keys with a value, sorted."""
        self._check_open()
        start = _value("")
        return sorted(name[len(start) :] for name in self._request(lambda: self._names(start)))

    def queue_push(self, key: str, value: Value) -> None:
        """Append `value` to the queue `key`."""
        item = check_value(value)
        more = _LENGTH.pack(len(item)) + item
        self._update(_queue(key), lambda old: ((old or b"") + more, None))

    def queue_pop(self, key: str, block: bool = True, timeout: Timeout | None = None) -> bytes:
        """Remove and return the oldest value of the queue `key`."""
        name = _queue(key)
        deadline = self._deadline(timeout)
        while (item := self._update(name, _pop)) is None:
            if not block:
                raise QueueEmptyError(f"queue {key!r} on {self!r} is empty")
            there = self._poll(deadline, lambda: self._entries([name])[0].value is not None)
            # Another client may take each value that this one sees.
            if not there or deadline.expired():
                raise keys_timeout(self, "queue_pop", [key], [key], deadline.timeout_s)
        return item

    def queue_len(self, key: str) -> int:
        """Return the number of values in the queue `key`."""
        self._check_open()
        (entry,) = self._entries([_queue(key)])
        return len(_items(entry.value or b""))

    def barrier(self, key: str, world_size: int, timeout: Timeout | None = None) -> None:
        """Block until `world_size` callers are inside `barrier(key)`."""
        name, size = f"b/{check_key(key)}", check_world_size(world_size)
        member = uuid.uuid4().hex
        deadline = self._deadline(timeout)
        inside = 0

        def enter(old: bytes | None) -> tuple[bytes | None, None]:
            head, *members = (old or b"%d" % size).decode().split(" ")
            if int(head) != size:
                raise InvalidArgumentError(
                    f"barrier {key!r} was entered with world_size={head}, now with "
                    f"world_size={size}"
                )
            members.append(member)
            # The last member deletes the barrier, which releases all others.
            return None if len(members) >= size else " ".join([head, *members]).encode(), None

        def leave(old: bytes | None) -> tuple[bytes | None, int]:
            head, *members = (old or b"").decode().split(" ")
            if member not in members:
                return old, 0
            rest = [each for each in members if each != member]
            return " ".join([head, *rest]).encode() if rest else None, len(members)

        def free() -> bool:
            return member not in (self._entries([name])[0].value or b"").decode().split(" ")

        try:
            self._update(name, enter)
            if self._poll(deadline, free):
                return
        except BaseException:
            with contextlib.suppress(StoreError):
                self._update(name, leave)
            raise
        if inside := self._update(name, leave):
            raise barrier_timeout(self, key, str(inside), size, deadline.timeout_s)

    def _check_open(self) -> None:
        super()._check_open()
        if self._pid != os.getpid():
            self._reset_after_fork()

    def _reset_after_fork(self) -> None:
        """Reset the state in a forked child: lock, mark and membership are the parent's."""
        self._pid = os.getpid()
        self._joined = False
        self._mark_name, self._mark = f"m/{uuid.uuid4().hex}", Entry(None, None)
        self._change_lock = threading.RLock()

    def has_extended_api(self) -> bool:
        """Return True."""
        return True

    def close(self) -> None:
        """Close the connections; the last of `world_size` ranks deletes the keys."""
        if self._closed:
            return
        try:
            if self._pid == os.getpid():
                self._part()
        finally:
            super().close()
            self._hang_up()

    def _part(self) -> None:
        with contextlib.suppress(StoreError):
            if self._joined and self._update("u", self._leave):
                self._request(self._clear)
            elif self._mark.value is not None:
                self._request(lambda: self._swap([Swap(self._mark_name, None, None)]))

    def _open(self, probe: Callable[[], object]) -> None:
        """Make a first request, then join the users; close the store if that fails."""
        try:
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

        if not self._poll(deadline, lambda: self._update("u", enter)):
            raise StoreTimeoutError(
                f"{self!r} still belongs to another run of {self.world_size} ranks after "
                f"{deadline.timeout_s:g} s",
                hint="use another prefix for every run, or delete its keys if that run is dead",
            )
        self._joined = True

    def _leave(self, old: bytes | None) -> tuple[bytes | None, bool]:
        came, left = map(int, (old or b"0 0").split())
        return b"%d %d" % (came, left + 1), left + 1 >= self.world_size

    def _entries(self, names: list[str]) -> list[Entry]:
        return self._request(lambda: self._fetch(names)) if names else []

    def _update(self, name: str, change: Callable[[bytes | None], tuple[bytes | None, T]]) -> T:
        """Replace the value of a name by `change(value)[0]`; return `change(value)[1]`."""
        self._check_open()
        deadline = Deadline(self._timeout_s)
        pause_s = _FIRST_PAUSE_S
        while True:
            (before,) = self._entries([name])
            after, result = change(before.value)
            if after == before.value or self._try_change([Swap(name, before, after)]):
                return result
            self._pause(pause_s, deadline, name)
            pause_s = min(2 * pause_s, _LAST_PAUSE_S)

    def _change(self, swaps: list[Swap]) -> None:
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
                self._mark = Entry(mark, version)
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

    def _poll(self, deadline: Deadline, question: Callable[[], bool]) -> bool:
        """Ask until the answer is true; return False at the deadline."""
        pause_s = _FIRST_PAUSE_S
        while not question():
            if deadline.expired():
                return False
            time.sleep(min(pause_s * random.uniform(0.5, 1.0), deadline.remaining()))
            pause_s = min(2 * pause_s, _LAST_PAUSE_S)
            self._check_open()
        return True

    def _request(self, call: Callable[[], T]) -> T:
        """Make a request, and retry it while the service does not answer."""
        deadline = Deadline(min(self._timeout_s, self.patience_s))
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                return call()
            except Unreachable as error:
                if deadline.expired():
                    raise StoreConnectionError(
                        f"no answer from {self!r} within {deadline.timeout_s:g} s: {error}",
                        hint="is the service running there, and is the port open?",
                    ) from error
            time.sleep(min(pause_s, deadline.remaining()))
            pause_s = min(2 * pause_s, _LAST_PAUSE_S)


def _value(key: str) -> str:
    return f"k/{check_key(key)}"


def _queue(key: str) -> str:
    return f"q/{check_key(key)}"


def _items(data: bytes) -> list[bytes]:
    """Return the values of a queue, oldest first."""
    items = []
    place = 0
    while place < len(data):
        (length,) = _LENGTH.unpack_from(data, place)
        place += _LENGTH.size + length
        items.append(data[place - length : place])
    return items


def _pop(old: bytes | None) -> tuple[bytes | None, bytes | None]:
    """Return the queue without its oldest value, and that."""
    if not old:
        return None, None
    (length,) = _LENGTH.unpack_from(old)
    end = _LENGTH.size + length
    return old[end:] or None, old[_LENGTH.size : end]
