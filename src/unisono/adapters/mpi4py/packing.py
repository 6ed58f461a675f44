"""From mpi4py's arguments, such as [array, count, displacement, datatype], to runs of elements.

Also Pack and Unpack of datatypes.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from unisono.adapters.mpi4py.buffers import BOTTOM, NONE, Bytes, at_address, memory_of
from unisono.adapters.mpi4py.datatypes import Datatype, TypeMap, by_code, kind_of, named
from unisono.adapters.mpi4py.errors import PROC_NULL, require


class Run(NamedTuple):
    """Some elements in memory.

    Attributes:
        memory: The whole buffer.
        offset: Of the first element, in bytes.
        count: Number of elements.
        kind: Their datatype.
    """

    memory: Bytes
    offset: int
    count: int  # type: ignore[assignment]
    kind: TypeMap

    @property
    def nbytes(self) -> int:
        """Bytes of data."""
        return self.count * self.kind.size

    @property
    def is_plain(self) -> bool:
        """Whether the data is contiguous."""
        return self.kind.is_plain

    def _reach(self, low: int, high: int) -> tuple[Bytes, int]:
        """Return memory that has these bytes of the buffer, and the place of its first one."""
        if self.memory is NONE and low > 1 << 12:
            return at_address(low, high - low), low  # of BOTTOM: the places are addresses
        if low < 0 or high > len(self.memory):
            raise ValueError(f"message: buffer of {len(self.memory)} bytes is too small for {high}")
        return self.memory, 0

    def _index(self) -> Any:
        index = self.kind.index(self.count) + self.offset
        if not len(index):
            return self.memory, index
        memory, base = self._reach(int(index.min()), int(index.max()) + 1)
        return memory, index - base if base else index

    def pack(self) -> Bytes:
        """Return the data, or memory for a receive: the memory itself, or a copy if it has gaps."""
        if self.kind.is_plain:
            end = self.offset + self.nbytes
            memory, base = self._reach(self.offset, end) if self.nbytes else (self.memory, 0)
            return memory[self.offset - base : end - base]
        memory, index = self._index()
        packed: Bytes = memory[index]
        return packed

    def store(self, data: Bytes) -> None:
        """Write received data, which may be shorter, unless it is in the memory already."""
        if not self.kind.is_plain:
            memory, index = self._index()
            memory[index[: len(data)]] = data[: len(index)]

    def fill(self, data: Bytes) -> None:
        """Write data, which may be shorter."""
        if self.kind.is_plain:
            self.pack()[: len(data)] = data[: self.nbytes]
        else:
            self.store(data)

    def typed(self, data: Bytes) -> Any:
        """Return packed data as elements of NumPy's dtype, if there is one."""
        kind = self.kind
        if kind.dtype is None:
            return None
        return data.view(kind.dtype) if kind.size % kind.dtype.itemsize == 0 else None

    def slice(self, first: int, count: int) -> Run:
        """Return some of the elements."""
        return Run(self.memory, self.offset + first * self.kind.extent, count, self.kind)


def _words(message: Any, vector: bool) -> tuple[Any, Any, Any, Any]:
    """Return array, counts, displacements and datatype of an argument."""
    if not isinstance(message, (list, tuple)):
        return message, None, None, None
    if not 2 <= len(message) <= 4:
        raise ValueError("message: expecting 2 to 4 items")
    array, counts, displs, kind = message[0], None, None, None
    if len(message) == 2:
        counts = message[1]
        if isinstance(counts, (Datatype, str)):
            counts, kind = None, counts
    elif len(message) == 3:
        counts, kind = message[1:]
    else:
        counts, displs, kind = message[1:]
    pair = (tuple,) if vector else (tuple, list)
    if len(message) < 4 and isinstance(counts, pair):
        counts, displs = counts
    return array, counts, displs, kind


def _base(array: Any, kind: Any, writes: bool) -> tuple[Bytes, TypeMap | None]:
    if array is None or array is BOTTOM:
        return NONE, named["BYTE"].ob if kind is None else kind_of(kind)
    memory, code = memory_of(array, writes)
    if kind is None:
        if not code:
            raise BufferError("mismatched byte order")
        return memory, by_code[code].ob
    return memory, kind_of(kind)


def _usable(kind: TypeMap | None, what: str) -> TypeMap:
    if kind is None:
        raise ValueError(f"message: cannot {what}, datatype is null")
    if kind.extent <= 0:
        raise ValueError(f"message: cannot {what}, datatype extent {kind.extent}")
    return kind


