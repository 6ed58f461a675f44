"""A lock between processes: one file whose name shows its holder; it needs nothing but rename.

A process acquires the lock by renaming "<run>.free" to a name that contains its identity. It
releases the lock by renaming the file back. A rename is atomic on every file system, also on NFS
and on file systems without flock. The file exists once and has one name, so the lock has at most
one holder. The name identifies the holder, so another process can take the lock of a dead one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress

from unisono.core.base.deadline import Deadline
from unisono.core.base.process_identity import describe, is_dead, new_user
from unisono.errors import StoreError, StoreTimeoutError

_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.0005, 0.01
# Most holders release the lock before this; listing the directory earlier would cost more.
_LOOK_AFTER_S = 0.004


DRAFT = "new"
"""The end of the name of a file that the holder of the lock writes."""


class FileLock:
    """One process's handle of the lock of a store file.

    Args:
        path: The store file; the lock is in the same directory.
        run: Name of the run that uses the file; a lock belongs to one run.
        held: Create the lock and hold it; if false, the lock exists already.
    """

    def __init__(self, path: str, run: str, *, held: bool = False) -> None:
        self._path = path
        self._run = run
        self._folder, self._prefix = os.path.dirname(path) or ".", f".{run}."
        self._free = self._name("free")
        self._pid = os.getpid()
        self._mine = self._name(new_user())
        if held:
            os.close(os.open(self._mine, os.O_CREAT | os.O_EXCL, 0o600))

    def _name(self, end: str) -> str:
        return os.path.join(self._folder, self._prefix + end)

    def acquire(self, deadline: Deadline, check: Callable[[], object]) -> bool:
        """Take the lock; return whether it had to be taken from a dead process.

        Args:
            deadline: When to give up.
            check: Raises if the store and its lock no longer exist.

        Raises:
            StoreTimeoutError: Another process holds the lock; the text names it.
        """
        if self._pid != os.getpid():
            # After a fork, parent and child need different names, or both would hold the lock.
            self._pid, self._mine = os.getpid(), self._name(new_user())
        pause_s = _FIRST_PAUSE_S
        while not self._move(self._free, self._mine):
            holder = ""
            if pause_s >= _LOOK_AFTER_S or deadline.expired():
                check()
                holder = self._holder()
                if holder and is_dead(holder) and self._move(self._name(holder), self._mine):
                    return True
            if deadline.expired():
                raise self._timeout(holder, deadline.timeout_s)
            time.sleep(min(pause_s, deadline.remaining()))
            pause_s = min(2 * pause_s, _LAST_PAUSE_S)
        return False

    def release(self) -> None:
        """Release the lock; nothing happens if this process does not hold it."""
        if self._pid == os.getpid():
            self._move(self._mine, self._free)

    def discard(self) -> None:
        """Delete the lock, which this process must hold: the run is over."""
        os.unlink(self._mine)
        with suppress(OSError):
            os.unlink(self._name(DRAFT))  # of a process that was killed

    def discard_free(self) -> None:
        """Delete the lock if it is free: its store is gone."""
        with suppress(OSError):
            os.unlink(self._free)

    def _move(self, source: str, target: str) -> bool:
        try:
            os.rename(source, target)
        except FileNotFoundError:
            # NFS reports this also if the answer to a first, successful attempt was lost.
            return target == self._mine and os.path.exists(target)
        except OSError as error:
            raise StoreError(
                f"cannot lock the store file {self._path!r}: {error.strerror}",
                hint="every rank needs the right to create and rename files in its directory",
            ) from error
        return True

    def _holder(self) -> str:
        """Return the holder of the lock, or "" if it is free or being renamed."""
        for entry in os.listdir(self._folder):
            holder = entry.removeprefix(self._prefix)
            if holder not in (entry, "free", DRAFT):
                return holder
        return ""

    def _timeout(self, holder: str, timeout_s: float) -> StoreTimeoutError:
        if not holder:
            return StoreTimeoutError(
                f"the store file {self._path!r} could not be locked for {timeout_s:g} s",
                hint=f"if the file {self._free!r} is missing, delete the store file too; all ranks "
                "must use the same of several hard links",
            )
        return StoreTimeoutError(
            f"the store file {self._path!r} stayed locked for {timeout_s:g} s by "
            f"{describe(holder)}",
            hint="it is stopped, or it died on another host: then delete the file and start again",
        )
