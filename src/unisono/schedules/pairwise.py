"""Pairwise exchange: in every round a rank gives to and takes from one and the same partner.

That needs p = 2**k, where the partner of round k is r xor k. For other world sizes a rank gives to
its k-th right and takes from its k-th left neighbour, as the linear algorithms do.
n is the size of all p blocks, p the world size.
Source: MPICH's "pairwise" algorithms; Thakur, Rabenseifner and Gropp 2005.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from unisono.schedules import linear
from unisono.schedules.ir import (
    Buf,
    Exchange,
    IntArray,
    Schedule,
    is_power_of_two,
    recv,
    recv_reduce,
    send,
)

__all__ = ["all_to_all", "reduce_scatter"]

INPUT, OUTPUT = Buf.INPUT, Buf.OUTPUT


def all_to_all(p: int) -> Schedule:
    """Exchange blocks with every other rank in turn.

    Cost: p-1 rounds, n(p-1)/p sent.
    Source: MPICH's alltoall "pairwise".
    """

    def exchange(k: int, r: IntArray) -> Iterable[IntArray]:
        partner = r ^ (k + 1)
        yield send(r, partner, INPUT, partner)
        yield recv(r, partner, OUTPUT, partner)

    return _pairwise(linear.all_to_all(p), exchange)


def reduce_scatter(p: int) -> Schedule:
    """Exchange the blocks to be reduced with every other rank in turn.

    Cost: p-1 rounds, n(p-1)/p sent and reduced.
    Source: MPICH's reduce_scatter "pairwise".
    """

    def exchange(k: int, r: IntArray) -> Iterable[IntArray]:
        partner = r ^ (k + 1)
        yield send(r, partner, INPUT, partner)
        yield recv_reduce(r, partner, OUTPUT, 0)

    return _pairwise(linear.reduce_scatter(p), exchange)


def _pairwise(rotation: Schedule, exchange: Exchange) -> Schedule:
    """Return the linear schedule with its rotation replaced where partners exist."""
    if is_power_of_two(rotation.world_size):
        return replace(rotation, algorithm="pairwise", exchange=exchange)
    return replace(rotation, algorithm="pairwise")