def _inferred(length: int, kind: TypeMap | None) -> int:
    """Return how many elements a buffer has."""
    if not length:
        return 0
    extent = _usable(kind, "infer count").extent
    number, rest = divmod(length, extent)
    if rest:
        raise ValueError(
            f"message: cannot infer count, buffer length {length} is not a multiple of datatype "
            f"extent {extent}"
        )
    return number


def _known(kind: TypeMap | None, is_used: object) -> TypeMap:
    """Return a datatype; the null one stands for bytes where there are no elements."""
    if kind is None and is_used:
        raise ValueError("message: datatype is null")
    return named["BYTE"].ob if kind is None else kind


EMPTY_PART = Run(NONE, 0, 0, named["BYTE"].ob)


def simple(message: Any, writes: bool, peer: int = 0, blocks: int = 1) -> Run:
    """Return the elements of a message; `blocks`: of one of as many equal parts."""
    if peer == PROC_NULL:
        return EMPTY_PART
    if message is None:
        raise TypeError("message: expecting buffer or list/tuple")
    array, count, displ, given = _words(message, False)
    memory, kind = _base(array, given, writes)
    length, offset = len(memory), 0
    if displ is not None and (at := operator.index(displ)) != 0:
        if at < 0:
            raise ValueError(f"message: negative displacement {at}")
        offset = at * _usable(kind, "handle displacement").extent
        if offset > length:
            raise ValueError(f"message: displacement {at} out of bounds")
        length -= offset
    if count is not None:
        number = operator.index(count)
        if number < 0:
            raise ValueError(f"message: negative count {number}")
        if number > 0 and array is None:
            raise ValueError(f"message: buffer is None but count is {number}")
    else:
        number = _inferred(length, kind)
        if blocks > 1 and number % blocks:
            raise ValueError(
                f"message: cannot infer count, number of entries {number} is not a multiple of "
                f"required number of blocks {blocks}"
            )
        number //= max(blocks, 1)
    return Run(memory, offset, number, _known(kind, number))


def _numbers(given: Any, blocks: int) -> list[int]:
    values = [operator.index(each) for each in np.asarray(given).reshape(-1).tolist()]
    if len(values) != blocks:
        raise ValueError(f"expecting {blocks} items, got {len(values)}")
    return values


def vector(message: Any, writes: bool, blocks: int) -> list[Run]:
    """Return the blocks of a message with counts and displacements."""
    if message is None:
        raise TypeError("message: expecting buffer or list/tuple")
    array, counts, displs, given = _words(message, True)
    memory, kind = _base(array, given, writes)
    if counts is None:
        total = _inferred(len(memory), kind)
        whole, rest = divmod(total, max(blocks, 1))
        sizes = [whole + (k < rest) for k in range(blocks)]
    elif np.ndim(counts) == 0:
        sizes = [operator.index(counts)] * blocks
    else:
        sizes = _numbers(counts, blocks)
    if displs is None:
        places = [sum(sizes[:k]) for k in range(blocks)]
    elif np.ndim(displs) == 0:
        places = [operator.index(displs) * k for k in range(blocks)]
    else:
        places = _numbers(displs, blocks)
    kind = _known(kind, any(sizes))
    return [Run(memory, p * kind.extent, n, kind) for n, p in zip(sizes, places, strict=True)]


def vector_w(message: Any, writes: bool, blocks: int) -> list[Run]:
    """Return the blocks of a message with a datatype for each; displacements count bytes."""
    counts: Any = None
    displs: Any = None
    if len(message) == 2:
        array, kinds = message
    elif len(message) == 3:
        array, (counts, displs), kinds = message
    elif len(message) == 4:
        array, counts, displs, kinds = message
    else:
        raise ValueError("message: expecting 2 to 4 items")
    if array is BOTTOM:
        if counts is None or displs is None:
            raise ValueError("message: BOTTOM requires counts and displs")
        memory = NONE
    else:
        memory = NONE if array is None else memory_of(array, writes)[0]
    sizes = [1] * blocks if counts is None and displs is None else _numbers(counts, blocks)
    places = [0] * blocks if counts is None and displs is None else _numbers(displs, blocks)
    types: Sequence[Any] = list(kinds)
    if len(types) != blocks:
        raise ValueError(f"expecting {blocks} items, got {len(types)}")
    parts = []
    for size, place, each in zip(sizes, places, types, strict=True):
        kind = kind_of(each) or named["BYTE"].ob
        parts.append(Run(memory, place, size, kind))
    return parts


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
    part.fill(data)
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


for _each in (pack, unpack, pack_size, pack_external, unpack_external, pack_external_size):
    setattr(Datatype, _each.__name__.capitalize(), _each)
