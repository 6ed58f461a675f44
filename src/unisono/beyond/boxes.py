"""Boxes of a global array, and the boxes that a placement gives to a rank; no I/O."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from unisono.core.base.integers import as_integer
from unisono.errors import ArgumentTypeError, InvalidArgumentError, UnsupportedError

IndexRange = tuple[int, int]


class IndexBox(NamedTuple):
    """A range of indices in each dimension of a global array.

    Attributes:
        begins: The first index in each dimension.
        ends: The index behind the last one.
    """

    begins: tuple[int, ...]
    ends: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Elements in each dimension."""
        return tuple([end - begin for begin, end in zip(self.begins, self.ends, strict=True)])

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def within(self, outer: IndexBox) -> tuple[Any, ...]:
        """Return where this box is in the array of a box that contains it."""
        bounds = zip(self.begins, self.ends, outer.begins, strict=True)
        # Without the dots an array without dimensions would become a scalar.
        return (..., *(slice(begin - base, end - base) for begin, end, base in bounds))

    def common(self, other: IndexBox) -> IndexBox | None:
        """Return what two boxes have in common; None if that has no element."""
        begins = tuple(map(max, self.begins, other.begins))
        ends = tuple(map(min, self.ends, other.ends))
        return None if any(map(int.__ge__, begins, ends)) else IndexBox(begins, ends)

    def without(self, part: IndexBox) -> list[IndexBox]:
        """Return boxes that cover this box without `part`, which lies in it."""
        rest, begins, ends = [], list(self.begins), list(self.ends)
        for dim in range(len(begins)):
            if begins[dim] < part.begins[dim]:
                before = [*ends[:dim], part.begins[dim], *ends[dim + 1 :]]
                rest.append(IndexBox(tuple(begins), tuple(before)))
            if part.ends[dim] < ends[dim]:
                after = [*begins[:dim], part.ends[dim], *begins[dim + 1 :]]
                rest.append(IndexBox(tuple(after), tuple(ends)))
            begins[dim], ends[dim] = part.begins[dim], part.ends[dim]
        return rest

    def cut(self, most: int) -> Iterator[IndexBox]:
        """Yield boxes of at most `most` elements, in C order, that cover this box."""
        if self.size <= max(most, 1):
            yield self
            return
        dim = next(at for at, n in enumerate(self.shape) if n > 1)
        step = max(1, most // (self.size // self.shape[dim]))
        for begin in range(self.begins[dim], self.ends[dim], step):
            end = min(begin + step, self.ends[dim])
            begins = *self.begins[:dim], begin, *self.begins[dim + 1 :]
            yield from IndexBox(begins, (*self.ends[:dim], end, *self.ends[dim + 1 :])).cut(most)

    def runs(self, shape: Sequence[int]) -> tuple[list[int], int]:
        """Return where its contiguous parts begin in an array of this shape, and their size."""
        if not self.size:
            return [], 0
        # Dimensions behind `split` are whole, so a part is contiguous from there.
        split = len(shape)
        while split > 0 and self.shape[split:] == tuple(shape[split:]):
            split -= 1
        at = np.zeros(1, np.int64)
        for dim, (begin, end) in enumerate(zip(self.begins, self.ends, strict=True)):
            index = np.arange(begin, end if dim < split else begin + 1)
            at = (at[:, None] + index * math.prod(shape[dim + 1 :])).ravel()
        return at.tolist(), math.prod(self.shape[split:])

    def __str__(self) -> str:
        spans = zip(self.begins, self.ends, strict=True)
        return f"[{', '.join(f'{begin}:{end}' for begin, end in spans)}]"


def whole(shape: Sequence[int]) -> IndexBox:
    """Return the box of a whole array."""
    return IndexBox((0,) * len(shape), tuple(shape))


def placed_boxes(
    shape: Sequence[int], mesh: np.ndarray[Any, Any], placements: Sequence[Any], rank: int
) -> list[tuple[IndexBox, IndexBox]] | None:
    """Return the boxes that a placement gives to a rank, each with its place in the local array.

    The mesh dimensions cut one after another, as those of DTensor do: the pieces of a dimension
    have ceil(n / size) indices, the last ones fewer or none. A _StridedShard whose split_factor is
    the product of the later ones of its dimension comes after these, as FSDP2 cuts what TP has cut.

    Args:
        shape: Of the global array.
        mesh: Global ranks.
        placements: For each dimension of the mesh: None (replicated), the dimension of the array
            that it cuts, or a placement of torch: Replicate, Shard or _StridedShard.
        rank: The global rank.

    Returns:
        None if the rank is not in the mesh.

    Raises:
        InvalidArgumentError: The placement does not fit the mesh or the shape.
        UnsupportedError: torch itself has more than one layout for it.
    """
    if len(placements) != mesh.ndim:
        raise InvalidArgumentError(
            f"{len(placements)} placements for a mesh of {mesh.ndim} dimensions"
        )
    cuts = [_cut_of(placement, len(shape)) for placement in placements]
    place = np.argwhere(mesh == rank)
    if not len(place):
        return None
    spans: list[list[IndexRange]] = [[(0, n)] for n in shape]
    for at, dim, pieces in _in_order(shape, mesh.shape, placements, cuts):
        spans[dim] = _piece(spans[dim], mesh.shape[at], int(place[0][at]), pieces)
    return _product(spans)


def _in_order(
    shape: Sequence[int],
    sizes: Sequence[int],
    placements: Sequence[Any],
    cuts: Sequence[tuple[int, int] | None],
) -> list[tuple[int, int, int]]:
    """Return the mesh dimensions that cut, in their order, each with its dimension and pieces."""
    order: list[tuple[int, int, int]] = []
    for at, cut in reversed(list(enumerate(cuts))):
        if cut is None:
            continue
        dim, pieces = cut
        later = math.prod([sizes[other] for other, its, _ in order if its == dim])
        if pieces == later:
            # Also 1 of both.
            order.append((at, dim, 1))
        elif pieces > 1 and later > 1 and shape[dim] % (pieces * later * sizes[at]):
            raise UnsupportedError(
                f"placement {placements[at]!r} of {shape[dim]} indices in {later} pieces: torch "
                "has more than one layout for it"
            )
        else:
            order.insert(0, (at, dim, pieces))
    return order


def _cut_of(placement: Any, ndim: int) -> tuple[int, int] | None:
    """Return the dimension that a placement cuts, and the pieces for each rank; None: none."""
    if placement is None or (hasattr(placement, "is_replicate") and placement.is_replicate()):
        return None
    if hasattr(placement, "is_partial") and placement.is_partial():
        raise InvalidArgumentError(f"placement {placement!r}: the ranks have parts of a sum")
    given = getattr(placement, "dim", placement)
    if isinstance(given, bool) or not hasattr(given, "__index__"):
        raise ArgumentTypeError(
            f"placement {placement!r}: expected None, a dimension, or a placement of torch"
        )
    dim = as_integer(given, "placement")
    if not -ndim <= dim < ndim:
        raise InvalidArgumentError(
            f"placement {placement!r} of an array of {ndim} dimensions",
        )
    return dim % ndim, int(getattr(placement, "split_factor", 1))


def _piece(spans: Sequence[IndexRange], size: int, number: int, pieces: int) -> list[IndexRange]:
    """Return the `number`-th of `size` pieces of each of `pieces` parts of a dimension."""
    total = sum(end - begin for begin, end in spans)
    part = -(-total // pieces) or 1
    found: list[IndexRange] = []
    for start in range(0, total, part):
        stop = min(start + part, total)
        step = -(-(stop - start) // size)
        low, high, at = start + number * step, min(start + (number + 1) * step, stop), 0
        for begin, end in spans:
            first, last = max(begin, begin + low - at), min(end, begin + high - at)
            if first < last and found and found[-1][1] == first:
                found[-1] = found[-1][0], last
            elif first < last:
                found.append((first, last))
            at += end - begin
    return found


def _product(spans: Sequence[Sequence[IndexRange]]) -> list[tuple[IndexBox, IndexBox]]:
    """Return the boxes of all combinations of ranges, each with its place in the local array."""
    local: list[list[IndexRange]] = []
    for each in spans:
        ends = np.cumsum([0, *(end - begin for begin, end in each)]).tolist()
        local.append(list(itertools.pairwise(ends)))
    boxes = []
    for combination in itertools.product(*(range(len(each)) for each in spans)):
        outer = [spans[dim][at] for dim, at in enumerate(combination)]
        inner = [local[dim][at] for dim, at in enumerate(combination)]
        boxes.append((_of_spans(outer), _of_spans(inner)))
    return boxes


def _of_spans(spans: Sequence[IndexRange]) -> IndexBox:
    return IndexBox(tuple([begin for begin, _ in spans]), tuple([end for _, end in spans]))


def flat_boxes(shape: Sequence[int], start: int, count: int) -> list[tuple[IndexBox, int]]:
    """Return the boxes that cover `count` elements of the flattened array from `start` on.

    Returns:
        Each box with the number of elements before it. FSDP's flat parameters are cut like this.
    """
    if not count:
        return []
    total = math.prod(shape)
    if start < 0 or start + count > total:
        raise InvalidArgumentError(
            f"elements {start}:{start + count} of an array {list(shape)} of {total} elements"
        )
    boxes, at, stop = [], start, start + count
    while at < stop:
        # The largest box that begins here: whole rows of the outermost dimension that fits.
        index = [int(i) for i in np.unravel_index(at, tuple(shape))]
        dim = len(shape)
        inner = 1
        while dim > 0 and index[dim - 1] == 0 and at + inner * shape[dim - 1] <= stop:
            dim -= 1
            inner *= shape[dim]
        if dim == 0:
            boxes.append((whole(shape), at - start))
            break
        rows = min((stop - at) // inner, shape[dim - 1] - index[dim - 1])
        begins = (*index[:dim], *([0] * (len(shape) - dim)))
        ends = (*(i + 1 for i in index[: dim - 1]), index[dim - 1] + rows, *shape[dim:])
        boxes.append((IndexBox(begins, ends), at - start))
        at += rows * inner
    return boxes
