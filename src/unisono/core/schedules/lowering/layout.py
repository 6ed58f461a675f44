"""Compute the offsets of chunks in buffers from element counts.

    vector collectives   `count` is the vector's length; chunk i of N is [i*n//N, (i+1)*n//N)
    block collectives    `count` is one block's length; chunk i of m of block b starts at
                         b*n + i*n//m, or at the sum of the splits before b, plus i*split//m
    barrier              everything is empty

Chunk sizes differ by at most one element. Some chunks are empty if there are fewer elements than
chunks. SCRATCH repeats the collective's work chunks (the vector's, or those of all p blocks):
scratch chunk j is as large as work chunk j mod N. A chunk thus keeps its size when it passes
through the scratch chunk of its own number. If all blocks are equal, any block fits the place of
any other.

Uneven splits. all_gather and gather take `out_splits`, reduce_scatter and scatter take `in_splits`.
Either list holds the p block sizes and is the same on every rank. In `gather` and `scatter` a rank
other than the root needs only its own entry right. `all_to_all` takes both lists: the elements that
this rank sends to each rank, and the elements that it receives from each rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from unisono.core.schedules.ir import VECTOR_COLLECTIVES, Buf, IntArray, Schedule
from unisono.errors import InvalidArgumentError

# The split lists that a collective takes. A list that it does not take follows from the other.
_SPLITS = {
    "all_gather": ("out_splits",),
    "gather": ("out_splits",),
    "reduce_scatter": ("in_splits",),
    "scatter": ("in_splits",),
    "all_to_all": ("in_splits", "out_splits"),
}


@dataclass(frozen=True)
class Layout:
    """The number of elements in each block of one call; hashable, so that programs can be cached.

    Attributes:
        count: Elements of the vector, or of each block if there are no splits.
        in_splits: Elements of each INPUT block, or None if all have `count`.
        out_splits: Elements of each OUTPUT block, or None if all have `count`.
    """

    count: int
    in_splits: tuple[int, ...] | None = None
    out_splits: tuple[int, ...] | None = None


def layout_for(
    schedule: Schedule,
    count: int,
    in_splits: Sequence[int] | None = None,
    out_splits: Sequence[int] | None = None,
) -> Layout:
    """Return the checked layout of one call; the module's docstring defines the arguments.

    Raises:
        InvalidArgumentError: A size is negative, the number of splits is wrong, or the collective
            or the algorithm takes no such splits.
    """
    given = {"in_splits": in_splits, "out_splits": out_splits}
    name = f"{schedule.collective} ({schedule.algorithm})"
    for key, splits in given.items():
        if splits is None:
            continue
        _check_splits(schedule, name, key, splits)
    if count < 0:
        raise InvalidArgumentError(f"{name}: count is {count}, expected 0 or more elements")
    if in_splits is None and out_splits is None:
        return Layout(int(count))
    missing = [k for k in _SPLITS.get(schedule.collective, ()) if given[k] is None]
    if missing:
        raise InvalidArgumentError(f"{name} needs {missing[0]} as well when splits are given")
    return Layout(
        int(count),
        None if in_splits is None else tuple(int(s) for s in in_splits),
        None if out_splits is None else tuple(int(s) for s in out_splits),
    )


def _check_splits(schedule: Schedule, name: str, key: str, splits: Sequence[int]) -> None:
    if key not in _SPLITS.get(schedule.collective, ()):
        raise InvalidArgumentError(f"{name} takes no {key}")
    if not schedule.uneven_ok:
        raise InvalidArgumentError(
            f"{name} needs blocks of equal size, got {key}",
            hint="choose an algorithm whose schedule has uneven_ok",
        )
    if len(splits) != schedule.world_size:
        raise InvalidArgumentError(
            f"{name}: {key} has {len(splits)} entries, expected one per rank: {schedule.world_size}"
        )
    if any(s < 0 for s in splits):
        raise InvalidArgumentError(f"{name}: {key} holds a negative size: {list(splits)}")


def buffer_bounds(schedule: Schedule, rank: int, layout: Layout) -> dict[Buf, IntArray]:
    """Return the bounds of the chunks of each buffer on `rank`, in elements.

    Returns:
        Per buffer an int64 array [chunks + 1]: chunk i is [bounds[i], bounds[i + 1]).
    """
    ins, outs = _block_sizes(schedule, rank, layout)
    m = schedule.block_chunks
    input_bounds = _chunk_bounds(ins, m)
    output_bounds = _chunk_bounds(outs, m)
    # The buffer with all chunks determines the sizes. Every rank computes the bounds of a gather's
    # OUTPUT, although only the root has this buffer.
    work = max(input_bounds, output_bounds, key=len)
    return {
        Buf.INPUT: input_bounds,
        Buf.OUTPUT: output_bounds,
        Buf.SCRATCH: _scratch_bounds(work, schedule.scratch_chunks),
    }


def buffer_ends(schedule: Schedule, rank: int, layout: Layout) -> IntArray:
    """Return the bounds of INPUT, OUTPUT and SCRATCH in one array, then a -1 for no buffer."""
    if layout.in_splits is None and layout.out_splits is None:
        return even_ends(schedule, layout.count)
    return _concatenated(buffer_bounds(schedule, rank, layout))


@lru_cache(maxsize=256)
def even_ends(schedule: Schedule, count: int) -> IntArray:
    """Return `buffer_ends` of equal blocks, which are the same on all ranks."""
    return _concatenated(buffer_bounds(schedule, 0, Layout(count)))


def _concatenated(bounds: dict[Buf, IntArray]) -> IntArray:
    joined = np.concatenate([bounds[Buf.INPUT], bounds[Buf.OUTPUT], bounds[Buf.SCRATCH], [-1]])
    joined.flags.writeable = False
    return joined


def _block_sizes(schedule: Schedule, rank: int, layout: Layout) -> tuple[IntArray, IntArray]:
    """Return the block sizes of INPUT and of OUTPUT on `rank`."""
    collective, p = schedule.collective, schedule.world_size
    none = np.empty(0, np.int64)
    if collective == "barrier":
        return none, np.zeros(1, np.int64)
    if collective in VECTOR_COLLECTIVES:
        return none, np.array([layout.count])
    splits = layout.in_splits if layout.in_splits is not None else layout.out_splits
    blocks = np.full(p, layout.count) if splits is None else np.array(splits)
    own = blocks[rank : rank + 1]
    if collective in ("all_gather", "gather"):
        return own, blocks
    if collective in ("reduce_scatter", "scatter"):
        return blocks, own
    return blocks, blocks if layout.out_splits is None else np.array(layout.out_splits)


def _chunk_bounds(sizes: IntArray, m: int) -> IntArray:
    """Cut each block into m chunks of balanced size."""
    ends = np.cumsum(sizes)
    inside = np.arange(m) * sizes[:, None] // m
    starts = (ends - sizes)[:, None] + inside
    return np.append(starts.ravel(), ends[-1:])


def _scratch_bounds(work: IntArray, chunks: int) -> IntArray:
    """Lay out scratch chunks; chunk j is as large as work chunk j mod N."""
    if not chunks:
        return np.zeros(1, np.int64)
    sizes = np.resize(np.diff(work), chunks)
    return np.append(0, np.cumsum(sizes))
