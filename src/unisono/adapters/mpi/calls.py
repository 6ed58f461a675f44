"""Collectives as calls of an MPI library, for C++, which has no mpi.h.

A call is the address of a function and its arguments. Each argument is an integer: a handle, a
count or an address. C++ sets the addresses of the caller's memory.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from unisono.adapters.mpi.library import library
from unisono.core.base.seam import cpp as _engine
from unisono.core.engines.api import Collective
from unisono.errors import UnsupportedError

# From this size on a call on Open MPI blocks a thread of C++, which takes 7 us. Open MPI's
# non-blocking collectives of 1 MiB take twice as long as its blocking collectives. The other
# libraries' take equally long, and no thread can then stay in MPI.
_BLOCKING_BYTES = 128 * 1024

# An int holds no larger count or displacement. The functions with the suffix _c take 64 bits.
_MOST = 2**31 - 1

# Places of the caller's memory among the arguments.
_INPUT, _OUTPUT, _REQUEST = "input", "output", "request"

Words = list[Any]
ItemSizes = int | tuple[int, ...]


@functools.cache
def address(name: str) -> int:
    """Return the address of a function of the library.

    Raises:
        UnsupportedError: The library does not have it.
    """
    found = library()
    # The extension module is linked with the library, so its functions are found there.
    function = getattr(ctypes.CDLL(found.MPI.__file__), name, None)
    if function is None:
        raise UnsupportedError(f"{found.name} has no function {name}, which this call needs")
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def most_moved() -> int:
    """Return the most bytes that a call of the library may move."""
    if library().name.startswith("Intel"):
        # Of 5 GiB its Ibcast moves 1 GiB, and returns no error. With 2.5 GiB it fails.
        return 2**31 - 1
    try:
        address("MPI_Bcast_c")
    except UnsupportedError:
        # Open MPI 5 has no functions with the suffix _c.
        return _MOST
    return 2**63 - 1


def handle(of: Any) -> int:
    """Return the handle of an object of mpi4py, as a signed integer."""
    value = int(library().MPI._handleof(of))
    return value - (1 << 64) if value >> 63 else value


class CallMaker:
    """Makes the calls of one communicator.

    Args:
        comm: Its handle.
        rank: This rank in it.
        size: Number of its ranks.

    Attributes:
        nothing: No call.
    """

    def __init__(self, comm: int, rank: int, size: int) -> None:
        self._comm = comm
        self._rank = rank
        self._size = size
        found = library()
        self._here = int(found.MPI.IN_PLACE)
        self._blocks = found.is_openmpi
        # MPICH 5 ends a non-blocking collective without an error if it cannot read the array of a
        # rank that has died. Intel MPI, which is made from MPICH, then ends the process.
        self._hides_death = not (found.is_openmpi or found.name.startswith("Intel"))
        self.nothing = _engine.MPICall(0, [], -1, -1, -1, None)

    def agreement(self) -> Any:
        """Return the MIN over all ranks of 4 unsigned 64-bit numbers."""
        MPI = library().MPI
        words = [self._here, _OUTPUT, 4, handle(MPI.UINT64_T), handle(MPI.MIN)]
        return self._made("allreduce", words, 4, 0)

    def probe(self) -> Any:
        """Return a look for a message from any rank; none comes, but MPI moves data in it."""
        MPI = library().MPI
        words = [int(MPI.ANY_SOURCE), int(MPI.ANY_TAG), self._comm, 0, 0]
        return _engine.MPICall(address("MPI_Iprobe"), words, 3, 4, -1, None)

    def reduction(self, what: Collective, unit: int, count: int, op: int) -> Any:
        """Return the call of a collective that reduces.

        Args:
            what: The collective.
            unit: Handle of the type of the elements.
            count: Number of elements of the whole data.
            op: Handle of the op.
        """
        kind, blocks = what.kind, what.blocks
        if kind == "reduce_scatter" and blocks is not None:
            words = [_INPUT, _OUTPUT, blocks, unit, op]
            return self._made(kind, words, count, what.nbytes)
        if kind == "reduce_scatter":
            words = [_INPUT, _OUTPUT, count // self._size, unit, op]
            return self._made("reduce_scatter_block", words, count, what.nbytes)
        ends = [self._here, _OUTPUT]
        if kind == "reduce":
            ends = ends if self._rank == what.root else [_OUTPUT, 0]
            return self._made(kind, [*ends, count, unit, op, what.root], count, what.nbytes)
        if kind == "all_reduce" and self._blocks and what.nbytes < _BLOCKING_BYTES:
            return self._doubling(unit, count, op, what.nbytes)
        return self._made(kind.replace("_", ""), [*ends, count, unit, op], count, what.nbytes)

    def movement(
        self, what: Collective, unit: int, count: int, mine: int | None = None, largest: int = 0
    ) -> Any:
        """Return the call of a collective that moves elements.

        Args:
            what: The collective.
            unit: Handle of the type of the elements.
            count: Number of elements of the whole data.
            mine: Number of elements of this rank's block if the ranks have exchanged their sizes.
                None: all blocks are equal, or `what` has them.
            largest: Bytes of the largest block if the ranks have exchanged their sizes.
        """
        kind, blocks, part = what.kind, what.blocks, count // self._size
        root = [] if what.root < 0 else [what.root]
        if kind == "barrier":
            return self._made(kind, [], 0, 0)
        if kind == "broadcast":
            return self._made("bcast", [_OUTPUT, count, unit, *root], count, what.nbytes)
        name = kind.replace("_", "")
        if mine is None and blocks is None:
            words = [_INPUT, part, unit, _OUTPUT, part, unit, *root]
            return self._made(name, words, part, what.nbytes)
        sent: ItemSizes = what.sent or ()
        received: ItemSizes = what.received or ()
        if kind != "all_to_all":
            known = blocks or ()
            own = known[self._rank] if mine is None else mine
            sent, received = (known, own) if kind == "scatter" else (own, known)
        most = max(size if isinstance(size, int) else sum(size) for size in (sent, received))
        sizes = [
            (size,) if isinstance(size, int) else (size, _starts(size)) for size in (sent, received)
        ]
        words = [_INPUT, *sizes[0], unit, _OUTPUT, *sizes[1], unit, *root]
        return self._made(name + "v", words, most, what.nbytes if mine is None else largest)

    def _doubling(self, unit: int, count: int, op: int, nbytes: int) -> Any:
        """Return an all_reduce of messages, which is faster than Open MPI's."""

        def made(name: str, words: Words, *places: int) -> Any:
            return _engine.MPICall(address(name), words, *places, None)

        words = [0, count, unit, 0, 0, self._comm, 0]
        ends = made("MPI_Isend", words, -1, -1, 6), made("MPI_Irecv", words, -1, -1, 6)
        reduce = made("MPI_Reduce_local", [0, 0, count, unit, op], 0, 1, -1)
        return _engine.MPIDoubling(*ends, reduce, self._rank, self._size, nbytes)

    def _made(self, name: str, words: Words, most: int, nbytes: int) -> Any:
        """Return a call.

        Args:
            name: Of the function, without prefixes and suffix.
            words: The arguments before the communicator; tuples are arrays of counts.
            most: The largest count or displacement.
            nbytes: Equal on all ranks. MPI does not match a non-blocking collective with a
                blocking one.
        """
        if nbytes > most_moved():
            raise UnsupportedError(
                f"{library().name} moves at most {most_moved():,} bytes in a call, not {nbytes:,}"
            )
        suffix, dtype = ("_c", np.int64) if most > _MOST else ("", np.int32)
        kept = [np.array(word, dtype) for word in words if isinstance(word, tuple)]
        arrays = iter(kept)
        words = [next(arrays).ctypes.data if isinstance(word, tuple) else word for word in words]
        if self._blocks and nbytes >= _BLOCKING_BYTES:
            function, words = f"MPI_{name.capitalize()}", [*words, self._comm]
        else:
            function, words = f"MPI_I{name}", [*words, self._comm, _REQUEST]
        places = [
            words.index(each) if each in words else -1 for each in (_INPUT, _OUTPUT, _REQUEST)
        ]
        numbers = [0 if isinstance(word, str) else word for word in words]
        call = _engine.MPICall(address(function + suffix), numbers, *places, kept)
        call.ends_together = self._hides_death and nbytes > 0
        return call


def in_bytes(what: Collective, itemsize: int) -> Collective:
    """Return a collective whose elements are bytes."""

    def scaled(sizes: tuple[int, ...] | None) -> tuple[int, ...] | None:
        return None if sizes is None else tuple(itemsize * size for size in sizes)

    sizes = scaled(what.blocks), scaled(what.sent), scaled(what.received)
    return Collective(what.kind, what.nbytes, what.root, what.reduces, *sizes)


def _starts(sizes: Sequence[int]) -> tuple[int, ...]:
    return tuple(accumulate(sizes, initial=0))[:-1]
