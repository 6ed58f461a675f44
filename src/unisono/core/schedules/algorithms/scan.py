"""Prefix reductions: rank r gets the reduction over ranks 0..r (scan) or 0..r-1 (exscan).

An exscan does not change rank 0's vector, because rank 0 has nothing to reduce. In MPI that vector
is undefined.

In the formulas n is the size of the vector, p the world size, m the pipeline depth, lg the
logarithm to base 2.

Source: MPICH's and Open MPI's scan "linear" and "recursive doubling"; Hillis and Steele 1986.
"""

from __future__ import annotations

from collections.abc import Iterable

from unisono.core.schedules import ir
from unisono.core.schedules.ir import (
    Buf,
    IntArray,
    Schedule,
    ceil_log2,
    copy,
    recv,
    recv_reduce,
    send,
)

OUTPUT, SCRATCH = Buf.OUTPUT, Buf.SCRATCH


def scan_chain(p: int, pipeline: int) -> Schedule:
    """Add each rank's vector to the sum from the left, and send the new sum to the right.

    The reduction is in the order of ranks.

    Cost: p-2+m rounds, n sent and reduced by every rank.
    Source: Open MPI's scan "linear", with a pipeline.
    """
    m = pipeline

    def exchange(k: int, r: IntArray) -> Iterable[IntArray]:
        # Rank r sends chunk c in round r + c, and receives the next chunk. Few ranks are active.
        r = r[(r <= k + 1) & (r > k - m)]
        c = k - r
        yield send(r, r + 1, OUTPUT, c, where=(r < p - 1) & (c >= 0))
        yield recv_reduce(r, r - 1, OUTPUT, c + 1, where=(r > 0) & (c < m - 1))

    return Schedule("scan", "linear", p, _chain_rounds(p, m), exchange, output_chunks=m)


def exscan_chain(p: int, pipeline: int) -> Schedule:
    """Keep the sum from the left on each rank, and send it on with the rank's own vector added.

    The reduction is in the order of ranks.

    Cost: p-2+m rounds, n sent and reduced by every rank.
    Source: Open MPI's exscan "linear", with a pipeline.
    """
    m = pipeline

    def own(r: IntArray) -> Iterable[IntArray]:
        yield copy(r, (OUTPUT, 0), (SCRATCH, 0), m, where=r > 0)

    def exchange(k: int, r: IntArray) -> Iterable[IntArray]:
        r = r[(r <= k + 1) & (r > k - m)]
        c = k - r
        gives = (r < p - 1) & (c >= 0)
        yield send(r, r + 1, OUTPUT, c, where=gives & (r == 0))
        yield send(r, r + 1, SCRATCH, m + c, where=gives & (r > 0))
        c = c + 1
        takes = (r > 0) & (c < m)
        yield recv(r, r - 1, OUTPUT, c, where=takes)
        # The received value is the first operand, so the copy of it is the destination of the
        # reduction.
        yield copy(r, (OUTPUT, c), (SCRATCH, m + c), where=takes & (r < p - 1))
        yield ir.reduce(r, (SCRATCH, c), (SCRATCH, m + c), where=takes & (r < p - 1))

    return Schedule(
        "exscan", "linear", p, _chain_rounds(p, m), exchange,
        output_chunks=m, scratch_chunks=2 * m, before=own,
    )  # fmt: skip


def scan_doubling(p: int) -> Schedule:
    """Reduce in round k with the partial result of the rank 2**k to the left.

    Cost: ceil(lg p) rounds, up to n ceil(lg p) sent and reduced.
    Source: Hillis and Steele 1986.
    """

    def exchange(k: int, r: IntArray) -> Iterable[IntArray]:
        distance = 1 << k
        yield send(r, r + distance, OUTPUT, 0, where=r + distance < p)
        yield recv_reduce(r, r - distance, OUTPUT, 0, where=r >= distance)

    return Schedule("scan", "recursive_doubling", p, ceil_log2(p), exchange)


def exscan_doubling(p: int) -> Schedule:
    """Scan as `scan_doubling`, then send every rank's result to its right neighbour.

    Cost: ceil(lg p)+1 rounds, up to n(ceil(lg p)+1) sent, n ceil(lg p) reduced.
    Source: Hillis and Steele 1986.
    """
    inclusive = scan_doubling(p)

    def exchange(k: int, r: IntArray) -> Iterable[IntArray]:
        if k < inclusive.rounds:
            yield from inclusive.exchange(k, r)
        else:
            yield send(r, r + 1, OUTPUT, 0, where=r < p - 1)
            yield recv(r, r - 1, OUTPUT, 0, where=r > 0)

    rounds = inclusive.rounds + 1 if p > 1 else 0
    return Schedule("exscan", "recursive_doubling", p, rounds, exchange)


def _chain_rounds(p: int, m: int) -> int:
    return p - 2 + m if p > 1 else 0
