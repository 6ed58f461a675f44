"""One file that all ranks of a group write or read together.

    with dist.open_file("state.bin", "w") as file:
        file.write_block(mine, shape=(1000, 1000), starts=(500, 0))

The ranks agree on each call before a byte is written. An error of one rank is raised on all. The
file has another name until all ranks have written all of it.

A file has no header: a block array is stored as `numpy.ndarray.tofile` stores the whole array.

Source: MPI 4.1, chapter 14 (MPI_File_write_all with a subarray as view, MPI_File_write_ordered).
"""

from __future__ import annotations

import contextlib
import math
import os
import stat
import uuid
from collections.abc import Iterable, Sequence
from typing import Any, Self

import numpy as np

from unisono.beyond.boxes import IndexBox
from unisono.core.base.buffers import BufferView, as_bytes, view
from unisono.core.base.deadline import Timeout
from unisono.core.base.integers import as_integers
from unisono.core.base.threads.streams import on_host
from unisono.core.base.types import Array
from unisono.core.c10d.objects.call import ObjectCall
from unisono.core.groups.process_group import ProcessGroup
from unisono.core.groups.world import Group, require_group
from unisono.core.platform.posix import BINARY, NONBLOCK, pwrite, read_into
from unisono.errors import (
    ArgumentTypeError,
    ClosedError,
    CollectiveError,
    InvalidArgumentError,
    UsageError,
)

# Linux moves at most 2 GiB - 4 KiB in a call.
_MOST_BYTES = 1 << 30

_SHARED = "all hosts must see the file under this path, as in a network file system"


