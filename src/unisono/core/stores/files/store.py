"""FileStore: a store in one file, for ranks that share a file system."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from unisono.core.base.deadline import Deadline, Timeout
from unisono.core.base.log import get_logger
from unisono.core.base.process_identity import Life, describe, life_of, new_user
from unisono.core.stores.api import DEFAULT_TIMEOUT, check_integer, check_path, require_outside
from unisono.core.stores.files.log import Compacted, RecordLog, packed_bytes
from unisono.core.stores.table import Change, ChangeKind, StoreTable
from unisono.core.stores.table_store import T, TableStore
from unisono.errors import (
    ClosedError,
    InvalidArgumentError,
    StoreError,
    StoreTimeoutError,
    UsageError,
)

_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.0005, 0.01
# Added to the time-out for the lock alone: other processes hold it for a moment at a time.
_LOCK_GRACE_S = 0.1
_CLOSE_TIMEOUT_S = 5.0
# A file from this size on is made anew if most of it has no effect any more. Larger: a process
# that opens the file reads more. Smaller: a small job makes its file anew without a gain.
_COMPACT_BYTES = 4 << 20
_LOG = get_logger("stores.file")
_MAY_DO_NOTHING = {ChangeKind.POP, ChangeKind.DELETE, ChangeKind.WITHDRAW}


class FileStore(TableStore):
    """Keys and values in a file that every rank can open, on NFS too.

    The file is a log of changes; each process replays it into a table of its own. Waiting
    looks at the file at most every 10 ms. The log only grows, so this store is for rendezvous,
    not for steady traffic. The lock of the file is "<directory>/.<run>.free".

    If `world_size` is given, the file of a killed run is replaced by a new one if

    - one of the processes that used it is dead (seen on the machine where it ran), or
    - it was made under another `run_id`.

    Without a run id, a run that was killed on other machines looks alive. A new world of the same
    size then waits until its time-out, and the error names the processes of the old run.

    Args:
        file_name: The file, or a symbolic link to it; created if missing. Its directory must
            exist.
        world_size: Number of ranks. The last of them to close the store deletes the file.
            -1: the file is kept, and so are its keys.
        timeout: Default for every blocking call, the constructor included; seconds or timedelta.
        run_id: The same on all ranks and different in every run, for example a job's number.

    Raises:
        StoreError: The file cannot be opened, is no regular file or no store, was damaged, or a
            living run with another run id has it.
        StoreTimeoutError: The run that has the file does not end.

    Source: torch.distributed.FileStore, torch 2.13, which hangs on a missing directory, a
    damaged file and the file of a killed run.
    """

    def __init__(
        self,
        file_name: str,
        world_size: int = -1,
        *,
        timeout: Timeout = DEFAULT_TIMEOUT,
        run_id: str = "",
    ) -> None:
        super().__init__(timeout)
        world_size = check_integer(world_size, "world_size")
        if world_size == 0 or world_size < -1:
            raise InvalidArgumentError(f"world_size of a FileStore cannot be {world_size}")
        self.path = check_path(file_name)
        self.world_size = world_size
        self._run_id = run_id.replace("\n", " ")
        self._state = _FileState(self.path, world_size, self._run_id, Deadline(timeout))
        self._finalizer = weakref.finalize(self, self._state.leave)

    def clone(self) -> FileStore:
        """Open the same file once more."""
        self._check_open()
        return FileStore(self.path, self.world_size, timeout=self._timeout_s, run_id=self._run_id)

    def close(self) -> None:
        """Leave the file; the last of `world_size` ranks deletes it."""
        super().close()
        self._finalizer()

    def _change(self, changes: Sequence[Change]) -> list[Any]:
        with self._state.locked(Deadline(self._timeout_s)):
            self._check_change()
            return self._state.change(changes)

    def _look(self, question: Callable[[StoreTable], T]) -> T:
        with self._state.up_to_date(Deadline(self._timeout_s)):
            return question(self._state.table)

    def _poll(self, deadline: Deadline, question: Callable[[StoreTable], bool]) -> bool:
        pause_s = _FIRST_PAUSE_S
        seen = -1
        while True:
            with self._state.up_to_date(Deadline(deadline.remaining() + _LOCK_GRACE_S)):
                if seen != self._state.applied and question(self._state.table):
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
    """The log, the table that results from it, and the processes that use the file."""

    def __repr__(self) -> str:
        return f"the store file {self._log.path!r}"

    def __init__(self, path: str, world_size: int, run_id: str, deadline: Deadline) -> None:
        self._world_size = world_size
        self._run_id = run_id
        self._lock = threading.RLock()
        self._user = new_user()
        self._pid = os.getpid()
        self._closed = False
        self.applied = 0
        while True:
            self._log = RecordLog(path, run_id, deadline)
            self._forget()
            try:
                while not self._join(deadline):
                    time.sleep(_LAST_PAUSE_S)
                return
            except StoreError:
                # The last user of an earlier world deleted the file while we opened it, or another
                # rank of ours has replaced it.
                if deadline.expired() or not self._log.removed():
                    raise

    def _join(self, deadline: Deadline) -> bool:
        """Add this process to the users; return False if an earlier run still has the file."""
        with self.locked(deadline):
            if self._world_size > 0 and self._users and not self._is_ours(deadline):
                return False
            self.change([Change(ChangeKind.JOIN, self._user)])
            return True

    def _is_ours(self, deadline: Deadline) -> bool:
        """Return whether this rank may join; replace the file first if its run is over."""
        lives = {user: life_of(user) for user in self._users}
        alive = [user for user, life in lives.items() if life is Life.ALIVE]
        renamed = self._run_id and self._log.label and self._run_id != self._log.label
        if renamed and alive:
            raise StoreError(
                f"the store file {self._log.path!r} belongs to run {self._log.label!r} of "
                f"{describe(alive[0])}, this is run {self._run_id!r}",
                hint="give every run that lives at the same time a file of its own",
            )
        if renamed or Life.DEAD in lives.values():
            _LOG.warning("%s was left by a run that is over; it is made anew", self._log.path)
            self._log.replace(self._run_id)
            self._forget()
            return True
        if alive or self._joined < self._world_size:
            return True
        if deadline.expired():
            raise StoreTimeoutError(
                f"the store file {self._log.path!r} belongs to a run of {self._joined} ranks that "
                f"did not end within {deadline.timeout_s:g} s: "
                f"{', '.join(map(describe, sorted(self._users)))} never left it",
                hint="if they are dead, delete the file; a run_id makes that unnecessary",
            )
        return False

    @contextmanager
    def locked(self, deadline: Deadline) -> Iterator[None]:
        """Keep other threads and processes out, with the table up to date."""
        with self._thread_lock(deadline), self._log.locked(deadline):
            self._catch_up(locked=True)
            yield

    @contextmanager
    def up_to_date(self, deadline: Deadline) -> Iterator[None]:
        """Keep other threads out, with the table up to date; other processes may go on writing."""
        with self._thread_lock(deadline):
            self._catch_up(locked=False)
            if self._log.torn:
                # The holder of the lock is writing. If the lock is free, reading under it reports
                # the damage.
                with self._log.locked(deadline):
                    self._catch_up(locked=True)
            yield

    def _catch_up(self, *, locked: bool) -> None:
        while True:
            try:
                changes = self._log.read(locked=locked)
                break
            except Compacted as found:
                self._log.begin(found.header)
                self._forget()
        for change in changes:
            self._apply(change)

    def _compact(self) -> None:
        """Replace the file if most of its records have no effect any more; under the lock.

        Otherwise the heartbeats of a job that runs for weeks would fill the disk.
        """
        both = Change(ChangeKind.JOIN, ""), Change(ChangeKind.LEAVE, "")
        before = both * (self._joined - len(self._users))
        users = [Change(ChangeKind.JOIN, user) for user in sorted(self._users)]
        changes = [*before, *users, *self.table.changes()]
        if 4 * sum(map(packed_bytes, changes)) < self._log.nbytes:
            try:
                self._log.compact(changes)
            except OSError as error:
                _LOG.debug("could not shorten %s: %s", self._log.path, error)
        self._compact_at = max(_COMPACT_BYTES, 2 * self._log.nbytes)

    @contextmanager
    def _thread_lock(self, deadline: Deadline) -> Iterator[None]:
        if self._pid != os.getpid():
            # Another thread of the parent may have held the lock at the fork.
            self._pid, self._lock = os.getpid(), threading.RLock()
        require_outside(self, self._lock)
        if not self._lock.acquire(timeout=min(deadline.remaining(), threading.TIMEOUT_MAX)):
            raise StoreTimeoutError(
                f"the store file {self._log.path!r} was in use by another thread of this "
                f"process for {deadline.timeout_s:g} s"
            )
        try:
            if self._closed:
                raise ClosedError(f"the store file {self._log.path!r} was closed by another thread")
            yield
        finally:
            self._lock.release()

    def change(self, changes: Sequence[Change]) -> list[Any]:
        """Apply changes, and write the changes with an effect as one record.

        Raises:
            StoreError: The disk is full; nothing is changed.
        """
        results, written = [], []
        try:
            for change in changes:
                results.append(self._apply(change))
                if not _did_nothing(change, results[-1]):
                    written.append(change)
            if written:
                self._log.append(written)
                if self._log.nbytes > self._compact_at:
                    self._compact()
        except BaseException:
            # The table has changes that the file lacks: rebuild it from the file.
            self._forget()
            self._log.rewind()
            raise
        return results

    def leave(self) -> None:
        """Remove this process from the users; the last of all ranks deletes the file."""
        deadline = Deadline(_CLOSE_TIMEOUT_S)
        try:
            if self._user.endswith(f"~{os.getpid()}"):
                if self._log.removed():
                    self._log.forget()
                else:
                    self._sign_off(deadline)
        except (StoreError, OSError, UsageError) as error:
            # This runs at exit too, so it logs: callers got the reason as an error before.
            _LOG.warning("could not sign off from %s: %s", self._log.path, error)
        self._closed = True

    def _sign_off(self, deadline: Deadline) -> None:
        with self.locked(deadline):
            self.change([Change(ChangeKind.LEAVE, self._user)])
            if 0 < self._world_size <= self._joined and not self._users:
                self._log.remove()

    def _forget(self) -> None:
        self.table = StoreTable()
        # `applied` goes on, because a waiting call compares it.
        self._compact_at = _COMPACT_BYTES
        self._users: set[str] = set()
        self._joined: int = 0

    def _apply(self, change: Change) -> Any:
        self.applied += 1
        if change.kind is ChangeKind.JOIN:
            self._users.add(change.key)
            self._joined += 1
        elif change.kind is ChangeKind.LEAVE:
            self._users.discard(change.key)
        return self.table.apply(change)


def _did_nothing(change: Change, result: Any) -> bool:
    """Return whether a change had no effect, so that polling a queue does not grow the file."""
    if change.kind is ChangeKind.COMPARE_SET:
        return bool(result != change.second)
    return change.kind in _MAY_DO_NOTHING and result in (None, False)
