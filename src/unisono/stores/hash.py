"""HashStore: a store inside one process, for threads as ranks and for tests."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Self

from unisono.base.deadline import Deadline, Timeout
from unisono.errors import ClosedError, QueueEmptyError
from unisono.stores.api import (
    DEFAULT_TIMEOUT,
    Store,
    Value,
    barrier_timeout,
    check_integer,
    check_key,
    check_keys,
    check_value,
    check_world_size,
    keys_timeout,
)
from unisono.stores.table import Table

__all__ = ["HashStore"]


class _Shared:
    """What all clones have in common."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.table = Table()


class HashStore(Store):
    """Keys and values in the memory of this process, shared by its threads.

    Waiting threads sleep until a write wakes them; nothing polls.

    Source: torch.distributed.HashStore, torch 2.13. Other than there, `add`, `append` and
    `compare_set` wake those who wait for the key.
    """

    def __init__(self) -> None:
        super().__init__(DEFAULT_TIMEOUT)
        self._shared = _Shared()
        self._sleeping: set[threading.Event] = set()

    def set(self, key: str, value: Value) -> None:
        """Store `value` under `key`."""
        with self._table() as table:
            table.set(check_key(key), check_value(value))

    def append(self, key: str, value: Value) -> None:
        """Append `value` to what `key` holds."""
        with self._table() as table:
            table.append(check_key(key), check_value(value))

    def add(self, key: str, amount: int) -> int:
        """Add to the number stored under `key` and return the sum."""
        with self._table() as table:
            return table.add(check_key(key), check_integer(amount, "amount"))

    def compare_set(self, key: str, expected: Value, desired: Value) -> bytes:
        """Store `desired` if `key` holds `expected`; see Store.compare_set."""
        with self._table() as table:
            return table.compare_set(check_key(key), check_value(expected), check_value(desired))

    def multi_set(self, keys: Sequence[str], values: Sequence[Value]) -> None:
        """Store each value under the key at the same position, all at once."""
        pairs = self._pairs(keys, values)
        with self._table() as table:
            for key, value in pairs:
                table.set(key, value)

    def get(self, key: str, timeout: Timeout | None = None) -> bytes:
        """Return the value of `key`, waiting until there is one."""
        return self._get("get", [check_key(key)], timeout)[0]

    def multi_get(self, keys: Sequence[str], timeout: Timeout | None = None) -> list[bytes]:
        """Return the values of all keys, waiting until each has one."""
        return self._get("multi_get", check_keys(keys), timeout)

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether every key has a value."""
        with self._table() as table:
            return not table.missing(check_keys(keys))

    def wait(self, keys: Sequence[str], timeout: Timeout | None = None) -> None:
        """Block until every key has a value."""
        self._wait("wait", check_keys(keys), self._deadline(timeout))

    def delete_key(self, key: str) -> bool:
        """Remove the value of `key`; return whether there was one."""
        with self._table() as table:
            return table.delete_key(check_key(key))

    def num_keys(self) -> int:
        """Return the number of keys with a value."""
        with self._table() as table:
            return len(table.values)

    def list_keys(self) -> list[str]:
        """Return all keys with a value, sorted."""
        with self._table() as table:
            return sorted(table.values)

    def queue_push(self, key: str, value: Value) -> None:
        """Append `value` to the queue `key`."""
        with self._table() as table:
            table.queue_push(check_key(key), check_value(value))

    def queue_pop(self, key: str, block: bool = True, timeout: Timeout | None = None) -> bytes:
        """Remove and return the oldest value of the queue `key`."""
        check_key(key)
        deadline = self._deadline(timeout)
        while True:
            event = threading.Event()
            with self._table() as table:
                value = table.queue_pop(key)
                if value is not None:
                    return value
                if not block:
                    raise QueueEmptyError(f"queue {key!r} on {self!r} is empty")
                watch = table.watch([key], event.set)
            if not self._sleep(event, deadline):
                with self._shared.lock:
                    table.unwatch(watch)
                    value = table.queue_pop(key)
                if value is None:
                    raise keys_timeout(self, "queue_pop", [key], [key], deadline.timeout_s)
                return value

    def queue_len(self, key: str) -> int:
        """Return the number of values in the queue `key`."""
        with self._table() as table:
            return table.queue_len(check_key(key))

    def barrier(self, key: str, world_size: int, timeout: Timeout | None = None) -> None:
        """Block until `world_size` callers are inside `barrier(key)`."""
        check_world_size(world_size)
        deadline = self._deadline(timeout)
        event = threading.Event()
        with self._table() as table:
            table.arrive(check_key(key), world_size, event, event.set)
        came = 0
        try:
            if self._sleep(event, deadline):
                return
        finally:
            # Also when Ctrl-C ends the sleep: a caller that left must not let others through.
            with self._shared.lock:
                came = table.withdraw(key, event)
        if came:
            raise barrier_timeout(self, key, str(came), world_size, deadline.timeout_s)

    def clone(self) -> HashStore:
        """Return another handle to the same data, with a timeout of its own."""
        self._check_open()
        other = HashStore()
        other._shared = self._shared
        other._timeout_s = self._timeout_s
        return other

    def has_extended_api(self) -> bool:
        """Return True."""
        return True

    def close(self) -> None:
        """Close this handle; its waiting threads raise ClosedError. Clones stay open."""
        super().close()
        for event in list(self._sleeping):
            event.set()

    def _table(self) -> _Locked:
        self._check_open()
        return _Locked(self._shared)

    def _get(self, operation: str, keys: list[str], timeout: Timeout | None) -> list[bytes]:
        deadline = self._deadline(timeout)
        while True:
            self._wait(operation, keys, deadline)
            with self._table() as table:
                missing = [key for key in keys if key not in table.values]
                if not missing:
                    return [table.values[key] for key in keys]
            if deadline.expired():
                raise keys_timeout(self, operation, keys, missing, deadline.timeout_s)
            # Deleted since, or the name of a queue: ask again, but not in a busy loop.
            self._sleep(threading.Event(), Deadline(0.01))

    def _wait(self, operation: str, keys: list[str], deadline: Deadline) -> None:
        event = threading.Event()
        with self._table() as table:
            if table.ready(keys):
                return
            watch = table.watch(keys, event.set)
        try:
            if self._sleep(event, deadline):
                return
        finally:
            with self._shared.lock:
                table.unwatch(watch)
                missing = table.missing(keys)
        if missing:
            raise keys_timeout(self, operation, keys, missing, deadline.timeout_s)

    def _sleep(self, event: threading.Event, deadline: Deadline) -> bool:
        """Wait for the event; False if the time is over."""
        self._sleeping.add(event)
        try:
            woken = event.wait(min(deadline.remaining(), threading.TIMEOUT_MAX))
        finally:
            self._sleeping.discard(event)
        if self._closed:
            raise ClosedError(f"{self!r} was closed while a thread waited on it")
        return woken

    def __repr__(self) -> str:
        return f"<HashStore keys={len(self._shared.table.values)}>"


class _Locked:
    """The table, with its lock held."""

    __slots__ = ("_shared",)

    def __init__(self, shared: _Shared) -> None:
        self._shared = shared

    def __enter__(self) -> Table:
        self._shared.lock.acquire()
        return self._shared.table

    def __exit__(self, *exc: object) -> None:
        self._shared.lock.release()
