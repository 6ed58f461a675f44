"""Ring algorithms: every rank sends to its right neighbour and receives from its left neighbour.

They send the fewest bytes possible and need a round per rank, so they are the choice for large
data.

In the formulas n is the size of the whole data (the vector, or p blocks), p the world size, m the
pipeline depth.

Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms", JPDC 69(2), 2009. NCCL calls
the pipelined chains ring broadcast and ring reduce.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from unisono.core.schedules.blocks import block_schedule
from unisono.core.schedules.ir import Buf, IntArray, Schedule, copy, recv, recv_reduce, send
from unisono.core.schedules.pipeline import Tree, tree_schedule

INPUT, OUTPUT, SCRATCH = Buf.INPUT, Buf.OUTPUT, Buf.SCRATCH


def all_reduce(p: int) -> Schedule:
    """Send partial sums around the ring, then send the complete sums around the ring.

    The vector has p chunks. In each of the first p-1 rounds a rank adds its contribution to the
    chunk that it receives. A chunk is complete at rank (chunk - 1) mod p. In the last p-1 rounds
    the complete chunks are copied from rank to rank.

    Use: large data on few or medium numbers of ranks: no algorithm sends less.
    Cost: 2(p-1) rounds, 2n(p-1)/p sent, n(p-1)/p reduced.
    Source: Patarasuk and Yuan 2009.
    """
    return _all_reduce("ring", p, 1, 0)


def two_way_all_reduce(p: int) -> Schedule:
    """Send one half of the vector around the ring to the right, the other half to the left.

    Use: large data where links to both neighbours are free at the same time.
    Cost: 2(p-1) rounds, 2n(p-1)/p sent in 2 messages per round, n(p-1)/p reduced.
    Source: the rings of TPU networks; Sack and Gropp, "Collective algorithms for multiported torus
        networks", ACM TOPC 1(2), 2015.
    """
    return _all_reduce("two_way_ring", p, np.array([[1], [-1]]), np.array([[0], [p]]))


def reduce_scatter(p: int) -> Schedule:
    """Send partial sums around the ring, so that each block ends at its owner.

    Cost: p-1 rounds, n(p-1)/p sent and reduced.
    Source: the first half of Patarasuk and Yuan's all-reduce.
    """

    def exchange(k: int, r: IntArray) -> Iterable[IntArray]:
        outgoing, incoming = (r - k - 1) % p, (r - k - 2) % p
        if k == 0:
            yield send(r, (r + 1) % p, INPUT, outgoing)
        else:
            yield send(r, (r + 1) % p, SCRATCH, 0)
        if k < p - 2:
            yield copy(r, (INPUT, incoming), (SCRATCH, 0))
            yield recv_reduce(r, (r - 1) % p, SCRATCH, 0)
        else:
            yield recv_reduce(r, (r - 1) % p, OUTPUT, 0)

    return block_schedule("reduce_scatter", "ring", p, p - 1, exchange, scratch_chunks=1)


def all_gather(p: int) -> Schedule:
    """Pass every block around the ring.

    Cost: p-1 rounds, n(p-1)/p sent.
    Source: the second half of Patarasuk and Yuan's all-reduce.
    """

    def exchange(k: int, r: IntArray) -> Iterable[IntArray]:
        yield send(r, (r + 1) % p, OUTPUT, (r - k) % p)
        yield recv(r, (r - 1) % p, OUTPUT, (r - k - 1) % p)

    return block_schedule("all_gather", "ring", p, p - 1, exchange, uneven_ok=True)


def two_way_all_gather(p: int) -> Schedule:
    """Pass every block around the ring both ways at the same time.

    Cost: floor(p/2) rounds, n(p-1)/p sent in 2 messages per round.
    Source: torchcomms' bidirectional all-gather.
    """

    def exchange(k: int, r: IntArray) -> Iterable[IntArray]:
        # If p is even, the last block comes from one side only.
        ways = (1, -1)[: 1 + (2 * k + 2 < p)]
        for way in ways:
            yield send(r, (r + way) % p, OUTPUT, (r - way * k) % p)
        for way in ways:
            yield recv(r, (r - way) % p, OUTPUT, (r - way * (k + 1)) % p)

    return block_schedule("all_gather", "two_way_ring", p, p // 2, exchange, uneven_ok=True)


def broadcast(p: int, root: int, pipeline: int) -> Schedule:
    """Pass the vector along a chain that starts at the root, in `pipeline` chunks.

    Cost: p-2+m rounds of n/m bytes, n sent.
    Source: NCCL's ring broadcast.
    """
    return tree_schedule("broadcast", "ring", [_chain(p, root)], root, pipeline)


def reduce(p: int, root: int, pipeline: int) -> Schedule:
    """Pass partial sums along a chain that ends at the root, in `pipeline` chunks.

    Cost: p-2+m rounds of n/m bytes, n sent, n reduced.
    Source: NCCL's ring reduce.
    """
    return tree_schedule("reduce", "ring", [_chain(p, root)], root, pipeline)


def _all_reduce(algorithm: str, p: int, way: IntArray | int, first: IntArray | int) -> Schedule:
    """Return the all_reduce in which the p chunks from `first` on go around each `way`, 1 or -1."""

    def exchange(k: int, r: IntArray) -> Iterable[IntArray]:
        take = recv_reduce if k < p - 1 else recv
        yield send(r, (r + way) % p, OUTPUT, first + (r - way * k) % p)
        yield take(r, (r - way) % p, OUTPUT, first + (r - way * (k + 1)) % p)

    chunks = np.size(way) * p
    return Schedule("all_reduce", algorithm, p, 2 * (p - 1), exchange, output_chunks=chunks)


def _chain(p: int, root: int) -> Tree:
    """Return the tree in which each rank has one child, its right neighbour."""
    v = np.arange(p)
    child = np.where(v + 1 < p, v + 1, -1)
    return Tree(v - 1, child[:, None], v, p - 1).relabelled((v + root) % p)
