"""Pipelines over rooted trees, for chain, binary tree and double tree; levels of binomial trees.

A tree of height H moves a vector of m chunks in H + m - 1 rounds. While an edge carries chunk c,
the edges below it carry chunk c-1. On the way up the chunks are reduced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from unisono.core.schedules.ir import BoolArray, Buf, IntArray, Schedule, recv, recv_reduce, send

# Smaller: the latency of a message is no longer hidden. Larger: a chunk does not stay in cache.
# Precedents: Open MPI han 512 KiB, NCCL 1 MiB, xhc 16 KiB.
_CHUNK_BYTES = 256 * 1024
MAX_PIPELINE = 128

# 2.5 Gb/s. A choice that assumes this rate is good for links of 0.6 to 10 Gb/s.
BYTES_PER_US = 312.5


@dataclass(frozen=True, eq=False)
class Tree:
    """A rooted tree over ranks 0..p-1.

    Attributes:
        parent: int64 [p], -1 at the root.
        children: int64 [p, arity], -1 for a missing child.
        depth: int64 [p], 0 at the root.
        height: The largest depth.
        chunk: The first of the chunks that this tree carries.
    """

    parent: IntArray
    children: IntArray
    depth: IntArray
    height: int
    chunk: int = 0

    def relabelled(self, ranks: IntArray, chunk: int = 0) -> Tree:
        """Return the same tree with rank i renamed to `ranks[i]`."""
        names = np.append(ranks, -1)
        order = np.argsort(ranks)
        return Tree(
            names[self.parent][order],
            names[self.children][order],
            self.depth[order],
            self.height,
            chunk,
        )


def tree_schedule(
    collective: str, algorithm: str, trees: Sequence[Tree], root: int, pipeline: int
) -> Schedule:
    """Return the schedule in which each tree carries `pipeline` chunks of OUTPUT.

    The chunks of a broadcast move down, those of a reduce up, those of an all_reduce up and then
    down.

    Cost: H-1+m rounds one way, 2H-1+m both ways; H is the height, m the pipeline depth.
    """
    p, height = len(trees[0].parent), trees[0].height
    up, down = collective != "broadcast", collective != "reduce"

    def exchange(k: int, r: IntArray) -> Iterable[IntArray]:
        sends, receives = [], []
        for tree in trees:
            depth, parent, children = tree.depth[r], tree.parent[r], tree.children[r]
            if up:
                # The edge from depth d+1 to d carries chunk c in round H-1-d + c.
                c = k - (height - depth)
                sends.append(_edges(send, r, parent, tree, c, pipeline))
                c = (c + 1)[:, None]
                receives.append(_edges(recv_reduce, r[:, None], children, tree, c, pipeline))
            if down:
                # The edge from depth d to d+1 carries chunk c in round d + c. In an all_reduce it
                # does so H rounds later: a chunk that arrives at the root in round H-1+c leaves
                # the root in round H+c.
                c = k - depth - (height if up else 0)
                sends.append(_edges(send, r[:, None], children, tree, c[:, None], pipeline))
                receives.append(_edges(recv, r, parent, tree, c + 1, pipeline))
        # Both lists have the same order of trees and directions. Two ranks that share several
        # edges in a round otherwise match wrong messages, because matching is first in, first out.
        return sends + receives

    rounds = height * (up + down) - 1 + pipeline if p > 1 else 0
    return Schedule(
        collective, algorithm, p, rounds, exchange, root, output_chunks=len(trees) * pipeline
    )


def binomial_level(v: IntArray, d: int, p: int) -> tuple[BoolArray, BoolArray]:
    """Return which ranks v are the parents, and which the children, of a round with distance d."""
    return (v % (2 * d) == 0) & (v + d < p), v % (2 * d) == d


def _edges(
    step: Callable[..., IntArray], r: IntArray, peer: IntArray, tree: Tree, c: IntArray, m: int
) -> IntArray:
    """Return the rows of the edges to `peer` that carry a chunk, `c`, in this round."""
    return step(r, peer, Buf.OUTPUT, tree.chunk + c, where=(peer >= 0) & (c >= 0) & (c < m))


def depth_of(algorithm: str, nbytes: int, p: int, round_trip_us: int) -> int:
    """Return the pipeline depth: the number of chunks in a pipeline, a power of two."""
    streams = {"double_tree": 2, "two_shot": p, "rank_order": p, "two_level": p}.get(algorithm, 1)
    # A chunk takes at least as long as its delay. Many schedules wait for a chunk of a peer before
    # they send the next one.
    least = max(_CHUNK_BYTES, int(round_trip_us / 2 * BYTES_PER_US))
    chunks = -(-nbytes // (streams * least))
    # A power of two, so that calls of many sizes build few schedules.
    return min(1 << (max(chunks, 1) - 1).bit_length(), MAX_PIPELINE)
