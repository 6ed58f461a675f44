"""Halving and doubling: exchange half as much data per round while reducing, then twice as much.

The algorithms have the bandwidth of a ring and a logarithmic number of rounds.

In the formulas n is the size of the whole data (the vector, or p blocks), and p the world size.
`q` is the largest power of two <= p, `lg` the logarithm to base 2.

Source: Rabenseifner, "Optimization of collective reduction operations", ICCS 2004. Thakur,
Rabenseifner and Gropp 2005. The broadcast is van de Geijn's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from unisono.core.schedules.blocks import block_schedule
from unisono.core.schedules.fold import Fold, with_fold
from unisono.core.schedules.ir import (
    Buf,
    IntArray,
    Schedule,
    ceil_log2,
    copy,
    is_power_of_two,
    recv,
    recv_reduce,
    send,
)
from unisono.core.schedules.pipeline import binomial_level

INPUT, OUTPUT, SCRATCH = Buf.INPUT, Buf.OUTPUT, Buf.SCRATCH
NAME = "halving_doubling"


def all_reduce(p: int) -> Schedule:
    """Reduce-scatter by recursive halving, then all-gather by recursive doubling.

    The vector has q chunks, one per member. The other ranks fold; see `fold`.

    Use: medium and large data on equal links, best with 2**k ranks.
    Cost: 2 lg p rounds, 2n(p-1)/p sent, n(p-1)/p reduced; for other p than 2**k,
        2 floor(lg p)+2 rounds, 2n(q-1)/q + n sent, n(q-1)/q + n reduced.
    Source: Rabenseifner 2004; MPICH's allreduce "reduce_scatter_allgather".
    """
    q = Fold(p).q
    return in_halves(NAME, p, np.arange(q), lambda k, member: member ^ (q >> (k + 1)))


def in_halves(
    algorithm: str, p: int, number: IntArray, partner: Callable[[int, IntArray], IntArray]
) -> Schedule:
    """Return the all_reduce of `all_reduce`, with other partners.

    Args:
        algorithm: As for `Schedule`.
        p: World size.
        number: The chunk that each member reduces [q]. In round k the numbers of two partners
            first differ in bit lg q - 1 - k.
        partner: `partner(k, members)` returns the partners of reducing round `k`. The rounds that
            gather have the same partners in reverse.
    """
    fold = Fold(p)

    def inner(k: int, r: IntArray, member: IntArray) -> Iterable[IntArray]:
        level = min(k, 2 * fold.log2 - 1 - k)
        exchange = _halve if k < fold.log2 else _double
        return exchange(r, number[member], fold.rank(partner(level, member)), fold.q >> (level + 1))

    rounds, exchange = with_fold(fold, fold.q, 2 * fold.log2, inner)
    return Schedule("all_reduce", algorithm, p, rounds, exchange, output_chunks=fold.q)


def reduce_scatter(p: int) -> Schedule:
    """Halve the set of blocks that a rank reduces, until only its own block is left.

    A member also reduces the block of its guest, and sends it to the guest at the end.

    Cost: lg p rounds, n(p-1)/p sent and reduced; for other p than 2**k, floor(lg p)+2 rounds and
        at most n more.
    Source: MPICH's reduce_scatter "recursive halving".
    """
    fold = Fold(p)
    folded = int(fold.guests > 0)

    def load(r: IntArray) -> Iterable[IntArray]:
        yield copy(r, (INPUT, 0), (SCRATCH, 0), p, where=~fold.is_guest(r))

    def exchange(k: int, r: IntArray) -> Iterable[IntArray]:
        guest, host = fold.is_guest(r), fold.is_host(r)
        if folded and k == 0:
            yield send(r, r - 1, INPUT, 0, p, where=guest)
            yield recv_reduce(r, r + 1, SCRATCH, 0, p, where=host)
        elif k - folded < fold.log2:
            members = r[~guest]
            yield from _halve_blocks(fold, k - folded, members)
        else:
            yield send(r, r + 1, SCRATCH, r + 1, where=host)
            yield recv(r, r - 1, OUTPUT, 0, where=guest)

    def store(r: IntArray) -> Iterable[IntArray]:
        yield copy(r, (SCRATCH, r), (OUTPUT, 0), where=~fold.is_guest(r))

    rounds = fold.log2 + 2 * folded
    return block_schedule(
        "reduce_scatter", NAME, p, rounds, exchange,
        scratch_chunks=p, uneven_ok=True, before=load, after=store,
    )  # fmt: skip


def reduce(p: int, root: int) -> Schedule:
    """Reduce-scatter by recursive halving, then gather the chunks up a binomial tree.

    Cost: 2 lg p rounds, 2n(p-1)/p sent, n(p-1)/p reduced; for other p than 2**k one round and n
        more.
    Source: Rabenseifner 2004; MPICH's reduce "reduce_scatter_gather".
    """
    fold = Fold(p)
    folded = int(fold.guests > 0)

    def rank(member: IntArray) -> IntArray:
        return (fold.rank(member) + root) % p

    def exchange(k: int, r: IntArray) -> Iterable[IntArray]:
        v = (r - root) % p
        guest = fold.is_guest(v)
        if folded and k == 0:
            yield send(r, (r - 1) % p, OUTPUT, 0, fold.q, where=guest)
            yield recv_reduce(r, (r + 1) % p, OUTPUT, 0, fold.q, where=fold.is_host(v))
            return
        inside, member = r[~guest], fold.member(v[~guest])
        if k - folded < fold.log2:
            d = fold.q >> (k - folded + 1)
            yield from _halve(inside, member, rank(member ^ d), d)
        else:
            d = 1 << (k - folded - fold.log2)
            yield send(inside, rank(member - d), OUTPUT, member, d, where=member % (2 * d) == d)
            yield recv(inside, rank(member + d), OUTPUT, member + d, d, where=member % (2 * d) == 0)

    rounds = 2 * fold.log2 + folded
    return Schedule("reduce", NAME, p, rounds, exchange, root, output_chunks=fold.q)


def broadcast(p: int, root: int) -> Schedule:
    """Scatter the vector down a binomial tree, then all-gather it.

    The all-gather is recursive doubling for p = 2**k and a ring otherwise.

    Cost: 2 lg p rounds for p = 2**k, else ceil(lg p) + p-1 rounds; at most 2n(p-1)/p sent.
    Source: MPICH's bcast "scatter_recursive_doubling_allgather" and "scatter_ring_allgather".
    """
    log2 = ceil_log2(p)
    doubling = is_power_of_two(p)

    def exchange(k: int, r: IntArray) -> Iterable[IntArray]:
        v = (r - root) % p
        if k < log2:
            yield from _scatter(p, r, v, 1 << (log2 - 1 - k))
        elif doubling:
            width = 1 << (k - log2)
            yield from _double(r, v, ((v ^ width) + root) % p, width)
        else:
            hop = k - log2
            yield send(r, (r + 1) % p, OUTPUT, (v - hop) % p)
            yield recv(r, (r - 1) % p, OUTPUT, (v - hop - 1) % p)

    rounds = log2 + (log2 if doubling else p - 1)
    return Schedule("broadcast", NAME, p, rounds, exchange, root, output_chunks=p)


def _halve(r: IntArray, v: IntArray, partner: IntArray, width: int) -> Iterable[IntArray]:
    """Keep the `width` chunks that hold chunk `v`; send as many others to the partner."""
    mine = v // width * width
    yield send(r, partner, OUTPUT, mine ^ width, width)
    yield recv_reduce(r, partner, OUTPUT, mine, width)


def _halve_blocks(fold: Fold, k: int, r: IntArray) -> Iterable[IntArray]:
    """Halve the members' blocks in SCRATCH like `_halve`; a host has two blocks."""
    member, d = fold.member(r), fold.q >> (k + 1)
    mine, theirs = member // d * d, member // d * d ^ d
    partner = fold.rank(member ^ d)
    for step, half in ((send, theirs), (recv_reduce, mine)):
        first = fold.rank(half)
        yield step(r, partner, SCRATCH, first, fold.rank(half + d) - first)


def _double(r: IntArray, v: IntArray, partner: IntArray, width: int) -> Iterable[IntArray]:
    """Exchange the `width` chunks that rank number `v` has gathered."""
    mine = v // width * width
    yield send(r, partner, OUTPUT, mine, width)
    yield recv(r, partner, OUTPUT, mine ^ width, width)


def _scatter(p: int, r: IntArray, v: IntArray, d: int) -> Iterable[IntArray]:
    """Send the subtree at rank number v + d its chunks; chunk v is for rank number v."""
    upper, lower = binomial_level(v, d, p)
    yield send(r, (r + d) % p, OUTPUT, v + d, np.minimum(d, p - v - d), where=upper)
    yield recv(r, (r - d) % p, OUTPUT, v, np.minimum(d, p - v), where=lower)
