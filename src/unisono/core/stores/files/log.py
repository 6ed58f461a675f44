"""An append-only file of records that several processes write in turn.

    header: "unisono store 3", name of the run, label, number of the file, each with a newline
    record: checksum of the rest, length of the rest, changes
    change: kind, lengths of key and of the two values, these three

The header is created whole, by link or rename, and never changes. Records are written under the
lock and read without it. An incomplete record is still being written, or its writer died. The file
is opened for each request, because NFS then fetches what other processes have written.

A run may replace its file by a shorter one with the same effect. Its number shows it.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
import time
import uuid
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from unisono.core.base.deadline import Deadline
from unisono.core.platform.files import lock
from unisono.core.platform.posix import BINARY, pread, pwrite
from unisono.core.stores.files.lock import DRAFT, FileLock
from unisono.core.stores.table import Change, ChangeKind
from unisono.errors import StoreConnectionError, StoreError, StoreTimeoutError

_MAGIC = b"unisono store 3\n"
_FRAME = struct.Struct("<II")
_CHANGE = struct.Struct("<BIII")
_HEADER_BYTES = 1024
_PAUSE_S = 0.005
# Turns without a look at the deadline: make an empty file, replace it, read it.
_TURNS = 3
_KINDS = {
    stat.S_IFDIR: "directory",
    stat.S_IFCHR: "character device",
    stat.S_IFBLK: "block device",
    stat.S_IFIFO: "named pipe",
    stat.S_IFSOCK: "socket",
}
_NO_FLOCK_HINT = (
    "its file system has no flock: delete the empty file, and ranks make it by a hard link; if "
    "there are no hard links either, choose a path on another file system, or tcp://"
)
_NAMES_HINT = "all ranks must use one name; a symbolic link to it is as good"


class Compacted(Exception):
    """The run has a new file, perhaps with this header, which must be read from its begin."""

    def __init__(self, header: bytes) -> None:
        super().__init__(header)
        self.header = header


class RecordLog:
    """The file of one run, and how far this process has read it.

    Attributes:
        label: The run's name, set by its first rank; may be empty.
        torn: Whether the last `read` found an incomplete record at the end.

    Args:
        path: The file; made if it does not exist or is empty.
        label: For a new file.
        deadline: When to give up.

    Raises:
        StoreError: The directory is missing, the file cannot be opened, or is no store.
    """

    def __init__(self, path: str, label: str, deadline: Deadline) -> None:
        # The lock is beside the file, so two links to one file must lead to one lock.
        self.path = os.path.realpath(path)
        self.torn = False
        self._stolen = False
        turns = 0
        while not (header := self._read_or_create(label, deadline)):
            turns += 1
            if turns <= _TURNS:
                continue
            if deadline.expired():
                raise StoreTimeoutError(
                    f"the store file {self.path!r} could not be opened for {deadline.timeout_s:g} "
                    "s: there is an entry of that name, but it leads to no file",
                    hint="delete it, or choose another path",
                )
            time.sleep(min(_PAUSE_S, deadline.remaining()))
        self.begin(header)
        self._lock = FileLock(self.path, self._run)

    def begin(self, header: bytes) -> None:
        """Make the next `read` begin at the first record of the file with this header."""
        magic, run, label, number, *_ = [*header.split(b"\n", 4), b"", b"", b""]
        if magic + b"\n" != _MAGIC:
            raise StoreError(
                f"{self.path!r} is not a unisono store: it begins with {header[:16]!r}",
                hint="choose another path, or delete the file",
            )
        self._run, self.label, self._number = run.decode(), label.decode(), int(number or 0)
        self._header = _header(self._run, self.label, self._number)
        self._position = len(self._header)

    @property
    def nbytes(self) -> int:
        """The size of the file as far as this process knows."""
        return self._position

    def _read_or_create(self, label: str, deadline: Deadline) -> bytes:
        """Return the header, or nothing if other processes are about to write one."""
        try:
            # Before it is opened, because to open a device or a pipe may change it.
            self._check_kind(os.stat(self.path).st_mode)
            fd = os.open(self.path, os.O_RDWR | BINARY)
        except FileNotFoundError:
            self._put(label, _link, FileExistsError)
            return b""
        except OSError as error:
            raise self._failed("open", error) from error
        try:
            self._check_kind(os.fstat(fd).st_mode)
            if not (header := pread(fd, _HEADER_BYTES, 0)):
                self._fill(fd, label, deadline)
            return header
        finally:
            os.close(fd)

    def _check_kind(self, mode: int) -> None:
        if not stat.S_ISREG(mode):
            kind = _KINDS.get(stat.S_IFMT(mode), "special file")
            raise StoreError(
                f"the store file {self.path!r} is a {kind}, expected a regular file",
                hint="choose another path; ranks make the file",
            )

    def _fill(self, fd: int, label: str, deadline: Deadline) -> None:
        """Replace an empty file, such as one that mktemp made, by a new store.

        If several processes find the file empty, only one may replace it: a second replacement
        would discard what was written in between. Only this function needs flock.
        """
        while True:
            try:
                lock(fd)
                break
            except BlockingIOError:
                pass
            except OSError as error:
                raise self._failed("use", error, _NO_FLOCK_HINT) from error
            if deadline.expired():
                raise StoreTimeoutError(
                    f"the empty store file {self.path!r} stayed locked by another process for "
                    f"{deadline.timeout_s:g} s"
                )
            time.sleep(min(_PAUSE_S, deadline.remaining()))
        if (names := os.fstat(fd).st_nlink) > 1:
            # Only this name would lead to the new store.
            raise StoreError(
                f"the empty store file {self.path!r} has {names} names (hard links)",
                hint=_NAMES_HINT,
            )
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(fd), os.stat(self.path)):
                self._put(label, os.replace)

    def _put(
        self,
        label: str,
        place: Callable[[str, str], None],
        lost: type[OSError] | tuple[()] = (),
        *,
        hold: bool = False,
    ) -> tuple[bytes, FileLock]:
        """Make a new store and `place` it at the path; `lost` means that a store exists there."""
        run = uuid.uuid4().hex
        header = _header(run, label)
        placed = False
        try:
            lock = FileLock(self.path, run, held=True)
        except OSError as error:
            raise self._failed("open", error) from error
        try:
            self._write(run, header, place)
            placed = True
        except lost:
            pass
        except OSError as error:
            raise self._failed("open", error) from error
        finally:
            if not placed:
                lock.discard()
            elif not hold:
                lock.release()
        return header, lock

    def _write(self, run: str, data: bytes, place: Callable[[str, str], None]) -> None:
        """Write a file of a run, whose lock must be held, and `place` it at the path."""
        draft = os.path.join(os.path.dirname(self.path) or ".", f".{run}.{DRAFT}")
        with suppress(FileNotFoundError):
            os.unlink(draft)  # of a process that was killed
        try:
            fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | BINARY, 0o600)
            with os.fdopen(fd, "wb") as file:
                file.write(data)
            place(draft, self.path)
        finally:
            with suppress(OSError):
                os.unlink(draft)

    def _failed(self, what: str, error: OSError, hint: str = "") -> StoreError:
        return StoreError(
            f"cannot {what} the store file {self.path!r}: {error.strerror}",
            hint=hint or "its directory must exist, and every rank must be able to write there",
        )

    @contextmanager
    def locked(self, deadline: Deadline) -> Iterator[None]:
        """Keep all other writers out.

        Raises:
            StoreTimeoutError: Another process keeps the lock.
            StoreConnectionError: The file was removed, or belongs to another run now.
        """
        try:
            self._stolen = self._lock.acquire(deadline, self._check) or self._stolen
            yield
        finally:
            self._lock.release()

    @contextmanager
    def _opened(self) -> Iterator[int]:
        """Open the file, and check that it is still that of this run."""
        try:
            fd = os.open(self.path, os.O_RDWR | BINARY)
        except FileNotFoundError:
            raise StoreConnectionError(
                f"the store file {self.path!r} was removed while in use"
            ) from None
        except OSError as error:
            raise self._failed("open", error) from error
        try:
            self._check_kind(os.fstat(fd).st_mode)
            if (header := pread(fd, _HEADER_BYTES, 0))[: len(self._header)] != self._header:
                if header.startswith(_MAGIC + f"{self._run}\n".encode()):
                    raise Compacted(header)
                size = os.fstat(fd).st_size
                if size < self._position:
                    raise StoreError(
                        f"the store file {self.path!r} shrank from {self._position} to {size} bytes"
                    )
                raise StoreConnectionError(
                    f"the store file {self.path!r} was taken over by another run while in use",
                    hint="give every run that lives at the same time a file of its own",
                )
            yield fd
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
            # On NFS another host has replaced the file since it was opened.
            raise Compacted(self._header) from None
        finally:
            os.close(fd)

    def _check(self) -> None:
        with suppress(Compacted), self._opened():
            pass

    def removed(self) -> bool:
        """Return whether the path no longer leads to this run's file."""
        try:
            self._check()
        except StoreConnectionError:
            return True
        return False

    def read(self, *, locked: bool) -> list[Change]:
        """Return the changes that this process has not read yet.

        Args:
            locked: Whether the lock is held. An incomplete record at the end is then cut off if
                the lock was taken from a dead process, and reported as damage otherwise.

        Raises:
            Compacted: This process has read another file of the run.
            StoreError: The file was truncated or damaged.
        """
        with self._opened() as fd:
            size = os.fstat(fd).st_size
            if size < self._position:
                raise StoreError(
                    f"the store file {self.path!r} shrank from {self._position} to {size} bytes"
                )
            data = pread(fd, size - self._position, self._position)
            changes: list[Change] = []
            end = 0
            while (record := _parse(data, end)) is not None:
                found, end = record
                changes += found
            self.torn = end < len(data)
            if self.torn and locked:
                if not self._stolen:
                    raise StoreError(
                        f"the store file {self.path!r} is damaged at byte {self._position + end} "
                        f"of {size}",
                        hint="delete the file and start all ranks again",
                    )
                os.ftruncate(fd, self._position + end)
                self.torn = False
            if locked:
                self._stolen = False
            self._position += end
        return changes

    def append(self, changes: Sequence[Change]) -> None:
        """Write one record; the lock must be held and all records read.

        Raises:
            StoreError: The disk is full; the file is as before.
        """
        data = _record(changes)
        with self._opened() as fd:
            try:
                written = 0
                while written < len(data):
                    view = memoryview(data)[written:]
                    if not (more := pwrite(fd, view, self._position + written)):
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                    written += more
            except BaseException as error:
                os.ftruncate(fd, self._position)
                if isinstance(error, OSError):
                    raise self._failed("write to", error, " ") from error
                raise
        self._position += len(data)

    def compact(self, changes: Sequence[Change]) -> None:
        """Replace the file by one with these changes only; the lock must be held.

        A file with several names stays: only one of them would lead to the new file.

        Raises:
            OSError: The file is as before.
        """
        if os.stat(self.path).st_nlink > 1:
            return
        header = _header(self._run, self.label, self._number + 1)
        data = header + (_record(changes) if changes else b"")
        self._write(self._run, data, os.replace)
        self.begin(header)
        self._position = len(data)

    def rewind(self) -> None:
        """Make the next `read` begin at the first record."""
        self._position = len(self._header)

    def replace(self, label: str) -> None:
        """Replace the file by that of a new run; the lock must be held, and stays so."""
        header, lock = self._put(label, os.replace, hold=True)
        self._lock.discard()
        self._lock = lock
        self.begin(header)

    def remove(self) -> None:
        """Delete the file and its lock, which must be held."""
        os.unlink(self.path)
        self._lock.discard()

    def forget(self) -> None:
        """Delete the lock of a run whose file was deleted."""
        self._lock.discard_free()


