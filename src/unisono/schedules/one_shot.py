"""One-shot algorithms for shared memory: everybody posts, then everybody reads.

One round, and therefore the lowest latency there is; every rank reads what it needs from all
others, so all_reduce suits small data only.
n is the size of the whole data (the vector, or p blocks), p the world size. Costs count a post to
all as p-1 messages, which it is on links without shared memory.
Source: PyTorch's symmetric-memory one_shot_all_reduce, FasterTransformer's one-shot kernels.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from unisono.schedules.ir import Buf, IntArray, Schedule, copy, post, read, read_reduce, reduce

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "gather",
    "reduce_in_rank_order",
    "reduce_scatter",
    "reduce_to_root",
    "scatter",
]

INPUT, OUTPUT, SCRATCH = Buf.INPUT, Buf.OUTPUT, Buf.SCRATCH
NAME = "one_shot"


def all_reduce(p: int) -> Schedule:
    """Every rank reads every vector and reduces them in the order of ranks.

    The fixed order makes the results of all ranks bitwise equal.

    Cost: 1 round, (p-1)n read and reduced by every rank.
    Source: PyTorch's one_shot_all_reduce.
    """

    def exchange(k: int, r: IntArray) -> Iterable[IntArray]:
        yield post(r, -1, OUTPUT, 0)
        yield from reduce_in_rank_order(r, np.zeros_like(r), p)

    return Schedule("all_reduce", NAME, p, _rounds(p), exchange, scratch_chunks=1)


def broadcast(p: int, root: int) -> Schedule:
    """Every rank reads the root's vector.

    Cost: 1 round, n read by every rank but the root.
    Source: MPICH's release_gather broadcast with a flat tree.
    """

    def exchange(k: int, r: IntArray) -> Iterable[IntArray]:
        yield post(r, -1, OUTPUT, 0, where=r == root)
        yield read(r, root, OUTPUT, 0, where=r != root)

    return Schedule("broadcast", NAME, p, _rounds(p), exchange, root)


def reduce_to_root(p: int, root: int) -> Schedule:
    """The root reads and reduces every vector.

    Cost: 1 round, (p-1)n read and reduced by the root.
    Source: MPICH's release_gather reduce with a flat tree.
    """

    def exchange(k: int, r: IntArray) -> Iterable[IntArray]:
        yield post(r, root, OUTPUT, 0, where=r != root)
        at_root = r[r == root][:, None]
        yield read_reduce(at_root, _others(at_root, p), OUTPUT, 0)

    return Schedule("reduce", NAME, p, _rounds(p), exchange, root)


def all_gather(p: int) -> Schedule:
    """Every rank reads every block.

    Cost: 1 round, n(p-1)/p read by every rank.
    Source: MSCCL++'s fullmesh all-gather.
    """

    def own(r: IntArray) -> Iterable[IntArray]:
        yield copy(r, (INPUT, 0), (OUTPUT, r))

    def exchange(k: int, r: IntArray) -> Iterable[IntArray]:
        peers = _others(r[:, None], p)
        yield post(r, -1, INPUT, 0)
        yield read(r[:, None], peers, OUTPUT, peers)

    return Schedule(
        "all_gather", NAME, p, _rounds(p), exchange, -1, 1, p, uneven_ok=True, before=own
    )


def gather(p: int, root: int) -> Schedule:
    """The root reads every block.

    Cost: 1 round, n(p-1)/p read by the root.
    Source: as all_gather, on the root alone.
    """

    def own(r: IntArray) -> Iterable[IntArray]:
        yield copy(r, (INPUT, 0), (OUTPUT, r), where=r == root)

    def exchange(k: int, r: IntArray) -> Iterable[IntArray]:
        yield post(r, root, INPUT, 0, where=r != root)
        at_root = r[r == root][:, None]
        peers = _others(at_root, p)
        yield read(at_root, peers, OUTPUT, peers)

    return Schedule("gather", NAME, p, _rounds(p), exchange, root, 1, p, uneven_ok=True, before=own)


def scatter(p: int, root: int) -> Schedule:
    """Every rank reads its block at the root.

    Cost: 1 round, n/p read by every rank but the root.
    Source: the mirror image of gather.
    """

    def own(r: IntArray) -> Iterable[IntArray]:
        yield copy(r, (INPUT, r), (OUTPUT, 0), where=r == root)

    def exchange(k: int, r: IntArray) -> Iterable[IntArray]:
        at_root = r[r == root][:, None]
        peers = _others(at_root, p)
        yield post(at_root, peers, INPUT, peers)
        yield read(r, root, OUTPUT, 0, where=r != root)

    return Schedule(
        "scatter", NAME, p, _rounds(p), exchange, root, p, 1, uneven_ok=True, before=own
    )


def reduce_scatter(p: int) -> Schedule:
    """Every rank reads and reduces its block of every other rank.

    Cost: 1 round, n(p-1)/p read and reduced by every rank.
    Source: the first half of PyTorch's two_shot_all_reduce.
    """

    def own(r: IntArray) -> Iterable[IntArray]:
        yield copy(r, (INPUT, r), (OUTPUT, 0))

    def exchange(k: int, r: IntArray) -> Iterable[IntArray]:
        peers = _others(r[:, None], p)
        yield post(r[:, None], peers, INPUT, peers)
        yield read_reduce(r[:, None], peers, OUTPUT, 0)

    return Schedule(
        "reduce_scatter", NAME, p, _rounds(p), exchange, -1, p, 1, uneven_ok=True, before=own
    )


def all_to_all(p: int) -> Schedule:
    """Every rank reads its block of every other rank.

    Cost: 1 round, n(p-1)/p read by every rank.
    Source: MSCCL++'s fullmesh all-to-all.
    """

    def own(r: IntArray) -> Iterable[IntArray]:
        yield copy(r, (INPUT, r), (OUTPUT, r))

    def exchange(k: int, r: IntArray) -> Iterable[IntArray]:
        peers = _others(r[:, None], p)
        yield post(r[:, None], peers, INPUT, peers)
        yield read(r[:, None], peers, OUTPUT, peers)

    return Schedule(
        "all_to_all", NAME, p, _rounds(p), exchange, -1, p, p, uneven_ok=True, before=own
    )


def barrier(p: int) -> Schedule:
    """Every rank posts that it is here and reads that all others are.

    Cost: 1 round, p-1 flags read by every rank.
    Source: PyTorch's symmetric-memory signal-pad barrier.
    """

    def exchange(k: int, r: IntArray) -> Iterable[IntArray]:
        yield post(r, -1, OUTPUT, 0)
        yield read(r[:, None], _others(r[:, None], p), OUTPUT, 0)

    return Schedule("barrier", NAME, p, _rounds(p), exchange)


def reduce_in_rank_order(r: IntArray, first: IntArray, size: int) -> Iterable[IntArray]:
    """Reduce the posts of ranks [first, first + size) into OUTPUT[0], in the order of ranks.

    Each rank belongs to its group and has its own vector in OUTPUT[0]. Ranks 0 and 1 of the group
    start from their own vector, since a+b = b+a; the others set it aside in SCRATCH[0] until it
    is its turn.
    """
    place = r - first
    late = place >= 2
    yield copy(r, (OUTPUT, 0), (SCRATCH, 0), where=late)
    yield read(r, first, OUTPUT, 0, where=late)
    yield read_reduce(r, first, OUTPUT, 0, where=place == 1)
    for turn in range(1, size):
        yield read_reduce(
            r, first + turn, OUTPUT, 0, where=(place != turn) & (late | (place == 0) | (turn > 1))
        )
        yield reduce(r, (SCRATCH, 0), (OUTPUT, 0), where=late & (place == turn))


def _others(ranks: IntArray, p: int) -> IntArray:
    """Return all other ranks [ranks, p-1], beginning with the right neighbour.

    Were the order the same for all, all would read the same rank's memory at the same time.
    """
    return (ranks + np.arange(1, p)) % p


def _rounds(p: int) -> int:
    return min(p - 1, 1)
