"""FileStore: a store in one file, for ranks that share a file system."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from unisono.base.deadline import Deadline
from unisono.base.log import get_logger
from unisono.errors import InvalidArgumentError, StoreError, StoreTimeoutError
from unisono.stores.api import DEFAULT_TIMEOUT
from unisono.stores.file_log import RecordLog
from unisono.stores.table import Change, ChangeKind, Table
from unisono.stores.table_store import T, TableStore
from unisono.stores.users import is_dead, new_user

__all__ = ["FileStore"]

_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.0005, 0.01
# A wait whose time is nearly over still gets the lock from others that hold it for a moment.
_LOCK_GRACE_S = 0.1
_CLOSE_TIMEOUT_S = 5.0
_LOG = get_logger("stores.file")
# Polling a queue or deleting what is not there must not make the file grow.
_MAY_DO_NOTHING = {ChangeKind.POP, ChangeKind.DELETE, ChangeKind.WITHDRAW}


class FileStore(TableStore):
    """Keys and values in a file that every rank can open.

    The file is a log of changes; each process replays it into a table of its own. Waiting
    polls the file's length, at most every 10 ms. The log only grows, so this store is for
    rendezvous, not for steady traffic.

    Args:
        path: The file; created if missing. Its directory must exist.
        world_size: Number of ranks. The last of them to close the store deletes the file, and
            a file whose users have all died (a killed run) is emptied instead of trusted.
            -1: the file is kept, and so are its keys.

    Raises:
        StoreError: The file cannot be opened, is no store, or was damaged by a dying writer.

    Source: torch.distributed.FileStore, torch 2.13, which hangs on a missing directory, a
    damaged file and the file of a killed run.
    """

    def __init__(self, path: str, world_size: int = -1) -> None:
        super().__init__(DEFAULT_TIMEOUT)
        if world_size == 0 or world_size < -1:
            raise InvalidArgumentError(f"world_size of a FileStore cannot be {world_size}")
        self.path = os.fspath(path)
        self.world_size = world_size
        self._state = _FileState(self.path, world_size)
        self._finalizer = weakref.finalize(self, self._state.leave)

    def clone(self) -> FileStore:
        """Open the same file once more."""
        self._check_open()
        other = FileStore(self.path, self.world_size)
        other._timeout_s = self._timeout_s
        return other

    def close(self) -> None:
        """Leave the file; the last of `world_size` ranks deletes it."""
        super().close()
        self._finalizer()

    def _change(self, changes: Sequence[Change]) -> list[Any]:
        with self._state.locked(Deadline(self._timeout_s)):
            return [self._state.change(change) for change in changes]

    def _look(self, question: Callable[[Table], T]) -> T:
        with self._state.locked(Deadline(self._timeout_s)):
            return question(self._state.table)

    def _poll(self, deadline: Deadline, question: Callable[[Table], bool]) -> bool:
        pause_s = _FIRST_PAUSE_S
        seen = -1
        while True:
            if self._state.changed_since(seen):
                with self._state.locked(Deadline(deadline.remaining() + _LOCK_GRACE_S)):
                    if question(self._state.table):
                        return True
                    seen = self._state.applied
            if deadline.expired():
                return False
            time.sleep(min(pause_s, deadline.remaining()))
            pause_s = min(2 * pause_s, _LAST_PAUSE_S)
            self._check_open()

    def __repr__(self) -> str:
        return f"<FileStore {self.path!r}>"


class _FileState:
    """The log, the table it leads to, and who uses the file."""

    def __init__(self, path: str, world_size: int) -> None:
        self.table = Table()
        self.applied = 0
        self._world_size = world_size
        self._users: set[str] = set()
        self._joined = 0
        self._lock = threading.Lock()
        self._user = new_user()
        self._pid = os.getpid()
        deadline = Deadline(DEFAULT_TIMEOUT)
        while True:
            self._log = RecordLog(path)
            try:
                with self.locked(deadline):
                    if world_size > 0 and self._users and all(map(is_dead, self._users)):
                        self._start_afresh(erase=True)
                    self.change(Change(ChangeKind.JOIN, self._user))
                return
            except BaseException as error:
                gone = isinstance(error, StoreError) and self._log.removed()
                self._log.close()
                # The last user of an earlier world deleted the file while we opened it.
                if not gone or deadline.expired():
                    raise

    @contextmanager
    def locked(self, deadline: Deadline) -> Iterator[None]:
        """Keep other threads and processes out, with the table up to date."""
        self._take_thread_lock(deadline)
        try:
            with self._log.locked(deadline):
                for change in self._log.read():
                    self._apply(change)
                yield
        finally:
            self._lock.release()

    def _take_thread_lock(self, deadline: Deadline) -> None:
        if self._pid != os.getpid():
            # Another thread of the parent may have held the lock at the fork.
            self._pid, self._lock = os.getpid(), threading.Lock()
        if not self._lock.acquire(timeout=min(deadline.remaining(), threading.TIMEOUT_MAX)):
            raise StoreTimeoutError(
                f"the store file {self._log.path!r} was in use by another thread of this "
                f"process for {deadline.timeout_s:g} s"
            )

    def changed_since(self, applied: int) -> bool:
        """Return whether anybody wrote since then, another thread here included."""
        return self.applied != applied or self._log.grown() or self._log.removed()

    def change(self, change: Change) -> Any:
        """Apply one change and write it down, unless it changes nothing.

        Raises:
            StoreError: The disk is full; nothing is changed.
        """
        result = self._apply(change)
        nothing = (
            result != change.second
            if change.kind is ChangeKind.COMPARE_SET
            else change.kind in _MAY_DO_NOTHING and result in (None, False)
        )
        if nothing:
            return result
        try:
            self._log.append(change)
        except BaseException:
            # The table is ahead of the file now; build it anew from what is written.
            self._start_afresh(erase=False)
            raise
        return result

    def leave(self) -> None:
        """Sign off and close the file; the last of all ranks deletes it."""
        deadline = Deadline(_CLOSE_TIMEOUT_S)
        try:
            if self._user.endswith(f" {os.getpid()}") and not self._log.removed():
                with self.locked(deadline):
                    self.change(Change(ChangeKind.LEAVE, self._user))
                    if 0 < self._world_size <= self._joined and not self._users:
                        self._log.remove()
        except (StoreError, OSError) as error:
            # Also runs at exit, where an error helps nobody; users saw the reason before.
            _LOG.warning("could not sign off from %s: %s", self._log.path, error)
        # Not while another thread is in the middle of an operation on the descriptor.
        self._take_thread_lock(deadline)
        self._log.close()
        self._lock.release()

    def _start_afresh(self, *, erase: bool) -> None:
        self.table = Table()
        self._users.clear()
        self._joined = 0
        self._log.rewind(erase=erase)

    def _apply(self, change: Change) -> Any:
        self.applied += 1
        if change.kind is ChangeKind.JOIN:
            self._users.add(change.key)
            self._joined += 1
        elif change.kind is ChangeKind.LEAVE:
            self._users.discard(change.key)
        return self.table.apply(change)
