"""The common form of schedules that move one block per rank, or per pair of ranks.

A scatter is a gather backwards, and a reduce_scatter an all_gather backwards.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from unisono.core.schedules.ir import Buf, ExchangeRule, IntArray, Local, Op, Schedule, copy

_BACKWARDS = {"gather": "scatter", "all_gather": "reduce_scatter"}


def block_schedule(
    collective: str,
    algorithm: str,
    p: int,
    rounds: int,
    exchange: ExchangeRule,
    root: int = -1,
    *,
    before: Local | None = None,
    **options: Any,
) -> Schedule:
    """Return the schedule of a collective that moves blocks, with one chunk per block.

    Args:
        collective: One of `BLOCK_COLLECTIVES`.
        algorithm: As for `Schedule`.
        p: World size.
        rounds: As for `Schedule`.
        exchange: As for `Schedule`.
        root: As for `Schedule`.
        before: Local steps before the first round. If None, each rank that has its own block in
            INPUT and a place for it in OUTPUT copies it there.
        **options: scratch_chunks, uneven_ok, after.
    """
    inputs = 1 if collective in ("all_gather", "gather") else p
    outputs = 1 if collective in ("reduce_scatter", "scatter") else p

    def copy_own(r: IntArray) -> Iterable[IntArray]:
        source, target = (r if inputs == p else 0), (r if outputs == p else 0)
        yield copy(r, (Buf.INPUT, source), (Buf.OUTPUT, target), where=(r == root) | (root < 0))

    return Schedule(
        collective, algorithm, p, rounds, exchange, root,
        input_chunks=inputs, output_chunks=outputs, before=before or copy_own, **options,
    )  # fmt: skip


def backwards(schedule: Schedule) -> Schedule:
    """Return the scatter for a gather, or the reduce_scatter for an all_gather.

    The rounds and their steps run in reverse. A send becomes a receive, which reduces in a
    reduce_scatter, and a receive a send. INPUT and OUTPUT change places.
    """
    takes = Op.RECV if schedule.collective == "gather" else Op.RECV_REDUCE
    ops, bufs = np.array([takes, Op.SEND, -1, Op.COPY]), np.array([Buf.OUTPUT, Buf.INPUT, 2, -1])

    def turned(parts: Iterable[IntArray]) -> Iterable[IntArray]:
        for rows in reversed(list(parts)):
            rank, op, peer, src_buf, src, dst_buf, dst, n = rows.T
            yield np.stack([rank, ops[op], peer, bufs[dst_buf], dst, bufs[src_buf], src, n]).T

    return replace(
        schedule,
        collective=_BACKWARDS[schedule.collective],
        input_chunks=schedule.output_chunks,
        output_chunks=schedule.input_chunks,
        exchange=lambda k, r: turned(schedule.exchange(schedule.rounds - 1 - k, r)),
        before=lambda r: turned(schedule.after(r)),
        after=lambda r: turned(schedule.before(r)),
    )
