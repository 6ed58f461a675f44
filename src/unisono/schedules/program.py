"""Lowering: what one rank does, as flat integers in elements, for an engine to execute."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from unisono.errors import ScheduleError
from unisono.schedules.ir import Buf, IntArray, Schedule
from unisono.schedules.layout import Layout, buffer_bounds

__all__ = ["Program", "lower"]

_RANK, _OP, _PEER, _SRC_BUF, _SRC, _DST_BUF, _DST, _N = range(8)


@dataclass(frozen=True, eq=False)
class Program:
    """One rank's part of one collective call.

    Attributes:
        steps: int64 [n, 7], read-only: (op, peer, src_buf, src_off, dst_buf, dst_off, count),
            offsets and counts in elements, unused fields -1; `op` is an `Op`, the buffers are
            `Buf`s, POST has peer -1 for "every other rank". In the order of execution.
        scratch_count: Elements of SCRATCH that this rank needs.
    """

    steps: IntArray
    scratch_count: int


@lru_cache(maxsize=1024)
def lower(schedule: Schedule, rank: int, layout: Layout) -> Program:
    """Return the program of `rank`; cached, since a training loop repeats its calls.

    Steps without elements are dropped, at both ends of a message alike because both ends agree
    on its size. A barrier's steps have no elements and stay.

    Raises:
        ScheduleError: A local step joins two places of different size.
    """
    rows = _rank_rows(schedule, rank)
    bounds = buffer_bounds(schedule, rank, layout)
    src_off, src_count = _place(rows[:, _SRC_BUF], rows[:, _SRC], rows[:, _N], bounds)
    dst_off, dst_count = _place(rows[:, _DST_BUF], rows[:, _DST], rows[:, _N], bounds)
    _require_equal(schedule, rank, rows, src_count, dst_count)
    count = np.maximum(src_count, dst_count)
    columns = (rows[:, _OP], rows[:, _PEER], rows[:, _SRC_BUF], src_off)
    steps = np.stack([*columns, rows[:, _DST_BUF], dst_off, count], axis=1)
    if schedule.collective != "barrier":
        steps = steps[count > 0]
    steps.flags.writeable = False
    return Program(steps, _scratch_count(steps))


@lru_cache(maxsize=256)
def _rank_rows(schedule: Schedule, rank: int) -> IntArray:
    """Return all rows of one rank; they serve every element count."""
    ranks = np.array([rank])
    return np.concatenate([schedule.steps(k, ranks) for k in range(schedule.stages)])


def _place(
    bufs: IntArray, chunks: IntArray, n: IntArray, bounds: dict[Buf, IntArray]
) -> tuple[IntArray, IntArray]:
    """Return offset and count of each row's chunk range; -1 where the row names no buffer."""
    offset = np.full(len(bufs), -1, np.int64)
    count = np.full(len(bufs), -1, np.int64)
    for buf, edges in bounds.items():
        here = bufs == buf
        offset[here] = edges[chunks[here]]
        count[here] = edges[chunks[here] + n[here]] - offset[here]
    return offset, count


def _require_equal(
    schedule: Schedule, rank: int, rows: IntArray, src_count: IntArray, dst_count: IntArray
) -> None:
    wrong = (src_count >= 0) & (dst_count >= 0) & (src_count != dst_count)
    if wrong.any():
        at = int(np.flatnonzero(wrong)[0])
        raise ScheduleError(
            f"{schedule.collective} ({schedule.algorithm}), rank {rank}, step {at}: "
            f"source has {src_count[at]} elements, destination {dst_count[at]}: {rows[at]}"
        )


def _scratch_count(steps: IntArray) -> int:
    """Return the end of the last scratch element that any step touches."""
    used = 0
    for buf, off in ((2, 3), (4, 5)):
        ends = (steps[:, off] + steps[:, 6])[steps[:, buf] == Buf.SCRATCH]
        used = max(used, int(ends.max(initial=0)))
    return used
