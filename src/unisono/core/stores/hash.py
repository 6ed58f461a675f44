"""HashStore: a store inside one process, for threads as ranks and for tests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from unisono.core.base.deadline import Deadline
from unisono.core.stores.api import DEFAULT_TIMEOUT, require_outside
from unisono.core.stores.table import Change, StoreTable
from unisono.core.stores.table_store import T, TableStore
from unisono.errors import ClosedError


class HashStore(TableStore):
    """Keys and values in the memory of this process, shared by its threads.

    Waiting threads sleep until a write wakes them; nothing polls.

    Source: torch.distributed.HashStore, torch 2.13. Unlike there, `add`, `append` and
    `compare_set` wake the threads that wait for the key.
    """

    def __init__(self) -> None:
        super().__init__(DEFAULT_TIMEOUT)
        self._table = StoreTable()
        self._changed = threading.Condition()

    def clone(self) -> HashStore:
        """Return another handle to the same data, with a timeout of its own."""
        self._check_open()
        other = HashStore()
        other._table, other._changed = self._table, self._changed
        other._timeout_s = self._timeout_s
        return other

    def close(self) -> None:
        """Close this handle; its waiting threads raise ClosedError. Clones stay open."""
        super().close()
        with self._changed:
            self._changed.notify_all()

    def _change(self, changes: Sequence[Change]) -> list[Any]:
        require_outside(self, self._changed)
        with self._changed:
            self._check_change()
            results = [self._table.apply(change) for change in changes]
            self._changed.notify_all()
        return results

    def _look(self, question: Callable[[StoreTable], T]) -> T:
        require_outside(self, self._changed)
        with self._changed:
            return question(self._table)

    def _poll(self, deadline: Deadline, question: Callable[[StoreTable], bool]) -> bool:
        require_outside(self, self._changed)
        with self._changed:
            while not question(self._table):
                if self._closed:
                    raise ClosedError(f"{self!r} was closed while a thread waited on it")
                if deadline.expired():
                    return False
                self._changed.wait(min(deadline.remaining(), threading.TIMEOUT_MAX))
        return True

    def __repr__(self) -> str:
        return f"<HashStore keys={len(self._table.values)}>"
