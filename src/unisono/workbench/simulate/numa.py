"""NUMA nodes inside hosts: what a rank reads from another node of its host."""

from __future__ import annotations

import numpy as np

from unisono.core.schedules.ir import IntArray
from unisono.workbench.simulate.networks import Hosts, LinkGroup, LinkSpec, Network

# The groups of `Hosts` of the ports of ranks.
_FROM_MEMORY = 1


class NumaHosts(Network):
    """Hosts with NUMA nodes.

    A rank reads what another rank has posted. From another node of its host it reads over the links
    of both nodes, which all ranks of a node share. It also reads less per time than from its own
    node, because a core waits longer for each of its lines under way.

    Args:
        hosts: The network without nodes.
        ranks: Ranks per node; the last node of a host may have fewer.
        link: A node's link to the others; its latency is in addition to that inside a node.
        far: The port of a rank for what it reads from other nodes.
    """

    def __init__(self, hosts: Hosts, ranks: int, link: LinkSpec, far: LinkSpec) -> None:
        self.hosts, self.ranks, self.far = hosts, ranks, far
        self._nodes = -(-hosts.per_host // ranks)
        number = self._nodes * -(-hosts.size // hosts.per_host)
        links = [
            LinkGroup("node {} out", number, link),
            LinkGroup("node {} in", number, LinkSpec(0, link.gbps, link.whole)),
        ]
        super().__init__(
            hosts.size, [*hosts.groups, *links], cut_through=hosts.cut_through, period=hosts.period
        )

    def _node(self, ranks: IntArray) -> IntArray:
        host, place = np.divmod(ranks, self.hosts.per_host)
        node: IntArray = host * self._nodes + place // self.ranks
        return node

    def routes(self, source: IntArray, target: IntArray) -> IntArray:
        """Return the links of the hosts; between two nodes of a host also those of the nodes."""
        links = self.hosts.routes(source, target)
        links = np.pad(links, ((0, 0), (0, max(0, 4 - links.shape[1]))), constant_values=-1)
        node, to_node, per_host = self._node(source), self._node(target), self.hosts.per_host
        across = (node != to_node) & (source // per_host == target // per_host)
        ends = (source, self.first[-2] + node, self.first[-1] + to_node, self.size + target)
        links[across, :4] = np.stack(ends, axis=1)[across]
        return links

    def costs(self, links: IntArray, nbytes: IntArray) -> tuple[IntArray, IntArray]:
        """Return those of `Network.costs`; a rank that reads from another node does so longer."""
        latency, busy = super().costs(links, nbytes)
        kinds = self.kinds(links)
        across = (kinds == len(self.groups) - 1).any(axis=1)
        away = across[:, None] & (kinds == _FROM_MEMORY)
        far = np.maximum(busy, self.far.busy_ps(nbytes)[:, None])
        return latency, np.where(away, far, busy)

    def cuts(self) -> list[tuple[int, float]]:
        """Return those of the hosts, and the nodes with their links."""
        ports, *_ = found = self.hosts.cuts()
        if self.size > self.hosts.per_host:
            return found
        return [(ports[0], self.groups[0].spec.gbps), (self.ranks, self.groups[-1].spec.gbps)]
