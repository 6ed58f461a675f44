"""Node trees: two binary trees over the hosts, and a chain inside each host.

Each tree carries half of the vector. Partial results go down the chain of a host to its first rank,
and from there up the tree; the result goes the other way. An inner host of one tree is a leaf of
the other tree.

In the formulas n is the size of the vector, H the number of hosts, L the ranks per host. The
pipeline depth per tree is m, and `lg` is the logarithm to base 2.

Source: NCCL 2.30, trees.cc and connect.cc; `double_tree` has the trees.
"""

from __future__ import annotations

import numpy as np

from unisono.core.schedules.algorithms.double_tree import double_tree
from unisono.core.schedules.ir import Schedule
from unisono.core.schedules.pipeline import Tree, tree_schedule


def all_reduce(p: int, local: int, pipeline: int) -> Schedule:
    """Reduce along the chains and up both trees, then broadcast the same way back.

    Use: small and medium data on many hosts with several ranks.
    Cost: 2(L-1) + 2 ceil(lg H) - 1 + m rounds, of which 2 ceil(lg H) between hosts; at most 3n
        sent.
    Source: NCCL's tree all-reduce, with all edges of a node at one rank.
    """
    trees = [_with_chains(tree, local) for tree in double_tree(p // local, pipeline)]
    return tree_schedule("all_reduce", "node_tree", trees, -1, pipeline)


def _with_chains(tree: Tree, local: int) -> Tree:
    """Return a tree over ranks: its nodes become first ranks of hosts, with chains below."""
    rank = np.arange(len(tree.parent) * local)
    host, place = rank // local, rank % local
    up = tree.parent[host]
    below = tree.children[host]
    apart = np.where((below >= 0) & (place == 0)[:, None], below * local, -1)
    chained = np.where(place < local - 1, rank + 1, -1)
    return Tree(
        np.where(place > 0, rank - 1, np.where(up >= 0, up * local, -1)),
        np.column_stack([apart, chained]),
        tree.depth[host] + place,
        tree.height + local - 1,
        tree.chunk,
    )