class CollectiveFile:
    """A file that all ranks of a group have opened; made by `open_file`.

    All methods but `close` of a file to read are collective calls. Arrays follow one another in
    the file, each call at the end of the call before.

    Attributes:
        path: The file's path. A file to write has this name after `close`.
        position: Bytes before the next call's array.
    """

    def __init__(self, group: ProcessGroup, path: str, name: str, fd: int, size: int | None):
        self.path = path
        self.position = 0
        self._group = group
        # The name until the file is complete.
        self._name = name
        self._file = os.fdopen(fd, "rb" if size is not None else "wb", buffering=0)
        self._size = size
        # A file that exists is not replaced.
        self._is_new = False

    @on_host
    def write_block(
        self,
        tensor: Array,
        shape: Sequence[int],
        starts: Sequence[int],
        *,
        timeout: Timeout | None = None,
    ) -> None:
        """Write one array of which each rank has a block.

        The blocks must cover the array without overlap. A block without elements is fine. Cost:
        one write call for each contiguous part of the block.

        Args:
            tensor: [...] this rank's block, any layout; one dtype on all ranks.
            shape: Of the whole array; equal on all ranks.
            starts: Index of the block's first element in each dimension.
            timeout: Of the whole call; the group's if None.

        Raises:
            InvalidArgumentError: The block does not fit into the shape.
            CollectiveMismatchError: Ranks disagree about shape or dtype, or a rank's arguments are
                wrong.
            CollectiveError: Blocks overlap or do not cover the array, or a rank cannot write. The
                next call writes at the same position.
        """
        with ObjectCall(self._group, "write_block", timeout, None) as call:
            box = _Box(self, call, tensor, shape, starts, writes_file=True)
            boxes = call.loads_all(call.all_gather(call.pack(lambda: (box.starts, box.extents))))
            _require_tiling(self._group, call, boxes, box.shape)
            call.on_all(lambda: self._move(box, pwrite), f"cannot write {self.path}")
        self.position += box.whole_bytes

    @on_host
    def read_block(
        self,
        tensor: Array,
        shape: Sequence[int],
        starts: Sequence[int],
        *,
        timeout: Timeout | None = None,
    ) -> None:
        """Read a block of one array; the blocks of the ranks may overlap or leave out elements.

        Args:
            tensor: [...] memory for this rank's block, any layout; one dtype on all ranks.
            shape: Of the whole array; equal on all ranks.
            starts: Index of the block's first element in each dimension.
            timeout: Of the whole call; the group's if None.

        Raises:
            InvalidArgumentError: The block does not fit into the shape.
            CollectiveMismatchError: Ranks disagree about shape or dtype, or a rank's arguments are
                wrong.
            CollectiveError: The file is too short, or a rank cannot read it. The tensor may have
                changed then.
        """
        with ObjectCall(self._group, "read_block", timeout, None) as call:
            box = _Box(self, call, tensor, shape, starts, writes_file=False)
            call.on_all(lambda: self._read(box), f"cannot read {self.path}")
        box.data.unpack()
        self.position += box.whole_bytes

    @on_host
    def write_in_order(self, tensor: Array, *, timeout: Timeout | None = None) -> int:
        """Write the arrays of all ranks in the order of the ranks; sizes may differ.

        Returns:
            The offset of this rank's array in the file, in bytes.

        Raises:
            CollectiveMismatchError: Ranks disagree about the dtype.
            CollectiveError: A rank cannot write.
        """
        with ObjectCall(self._group, "write_in_order", timeout, None) as call:
            boxes: list[BufferView] = []

            def check() -> None:
                self._require_open(writes=True)
                boxes.append(view(tensor, write=False))

            call.check(check)
            data = boxes[0]
            call.label += f"({data.dtype}, byte {self.position})"
            sizes = call.loads_all(call.all_gather(call.pack(lambda: data.nbytes)))
            offset = self.position + sum(sizes[: self._group.rank()])
            raw = as_bytes(data.array)
            call.on_all(
                lambda: _move_all(self._fd, raw, offset, pwrite), f"cannot write {self.path}"
            )
        self.position += sum(sizes)
        return int(offset)

    @on_host
    def close(self, *, timeout: Timeout | None = None) -> None:
        """Close the file. A file to write gets its name after all ranks have stored their parts.

        Raises:
            CollectiveError: A rank cannot store its part. The file keeps its temporary name.
        """
        if self._file.closed:
            return
        if self._size is not None:
            self._file.close()
            return
        with ObjectCall(self._group, "CollectiveFile.close", timeout, None) as call:
            call.label += f"({self.path!r}, {self.position} bytes)"
            # Without it a rank that alone calls `close` would close its file.
            self._group.agree(call.label, timeout=call.remaining_s)
            call.on_all(self._store, f"cannot store {self._name}")
            call.on_all(self._rename, f"cannot name {self.path}")

    def __enter__(self) -> Self:
        self._since = self._group.place()
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        complete = False
        try:
            if error is None:
                self.close()
                complete = True
            elif self._size is None and not self._group.is_known_to_all(error, self._since):
                # The other ranks are in a later call of this file.
                self._group.refuse("CollectiveFile.close", error)
        finally:
            self._file.close()
            if not complete and self._size is None:
                _remove(self._group, self._name)

    def __repr__(self) -> str:
        state = "closed" if self._file.closed else "to write" if self._size is None else "to read"
        return f"<CollectiveFile {self.path} {state} position={self.position}>"

    @property
    def _fd(self) -> int:
        return self._file.fileno()

    def _require_open(self, *, writes: bool) -> None:
        if self._file.closed:
            raise ClosedError(f"{self.path} was closed")
        if writes != (self._size is None):
            mode = "w" if self._size is None else "r"
            raise UsageError(f"{self.path} was opened with mode {mode!r}")

    def _write_pieces(
        self, pieces: Iterable[tuple[int, memoryview]], nbytes: int, name: str, *, timeout: Any
    ) -> None:
        """Write pieces of `nbytes` that together the ranks have, each at its offset; collective."""
        with ObjectCall(self._group, name, timeout, None) as call:
            call.check(lambda: self._require_open(writes=True))
            call.label += f"({nbytes} bytes, byte {self.position})"

            def write() -> None:
                for offset, piece in pieces:
                    _move_all(self._fd, piece, self.position + offset, pwrite)

            call.on_all(write, f"cannot write {self.path}")
        self.position += nbytes

    def _move(self, box: _Box, move: Any) -> None:
        raw = as_bytes(box.data.array)
        at = 0
        for offset in box.offsets:
            _move_all(self._fd, raw[at : at + box.run_bytes], self.position + offset, move)
            at += box.run_bytes

    def _read(self, box: _Box) -> None:
        assert self._size is not None
        if self.position + box.whole_bytes > self._size:
            raise OSError(
                None,
                f"it has {self._size} bytes, expected {box.whole_bytes} from byte {self.position}",
            )
        self._move(box, read_into)

    def _store(self) -> None:
        try:
            # A write that failed may have left bytes behind the end.
            os.ftruncate(self._fd, self.position)
            os.fsync(self._fd)
        finally:
            self._file.close()

    def _rename(self) -> None:
        if self._group.rank() == 0:
            if self._is_new:
                os.link(self._name, self.path)
                os.unlink(self._name)
            else:
                os.replace(self._name, self.path)
            folder = os.open(os.path.dirname(os.path.abspath(self.path)), os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)


