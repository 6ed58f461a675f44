"""Arrays of a GPU as the flat memory of a call; the functions are those of `backends.flat`.

A list stays a list: NCCL takes the arrays of a call one by one, in one launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

from unisono.adapters.nccl.arrays import ArrayLibrary, GPUView, address_of, shadow_at, view
from unisono.adapters.nccl.gpu import GPU
from unisono.core.backends.flat import FlatMemory, apart, views_of
from unisono.core.base.types import DType
from unisono.errors import InvalidArgumentError

__all__ = ["GPUFlat", "Piece", "apart", "index_of", "listed", "many", "one", "striped"]


class Piece(NamedTuple):
    """Elements in a row: the address of the first, and their number (`count` is tuple's)."""

    address: int
    elements: int


class GPUFlat(FlatMemory):
    """Memory of a GPU for one call, with the arrays that it stands for.

    `begin` and `end` only enqueue copies. They run in the stream that is current then.
    """

    def __init__(self, views: Sequence[GPUView]) -> None:
        super().__init__([each.array for each in views], list(views))
        self._copy: Any = None

    @property
    def views(self) -> list[GPUView]:
        """The views of the arrays."""
        return cast(list[GPUView], self._views)

    @property
    def library(self) -> ArrayLibrary:
        """The library of the first array."""
        return self.views[0].library

    def make_private(self) -> None:
        """Use a copy, which `begin` makes."""
        self._private = True

    def begin(self, gpu: GPU, stream: Any) -> None:
        """Fill the copies."""
        for each in self._views:
            each.pack()
        if not self._private:
            return
        itemsize = self.dtype.itemsize
        self._copy = gpu.allocate(max(1, self.count) * itemsize, stream)
        at, parts = int(self._copy.handle), []
        for each in self._views:
            gpu.copy(at, address_of(each.array), each.nbytes, stream)
            parts.append(shadow_at(at, (each.count,), None, self.dtype))
            at += each.nbytes
        self.memory = parts

    def end(self) -> None:
        """Copy results into the caller's arrays, unless they are in place."""
        for each in self._views:
            each.unpack()

    def pieces(self) -> list[Piece]:
        """Return the memory of each array."""
        return [Piece(address_of(array), array.size) for array in self.arrays]


def one(tensor: Any, *, write: bool, name: str = "tensor", private: bool = False) -> GPUFlat:
    """Return one array; NCCL needs no copy of it to scale it."""
    return GPUFlat([view(tensor, write=write, name=name)])


def many(
    tensors: Sequence[Any],
    *,
    write: bool,
    name: str,
    like: DType | None = None,
    private: bool = False,
    repeats: bool = False,
) -> GPUFlat:
    """Return several arrays of one dtype; NCCL would reduce a repeated one twice, in place."""
    return listed(tensors, write=write, name=name, like=like)


def listed(
    tensors: Sequence[Any],
    *,
    write: bool,
    name: str,
    like: DType | None = None,
    places: Sequence[int] | None = None,
) -> GPUFlat:
    """Return an array for each rank or neighbour."""
    made = views_of(tensors, write, name, like, places, view)
    return GPUFlat(cast(list[GPUView], made))


def striped(
    tensors: Sequence[Any], blocks: int, *, write: bool, name: str, like: DType | None = None
) -> GPUFlat:
    """Return arrays that have a block for each rank."""
    return listed(tensors, write=write, name=name, like=like)


def index_of(memory: Sequence[GPUFlat]) -> int:
    """Return the GPU of all arrays of a call."""
    indices = sorted({view.index for each in memory for view in each.views})
    if len(indices) > 1:
        raise InvalidArgumentError(f"the arrays of one call are on GPUs {indices}, expected one")
    return indices[0]
