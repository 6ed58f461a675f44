"""Linear algorithms: every block goes directly from its owner to the ranks that need it.

They work for every collective, for every world size and for blocks of different size, so they are
the fallback. The root exchanges data with all ranks in one round, its nearest right neighbour
first. all_to_all does all exchanges in one round, too. Otherwise every rank sends to its k-th right
neighbour in round k, and receives from its k-th left neighbour.

In the formulas n is the size of the whole data (the vector, or p blocks), p the world size.
Source: Open MPI's coll/base "linear" algorithms; the rotation is MPICH's for all-to-all.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from unisono.core.schedules.blocks import backwards, block_schedule
from unisono.core.schedules.ir import Buf, IntArray, Schedule, recv, recv_reduce, send

INPUT, OUTPUT = Buf.INPUT, Buf.OUTPUT


def broadcast(p: int, root: int) -> Schedule:
    """Send the vector from the root to every rank.

    Cost: 1 round, (p-1)n sent by the root.
    Source: Open MPI's bcast "linear".
    """

    def exchange(k: int, r: IntArray) -> Iterable[IntArray]:
        at, others = _at_root(p, root, r)
        yield send(at, others, OUTPUT, 0)
        yield recv(r, root, OUTPUT, 0, where=r != root)

    return Schedule("broadcast", "linear", p, min(p - 1, 1), exchange, root)


def reduce(p: int, root: int) -> Schedule:
    """Receive the vectors of all ranks on the root, and reduce them one after another.

    Cost: 1 round, (p-1)n received and reduced by the root.
    Source: Open MPI's reduce "linear".
    """

    def exchange(k: int, r: IntArray) -> Iterable[IntArray]:
        at, others = _at_root(p, root, r)
        yield send(r, root, OUTPUT, 0, where=r != root)
        yield recv_reduce(at, others, OUTPUT, 0)

    return Schedule("reduce", "linear", p, min(p - 1, 1), exchange, root)


def all_reduce(p: int) -> Schedule:
    """Reduce to rank 0, then broadcast from there.

    Use: few ranks and tiny data; a root with many ranks is the bottleneck.
    Cost: 2 rounds, (p-1)n sent, received and reduced by rank 0.
    Source: Open MPI's allreduce "linear".
    """
    up, down = reduce(p, 0), broadcast(p, 0)

    def exchange(k: int, r: IntArray) -> Iterable[IntArray]:
        return up.exchange(k, r) if k < up.rounds else down.exchange(k - up.rounds, r)

    return Schedule("all_reduce", "linear", p, 2 * up.rounds, exchange)


def gather(p: int, root: int) -> Schedule:
    """Send the block of every rank to the root.

    Cost: 1 round, n/p sent by each rank, n(p-1)/p received by the root.
    Source: Open MPI's gather "linear".
    """

    def exchange(k: int, r: IntArray) -> Iterable[IntArray]:
        at, others = _at_root(p, root, r)
        yield send(r, root, INPUT, 0, where=r != root)
        yield recv(at, others, OUTPUT, others)

    return block_schedule("gather", "linear", p, min(p - 1, 1), exchange, root, uneven_ok=True)


def scatter(p: int, root: int) -> Schedule:
    """Send every rank its block from the root.

    Cost: 1 round, n(p-1)/p sent by the root.
    Source: Open MPI's scatter "linear".
    """
    exchange = backwards(gather(p, root)).exchange
    return block_schedule("scatter", "linear", p, min(p - 1, 1), exchange, root, uneven_ok=True)


def all_gather(p: int) -> Schedule:
    """Send the block of every rank to every other rank.

    Cost: p-1 rounds, n(p-1)/p sent.
    Source: Open MPI's allgather "direct".
    """

    def exchange(k: int, r: IntArray) -> Iterable[IntArray]:
        right, left = (r + 1 + k) % p, (r - 1 - k) % p
        yield send(r, right, INPUT, 0)
        yield recv(r, left, OUTPUT, left)

    return block_schedule("all_gather", "linear", p, p - 1, exchange, uneven_ok=True)


def reduce_scatter(p: int) -> Schedule:
    """Send every rank the blocks that it has to reduce, directly from their owners.

    Cost: p-1 rounds, n(p-1)/p sent and reduced.
    Source: MPICH's reduce_scatter "pairwise" with its rotation.
    """

    def exchange(k: int, r: IntArray) -> Iterable[IntArray]:
        right, left = (r + 1 + k) % p, (r - 1 - k) % p
        yield send(r, right, INPUT, right)
        yield recv_reduce(r, left, OUTPUT, 0)

    return block_schedule("reduce_scatter", "linear", p, p - 1, exchange, uneven_ok=True)


def all_to_all(p: int) -> Schedule:
    """Send every block directly to its destination, all of them in one round.

    Each rank sends first to the ranks that are farthest from it by number. If ranks are numbered
    host by host, these are on other hosts, and the slowest messages should start first.

    Cost: 1 round, n(p-1)/p sent.
    Source: Open MPI's alltoall "linear".
    """
    distances = 1 + np.roll(np.arange(p - 1), 1 - p // 2)

    def exchange(k: int, r: IntArray) -> Iterable[IntArray]:
        column = r[:, None]
        right, left = (column + distances) % p, (column - distances) % p
        yield send(column, right, INPUT, right)
        yield recv(column, left, OUTPUT, left)

    return block_schedule("all_to_all", "linear", p, min(p - 1, 1), exchange, uneven_ok=True)


def barrier(p: int) -> Schedule:
    """Send a message from every rank to rank 0, then from rank 0 to every rank.

    Cost: 2 rounds of empty messages at rank 0.
    Source: Open MPI's barrier "linear".
    """
    return replace(all_reduce(p), collective="barrier")


def _at_root(p: int, root: int, r: IntArray) -> tuple[IntArray, IntArray]:
    """Return the root [1, 1] if it is among the ranks `r`, and all other ranks [p-1]."""
    return r[r == root][:, None], (root + np.arange(1, p)) % p
