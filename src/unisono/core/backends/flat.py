"""Flat memory: the input and output of a program, made from the arrays of a call.

    one      an array                   in place; a packed copy if it is not contiguous
    many     arrays as one              in place if they are adjacent, otherwise a copy
    listed   an array for each rank     a list, each in place
    striped  arrays of p blocks each    a copy: the first block of each, then the second, ...

`fill` copies the values of the arrays into copies, `write_back` copies results into the arrays.
Both run when the turn of the call has come, because earlier calls may still write its arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from unisono.core.base.buffers import Array, BufferView, view
from unisono.core.base.types import DType
from unisono.core.engines.array_lists import adjacent, copy_back
from unisono.errors import InvalidArgumentError


class FlatMemory:
    """Flat memory for a program, with the arrays that it stands for.

    Attributes:
        memory: [count] contiguous, or a list of such arrays that stand for their concatenation.
        dtype: Element type of all arrays.
        sizes: Elements of each array.
        shape: Shape of the single array; None for a list.
    """

    def __init__(self, memory: Array | list[Array], views: list[BufferView]) -> None:
        self.memory = memory
        self.dtype: DType = views[0].dtype
        self.sizes = tuple([v.count for v in views])
        self.shape = views[0].shape if len(views) == 1 else None
        self._views = views
        self._private = False

    @property
    def array(self) -> Array:
        """`memory`, if it is not a list."""
        assert not isinstance(self.memory, list)
        return self.memory

    @property
    def arrays(self) -> list[Array]:
        """`memory` as a list."""
        return self.memory if isinstance(self.memory, list) else [self.memory]

    @property
    def count(self) -> int:
        return sum(self.sizes)

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the arrays."""
        return tuple([view.shape for view in self._views])

    @property
    def in_place(self) -> bool:
        """Whether `memory` is that of the caller's arrays, so that no copy is needed."""
        return not self._private and not any(view.packed for view in self._views)

    def make_private(self) -> None:
        """Use a copy, unless `memory` is a copy already."""
        if not self._private:
            self._private, self.memory = True, np.empty(self.count, self.dtype.storage)

    def fill(self) -> None:
        """Copy the values of the caller's arrays, unless they are used in place."""
        for source in self._views:
            source.pack()
        if self._private:
            np.concatenate([view.array for view in self._views], out=self.array)

    def write_back(self) -> None:
        """Copy results into the caller's arrays, unless they are used in place."""
        if self._private:
            copy_back(self.array, [view.array for view in self._views])
        for target in self._views:
            target.unpack()


def one(tensor: Any, *, write: bool, name: str = "tensor", private: bool = False) -> FlatMemory:
    """Return one array as flat memory; a copy of it if `private`."""
    target = view(tensor, write=write, name=name, pack=False)
    data = FlatMemory(target.array, [target])
    if private:
        data.make_private()
    return data


def many(
    tensors: Sequence[Any],
    *,
    write: bool,
    name: str,
    like: DType | None = None,
    private: bool = False,
    repeats: bool = False,
) -> FlatMemory:
    """Return several arrays of one dtype as one, in their order.

    Adjacent arrays, such as the rows of one array, are used in place unless `private`; others are
    copied. With `repeats` one array may stand several times in the list.

    Raises:
        InvalidArgumentError: The list is empty, dtypes differ, or results would overwrite one
            another.
    """
    views = views_of(tensors, write, name, like, repeats=repeats)
    arrays = [v.array for v in views]
    together = None if private or any(v.packed for v in views) else adjacent(arrays)
    data = FlatMemory(arrays if together is None else together, views)
    if together is None:
        data.make_private()
    return data


def listed(
    tensors: Sequence[Any],
    *,
    write: bool,
    name: str,
    like: DType | None = None,
    places: Sequence[int] | None = None,
) -> FlatMemory:
    """Return an array for each rank or neighbour as a list, in place.

    Args:
        tensors: The arrays.
        write: Whether the call writes into them.
        name: Of the list, for errors.
        like: The dtype that they must have; that of the first if None.
        places: The places of the arrays in the caller's list, for errors; 0, 1, ... if None.

    Raises:
        InvalidArgumentError: As `many`.
    """
    views = views_of(tensors, write, name, like, places)
    return FlatMemory([v.array for v in views], views)


