"""Reductions in the order of ranks: the bits of the result depend only on the data.

The rank that reduces a part computes ((x_0 (op) x_1) (op) x_2) (op) ... (op) x_{p-1}. Other chunk
sizes, another algorithm of this kind or another engine therefore give the same bits. Deterministic
calls use these algorithms. `verify(schedule, rank_order=True)` proves the order.

Every rank reduces one p-th of the data, its part, with the traffic of the two-shot algorithms. In
those a rank begins with its own part. Here its own part stays in SCRATCH until its turn.

In the formulas n is the size of the whole data (the vector, or p blocks), p the world size, m the
pipeline depth. Costs count messages: over shared memory a post is written once.

Source: PyTorch's symmetric-memory two_shot_all_reduce, with a fixed order.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from unisono.core.schedules.algorithms.shared_memory.one_shot import (
    others,
    reduce_in_rank_order,
    reduce_in_turns,
)
from unisono.core.schedules.algorithms.shared_memory.two_shot import in_two_shots
from unisono.core.schedules.blocks import block_schedule
from unisono.core.schedules.ir import Buf, IntArray, Schedule, copy, post, read

INPUT, OUTPUT, SCRATCH = Buf.INPUT, Buf.OUTPUT, Buf.SCRATCH
NAME = "rank_order"


def all_reduce(p: int, pipeline: int) -> Schedule:
    """Reduce one part per rank in the order of ranks, then read the parts of the other ranks.

    A part has `pipeline` chunks. While chunk k of the parts is reduced, chunk k-1 is read.

    Use: if bits must not depend on the number of hosts or algorithm.
    Cost: 1+m rounds, 2n(p-1)/p read, n(p-1)/p reduced.
    Source: as the module.
    """

    def reduce_part(r: IntArray, chunk: IntArray) -> Iterable[IntArray]:
        return reduce_in_rank_order(r, np.arange(p)[None], chunk)

    return in_two_shots(NAME, p, pipeline, reduce_part, scratch_chunks=p * pipeline)


def reduce(p: int, root: int) -> Schedule:
    """Reduce one part per rank in the order of ranks; the root reads the parts.

    Cost: 2 rounds, 2n(p-1)/p read by the root, n(p-1)/p reduced.
    Source: as the module; Rabenseifner's reduce.
    """

    def exchange(k: int, r: IntArray) -> Iterable[IntArray]:
        if k == 0:
            yield post(r[:, None], others(r[:, None], p), OUTPUT, others(r[:, None], p))
            yield from reduce_in_rank_order(r, np.arange(p)[None], r)
        else:
            at_root = r[r == root][:, None]
            peers = others(at_root, p)
            yield post(r, root, OUTPUT, r, where=r != root)
            yield read(at_root, peers, OUTPUT, peers)

    rounds = 2 if p > 1 else 0
    return Schedule("reduce", NAME, p, rounds, exchange, root, output_chunks=p, scratch_chunks=p)


def reduce_scatter(p: int) -> Schedule:
    """Reduce the blocks that all ranks hold for a rank, in the order of ranks.

    Cost: 1 round, n(p-1)/p read and reduced by every rank.
    Source: as the module, its first half.
    """

    def own(r: IntArray) -> Iterable[IntArray]:
        # Keep the own block in SCRATCH: OUTPUT may be this block of INPUT, and the first read
        # overwrites OUTPUT.
        yield copy(r, (INPUT, r), (SCRATCH, r), where=r > 0)
        yield copy(r, (INPUT, r), (OUTPUT, 0), where=r == 0)

    def exchange(k: int, r: IntArray) -> Iterable[IntArray]:
        column = r[:, None]
        yield post(column, others(column, p), INPUT, others(column, p))
        yield read(r, 0, OUTPUT, 0, where=r > 0)
        yield reduce_in_turns(r, np.arange(p)[None], r, 0)

    rounds = 1 if p > 1 else 0
    return block_schedule(
        "reduce_scatter", NAME, p, rounds, exchange, scratch_chunks=p, uneven_ok=True, before=own
    )