class _Box:
    """A block of an array in a file.

    Attributes:
        data: This rank's memory.
        shape: Of the whole array.
        starts: Of the block in each dimension.
        extents: Of the block in each dimension.
        whole_bytes: Of the whole array.
        offsets: Of each contiguous part of the block from the array's begin, in bytes.
        run_bytes: Of each contiguous part.
    """

    def __init__(
        self,
        file: CollectiveFile,
        call: ObjectCall,
        tensor: Array,
        shape: Sequence[int],
        starts: Sequence[int],
        *,
        writes_file: bool,
    ) -> None:
        def check() -> None:
            file._require_open(writes=writes_file)
            self.data = view(tensor, write=not writes_file, pack=writes_file)
            self.shape = as_integers(shape, "shape")
            self.starts = as_integers(starts, "starts")
            self.extents = self.data.shape
            fits = len(self.shape) == len(self.starts) == len(self.extents) and all(
                start >= 0 and start + extent <= size
                for start, extent, size in zip(self.starts, self.extents, self.shape, strict=True)
            )
            if not fits:
                raise InvalidArgumentError(
                    f"a block {list(self.extents)} at {list(self.starts)} does not fit into "
                    f"{list(self.shape)}"
                )

        call.check(check)
        itemsize = self.data.dtype.itemsize
        self.whole_bytes = math.prod(self.shape) * itemsize
        call.label += f"({self.data.dtype}, {list(self.shape)}, byte {file.position})"
        ends = tuple(map(int.__add__, self.starts, self.extents))
        offsets, run = IndexBox(self.starts, ends).runs(self.shape)
        self.offsets = [offset * itemsize for offset in offsets]
        self.run_bytes = run * itemsize


def open_file(
    path: str | os.PathLike[str],
    mode: str = "r",
    group: Group = None,
    *,
    timeout: Timeout | None = None,
) -> CollectiveFile:
    """Open a file on all ranks of a group; a collective call, and a context manager.

    A file to write is `PATH.<random>.incomplete` until `close`, which replaces PATH, and does not
    follow a symbolic link. After an error in the with block or at its end, rank 0 of the group
    removes the incomplete file. After the end of a process it may stay.

    Args:
        path: Equal on all ranks. The ranks must see the same folder.
        mode: "w" for a new file, "r" to read one.
        group: The default group if None.
        timeout: Of the call; the group's if None.

    Raises:
        InvalidArgumentError: Another mode, or this rank is no member of the group.
        CollectiveMismatchError: Ranks disagree about path or mode.
        CollectiveError: A rank cannot open the file; raised on all ranks.

    Examples: On rank 1 of 2
        >>> with dist.open_file("/dev/shm/unisono-example", "w") as file:
        ...     file.write_block(np.full((1, 2), rank), shape=(2, 2), starts=(rank, 0))
        >>> np.fromfile("/dev/shm/unisono-example", int)
        array([0, 0, 1, 1])
    """
    pg = require_group(group)
    with ObjectCall(pg, "open_file", timeout, None) as call:
        names: list[str] = []

        def check() -> None:
            try:
                names.append(os.fsdecode(os.fspath(path)))
            except TypeError:
                raise ArgumentTypeError(f"path must be a path, got {path!r}") from None
            if not isinstance(mode, str) or mode not in ("r", "w"):
                raise InvalidArgumentError(f"mode={mode!r}: expected 'r' or 'w'")

        call.check(check)
        name = names[0]
        call.label = f"open_file({name!r}, {mode!r})"
        failed = f"cannot open {name}"
        opened: list[int] = []
        try:
            if mode == "r":
                size = call.on_all(lambda: _open_to_read(name, opened), failed, hint=_SHARED)
                return _made(pg, call, name, opened, size)
            part = f"{name}.{uuid.uuid4().hex[:12]}.incomplete"
            try:
                made = call.on_all(
                    lambda: _create(name, part, opened) if pg.rank() == 0 else "", failed
                )
                call.on_all(lambda: _join(made[0], opened), failed, hint=_SHARED)
            except BaseException:
                # The part of rank 0 is that of all ranks.
                _remove(pg, part)
                raise
            return CollectiveFile(pg, name, made[0], opened.pop(), None)
        finally:
            for fd in opened:
                os.close(fd)


