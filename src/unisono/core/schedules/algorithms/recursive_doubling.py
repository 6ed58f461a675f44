"""Recursive doubling: in round k partners are 2**k apart, and the data of a rank doubles.

The algorithms need the fewest rounds possible, and are the choice for small data.

In the formulas n is the size of the whole data (the vector, or p blocks), and p the world size.
`lg` is the logarithm to base 2.

Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in
MPICH", IJHPCA 19(1), 2005. The barrier is Hensgen, Finkel and Manber 1988.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from unisono.core.schedules.algorithms.shared_memory.one_shot import reduce_in_rank_order
from unisono.core.schedules.blocks import block_schedule
from unisono.core.schedules.fold import Fold, with_fold
from unisono.core.schedules.ir import (
    Buf,
    IntArray,
    Schedule,
    ceil_log2,
    post,
    recv,
    recv_reduce,
    send,
)

OUTPUT = Buf.OUTPUT


def all_reduce(p: int) -> Schedule:
    """Exchange and reduce the whole vector with a partner 1, 2, 4, ... ranks away.

    Partners compute a+b and b+a; all ranks get bitwise equal results because the reduce ops
    commute.

    Use: small data: the fewest rounds with one message each.
    Cost: lg p rounds, n lg p sent and reduced; for other p than 2**k, floor(lg p)+2 rounds and
        n(floor(lg p)+1) sent and reduced.
    Source: MPICH's allreduce "recursive doubling".
    """
    fold = Fold(p)

    def inner(k: int, r: IntArray, member: IntArray) -> Iterable[IntArray]:
        partner = fold.rank(member ^ (1 << k))
        yield send(r, partner, OUTPUT, 0)
        yield recv_reduce(r, partner, OUTPUT, 0)

    rounds, exchange = with_fold(fold, 1, fold.log2, inner)
    return Schedule("all_reduce", "recursive_doubling", p, rounds, exchange)


def multiplying(p: int) -> Schedule:
    """Exchange and reduce the whole vector in groups of 4 ranks, which are 1, 4, 16, ... apart.

    All ranks of a group reduce in the same order, so the results are bitwise equal. If lg p is odd,
    the last groups have 2 ranks.

    Use: tiny data, if a rank can send 3 messages at once.
    Cost: ceil(lg p / 2) rounds; 3n sent and reduced in groups of 4, n in groups of 2. For other p
        than 2**k, 2 rounds and n more.
    Source: Ruefenacht, Bull and Booth, "Generalisation of recursive doubling for AllReduce", PARCO
        69, 2017; MPICH's allreduce "recexch".
    """
    fold = Fold(p)

    def inner(k: int, r: IntArray, member: IntArray) -> Iterable[IntArray]:
        apart = 4**k
        size = min(4, fold.q // apart)
        place = member // apart % size
        first = member - place * apart
        turn = (place[:, None] + np.arange(1, size)) % size
        yield post(r[:, None], fold.rank(first[:, None] + turn * apart), OUTPUT, 0)
        group = fold.rank(first[:, None] + np.arange(size) * apart)
        yield from reduce_in_rank_order(r, group)

    rounds, exchange = with_fold(fold, 1, -(-fold.log2 // 2), inner)
    name = "recursive_multiplying"
    return Schedule("all_reduce", name, p, rounds, exchange, scratch_chunks=1)


def all_gather(p: int) -> Schedule:
    """Exchange all blocks gathered so far with a partner 1, 2, 4, ... ranks away.

    Only for p = 2**k.

    Cost: lg p rounds, n(p-1)/p sent.
    Source: MPICH's allgather "recursive doubling".
    """

    def exchange(k: int, r: IntArray) -> Iterable[IntArray]:
        width = 1 << k
        mine = r // width * width
        yield send(r, r ^ width, OUTPUT, mine, width)
        yield recv(r, r ^ width, OUTPUT, mine ^ width, width)

    return block_schedule(
        "all_gather", "recursive_doubling", p, ceil_log2(p), exchange, uneven_ok=True
    )


def barrier(p: int) -> Schedule:
    """Send to the rank 1, 2, 4, ... to the right; receive from the rank 1, 2, 4, ... to the left.

    Use: each barrier between hosts.
    Cost: ceil(lg p) rounds of empty messages.
    Source: Hensgen, Finkel and Manber, "Two algorithms for barrier synchronization", 1988
        (dissemination barrier).
    """

    def exchange(k: int, r: IntArray) -> Iterable[IntArray]:
        yield send(r, (r + (1 << k)) % p, OUTPUT, 0)
        yield recv(r, (r - (1 << k)) % p, OUTPUT, 0)

    return Schedule("barrier", "dissemination", p, ceil_log2(p), exchange)
