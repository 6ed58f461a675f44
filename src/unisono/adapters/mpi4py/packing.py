"""Pack and Unpack of datatypes."""

from __future__ import annotations

from typing import Any

import numpy as np

from unisono.adapters.mpi4py.buffers import Run, memory_of, simple
from unisono.adapters.mpi4py.datatypes import Datatype
from unisono.adapters.mpi4py.errors import require


def _elements(kind: Any, buf: Any, writes: bool) -> Run:
    """Return the elements of a datatype in a buffer."""
    layout = kind.live
    if isinstance(buf, (list, tuple)):
        return simple(buf, writes)
    memory, _ = memory_of(buf, writes)
    low, span = layout.true_bounds
    room = len(memory) - low - span
    step = layout.extent
    count = 0 if not layout.size or room < 0 else 1 if step <= 0 else 1 + room // step
    return Run(memory, 0, count, layout)


def _swapped(part: Run, data: Any) -> Any:
    """Return data in the other byte order: external32 is big-endian."""
    dtype = part.kind.dtype
    if dtype is None or dtype.names:
        require(dtype is not None, "ERR_TYPE", "external32 of mixed types")
        return data
    base = np.dtype(f"f{dtype.itemsize // 2}") if dtype.kind == "c" else dtype
    return data.view(base).byteswap().view(np.uint8)


def pack(self: Datatype, inbuf: Any, outbuf: Any, position: int, comm: Any) -> int:
    """Pack elements into a buffer, from a position; return the next position."""
    return _put(_elements(self, inbuf, False).pack(), outbuf, position)


def _put(data: Any, outbuf: Any, position: int) -> int:
    memory, _ = memory_of(outbuf[0] if isinstance(outbuf, (list, tuple)) else outbuf, True)
    end = position + len(data)
    require(end <= len(memory), "ERR_ARG", f"{end} bytes for {len(memory)}")
    memory[position:end] = data
    return end


def unpack(self: Datatype, inbuf: Any, position: int, outbuf: Any, comm: Any) -> int:
    """Unpack elements from a buffer, from a position; return the next position."""
    return _get(_elements(self, outbuf, True), inbuf, position, False)


def _get(part: Run, inbuf: Any, position: int, swap: bool) -> int:
    memory, _ = memory_of(inbuf[0] if isinstance(inbuf, (list, tuple)) else inbuf, False)
    end = position + part.nbytes
    require(end <= len(memory), "ERR_ARG", f"{end} bytes of {len(memory)}")
    data = memory[position:end].copy()
    data = _swapped(part, data) if swap else data
    if part.is_plain:
        part.pack()[:] = data
    else:
        part.store(data)
    return end


def pack_size(self: Datatype, count: int, comm: Any) -> int:
    """Return the bytes of packed elements."""
    return count * int(self.live.size)


def pack_external(self: Datatype, datarep: str, inbuf: Any, outbuf: Any, position: int) -> int:
    """As Pack, in MPI's common format."""
    require(datarep == "external32", "ERR_UNSUPPORTED_DATAREP", datarep)
    part = _elements(self, inbuf, False)
    return _put(_swapped(part, part.pack().copy()), outbuf, position)


def unpack_external(self: Datatype, datarep: str, inbuf: Any, position: int, outbuf: Any) -> int:
    """As Unpack, from MPI's common format."""
    require(datarep == "external32", "ERR_UNSUPPORTED_DATAREP", datarep)
    return _get(_elements(self, outbuf, True), inbuf, position, True)


def pack_external_size(self: Datatype, datarep: str, count: int) -> int:
    """Return the bytes of elements in MPI's common format."""
    require(datarep == "external32", "ERR_UNSUPPORTED_DATAREP", datarep)
    return count * int(self.live.size)


def install() -> None:
    """Add the methods to Datatype."""
    for function in (pack, unpack, pack_size, pack_external, unpack_external, pack_external_size):
        setattr(Datatype, function.__name__.capitalize(), function)
