"""Pairwise exchange: in every round a rank sends to and receives from the same partner.

This needs p = 2**k; the partner of round k is r xor k. For other world sizes a rank sends to its
k-th right neighbour and receives from its k-th left neighbour, as in the linear algorithms.

A root exchanges with its k-th right neighbour in round k. Sends do not wait, so without more all
blocks would be under way at once. A switch may lose them, and TCP then waits 200 ms. So only
`AT_ONCE` blocks are: other blocks wait for a message of 0 chunks that an earlier one has arrived.

In the formulas n is the size of all p blocks, p the world size.
Source: MPICH's "pairwise" algorithms; Thakur, Rabenseifner and Gropp 2005.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from unisono.core.schedules.algorithms import linear
from unisono.core.schedules.blocks import backwards
from unisono.core.schedules.ir import (
    Buf,
    IntArray,
    Schedule,
    is_power_of_two,
    recv,
    recv_reduce,
    send,
)

INPUT, OUTPUT, SCRATCH = Buf.INPUT, Buf.OUTPUT, Buf.SCRATCH

AT_ONCE = 3
"""Fewer: a link is idle while a message of 0 chunks is under way. More: a switch may lose data."""


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


def gather(p: int, root: int) -> Schedule:
    """Receive one block after another; the root lets the third next rank send then.

    Use: large data: each rank has one partner at a time, so no link carries two messages.
    Cost: p-1 rounds, n/p sent by each rank, n(p-1)/p received by the root.
    Source: pHost's tokens for receivers (Gao et al., CoNEXT 2015).
    """

    def exchange(k: int, r: IntArray) -> Iterable[IntArray]:
        peer, later = (root + 1 + k) % p, (root + k + AT_ONCE) % p
        waits = 0 < k < p - AT_ONCE
        yield send(r, later, SCRATCH, 0, 0, where=(r == root) & waits)
        yield recv(r, root, SCRATCH, 0, 0, where=(r == later) & waits)
        yield send(r, root, INPUT, 0, where=r == peer)
        yield recv(r, peer, OUTPUT, peer, where=r == root)

    return replace(linear.gather(p, root), algorithm="pairwise", rounds=p - 1, exchange=exchange)


def scatter(p: int, root: int) -> Schedule:
    """Send one block after another; a rank reports to the root that it has its block.

    Cost: p-1 rounds, n(p-1)/p sent by the root.
    Source: as gather, backwards.
    """
    return backwards(gather(p, root))


def _partners(p: int, k: int, r: IntArray) -> tuple[IntArray, IntArray]:
    """Return the ranks that each rank sends to and receives from in round `k`."""
    if is_power_of_two(p):
        return r ^ (k + 1), r ^ (k + 1)
    return (r + 1 + k) % p, (r - 1 - k) % p
