"""The base of all stores but TCPStore: every operation, in terms of three hooks."""

from __future__ import annotations

import contextlib
import os
import threading
import uuid
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from unisono.core.base.deadline import Deadline, Timeout
from unisono.core.stores.api import (
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
from unisono.core.stores.table import Change, ChangeKind, StoreTable
from unisono.errors import ClosedError, QueueEmptyError, StoreError, UsageError

T = TypeVar("T")


class TableStore(Store):
    """A store with a table; a subclass shares the table and waits for it."""

    def __init__(self, timeout: Timeout) -> None:
        super().__init__(timeout)
        self._inside: set[tuple[str, str]] = set()
        self._closer: int | None = None

    @abstractmethod
    def _change(self, changes: Sequence[Change]) -> list[Any]:
        """Apply all changes at once, after `_check_change` under the lock; return the results."""

    @abstractmethod
    def _look(self, question: Callable[[StoreTable], T]) -> T:
        """Ask the table while other threads and processes are kept out."""

    @abstractmethod
    def _poll(self, deadline: Deadline, question: Callable[[StoreTable], bool]) -> bool:
        """Wait until the answer is true; return False at the deadline."""

    def set(self, key: str, value: Value) -> None:
        """Store `value` under `key`."""
        self._do(ChangeKind.SET, key, check_value(value))

    def append(self, key: str, value: Value) -> None:
        """Append `value` to what `key` holds."""
        self._do(ChangeKind.APPEND, key, check_value(value))

    def add(self, key: str, amount: int) -> int:
        """Add to the number stored under `key` and return the sum."""
        return int(self._do(ChangeKind.ADD, key, b"%d" % check_integer(amount, "amount")))

    def compare_set(self, key: str, expected: Value, desired: Value) -> bytes:
        """Store `desired` if `key` holds `expected`; see Store.compare_set."""
        old, new = check_value(expected), check_value(desired)
        return bytes(self._do(ChangeKind.COMPARE_SET, key, old, new))

    def multi_set(self, keys: Sequence[str], values: Sequence[Value]) -> None:
        """Store each value under the key at the same position, all at once."""
        pairs = self._pairs(keys, values)
        self._check_open()
        self._change([Change(ChangeKind.SET, key, value) for key, value in pairs])

    def get(self, key: str, timeout: Timeout | None = None) -> bytes:
        """Return the value of `key`, waiting until there is one."""
        return self._get("get", [check_key(key)], timeout)[0]

    def multi_get(self, keys: Sequence[str], timeout: Timeout | None = None) -> list[bytes]:
        """Return the values of all keys, waiting until each has one."""
        return self._get("multi_get", check_keys(keys), timeout)

    def check(self, keys: Sequence[str], timeout: Timeout | None = None) -> bool:
        """Return whether every key has a value."""
        names = check_keys(keys)
        return self._ask(lambda table: not table.missing(names))

    def wait(self, keys: Sequence[str], timeout: Timeout | None = None) -> None:
        """Block until every key has a value."""
        names = check_keys(keys)
        deadline = self._deadline(timeout)
        missing: list[str] = []

        def present(table: StoreTable) -> bool:
            missing[:] = table.missing(names)
            return not missing

        if not self._poll(deadline, present):
            raise keys_timeout(self, "wait", names, missing, deadline.timeout_s)

    def delete_key(self, key: str) -> bool:
        """Remove the value of `key`; return whether there was one."""
        return bool(self._do(ChangeKind.DELETE, key))

    def num_keys(self) -> int:
        """Return the number of keys with a value."""
        return len(self._ask(lambda table: table.names()))

    def list_keys(self) -> list[str]:
        """Return all keys with a value, sorted."""
        return sorted(self._ask(lambda table: table.names()))

    def queue_push(self, key: str, value: Value) -> None:
        """Append `value` to the queue `key`."""
        self._do(ChangeKind.PUSH, key, check_value(value))

    def queue_pop(self, key: str, block: bool = True, timeout: Timeout | None = None) -> bytes:
        """Remove and return the oldest value of the queue `key`."""
        key = check_key(key)
        deadline = self._deadline(timeout)
        while (value := self._do(ChangeKind.POP, key)) is None:
            if not block:
                raise QueueEmptyError(f"queue {key!r} on {self!r} is empty")
            there = self._poll(deadline, lambda table: table.queue_len(key) > 0)
            # Another caller may take each value that this one sees.
            if not there or deadline.expired():
                raise keys_timeout(self, "queue_pop", [key], [key], deadline.timeout_s)
        return bytes(value)

    def queue_len(self, key: str) -> int:
        """Return the number of values in the queue `key`."""
        name = check_key(key)
        return self._ask(lambda table: table.queue_len(name))

    def barrier(self, key: str, world_size: int, timeout: Timeout | None = None) -> None:
        """Block until `world_size` callers are inside `barrier(key)`."""
        key, size = check_key(key), b"%d" % check_world_size(world_size)
        member = f"{os.getpid()}~{uuid.uuid4().hex}"
        deadline = self._deadline(timeout)
        came = 0
        try:
            # First, so that `close` finds each member that arrived.
            self._inside.add((key, member))
            self._do(ChangeKind.ARRIVE, key, size, member.encode())
            if not self._poll(deadline, lambda table: not table.inside(key, member)):
                came = self._leave_barrier(key, member)
            # Nobody released a member that `close` took out.
            self._check_open()
        except BaseException:
            # Also after Ctrl-C: a caller that left must not count, or the others pass too early.
            with contextlib.suppress(StoreError, UsageError):
                self._leave_barrier(key, member)
            raise
        self._inside.discard((key, member))
        if came:
            raise barrier_timeout(self, key, str(came), world_size, deadline.timeout_s)

    def close(self) -> None:
        """Close this handle; its waiting threads raise ClosedError."""
        self._closer = threading.get_ident()
        super().close()
        for key, member in list(self._inside):
            # The members of a parent process stay.
            if member.startswith(f"{os.getpid()}~"):
                with contextlib.suppress(StoreError, ClosedError):
                    self._leave_barrier(key, member)

    def has_extended_api(self) -> bool:
        """Return True."""
        return True

    def _leave_barrier(self, key: str, member: str) -> int:
        """Leave a barrier; return how many were inside, 0 if this member was not."""
        (came,) = self._change([Change(ChangeKind.WITHDRAW, key, member.encode())])
        self._inside.discard((key, member))
        return int(came)

    def _check_change(self) -> None:
        """Refuse a change that comes after `close`, unless `close` makes it."""
        if self._closer != threading.get_ident():
            self._check_open()

    def _ask(self, question: Callable[[StoreTable], T]) -> T:
        self._check_open()
        return self._look(question)

    def _do(self, kind: ChangeKind, key: str, first: bytes = b"", second: bytes = b"") -> Any:
        self._check_open()
        return self._change([Change(kind, check_key(key), first, second)])[0]

    def _get(self, operation: str, keys: list[str], timeout: Timeout | None) -> list[bytes]:
        deadline = self._deadline(timeout)
        found: list[bytes | None] = []

        def fetch(table: StoreTable) -> bool:
            found[:] = table.found(keys)
            return None not in found

        if not self._poll(deadline, fetch):
            missing = [key for key, value in zip(keys, found, strict=True) if value is None]
            raise keys_timeout(self, operation, keys, missing, deadline.timeout_s)
        return [value for value in found if value is not None]