def _remove(group: ProcessGroup, name: str) -> None:
    if group.rank() == 0:
        with contextlib.suppress(OSError, ValueError):
            os.unlink(name)


def _made(
    group: ProcessGroup, call: ObjectCall, name: str, opened: list[int], sizes: Sequence[int]
) -> CollectiveFile:
    """Return a file to read, which must have one size on all ranks."""
    if len(set(sizes)) > 1:
        texts = [f"rank {rank}: {size}" for rank, size in zip(group.ranks, sizes, strict=True)]
        raise CollectiveError(
            f"{call}: {name} has different sizes in bytes: {', '.join(texts)}",
            context=call.context(0),
            hint=_SHARED,
        )
    return CollectiveFile(group, name, name, opened.pop(), sizes[0])


def _open_to_read(name: str, opened: list[int]) -> int:
    # Without O_NONBLOCK a named pipe would block until a process writes to it.
    opened.append(os.open(name, os.O_RDONLY | BINARY | NONBLOCK))
    status = os.fstat(opened[0])
    if not stat.S_ISREG(status.st_mode):
        raise OSError(None, "it is not a regular file")
    return status.st_size


def _create(name: str, part: str, opened: list[int]) -> str:
    # `close` would replace a device, and only then detect a folder.
    if os.path.exists(name) and not os.path.isfile(name):
        raise OSError(None, "it is not a regular file")
    opened.append(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | BINARY, 0o666))
    return part


def _join(name: str, opened: list[int]) -> None:
    if not opened:
        opened.append(os.open(name, os.O_WRONLY | BINARY))


def _require_tiling(
    group: ProcessGroup, call: ObjectCall, boxes: Sequence[Any], shape: tuple[int, ...]
) -> None:
    """Check that the blocks of all ranks cover an array without overlap; equal on every rank."""
    table = np.array([[starts, extents] for starts, extents in boxes], np.int64)
    begins, ends = table[:, 0], table[:, 0] + table[:, 1]
    volumes = table[:, 1].prod(axis=1)
    for rank in range(len(boxes)):
        both = np.maximum(begins[rank], begins), np.minimum(ends[rank], ends)
        overlap = (both[0] < both[1]).all(axis=1)
        overlap[: rank + 1] = False
        if overlap.any():
            other = int(np.argmax(overlap))
            raise CollectiveError(
                f"{call}: the blocks of rank {group.ranks[rank]} "
                f"({boxes[rank][1]} at {boxes[rank][0]}) and rank {group.ranks[other]} "
                f"({boxes[other][1]} at {boxes[other][0]}) overlap",
                context=call.context(rank),
            )
    if volumes.sum() != math.prod(shape):
        raise CollectiveError(
            f"{call}: the blocks have {volumes.sum()} elements, the array {list(shape)} has "
            f"{math.prod(shape)}",
            context=call.context(0),
            hint="the blocks of all ranks must cover the array",
        )


def _move_all(fd: int, data: memoryview, offset: int, move: Any) -> None:
    """Write or read all of `data`, although a call may move only a part."""
    while data:
        done = move(fd, data[:_MOST_BYTES], offset)
        if done == 0:
            raise OSError(None, f"it ends at byte {offset}")
        data, offset = data[done:], offset + done
