"""Tree algorithms: binomial trees for small data, a pipelined binary tree for larger data.

In the formulas n is the size of the whole data (the vector, or p blocks), p the world size, m the
pipeline depth. `lg` is the logarithm to base 2. The trees are built for root 0 on relabelled ranks
v = (r - root) mod p.

Source: Thakur, Rabenseifner and Gropp 2005 (binomial); the binary tree is the usual heap, as in
Open MPI's "binary" algorithms.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from unisono.core.schedules.blocks import backwards, block_schedule
from unisono.core.schedules.ir import (
    Buf,
    IntArray,
    Schedule,
    ceil_log2,
    copy,
    recv,
    recv_reduce,
    send,
)
from unisono.core.schedules.pipeline import Tree, binomial_level, tree_schedule

INPUT, OUTPUT, SCRATCH = Buf.INPUT, Buf.OUTPUT, Buf.SCRATCH


def binomial_broadcast(p: int, root: int) -> Schedule:
    """Double the number of ranks that have the vector in every round.

    In the round with distance d the ranks v = 0 mod 2d send to v + d.

    Use: small data: the fewest rounds with one message each.
    Cost: ceil(lg p) rounds, n ceil(lg p) sent by the root.
    Source: MPICH's bcast "binomial".
    """
    return binomial("broadcast", "binomial", p, root, np.arange(p))


def binomial_reduce(p: int, root: int) -> Schedule:
    """Halve the number of ranks that hold partial results in every round.

    In the round with distance d the ranks v = d mod 2d send to v - d.

    Cost: ceil(lg p) rounds, n sent, n ceil(lg p) received and reduced by the root.
    Source: MPICH's reduce "binomial".
    """
    return binomial("reduce", "binomial", p, root, np.arange(p))


def binomial(collective: str, algorithm: str, p: int, root: int, names: IntArray) -> Schedule:
    """Return the broadcast or reduce in which node v of the tree is rank root + `names[v]`."""
    log2, number = ceil_log2(p), np.argsort(names)
    down = collective == "broadcast"
    take = recv if down else recv_reduce

    def exchange(k: int, r: IntArray) -> Iterable[IntArray]:
        v, d = number[(r - root) % p], 1 << (log2 - 1 - k if down else k)
        upper, lower = binomial_level(v, d, p)
        below, above = ((names[(v + way) % p] + root) % p for way in (d, -d))
        gives, takes = (upper, lower) if down else (lower, upper)
        yield send(r, below if down else above, OUTPUT, 0, where=gives)
        yield take(r, above if down else below, OUTPUT, 0, where=takes)

    return Schedule(collective, algorithm, p, log2, exchange, root)


def binomial_gather(p: int, root: int) -> Schedule:
    """Collect the blocks of subtrees whose size doubles in every round.

    Rank v collects the blocks v, v+1, ... of its subtree in SCRATCH, its own first. The root
    copies them into rank order at the end.

    Cost: ceil(lg p) rounds, n(p-1)/p received by the root.
    Source: MPICH's gather "binomial".
    """

    def own(r: IntArray) -> Iterable[IntArray]:
        yield copy(r, (INPUT, 0), (SCRATCH, 0))

    def exchange(k: int, r: IntArray) -> Iterable[IntArray]:
        v, d = (r - root) % p, 1 << k
        upper, lower = binomial_level(v, d, p)
        yield send(r, (r - d) % p, SCRATCH, 0, np.minimum(d, p - v), where=lower)
        yield recv(r, (r + d) % p, SCRATCH, d, np.minimum(d, p - v - d), where=upper)

    def unrotate(r: IntArray) -> Iterable[IntArray]:
        at_root = r == root
        yield copy(r, (SCRATCH, 0), (OUTPUT, root), p - root, where=at_root)
        yield copy(r, (SCRATCH, p - root), (OUTPUT, 0), root, where=at_root & (root > 0))

    return block_schedule(
        "gather", "binomial", p, ceil_log2(p), exchange, root,
        scratch_chunks=p, before=own, after=unrotate,
    )  # fmt: skip


def binomial_scatter(p: int, root: int) -> Schedule:
    """Send subtrees their blocks; the size of a subtree halves in every round.

    Cost: ceil(lg p) rounds, n(p-1)/p sent by the root.
    Source: MPICH's scatter "binomial".
    """
    return backwards(binomial_gather(p, root))


def broadcast(p: int, root: int, pipeline: int) -> Schedule:
    """Send the vector down a binary tree, in `pipeline` chunks.

    Cost: h-1+m rounds of 2n/m bytes, h = floor(lg p); 2n sent by inner ranks.
    Source: Open MPI's bcast "binary".
    """
    return tree_schedule("broadcast", "tree", [_binary(p, root)], root, pipeline)


def reduce(p: int, root: int, pipeline: int) -> Schedule:
    """Send partial results up a binary tree, in `pipeline` chunks.

    Cost: h-1+m rounds, h = floor(lg p); n sent, 2n received and reduced by inner ranks.
    Source: Open MPI's reduce "binary".
    """
    return tree_schedule("reduce", "tree", [_binary(p, root)], root, pipeline)


def all_reduce(p: int, pipeline: int) -> Schedule:
    """Reduce up a binary tree and broadcast down the same tree, in `pipeline` chunks.

    Use: small and medium data on many ranks.
    Cost: 2h-1+m rounds, h = floor(lg p); 3n sent by inner ranks.
    Source: NCCL's tree all-reduce, with one tree.
    """
    return tree_schedule("all_reduce", "tree", [_binary(p, 0)], -1, pipeline)


def _binary(p: int, root: int) -> Tree:
    """Return the binary heap over the relabelled ranks: the children of v are 2v+1 and 2v+2."""
    v = np.arange(p)
    children = 2 * v[:, None] + (1, 2)
    depth = np.frexp(v + 1)[1].astype(np.int64) - 1
    heap = Tree((v + 1) // 2 - 1, np.where(children < p, children, -1), depth, int(depth[-1]))
    return heap.relabelled((v + root) % p)
