"""An append-only file of records that several processes write in turn.

A record is appended under an exclusive lock, and read under it; so an incomplete record means
that its writer died in the middle of a write, not that it is still writing.
"""

from __future__ import annotations

import fcntl
import os
import struct
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

from unisono.base.deadline import Deadline
from unisono.errors import ClosedError, StoreConnectionError, StoreError, StoreTimeoutError
from unisono.stores.table import Change, ChangeKind

__all__ = ["RecordLog"]

_MAGIC = b"unisono store 1\n"
# Checksum of what follows, kind, lengths of key and of the two values.
_HEADER = struct.Struct("<IBIII")
_CHECKSUM_BYTES = 4
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.0005, 0.01


class RecordLog:
    """One open file, and how far this process has read it.

    Raises:
        StoreError: The directory is missing, the file cannot be opened, or is no store.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._fd = -1
        self._position = 0
        self._open()

    def _open(self) -> None:
        self._pid = os.getpid()
        try:
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StoreError(
                f"cannot open the store file {self.path!r}: {error.strerror}",
                hint="its directory must exist and be writable on every rank",
            ) from error

    @contextmanager
    def locked(self, deadline: Deadline) -> Iterator[None]:
        """Keep all other users out.

        Raises:
            StoreTimeoutError: Another process keeps the lock.
            StoreConnectionError: The file was removed.
            ClosedError: Another thread closed the file.
        """
        if self._fd < 0:
            raise ClosedError(f"the store file {self.path!r} was closed by another thread")
        if self._pid != os.getpid():
            # A lock belongs to the open file, which a fork shares: both would hold it.
            os.close(self._fd)
            self._open()
        self._acquire(deadline)
        try:
            yield
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _acquire(self, deadline: Deadline) -> None:
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if deadline.expired():
                    raise StoreTimeoutError(
                        f"the store file {self.path!r} stayed locked by another process for "
                        f"{deadline.timeout_s:g} s",
                        hint="a process that uses it is stopped; find it with lslocks or fuser",
                    ) from None
            time.sleep(min(pause_s, deadline.remaining()))
            pause_s = min(2 * pause_s, _LAST_PAUSE_S)
        if self.removed():
            fcntl.flock(self._fd, fcntl.LOCK_UN)
            raise StoreConnectionError(f"the store file {self.path!r} was removed while in use")

    def removed(self) -> bool:
        """Return whether the path no longer leads to the file that is open here."""
        try:
            there = os.stat(self.path)
        except FileNotFoundError:
            return True
        if self._fd < 0:
            return False
        here = os.fstat(self._fd)
        return (there.st_dev, there.st_ino) != (here.st_dev, here.st_ino)

    def grown(self) -> bool:
        """Return whether there is something to read; needs no lock."""
        return self._fd < 0 or os.fstat(self._fd).st_size != self._position

    def read(self) -> list[Change]:
        """Return the records that were not read yet; the lock must be held.

        Raises:
            StoreError: The file is no store, was truncated, or has a torn or damaged record.
        """
        size = os.fstat(self._fd).st_size
        if size < self._position:
            raise StoreError(
                f"the store file {self.path!r} shrank from {self._position} to {size} bytes"
            )
        data = os.pread(self._fd, size - self._position, self._position)
        start = 0
        if self._position == 0 and data:
            if data[: len(_MAGIC)] != _MAGIC:
                raise StoreError(
                    f"{self.path!r} is not a unisono store: it begins with {data[:16]!r}",
                    hint="choose another path, or delete the file",
                )
            start = len(_MAGIC)
        records = []
        while start < len(data):
            record, start = self._parse(data, start)
            records.append(record)
        self._position = size
        return records

    def _parse(self, data: bytes, start: int) -> tuple[Change, int]:
        body = start + _HEADER.size
        if body <= len(data):
            checksum, kind, *sizes = _HEADER.unpack_from(data, start)
            end = body + sum(sizes)
            if end <= len(data):
                if zlib.crc32(data[start + _CHECKSUM_BYTES : end]) != checksum:
                    raise self._damaged("damaged", start, data)
                parts = []
                for size in sizes:
                    parts.append(data[body : body + size])
                    body += size
                key = parts[0].decode("utf-8", "surrogateescape")
                return Change(ChangeKind(kind), key, parts[1], parts[2]), end
        raise self._damaged("torn", start, data)

    def _damaged(self, how: str, start: int, data: bytes) -> StoreError:
        offset = self._position + start
        return StoreError(
            f"the store file {self.path!r} has a {how} record at byte {offset} of "
            f"{self._position + len(data)}",
            hint="a process died while it wrote; delete the file and start all ranks again",
        )

    def append(self, record: Change) -> None:
        """Write one record; the lock must be held and all records read.

        Raises:
            StoreError: The disk is full; the file is as before.
        """
        key = record.key.encode("utf-8", "surrogateescape")
        sizes = len(key), len(record.first), len(record.second)
        rest = _HEADER.pack(0, record.kind, *sizes)[_CHECKSUM_BYTES:]
        rest += key + record.first + record.second
        data = zlib.crc32(rest).to_bytes(_CHECKSUM_BYTES, "little") + rest
        if self._position == 0:
            data = _MAGIC + data
        try:
            written = 0
            while written < len(data):
                view = memoryview(data)[written:]
                written += os.pwrite(self._fd, view, self._position + written)
        except OSError as error:
            os.ftruncate(self._fd, self._position)
            raise StoreError(
                f"cannot write to the store file {self.path!r}: {error.strerror}"
            ) from error
        self._position += len(data)

    def rewind(self, *, erase: bool = False) -> None:
        """Read from the beginning next time; `erase` also empties the file."""
        self._position = 0
        if erase:
            os.ftruncate(self._fd, 0)

    def remove(self) -> None:
        """Delete the file; the lock must be held."""
        os.unlink(self.path)

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
