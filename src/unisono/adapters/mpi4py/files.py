"""MPI's files: views, and individual, explicit and shared pointers, by positioned reads and writes.

`unisono.open_file` writes new files whole; MPI's files are read and written in place, so that they
have descriptors of their own here.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Self

import numpy as np

from unisono.adapters.mpi4py.buffers import Bytes
from unisono.adapters.mpi4py.comm import Comm, _split
from unisono.adapters.mpi4py.datatypes import Datatype, TypeMap, named
from unisono.adapters.mpi4py.errors import ANY_SOURCE, ANY_TAG, NUMBERS, fail, require, translated
from unisono.adapters.mpi4py.handles import (
    RAISES,
    Attributes,
    Described,
    Errhandler,
    Group,
    Handle,
    Status,
    WorldRanks,
)
from unisono.adapters.mpi4py.messages import CommState
from unisono.adapters.mpi4py.packing import Run, simple
from unisono.adapters.mpi4py.requests import Ongoing, add_calls
from unisono.beyond.windows.window import new_window
from unisono.core.c10d.objects.functions import all_gather_object
from unisono.core.platform.posix import BINARY, pwrite, read_into

_N = NUMBERS
_ERRORS = {
    FileNotFoundError: "ERR_NO_SUCH_FILE",
    FileExistsError: "ERR_FILE_EXISTS",
    PermissionError: "ERR_ACCESS",
    IsADirectoryError: "ERR_BAD_FILE",
}


class SharedFile(Described):
    """The object of a file."""

    def __init__(self, comm: Any, path: str, amode: int) -> None:
        self.comm = CommState(_split(comm.group, 0, comm.rank))
        super().__init__(path)
        self.path, self.amode, self.atomic, self.position = path, amode, False, 0
        byte: TypeMap = named["BYTE"].ob
        self.view = 0, byte, byte, "native"
        self.kinds: Any = named["BYTE"], named["BYTE"]
        self.pending: Any = None
        self.fd = -1
        error = self._open(first=self.comm.rank == 0)
        errors: list[Any] = [None] * self.comm.size
        all_gather_object(errors, error, self.comm.group)
        if any(errors):
            if self.fd >= 0:
                os.close(self.fd)
            self.comm.close()
            fail(*next(each for each in errors if each))
        # The shared pointer is an integer of rank 0.
        self.shared = new_window(np.zeros(1, np.int64), self.comm.group)
        if amode & _N["MODE_APPEND"]:
            self.position = os.fstat(self.fd).st_size

    def _open(self, first: bool) -> tuple[str, str] | None:
        amode = self.amode
        access = {_N["MODE_RDONLY"]: os.O_RDONLY, _N["MODE_WRONLY"]: os.O_WRONLY}
        modes = [m for m in ("MODE_RDONLY", "MODE_WRONLY", "MODE_RDWR") if amode & _N[m]]
        error: tuple[str, str] | None = None
        if len(modes) != 1:
            error = "ERR_AMODE", f"mode {amode}"
        for mine in (True, False):
            # Rank 0 makes the file before the others open it.
            self.comm.group.barrier()
            if error is None and first == mine:
                flags = access.get(_N[modes[0]], os.O_RDWR)
                if first and amode & _N["MODE_CREATE"]:
                    flags |= os.O_CREAT | (os.O_EXCL if amode & _N["MODE_EXCL"] else 0)
                try:
                    self.fd = os.open(self.path, flags | BINARY, 0o666)
                except OSError as problem:
                    error = _name_of(problem), str(problem)
        return error

    # ---- data -----------------------------------------------------------------------------

    def places(self, offset: int, nbytes: int) -> list[tuple[int, int]]:
        """Return pieces (place, bytes) of the file for data at an offset of the view, in bytes."""
        disp, _, kind, _ = self.view
        return kind.pieces(disp, offset, nbytes)

    def write(self, offset: int, part: Run) -> int:
        """Write elements at an offset of the view, in bytes; return the bytes."""
        return self._move(pwrite, offset, part.pack())

    def read(self, offset: int, part: Run) -> int:
        """Read elements; return the bytes, fewer at the end of the file."""
        data = np.zeros(part.nbytes, np.uint8)
        done = self._move(read_into, offset, data)
        part.fill(data[:done])
        return done

    def _move(self, call: Callable[[int, Any, int], int], offset: int, data: Bytes) -> int:
        """Move data by system calls; return the bytes, fewer if a call moves none."""
        at = 0
        for place, size in self.places(offset, len(data)):
            end = at + size
            while at < end:
                moved = call(self.fd, data[at:end].data, place + size - (end - at))
                if not moved:
                    return at
                at += moved
        return at

    @property
    def unit(self) -> int:
        """Bytes of an element of the view."""
        return self.view[1].size


def _name_of(error: OSError) -> str:
    return next((name for kind, name in _ERRORS.items() if isinstance(error, kind)), "ERR_IO")


class File(Attributes, Handle, root=True):
    """A file of several ranks."""

    error = "ERR_FILE"
    _default: Any = RAISES

    @classmethod
    def Open(
        cls, comm: Comm, filename: Any, amode: int = _N["MODE_RDONLY"], info: Any = None
    ) -> Self:
        """Open a file; a collective call."""
        with translated():
            made = cls.of(SharedFile(comm.live, os.fsdecode(filename), amode))
        made.Set_info(info)
        return made

    def Close(self) -> None:
        """Close the file; a collective call."""
        state = self.live
        with translated():
            state.comm.group.barrier()
            os.close(state.fd)
            if state.amode & _N["MODE_DELETE_ON_CLOSE"] and state.comm.rank == 0:
                os.unlink(state.path)
            state.shared.close()
            state.comm.group.barrier()
            state.comm.close()
        self.ob = None

    Free = Close

    @classmethod
    def Delete(cls, filename: Any, info: Any = None) -> None:
        """Delete a file."""
        try:
            os.unlink(os.fsdecode(filename))
        except OSError as error:
            fail(_name_of(error), str(error))

    # ---- size, hints, view ----------------------------------------------------------------

    def _together(self, action: Callable[[], object]) -> None:
        """Do something on rank 0, between barriers."""
        group = self.live.comm.group
        group.barrier()
        if group.rank() == 0:
            action()
        group.barrier()

    def Set_size(self, size: int) -> None:
        """Set the size; a collective call."""
        self._together(lambda: os.ftruncate(self.live.fd, size))

    def Preallocate(self, size: int) -> None:
        """Make the file at least this large; a collective call."""
        self._together(lambda: os.ftruncate(self.live.fd, max(size, self.Get_size())))

    def Get_size(self) -> int:
        """Return the size in bytes."""
        return os.fstat(self.live.fd).st_size

    def Get_amode(self) -> int:
        """Return the mode."""
        return int(self.live.amode)

    def Get_group(self) -> Group:
        """Return the ranks."""
        return Group.of(WorldRanks(self.live.comm.group.ranks))

    def Set_view(
        self,
        disp: int = 0,
        etype: Datatype | None = None,
        filetype: Datatype | None = None,
        datarep: str = "native",
        info: Any = None,
    ) -> None:
        """Set which bytes of the file this rank sees; a collective call."""
        require(datarep == "native", "ERR_UNSUPPORTED_DATAREP", datarep)
        state, etype = self.live, etype or named["BYTE"]
        filetype = filetype or etype
        if disp == _N["DISPLACEMENT_CURRENT"]:
            disp = self.Get_byte_offset(state.position)
        state.view = disp, etype.live, filetype.live, datarep
        state.kinds = Datatype(etype), Datatype(filetype)
        state.position = 0
        self._together(lambda: self._set_shared(0))

    def Get_view(self) -> tuple[int, Datatype, Datatype, str]:
        """Return displacement, types and representation of the view."""
        state = self.live
        return state.view[0], Datatype(state.kinds[0]), Datatype(state.kinds[1]), state.view[3]

    def Get_type_extent(self, datatype: Datatype) -> int:
        """Return the extent of a datatype in the file."""
        return int(datatype.live.extent)

    def Get_byte_offset(self, offset: int) -> int:
        """Return the place in the file of an offset of the view."""
        state = self.live
        found = state.places(offset * state.unit, 1)
        return int(found[0][0])

    def Set_atomicity(self, flag: bool) -> None:
        """Set the mode of conflicting accesses; each access is one system call in any case."""
        self.live.atomic = bool(flag)

    def Get_atomicity(self) -> bool:
        """Return the mode."""
        return bool(self.live.atomic)

    def Sync(self) -> None:
        """Store the file; a collective call."""
        os.fsync(self.live.fd)
        self.live.comm.group.barrier()

    def Get_errhandler(self) -> Errhandler:
        """Return the error handler."""
        return Errhandler.of(File._default if self.ob is None else self.ob.errhandler)

    def Set_errhandler(self, errhandler: Errhandler) -> None:
        """Set the error handler; of the null handle the one of later files."""
        if self.ob is None:
            File._default = errhandler.live
        else:
            self.ob.errhandler = errhandler.live

    size, amode, group = property(Get_size), property(Get_amode), property(Get_group)
    group_size = property(lambda self: self.live.comm.size)
    group_rank = property(lambda self: self.live.comm.rank)
    atomicity = property(Get_atomicity, Set_atomicity)

    # ---- pointers -------------------------------------------------------------------------

    def _sought(self, now: int, offset: int, whence: int) -> int:
        state = self.live
        if whence == _N["SEEK_SET"]:
            place = offset
        elif whence == _N["SEEK_CUR"]:
            place = now + offset
        else:
            require(whence == _N["SEEK_END"], "ERR_ARG", f"whence {whence}")
            disp, etype, kind, _ = state.view
            left = max(self.Get_size() - disp, 0)
            rows, rest = divmod(left, kind.extent) if kind.extent else (0, 0)
            inside = sum(
                max(0, min(size, rest - at))
                for at, size in zip(kind.offsets.tolist(), kind.lengths.tolist(), strict=True)
            )
            place = (rows * kind.size + inside) // max(etype.size, 1) + offset
        require(place >= 0, "ERR_ARG", f"offset {place}")
        return place

    def Seek(self, offset: int, whence: int = _N["SEEK_SET"]) -> None:
        """Move this rank's pointer."""
        self.live.position = self._sought(self.live.position, offset, whence)

    def Get_position(self) -> int:
        """Return this rank's pointer, in elements of the view."""
        return int(self.live.position)

    def _set_shared(self, place: int) -> None:
        shared = self.live.shared
        shared.fetch_add(place - shared.fetch_add(0, 0), 0)

    def Seek_shared(self, offset: int, whence: int = _N["SEEK_SET"]) -> None:
        """Move the shared pointer; a collective call."""
        place = self._sought(self.Get_position_shared(), offset, whence)
        self._together(lambda: self._set_shared(place))

    def Get_position_shared(self) -> int:
        """Return the shared pointer."""
        return int(self.live.shared.fetch_add(0, 0))


