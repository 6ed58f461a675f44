"""Recursive doubling: in round k partners are 2**k apart, and the data of a rank doubles.

The algorithms need the fewest rounds possible, and are the choice for small data.

In the formulas n is the size of the whole data (the vector, or p blocks), and p the world size.
`lg` is the logarithm to base 2.

Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in
MPICH", IJHPCA 19(1), 2005. The barrier is Hensgen, Finkel and Manber 1988.
"""

from __future__ import annotations

from collections.abc import Iterable

from unisono.schedules.blocks import block_schedule
from unisono.schedules.fold import Fold, with_fold
from unisono.schedules.ir import Buf, IntArray, Schedule, ceil_log2, recv, recv_reduce, send

OUTPUT = Buf.OUTPUT


def all_reduce(p: int) -> Schedule:
    """Exchange and reduce the whole vector with a partner 1, 2, 4, ... ranks away.

    Partners compute a+b and b+a; all ranks get bitwise equal results because the reduce ops
    commute.

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

    Cost: ceil(lg p) rounds of empty messages.
    Source: Hensgen, Finkel and Manber, "Two algorithms for barrier synchronization", 1988
        (dissemination barrier).
    """

    def exchange(k: int, r: IntArray) -> Iterable[IntArray]:
        yield send(r, (r + (1 << k)) % p, OUTPUT, 0)
        yield recv(r, (r - (1 << k)) % p, OUTPUT, 0)

    return Schedule("barrier", "dissemination", p, ceil_log2(p), exchange)
