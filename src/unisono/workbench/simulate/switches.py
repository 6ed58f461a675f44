"""Reductions in the network: switches that reduce, as ranks of a schedule; simulated only.

The switches are the last ranks. A switch begins with the identity of the operation. So each
schedule is an all_reduce over all of its ranks, and `verify` proves it as such. No engine runs it.
On `FullyConnected` each edge of the tree is a link of its own.

In the formulas n is the size of the vector, and m the pipeline depth.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from unisono.core.schedules.algorithms.double_tree import double_tree
from unisono.core.schedules.ir import Buf, IntArray, Schedule, recv, recv_reduce, send
from unisono.core.schedules.pipeline import Tree, tree_schedule
from unisono.errors import InvalidArgumentError
from unisono.workbench.simulate.networks import Hosts, Network

_KIB = 1024
# Of a channel. 4 times as many change the time of 4 GiB on 8 ranks by 2 %.
_MOST_SLICES = 64


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


def nvls(ranks: int, pipeline: int = 1, hosts: int = 1) -> Schedule:
    """Reduce a part for each rank of a host in the host's switch, and then between the hosts.

    Between hosts the ranks at one place have two trees, as in `double_tree`. Then each rank sends
    its part to its switch, which sends it to all its ranks. Switch h is rank `ranks` + h.

    Cost: 2h+3+m rounds, h = ceil(lg hosts); a rank sends n + n/L and receives the same, L ranks per
        host, and at most 2n/L to and from other hosts.
    Source: NCCL 2.30, NVLS (multimem.ld_reduce and multimem.st), and NVLSTree if there are several
        hosts: connectNvls in connect.cc.

    Raises:
        InvalidArgumentError: There is no rank, or the ranks do not fill the hosts.
    """
    if ranks < 1 or hosts < 1 or ranks % hosts:
        raise InvalidArgumentError(
            f"nvls: {ranks} ranks, expected 1 or more, equally many on {hosts} hosts"
        )
    local = ranks // hosts
    everyone = np.arange(local)
    trees = double_tree(hosts, pipeline)[: 1 + (hosts > 1)]
    apart = tree_schedule("all_reduce", "", [_per_place(t, local) for t in trees], -1, pipeline)

    def between(k: int, gpus: IntArray) -> IntArray:
        """Return the rows between hosts; a chunk of the trees is a slice, of which a rank has 1."""
        rows = apart.steps(k, gpus) if 0 <= k < apart.rounds else apart.steps(0, gpus[:0])
        slices = rows[:, (4, 6)]
        rows[:, (4, 6)] = np.where(slices < 0, -1, slices * local + rows[:, :1] % local)
        return rows

    def exchange(k: int, r: IntArray) -> Iterable[IntArray]:
        gpus, switches = r[r < ranks], r[r >= ranks][:, None]
        host, place, here = gpus // local, gpus % local, switches - ranks
        sends: list[IntArray] = []
        receives: list[IntArray] = []
        for tree in trees:
            back = 2 + tree.height + tree.depth
            # Whole slices to the switch, a part to each rank; later the part, and whole slices.
            for rounds, up, whole, take in (
                (0 * back, True, True, recv_reduce), (0 * back + 1, False, False, recv),
                (back, True, False, recv), (back + 1, False, True, recv),
            ):  # fmt: skip
                for rank, peer, at, part in (
                    (gpus, ranks + host, host, place),
                    (switches, here * local + everyone, here, everyone),
                ):
                    c = k - rounds[at]
                    first = (tree.chunk + c) * local + (0 if whole else part)
                    has = (c >= 0) & (c < pipeline)
                    out = up == (rank is gpus)
                    rows = (send if out else take)(
                        rank, peer, Buf.OUTPUT, first, local if whole else 1, has
                    )
                    (sends if out else receives).append(rows)
        # A rank and its switch match their messages in the order of these lists.
        return [*sends, between(k - 2, gpus), *receives]

    return Schedule(
        "all_reduce", "nvls", ranks + hosts, 2 * trees[0].height + 3 + pipeline, exchange,
        output_chunks=len(trees) * pipeline * local,
    )  # fmt: skip


def _per_place(tree: Tree, local: int) -> Tree:
    """Return a tree of hosts once for each place of a host, over ranks."""
    host, place = np.divmod(np.arange(len(tree.parent) * local), local)
    parent, children = tree.parent[host], tree.children[host]
    return Tree(
        np.where(parent < 0, -1, parent * local + place),
        np.where(children < 0, -1, children * local + place[:, None]),
        tree.depth[host], tree.height, tree.chunk,
    )  # fmt: skip


def slices(nbytes: int, ranks: int, hosts: int, channels: int) -> int:
    """Return the slices of a channel of `nvls`, with the sizes of NCCL's chunks.

    Source: NCCL 2.30.7, enqueue.cc (calcCollChunking), nvls.cc (ncclNvlsTuning).
    """
    at_once = channels * ranks // hosts
    chunk = (64 if hosts >= 4 else 128) * _KIB
    for kib, times in ((64, 64), (32, 8), (16, 2)) if hosts == 1 else ((64, 4), (32, 1)):
        if nbytes < times * at_once * chunk:
            chunk = min(chunk, kib * _KIB)
    return min(max(-(-nbytes // (at_once * chunk)), 1), _MOST_SLICES)


class Switched(Network):
    """Hosts with a switch in each that reduces: rank `size` + h is the switch of host h.

    A message to or from a switch crosses the port of the rank only. So a rank that sends to its
    switch does not wait for the others.
    """

    flips = False

    def __init__(self, network: Hosts) -> None:
        ranks, hosts = network.size, -(-network.size // network.per_host)
        super().__init__(
            ranks + hosts, network.groups, cut_through=network.cut_through, period=ranks + hosts
        )
        self.ranks = network

    def cuts(self) -> list[tuple[int, float]]:
        """Return those of the ranks."""
        return self.ranks.cuts()

    def routes(self, source: IntArray, target: IntArray) -> IntArray:
        """Return the port of the rank, or the links between two ranks."""
        ranks = self.ranks.size
        links = self.ranks.routes(np.minimum(source, ranks - 1), np.minimum(target, ranks - 1))
        for to_switch, port in ((target >= ranks, source), (source >= ranks, ranks + target)):
            links[to_switch] = -1
            links[to_switch, 0] = port[to_switch]
        return links