def _link(draft: str, path: str) -> None:
    """Place a new store at a path without a file.

    On a file system without hard links make an empty file, which `_fill` then replaces.
    """
    try:
        os.link(draft, path)
    except FileExistsError:
        raise
    except OSError:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | BINARY, 0o600))
        raise FileExistsError from None


def _header(run: str, label: str, number: int = 0) -> bytes:
    return _MAGIC + f"{run}\n{label}\n{number}\n".encode()


def _record(changes: Sequence[Change]) -> bytes:
    data = b"".join(map(_pack, changes))
    return _FRAME.pack(zlib.crc32(data), len(data)) + data


def packed_bytes(change: Change) -> int:
    """Return about how many bytes a change takes in the file."""
    return _CHANGE.size + len(change.key) + len(change.first) + len(change.second)


def _pack(change: Change) -> bytes:
    key = change.key.encode("utf-8", "surrogateescape")
    sizes = len(key), len(change.first), len(change.second)
    return _CHANGE.pack(change.kind, *sizes) + key + change.first + change.second


def _parse(data: bytes, start: int) -> tuple[list[Change], int] | None:
    """Return the changes of the record at `start` and where it ends; None if it is incomplete."""
    place = start + _FRAME.size
    if place > len(data):
        return None
    checksum, length = _FRAME.unpack_from(data, start)
    end = place + length
    # A length of 0 is a hole, not a record: NFS may write the second page before the first.
    if not length or end > len(data) or zlib.crc32(data[place:end]) != checksum:
        return None
    changes = []
    while place < end:
        kind, *sizes = _CHANGE.unpack_from(data, place)
        place += _CHANGE.size
        parts = []
        for size in sizes:
            parts.append(data[place : place + size])
            place += size
        key = parts[0].decode("utf-8", "surrogateescape")
        changes.append(Change(ChangeKind(kind), key, parts[1], parts[2]))
    return changes, end
