"""Pairwise exchange: in every round a rank sends to and receives from the same partner.

This needs p = 2**k; the partner of round k is r xor k. For other world sizes a rank sends to its
k-th right neighbour and receives from its k-th left neighbour, as in the linear algorithms.

In the formulas n is the size of all p blocks, p the world size.
Source: MPICH's "pairwise" algorithms; Thakur, Rabenseifner and Gropp 2005.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from unisono.schedules import linear
from unisono.schedules.ir import (
    Buf,
    IntArray,
    Schedule,
    is_power_of_two,
    recv,
    recv_reduce,
    send,
)

INPUT, OUTPUT = Buf.INPUT, Buf.OUTPUT


def all_to_all(p: int) -> Schedule:
    """Exchange blocks with every other rank in turn.

    Cost: p-1 rounds, n(p-1)/p sent.
    Source: MPICH's alltoall "pairwise".
    """

    def exchange(k: int, r: IntArray) -> Iterable[IntArray]:
        to, source = _partners(p, k, r)
        yield send(r, to, INPUT, to)
        yield recv(r, source, OUTPUT, source)

    return replace(linear.all_to_all(p), algorithm="pairwise", rounds=p - 1, exchange=exchange)


def reduce_scatter(p: int) -> Schedule:
    """Exchange the blocks to be reduced with every other rank in turn.

    Cost: p-1 rounds, n(p-1)/p sent and reduced.
    Source: MPICH's reduce_scatter "pairwise".
    """

    def exchange(k: int, r: IntArray) -> Iterable[IntArray]:
        to, source = _partners(p, k, r)
        yield send(r, to, INPUT, to)
        yield recv_reduce(r, source, OUTPUT, 0)

    return replace(linear.reduce_scatter(p), algorithm="pairwise", exchange=exchange)


def _partners(p: int, k: int, r: IntArray) -> tuple[IntArray, IntArray]:
    """Return the ranks that each rank sends to and receives from in round `k`."""
    if is_power_of_two(p):
        return r ^ (k + 1), r ^ (k + 1)
    return (r + 1 + k) % p, (r - 1 - k) % p