class _Striped(FlatMemory):
    """Arrays of p blocks each, block by block: the first block of all arrays, then the second."""

    def __init__(self, views: list[BufferView], blocks: int) -> None:
        # The sizes are checked later, together with those of the other list. Until then a size
        # that does not divide must not raise.
        parts = [v.array[: v.count // blocks * blocks].reshape(blocks, -1) for v in views]
        super().__init__(parts, views)
        self.make_private()
        self._parts = parts

    def fill(self) -> None:
        """Copy the values of the caller's arrays."""
        for source in self._views:
            source.pack()
        blocks = len(self._parts[0])
        np.concatenate(self._parts, axis=1, out=self.array.reshape(blocks, -1))

    def write_back(self) -> None:
        """Copy results into the caller's arrays."""
        blocks = len(self._parts[0])
        rows = self.array.reshape(blocks, self.count // blocks)
        at = 0
        for target, part in zip(self._views, self._parts, strict=True):
            part[:] = rows[:, at : at + part.shape[1]]
            at += part.shape[1]
            target.unpack()


def striped(
    tensors: Sequence[Any], blocks: int, *, write: bool, name: str, like: DType | None = None
) -> FlatMemory:
    """Return arrays of `blocks` blocks each as one flat copy, in the order of blocks.

    Raises:
        InvalidArgumentError: As `many`.
    """
    return _Striped(views_of(tensors, write, name, like), blocks)


def views_of(
    tensors: Sequence[Any],
    write: bool,
    name: str,
    like: DType | None,
    places: Sequence[int] | None = None,
    make: Callable[..., BufferView] = view,
    repeats: bool = False,
) -> list[BufferView]:
    """Return views of arrays of one dtype; check that they share no memory if they are written.

    Args:
        tensors: The arrays.
        write: Whether the call writes into them.
        name: Of the list, for errors.
        like: The dtype that they must have; that of the first if None.
        places: The places of the arrays in the caller's list, for errors; 0, 1, ... if None.
        make: Makes a view; has the parameters of `base.buffers.view`.
        repeats: Whether one array may stand in the list several times.
    """
    places = range(len(tensors)) if places is None else places
    views = [
        make(t, write=write, name=f"{name}[{i}]", pack=False)
        for i, t in zip(places, tensors, strict=True)
    ]
    if not views:
        raise InvalidArgumentError(f"{name} is empty; expected at least one array")
    dtype = like or views[0].dtype
    for i, v in zip(places, views, strict=True):
        if v.dtype != dtype:
            raise InvalidArgumentError(f"{name}[{i}] has dtype {v.dtype}, expected {dtype}")
    if write:
        _require_disjoint(views, name, places, repeats)
    return views


def _require_disjoint(
    views: list[BufferView], name: str, places: Sequence[int], repeats: bool
) -> None:
    """Check that no two arrays share memory; only arrays with overlapping spans can.

    With `repeats` an array and itself may, because both get the same values.
    """
    spans = sorted((*_span(v.memory), i) for i, v in enumerate(views) if v.count)
    for at, (_, end, i) in enumerate(spans):
        for start, _, j in spans[at + 1 :]:
            if start >= end:
                break
            if repeats and _layout(views[i].memory) == _layout(views[j].memory):
                continue
            if np.shares_memory(views[i].memory, views[j].memory):
                first, second = sorted((places[i], places[j]))
                raise InvalidArgumentError(
                    f"{name}[{first}] and {name}[{second}] share memory, so one result would "
                    "overwrite the other"
                )


def _layout(array: Array) -> tuple[Any, ...]:
    return array.__array_interface__["data"][0], array.shape, array.strides


def _span(array: Array) -> tuple[int, int]:
    """Return the first address of a non-empty array, and the first address after it."""
    start = end = int(array.__array_interface__["data"][0])
    for n, stride in zip(array.shape, array.strides, strict=True):
        if stride < 0:
            start += (n - 1) * stride
        else:
            end += (n - 1) * stride
    return start, end + array.itemsize


def apart(source: FlatMemory, target: FlatMemory) -> FlatMemory:
    """Return `source`, copied if a program that fills `target` would overwrite it."""
    spans = [(*_span(a), False) for a in source.arrays if a.size]
    spans += [(*_span(a), True) for a in target.arrays if a.size]
    ends = {False: 0, True: 0}
    for start, end, written in sorted(spans):
        if start < ends[not written]:
            source.make_private()
            break
        ends[written] = max(ends[written], end)
    return source