def _move(state: SharedFile, way: str, writes: bool, offset: int, buf: Any) -> Ongoing:
    """Read or write at an explicit offset or a pointer; `way`: at, own, shared or ordered."""
    part, unit = simple(buf, not writes), max(state.unit, 1)
    count = part.nbytes // unit
    if way == "own":
        offset = state.position
        state.position += count
    elif way == "shared":
        offset = int(state.shared.fetch_add(count, 0))
    elif way == "ordered":
        group, base = state.comm.group, np.zeros(1, np.int64)
        counts = np.empty((state.comm.size, 1), np.int64)
        group.all_gather_into_tensor(counts, np.array([count]))
        if state.comm.rank == 0:
            base[0] = state.shared.fetch_add(int(counts.sum()), 0)
        group.broadcast(base, 0)
        offset = int(base[0] + counts[: state.comm.rank].sum())
    try:
        done = (state.write if writes else state.read)(offset * unit, part)
    except OSError as error:
        is_refused = writes and state.amode & _N["MODE_RDONLY"]
        fail("ERR_READ_ONLY" if is_refused else _name_of(error), str(error))
    call = Ongoing()
    call.found = ANY_SOURCE, ANY_TAG, done
    return call


def _call(way: str, writes: bool, collective: bool) -> Callable[..., Ongoing]:
    def at(state: SharedFile, offset: int, buf: Any, status: Any = None) -> Ongoing:
        call = _move(state, way, writes, offset, buf)
        call.status = status
        if collective:
            state.comm.group.barrier()
        return call

    def along(state: SharedFile, buf: Any, status: Any = None) -> Ongoing:
        return at(state, 0, buf, status)

    function = at if way == "at" else along
    function.__doc__ = f"{'Write' if writes else 'Read'} elements; see MPI's chapter of files."
    return function


def _add_split_form(name: str, function: Callable[..., Ongoing]) -> None:
    def begin(self: File, *arguments: Any) -> None:
        require(self.live.pending is None, "ERR_OTHER", "a split call has begun")
        with translated():
            self.live.pending = function(self.live, *arguments)

    def end(self: File, buf: Any, status: Status | None = None) -> None:
        call, self.live.pending = self.live.pending, None
        require(call is not None, "ERR_OTHER", "no split call has begun")
        if status is not None:
            status.set(*call.found)

    for part in (begin, end):
        part.__name__, part.__doc__ = f"{name}_{part.__name__}", function.__doc__
        setattr(File, part.__name__, part)


for _kind in ("Read", "Write"):
    for _suffix, _way, _collective in (
        ("_at", "at", False),
        ("_at_all", "at", True),
        ("", "own", False),
        ("_all", "own", True),
        ("_shared", "shared", False),
        ("_ordered", "ordered", True),
    ):
        _function = _call(_way, _kind == "Write", _collective)
        add_calls(File, {f"{_kind}{_suffix}": _function}, "now start")
        if _collective:
            _add_split_form(f"{_kind}{_suffix}", _function)
FILE_NULL = File()
