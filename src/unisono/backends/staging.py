"""Between the arrays of a call and the one flat input and output of its program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from unisono.base.buffers import BufferView, view
from unisono.base.types import DType
from unisono.errors import InvalidArgumentError

__all__ = ["Flat", "apart", "many", "one", "striped"]

Array = np.ndarray[Any, Any]


class Flat:
    """Flat memory for a program, and the way back to the arrays it stands for.

    Attributes:
        array: [count] contiguous.
        dtype: Element type of all arrays.
        sizes: Elements of each array.
        shape: Shape of the single array; None for a list.
    """

    def __init__(self, array: Array, views: list[BufferView], *, private: bool) -> None:
        self.array = array
        self.dtype: DType = views[0].dtype
        self.sizes = tuple(v.count for v in views)
        self.shape = views[0].shape if len(views) == 1 and not private else None
        self._views = views
        self._private = private

    @property
    def count(self) -> int:
        return int(self.array.size)

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the arrays."""
        return tuple([view.shape for view in self._views])

    @property
    def in_place(self) -> bool:
        """Whether `array` is the memory of the user's array, so that nothing is to write back."""
        return not self._private and not any(view.packed for view in self._views)

    def make_private(self) -> None:
        """Work on a copy from now on, unless `array` is one already."""
        if not self._private:
            self._private, self.array = True, self.array.copy()

    def write_back(self) -> None:
        """Copy results into the user's arrays, as far as they are not there already."""
        at = 0
        for target in self._views:
            if self._private:
                target.array[:] = self.array[at : at + target.count]
                at += target.count
            target.unpack()

    def __str__(self) -> str:
        if len(self._views) == 1:
            return f"{self.dtype}[{', '.join(map(str, self._views[0].shape))}]"
        if len(set(self.sizes)) == 1:
            return f"{len(self.sizes)} x {self.dtype}[{self.sizes[0]}]"
        return f"{self.dtype}[{' + '.join(map(str, self.sizes))}]"


def one(tensor: Any, *, write: bool, name: str = "tensor", private: bool = False) -> Flat:
    """Return one array as flat memory; a copy of it if `private`."""
    target = view(tensor, write=write, name=name)
    return Flat(target.array.copy() if private else target.array, [target], private=private)


def many(
    tensors: Sequence[Any],
    *,
    write: bool,
    name: str,
    like: DType | None = None,
    private: bool = False,
) -> Flat:
    """Return several arrays of one dtype as flat memory, in their order.

    Arrays that lie one after another, as the rows of one array do, are used in place unless
    `private`; others are copied.

    Raises:
        InvalidArgumentError: The list is empty, dtypes differ, or results would overwrite one
            another.
    """
    views = _views(tensors, write, name, like)
    together = None if private else _adjacent(views)
    if together is not None:
        return Flat(together, views, private=False)
    return Flat(np.concatenate([v.array for v in views]), views, private=True)


def _adjacent(views: list[BufferView]) -> Array | None:
    """Return the memory of arrays that lie one after another, or None if they do not."""
    full = [v.array for v in views if v.count]
    if not full or any(v.packed for v in views):
        return None
    end = None
    for array in full:
        start = array.__array_interface__["data"][0]
        if end not in (None, start):
            return None
        end = start + array.nbytes
    first, count = full[0], sum(array.size for array in full)
    return np.lib.stride_tricks.as_strided(first, (count,), (first.itemsize,))


class _Striped(Flat):
    """Arrays of p blocks each, block by block: the first block of all arrays, then the second."""

    def __init__(self, views: list[BufferView], blocks: int) -> None:
        # The sizes are checked later, with those of the other list; a rest that does not divide
        # must not fail here already.
        parts = [v.array[: v.count // blocks * blocks].reshape(blocks, -1) for v in views]
        super().__init__(np.concatenate(parts, axis=1).reshape(-1), views, private=True)
        self._parts = parts

    def write_back(self) -> None:
        """Copy results into the user's arrays."""
        blocks = len(self._parts[0])
        rows = self.array.reshape(blocks, self.count // blocks)
        at = 0
        for target, part in zip(self._views, self._parts, strict=True):
            part[:] = rows[:, at : at + part.shape[1]]
            at += part.shape[1]
            target.unpack()


def striped(
    tensors: Sequence[Any], blocks: int, *, write: bool, name: str, like: DType | None = None
) -> Flat:
    """Return arrays of `blocks` blocks each as one flat copy, in the order of blocks.

    Raises:
        InvalidArgumentError: As `many`.
    """
    return _Striped(_views(tensors, write, name, like), blocks)


def _views(tensors: Sequence[Any], write: bool, name: str, like: DType | None) -> list[BufferView]:
    """Return views of arrays of one dtype, apart from one another if they are written."""
    views = [view(t, write=write, name=f"{name}[{i}]") for i, t in enumerate(tensors)]
    if not views:
        raise InvalidArgumentError(f"{name} is empty; expected at least one array")
    dtype = like or views[0].dtype
    for i, v in enumerate(views):
        if v.dtype != dtype:
            raise InvalidArgumentError(f"{name}[{i}] has dtype {v.dtype}, expected {dtype}")
    if write:
        _require_disjoint(views, name)
    return views


def _require_disjoint(views: list[BufferView], name: str) -> None:
    """Check that no two arrays share memory; neighbours by address are the only candidates."""
    spans = sorted((*_span(v.memory), i) for i, v in enumerate(views) if v.count)
    for at, (_, end, i) in enumerate(spans):
        for start, _, j in spans[at + 1 :]:
            if start >= end:
                break
            if np.shares_memory(views[i].memory, views[j].memory):
                first, second = sorted((i, j))
                raise InvalidArgumentError(
                    f"{name}[{first}] and {name}[{second}] share memory, so one result would "
                    "overwrite the other"
                )


def _span(array: Array) -> tuple[int, int]:
    """Return the first address that belongs to a non-empty array, and the first after it."""
    start = end = int(array.__array_interface__["data"][0])
    for n, stride in zip(array.shape, array.strides, strict=True):
        if stride < 0:
            start += (n - 1) * stride
        else:
            end += (n - 1) * stride
    return start, end + array.itemsize


def apart(source: Flat, target: Flat) -> Flat:
    """Return `source`, copied if a program that fills `target` would overwrite it."""
    if np.may_share_memory(source.array, target.array):
        source.array = source.array.copy()
    return source
