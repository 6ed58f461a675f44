"""Reductions in the network: switches that reduce, as ranks of a schedule; simulated only.

The switches are the ranks from `hosts` on. A switch begins with the identity of the operation. So
each schedule is an all_reduce over all of its ranks, and `verify` proves it as such. No engine runs
it. On `FullyConnected` each edge of the tree is a link of its own.

In the formulas n is the size of the vector, and m the pipeline depth.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from unisono.core.schedules.ir import Buf, IntArray, Schedule, recv, recv_reduce, send
from unisono.core.schedules.pipeline import Tree, tree_schedule
from unisono.errors import InvalidArgumentError


def sharp(hosts: int, radix: int, pipeline: int = 1) -> Schedule:
    """Reduce up a tree of switches, and send the result down.

    Each switch has `radix` ranks or switches below. All hosts are equally far from the root.

    Cost: 2h-1+m rounds for h levels of switches; a host sends n and receives n.
    Source: Graham et al., "Scalable Hierarchical Aggregation Protocol (SHArP)", COMHPC 2016.

    Raises:
        InvalidArgumentError: There is no host, or a switch has less than 2 ports.
    """
    if hosts < 1 or radix < 2:
        raise InvalidArgumentError(f"sharp: {hosts} hosts, radix {radix}; expected 1, 2 or more")
    sizes = [hosts]
    while sizes[-1] > 1 or len(sizes) == 1:
        sizes.append(-(-sizes[-1] // radix))
    first = np.cumsum([0, *sizes])
    parent = np.concatenate(
        [
            above + np.arange(size) // radix
            for size, above in zip(sizes[:-1], first[1:], strict=False)
        ]
        + [[-1]]
    )
    children = np.full((len(parent), radix), -1)
    below = np.arange(len(parent) - 1)
    children[parent[:-1], (below - first[np.searchsorted(first, below, "right") - 1]) % radix] = (
        below
    )
    depth = len(sizes) - 1 - np.repeat(np.arange(len(sizes)), sizes)
    tree = Tree(parent, children, depth, len(sizes) - 1)
    return tree_schedule("all_reduce", "sharp", [tree], -1, pipeline)


def nvls(ranks: int, pipeline: int = 1) -> Schedule:
    """Reduce a part for each rank in one switch, which also sends each part to all ranks.

    Cost: 3+m rounds; a rank sends n + n/p and receives the same, p = `ranks`.
    Source: NCCL 2.30, NVLS: multimem.ld_reduce and multimem.st.

    Raises:
        InvalidArgumentError: There is no rank.
    """
    if ranks < 1:
        raise InvalidArgumentError(f"nvls: {ranks} ranks, expected 1 or more")
    switch, everyone = ranks, np.arange(ranks)

    def exchange(k: int, r: IntArray) -> Iterable[IntArray]:
        gpus, at_switch = r[r < switch], r[r == switch][:, None]
        sends, receives = [], []
        for s in range(max(0, k - 3), min(k + 1, pipeline)):
            # Whole slices in stages 0 and 3, the part of each rank in stages 1 and 2.
            whole, first = k - s in (0, 3), s * ranks
            mine, parts = (first, first) if whole else (first + gpus, first + everyone)
            n = ranks if whole else 1
            if (k - s) % 2 == 0:
                take = recv_reduce if k == s else recv
                sends.append(send(gpus, switch, Buf.OUTPUT, mine, n))
                receives.append(take(at_switch, everyone, Buf.OUTPUT, parts, n))
            else:
                sends.append(send(at_switch, everyone, Buf.OUTPUT, parts, n))
                receives.append(recv(gpus, switch, Buf.OUTPUT, mine, n))
        return sends + receives

    chunks = ranks * pipeline
    return Schedule("all_reduce", "nvls", ranks + 1, 3 + pipeline, exchange, output_chunks=chunks)
