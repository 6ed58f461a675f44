"""Double binary tree: two trees carry half of the vector each.

An inner node of one tree is a leaf of the other tree, so all ranks send about the same number of
bytes. The depth is that of a tree, the bandwidth that of a ring.

In the formulas n is the size of the vector, p the world size, m the pipeline depth per tree.
`lg` is the logarithm to base 2.
Source: Sanders, Speck and Traeff, "Two-tree algorithms for full bandwidth broadcast, reduction
and scan", Parallel Computing 35, 2009; the trees are those of NCCL 2.30 (trees.cc).
"""

from __future__ import annotations

import numpy as np

from unisono.core.schedules.ir import IntArray, Schedule
from unisono.core.schedules.pipeline import Tree, tree_schedule


def all_reduce(p: int, pipeline: int) -> Schedule:
    """Reduce up both trees and broadcast down them, with `pipeline` chunks per tree.

    Use: medium and large data on many ranks: a tree's rounds, even work.
    Cost: 2 ceil(lg p) - 1 + m rounds, at most 2n sent, at most n reduced.
    Source: NCCL's tree all-reduce with one rank per node.
    """
    return tree_schedule("all_reduce", "double_tree", double_tree(p, pipeline), -1, pipeline)


def broadcast(p: int, root: int, pipeline: int) -> Schedule:
    """Send one half of the vector down each tree; the root sends to both.

    The trees span the other p-1 ranks.

    Cost: ceil(lg(p-1)) + m rounds, n sent.
    Source: Sanders, Speck and Traeff 2009.
    """
    return tree_schedule("broadcast", "double_tree", _fed_by(root, p, pipeline), root, pipeline)


def reduce(p: int, root: int, pipeline: int) -> Schedule:
    """Send partial results of one half of the vector up each tree and to the root.

    The trees span the other p-1 ranks.

    Cost: ceil(lg(p-1)) + m rounds, n sent, n reduced.
    Source: Sanders, Speck and Traeff 2009.
    """
    return tree_schedule("reduce", "double_tree", _fed_by(root, p, pipeline), root, pipeline)


def double_tree(p: int, pipeline: int) -> tuple[Tree, Tree]:
    """Return NCCL's two trees over p ranks; the second tree carries the chunks from `pipeline` on.

    The second tree is the first, mirrored (p even: r -> p-1-r) or shifted (p odd: r -> r+1).
    Both have depth ceil(lg p). No rank has more than two children in both together.
    """
    first = _alternating_tree(p)
    ranks = np.arange(p)
    names = (ranks + 1) % p if p % 2 else p - 1 - ranks
    return first, first.relabelled(names, pipeline)


def _alternating_tree(p: int) -> Tree:
    """Return NCCL's tree whose odd ranks are leaves.

    Let b be the lowest set bit of r. The parent of rank r is r + b or r - b, and its children are
    r - b/2 and r + b/2. Rank 0 is the root. Its only child is the largest power of two < p.
    """
    r = np.arange(p)
    # Treat rank 0 like the number 2**k >= p: it has no parent, and one child, a smaller number.
    bit = np.where(r > 0, r & -r, 1 << (p - 1).bit_length())
    up = (r ^ bit) | (bit << 1)
    parent = np.where(r > 0, np.where(up < p, up, r ^ bit), -1)

    below = np.where((r > 0) & (bit > 1), r - bit // 2, -1)
    above, step = r + bit // 2, bit // 2
    while ((above >= p) & (step > 0)).any():
        step = np.where(above >= p, step // 2, step)
        above = np.where(above >= p, r + step, above)
    above = np.where(step > 0, above, -1)
    return Tree(parent, np.stack([below, above], axis=1), *_depth(parent))


def _depth(parent: IntArray) -> tuple[IntArray, int]:
    """Return the depth of every rank, and the largest."""
    depth, ancestor = np.zeros_like(parent), parent
    while (ancestor >= 0).any():
        depth += ancestor >= 0
        ancestor = np.where(ancestor >= 0, parent[ancestor], -1)
    return depth, int(depth.max())


def _fed_by(root: int, p: int, pipeline: int) -> tuple[Tree, Tree]:
    """Return two trees over all ranks but `root`, with `root` as the parent of both tree roots."""
    if p == 1:
        return double_tree(1, pipeline)
    # Rank p-1 of the relabelled world is the root. It becomes the parent of both tree roots.
    names = (np.arange(p) + root + 1) % p
    trees = []
    for tree in double_tree(p - 1, pipeline):
        top = int(np.flatnonzero(tree.parent < 0)[0])
        hung = Tree(
            np.append(np.where(tree.parent < 0, p - 1, tree.parent), -1),
            np.vstack([tree.children, (top, -1)]),
            np.append(tree.depth + 1, 0),
            tree.height + 1,
        )
        trees.append(hung.relabelled(names, tree.chunk))
    return trees[0], trees[1]
