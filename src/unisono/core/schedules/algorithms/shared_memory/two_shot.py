"""Two-shot algorithms for shared memory: reduce-scatter by reads, then gather by reads.

Every rank reduces one p-th of the vector, its part. Two rounds have the traffic of a ring.

In the formulas n is the size of the vector, p the world size, m the pipeline depth. Costs count a
post to all ranks as p-1 messages, as on links without shared memory.

Source: PyTorch's symmetric-memory two_shot_all_reduce.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from unisono.core.schedules.algorithms.shared_memory.one_shot import others
from unisono.core.schedules.ir import Buf, IntArray, Schedule, copy, post, read, read_reduce

OUTPUT, SCRATCH = Buf.OUTPUT, Buf.SCRATCH


def all_reduce(p: int, pipeline: int) -> Schedule:
    """Reduce one part per rank, then read the parts of the other ranks.

    A part has `pipeline` chunks. While chunk k of the parts is reduced, chunk k-1 is read.

    Use: large data in shared memory.
    Cost: 1+m rounds, 2n(p-1)/p read, n(p-1)/p reduced.
    Source: PyTorch's two_shot_all_reduce.
    """

    def reduce_part(r: IntArray, chunk: IntArray) -> Iterable[IntArray]:
        yield read_reduce(r[:, None], others(r[:, None], p), OUTPUT, chunk[:, None])

    return in_two_shots("two_shot", p, pipeline, reduce_part)


def in_two_shots(
    algorithm: str,
    p: int,
    pipeline: int,
    reduce_part: Callable[[IntArray, IntArray], Iterable[IntArray]],
    scratch_chunks: int = 0,
) -> Schedule:
    """Return the all_reduce of `all_reduce`, with another way to reduce a part.

    `reduce_part(ranks, chunks)` returns the rows in which each rank reduces one chunk of its part
    from the posts of the other ranks.
    """

    def exchange(k: int, r: IntArray) -> Iterable[IntArray]:
        column, m = r[:, None], pipeline
        peers = others(column, p)
        reduces, gathers = k < m, k > 0
        if reduces:
            yield post(column, peers, OUTPUT, peers * m + k)
        if gathers:
            yield post(r, -1, OUTPUT, r * m + k - 1)
        if reduces:
            yield from reduce_part(r, r * m + k)
        if gathers:
            yield read(column, peers, OUTPUT, peers * m + k - 1)

    rounds = 1 + pipeline if p > 1 else 0
    return Schedule(
        "all_reduce", algorithm, p, rounds, exchange,
        output_chunks=p * pipeline, scratch_chunks=scratch_chunks,
    )  # fmt: skip


def reduce(p: int, root: int) -> Schedule:
    """Reduce one part per rank, then read the parts on the root.

    The other ranks reduce in SCRATCH, so that their vectors do not change.

    Cost: 2 rounds, 2n(p-1)/p read by the root, n(p-1)/p reduced.
    Source: Rabenseifner's reduce, with reads.
    """

    def exchange(k: int, r: IntArray) -> Iterable[IntArray]:
        helpers, at_root = r[r != root], r[r == root][:, None]
        from_root = others(at_root, p)
        if k == 0:
            peers = others(r[:, None], p)
            yield post(r[:, None], peers, OUTPUT, peers)
            yield copy(helpers, (OUTPUT, helpers), (SCRATCH, helpers))
            column = helpers[:, None]
            yield read_reduce(column, others(column, p), SCRATCH, column)
            yield read_reduce(at_root, from_root, OUTPUT, at_root)
        else:
            yield post(helpers, root, SCRATCH, helpers)
            yield read(at_root, from_root, OUTPUT, from_root)

    rounds = 2 if p > 1 else 0
    return Schedule(
        "reduce", "two_shot", p, rounds, exchange, root, output_chunks=p, scratch_chunks=p
    )
