"""One-shot algorithms for shared memory: all ranks post, then all ranks read.

They have one round, and therefore the lowest latency. Every rank reads from all other ranks, so
all_reduce suits small data only.

In the formulas n is the size of the whole data (the vector, or p blocks), p the world size. Costs
count a post to all ranks as p-1 messages, as on links without shared memory.

Source: PyTorch's symmetric-memory one_shot_all_reduce, FasterTransformer's one-shot kernels.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from unisono.core.schedules.algorithms import linear
from unisono.core.schedules.blocks import block_schedule
from unisono.core.schedules.ir import Buf, IntArray, Op, Schedule, copy, make_rows, post, read

INPUT, OUTPUT, SCRATCH = Buf.INPUT, Buf.OUTPUT, Buf.SCRATCH
NAME = "one_shot"
_TURN_OPS = (Op.REDUCE, Op.READ_REDUCE)


def all_reduce(p: int) -> Schedule:
    """Read the vectors of all ranks on every rank, and reduce them in the order of ranks.

    The fixed order makes the results of all ranks bitwise equal.

    Use: small data of few ranks in shared memory.
    Cost: 1 round, (p-1)n read and reduced by every rank.
    Source: PyTorch's one_shot_all_reduce.
    """

    def exchange(k: int, r: IntArray) -> Iterable[IntArray]:
        yield post(r, -1, OUTPUT, 0)
        yield from reduce_in_rank_order(r, np.arange(p)[None])

    return Schedule("all_reduce", NAME, p, _rounds(p), exchange, scratch_chunks=1)


def broadcast(p: int, root: int) -> Schedule:
    """Read the root's vector on every other rank.

    Cost: 1 round, n read by every rank but the root.
    Source: MPICH's release_gather broadcast with a flat tree.
    """

    def exchange(k: int, r: IntArray) -> Iterable[IntArray]:
        yield post(r, -1, OUTPUT, 0, where=r == root)
        yield read(r, root, OUTPUT, 0, where=r != root)

    return Schedule("broadcast", NAME, p, _rounds(p), exchange, root)


def reduce_to_root(p: int, root: int) -> Schedule:
    """Read and reduce every vector on the root.

    Cost: 1 round, (p-1)n read and reduced by the root.
    Source: MPICH's release_gather reduce with a flat tree.
    """
    return _at_once(linear.reduce(p, root))


def all_gather(p: int) -> Schedule:
    """Read every block on every rank.

    Cost: 1 round, n(p-1)/p read by every rank.
    Source: MSCCL++'s fullmesh all-gather.
    """

    def exchange(k: int, r: IntArray) -> Iterable[IntArray]:
        peers = others(r[:, None], p)
        yield post(r, -1, INPUT, 0)
        yield read(r[:, None], peers, OUTPUT, peers)

    return block_schedule("all_gather", NAME, p, _rounds(p), exchange, uneven_ok=True)


def gather(p: int, root: int) -> Schedule:
    """Read every block on the root.

    Cost: 1 round, n(p-1)/p read by the root.
    Source: as all_gather, on the root alone.
    """
    return _at_once(linear.gather(p, root))


def scatter(p: int, root: int) -> Schedule:
    """Read the root's block for each rank on that rank.

    Cost: 1 round, n/p read by every rank but the root.
    Source: the mirror image of gather.
    """
    return _at_once(linear.scatter(p, root))


def reduce_scatter(p: int) -> Schedule:
    """Read and reduce, on every rank, the blocks that the other ranks hold for it.

    Cost: 1 round, n(p-1)/p read and reduced by every rank.
    Source: the first half of PyTorch's two_shot_all_reduce.
    """
    return _at_once(linear.reduce_scatter(p))


def all_to_all(p: int) -> Schedule:
    """Read, on every rank, the blocks that the other ranks hold for it.

    Cost: 1 round, n(p-1)/p read by every rank.
    Source: MSCCL++'s fullmesh all-to-all.
    """
    return _at_once(linear.all_to_all(p))


def barrier(p: int) -> Schedule:
    """Post a flag on every rank, then read the flags of all other ranks.

    Cost: 1 round, p-1 flags read by every rank.
    Source: PyTorch's symmetric-memory signal-pad barrier.
    """

    def exchange(k: int, r: IntArray) -> Iterable[IntArray]:
        yield post(r, -1, OUTPUT, 0)
        yield read(r[:, None], others(r[:, None], p), OUTPUT, 0)

    return Schedule("barrier", NAME, p, _rounds(p), exchange)


def reduce_in_rank_order(
    r: IntArray, group: IntArray, chunk: IntArray | int = 0
) -> Iterable[IntArray]:
    """Reduce the posts of each rank's `group` into OUTPUT[chunk], in the order of the group.

    `group` is [ranks, size] or [1, size]. Each rank in `r` is in its group, and has its own value
    in OUTPUT[chunk]. The first rank of a group starts with its own value. Each other rank keeps its
    value in SCRATCH[chunk] until its turn. The second rank must do so, too. For it b+a differs from
    a+b in the payload of a NaN, and b*a from a*b in the last bit of a complex product.
    """
    late = r != group[:, 0]
    yield copy(r, (OUTPUT, chunk), (SCRATCH, chunk), where=late)
    yield read(r, group[:, 0], OUTPUT, chunk, where=late)
    yield reduce_in_turns(r, group, chunk, chunk)


def reduce_in_turns(
    r: IntArray, group: IntArray, kept: IntArray | int, chunk: IntArray | int
) -> IntArray:
    """Return rows that reduce all values of a group but the first into OUTPUT[chunk].

    Each value but the rank's own, SCRATCH[kept], is a post.
    """
    peers = group[:, 1:]
    own = peers == r[:, None]
    source = np.where(own, SCRATCH, -1), np.where(own, np.reshape(kept, (-1, 1)), -1)
    ops, posters = np.where(own, *_TURN_OPS), np.where(own, -1, peers)
    return make_rows(ops, r[:, None], posters, source, (OUTPUT, np.reshape(chunk, (-1, 1))), 1)


def _at_once(schedule: Schedule) -> Schedule:
    """Return a linear schedule with all rounds joined to one: first all posts, then all reads."""
    meaning = {Op.SEND: Op.POST, Op.RECV: Op.READ, Op.RECV_REDUCE: Op.READ_REDUCE}

    def exchange(k: int, r: IntArray) -> Iterable[IntArray]:
        rounds = [rows for j in range(schedule.rounds) for rows in schedule.exchange(j, r)]
        rows = np.concatenate(rounds)
        for op, posted in meaning.items():
            chosen = rows[rows[:, 1] == op]
            chosen[:, 1] = posted
            yield chosen

    return replace(schedule, algorithm=NAME, rounds=_rounds(schedule.world_size), exchange=exchange)


def others(ranks: IntArray, p: int) -> IntArray:
    """Return all other ranks [ranks, p-1], beginning with the right neighbour.

    If the order were the same on all ranks, all would read the memory of one rank at the same time.
    """
    peers = ranks + np.arange(1, p)
    # Without a division, which takes several times as long.
    return np.where(peers < p, peers, peers - p)


def _rounds(p: int) -> int:
    return min(p - 1, 1)
