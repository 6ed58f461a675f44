"""Lower a schedule to the program of one rank: rows of integers, in elements, for an engine."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from unisono.core.schedules.ir import BoolArray, Buf, IntArray, Schedule, sums_on
from unisono.core.schedules.lowering.layout import Layout, buffer_ends
from unisono.errors import ScheduleError

_RANK, _OP, _PEER, _SRC_BUF, _SRC, _DST_BUF, _DST, _N = range(8)


@dataclass(frozen=True, eq=False)
class Program:
    """One rank's part of one collective call.

    Attributes:
        steps: int64 [n, 8], read-only, in the order of execution: (op, peer, src_buf, src_off,
            dst_buf, dst_off, count, goes_on). Offsets and counts are in elements, unused fields are
            -1. `op` is an `Op`, the buffers are `Buf`s. POST has peer -1 for "every other rank".
            `goes_on` is 1 if the next step continues the accumulation.
        scratch_count: Elements of SCRATCH that this rank needs.
    """

    steps: IntArray
    scratch_count: int


@lru_cache(maxsize=1024)
def lower(schedule: Schedule, rank: int, layout: Layout) -> Program:
    """Return the program of `rank`; cached, because a training loop repeats its calls.

    Steps without elements are dropped. Both ends of a message drop it, because both compute the
    same size. Kept are steps of no chunks, and those of a barrier.

    Raises:
        ScheduleError: The source and the destination of a local step differ in size.
    """
    rows = _rank_rows(schedule, rank)
    ends = buffer_ends(schedule, rank, layout)
    steps, moved = _in_elements(schedule, rows, ends)
    scratch_ends = np.where(steps[:, 6] > 0, ends[rows.scratch], 0)
    steps = steps[moved | (rows.chunks[:, _N] == 0)]
    steps.flags.writeable = False
    return Program(steps, int(scratch_ends.max(initial=0)))


def lower_all(schedule: Schedule, layout: Layout) -> tuple[IntArray, IntArray]:
    """Return the steps of all ranks, rank by rank, and the rank of each; for equal blocks.

    Steps of no chunks are dropped: in shared memory no rank must be held back.
    """
    rows = _all_rows(schedule, np.arange(schedule.world_size))
    steps, moved = _in_elements(schedule, rows, buffer_ends(schedule, 0, layout))
    return steps[moved], rows.chunks[moved, _RANK]


class _RankRows(NamedTuple):
    """All rows of some ranks, rank by rank, with the indices of their chunks in `buffer_ends`.

    Attributes:
        chunks: The rows as the schedule returns them.
        steps: As in `Program`, without offsets and counts.
        src: Index of the begin of a row's source; the index of the -1 if it has none.
        dst: Index of the begin of a row's destination, likewise.
        src_end: Index of the end of the source, likewise.
        dst_end: Index of the end of the destination, likewise.
        scratch: [2, n]: `src_end` and `dst_end` of chunks in SCRATCH.
        local: Whether a row has a source and a destination.
    """

    chunks: IntArray
    steps: IntArray
    src: IntArray
    dst: IntArray
    src_end: IntArray
    dst_end: IntArray
    scratch: IntArray
    local: BoolArray


@lru_cache(maxsize=256)
def _rank_rows(schedule: Schedule, rank: int) -> _RankRows:
    """Return all rows of one rank; they are valid for every element count."""
    return _all_rows(schedule, np.array([rank]))


def _all_rows(schedule: Schedule, ranks: IntArray) -> _RankRows:
    """Return the rows of all stages; an index does not depend on the rank."""
    rows = np.concatenate([schedule.steps(k, ranks) for k in range(schedule.stages)])
    if len(ranks) > 1:
        rows = rows[np.argsort(rows[:, _RANK], kind="stable")]
    *bases, none = bases_of(schedule)
    steps = np.full((len(rows), 8), -1, np.int64)
    steps[:, [0, 1, 2, 4]] = rows[:, [_OP, _PEER, _SRC_BUF, _DST_BUF]]
    # Of the chunks, as in the proof: a step that is dropped because it has no elements divides a
    # sum, too.
    steps[:, 7] = sums_on(schedule, rows[:, _OP], rows[:, [_RANK, _DST_BUF, _DST, _N]])
    begin, end = np.full((2, 2, len(rows)), none)
    scratch = end.copy()
    for side, (buf, chunk) in enumerate(((_SRC_BUF, _SRC), (_DST_BUF, _DST))):
        named, aside = rows[:, buf] >= 0, rows[:, buf] == Buf.SCRATCH
        begin[side, named] = (np.array(bases)[rows[:, buf]] + rows[:, chunk])[named]
        end[side, named] = begin[side, named] + rows[named, _N]
        scratch[side, aside] = end[side, aside]
    local = (rows[:, _SRC_BUF] >= 0) & (rows[:, _DST_BUF] >= 0)
    return _RankRows(rows, steps, begin[0], begin[1], end[0], end[1], scratch, local)


@lru_cache(maxsize=256)
def bases_of(schedule: Schedule) -> IntArray:
    """Return the index in `buffer_ends` of the first bound of each buffer, and of the -1."""
    inputs = schedule.input_chunks
    lengths = inputs + (inputs > 0), schedule.output_chunks + 1, schedule.scratch_chunks + 1
    return np.cumsum([0, *lengths])


def _in_elements(schedule: Schedule, rows: _RankRows, ends: IntArray) -> tuple[IntArray, BoolArray]:
    """Return the steps with offsets and counts, and which of them a program keeps."""
    src_off, dst_off = ends[rows.src], ends[rows.dst]
    src_count, dst_count = ends[rows.src_end] - src_off, ends[rows.dst_end] - dst_off
    _require_equal(schedule, rows, src_count, dst_count)
    steps = rows.steps.copy()
    steps[:, 3], steps[:, 5] = src_off, dst_off
    steps[:, 6] = np.maximum(src_count, dst_count)
    return steps, (steps[:, 6] > 0) | (schedule.collective == "barrier")


def _require_equal(
    schedule: Schedule, rows: _RankRows, src_count: IntArray, dst_count: IntArray
) -> None:
    wrong = rows.local & (src_count != dst_count)
    if wrong.any():
        at = int(np.flatnonzero(wrong)[0])
        rank = rows.chunks[at, _RANK]
        step = at - np.searchsorted(rows.chunks[:, _RANK], rank)
        raise ScheduleError(
            f"{schedule.collective} ({schedule.algorithm}), rank {rank}, step {step}: "
            f"source has {src_count[at]} elements, destination {dst_count[at]}: {rows.chunks[at]}"
        )
