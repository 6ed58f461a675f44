"""Bruck's algorithms: a logarithmic number of rounds for any world size.

Blocks are renumbered relative to each rank. Both exchanges then have the same pattern on every
rank, at the price of local copies before and after.

In the formulas n is the size of all p blocks, p the world size, lg the logarithm to base 2.
Source: Bruck, Ho, Kipnis, Upfal and Weathersby, "Efficient algorithms for all-to-all
communications in multiport message-passing systems", IEEE TPDS 8(11), 1997.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from unisono.core.schedules.blocks import block_schedule
from unisono.core.schedules.ir import Buf, IntArray, Schedule, ceil_log2, copy, recv, send

INPUT, OUTPUT, SCRATCH = Buf.INPUT, Buf.OUTPUT, Buf.SCRATCH


def all_gather(p: int) -> Schedule:
    """Pass all blocks gathered so far 1, 2, 4, ... ranks to the left.

    SCRATCH[j] collects the block of rank r + j.

    Use: small data on any number of ranks: the fewest rounds.
    Cost: ceil(lg p) rounds, n(p-1)/p sent; round k sends min(2**k, p - 2**k) blocks.
    Source: Bruck et al. 1997; MPICH's allgather "brucks".
    """

    def own(r: IntArray) -> Iterable[IntArray]:
        yield copy(r, (INPUT, 0), (SCRATCH, 0))

    def exchange(k: int, r: IntArray) -> Iterable[IntArray]:
        d = 1 << k
        n = min(d, p - d)
        yield send(r, (r - d) % p, SCRATCH, 0, n)
        yield recv(r, (r + d) % p, SCRATCH, d, n)

    def unrotate(r: IntArray) -> Iterable[IntArray]:
        yield copy(r, (SCRATCH, 0), (OUTPUT, r), p - r)
        yield copy(r, (SCRATCH, p - r), (OUTPUT, 0), r, where=r > 0)

    return block_schedule(
        "all_gather", "bruck", p, ceil_log2(p), exchange,
        scratch_chunks=p, before=own, after=unrotate,
    )  # fmt: skip


def all_to_all(p: int) -> Schedule:
    """Move the block for the j-th rank to the right by one hop per bit of j.

    SCRATCH[j] is the block for rank r + j at the start and the block from rank r - j at the end.
    In round k the blocks with bit k set in j travel 2**k ranks to the right. They are packed into
    one message in SCRATCH[p], SCRATCH[p + 1], ...

    Cost: ceil(lg p) rounds, (n/p) * (sum of the bits set in 1..p-1) sent, (n/2) lg p for p = 2**k.
    Source: Bruck et al. 1997; MPICH's alltoall "brucks".
    """

    def rotate(r: IntArray) -> Iterable[IntArray]:
        yield copy(r, (INPUT, r), (SCRATCH, 0), p - r)
        yield copy(r, (INPUT, 0), (SCRATCH, p - r), r, where=r > 0)

    def exchange(k: int, r: IntArray) -> Iterable[IntArray]:
        d = 1 << k
        # The numbers with bit k set come in runs of d: [d, 2d), [3d, 4d), ...
        run = np.arange(d, p, 2 * d)
        length = np.minimum(d, p - run)
        packed = p + np.arange(len(run)) * d
        n = int(length.sum())
        column = r[:, None]
        yield copy(column, (SCRATCH, run), (SCRATCH, packed), length)
        yield send(r, (r + d) % p, SCRATCH, p, n)
        yield recv(r, (r - d) % p, SCRATCH, p, n)
        yield copy(column, (SCRATCH, packed), (SCRATCH, run), length)

    def unrotate(r: IntArray) -> Iterable[IntArray]:
        hops = np.arange(p)
        column = r[:, None]
        yield copy(column, (SCRATCH, hops), (OUTPUT, (column - hops) % p))

    return block_schedule(
        "all_to_all", "bruck", p, ceil_log2(p), exchange,
        scratch_chunks=p + p // 2, before=rotate, after=unrotate,
    )  # fmt: skip
