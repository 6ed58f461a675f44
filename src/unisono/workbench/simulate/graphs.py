"""Networks whose links are given one by one, such as the NVLinks of a DGX-1."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from unisono.core.schedules.ir import IntArray
from unisono.errors import InvalidArgumentError
from unisono.workbench.simulate.networks import LinkGroup, LinkSpec, Network

# All halves of more ranks are too many to look at for a bound.
_CUT_RANKS = 16


class Graph(Network):
    """Ranks with links of their own, one way each.

    A message takes the route with the fewest links; of these the one with the least latency and
    time per byte, then that over the lowest ranks.

    Args:
        size: Number of ranks.
        edges: The link from one rank to another.
        whole: As for `LinkSpec`.
        cut_through: As for `Network`.

    Raises:
        InvalidArgumentError: The links join another number of ranks, or not all of them.
    """

    flips = False

    def __init__(
        self, size: int, edges: Mapping[tuple[int, int], LinkSpec], whole: bool = False, *,
        cut_through: bool = True,
    ) -> None:  # fmt: skip
        ranks = {rank for ends in edges for rank in ends}
        if ranks != set(range(size)):
            raise InvalidArgumentError(
                f"the links of the network join {len(ranks)} ranks, and the world has {size}"
            )
        self.edges = dict(edges)
        links = [LinkGroup(f"link {a} to {b} {{}}", 1, spec) for (a, b), spec in self.edges.items()]
        super().__init__(size, links, cut_through=cut_through, period=size)
        self._table = self._routes_of_pairs()

    def _routes_of_pairs(self) -> IntArray:
        """Return the links of each pair of ranks [size * size, hops]; -1 after the last."""
        number = {ends: link for link, ends in enumerate(self.edges)}
        found: dict[tuple[int, int], list[int]] = {(rank, rank): [] for rank in range(self.size)}
        cost = dict.fromkeys(found, 0.0)
        fresh = list(found)
        while fresh:
            reached: dict[tuple[int, int], tuple[float, int, list[int]]] = {}
            for source, via in sorted(fresh):
                for (start, target), spec in self.edges.items():
                    if start == via and (source, target) not in found:
                        total = cost[source, via] + spec.latency_ps + 1e6 / spec.gbps
                        way = (total, via, [*found[source, via], number[via, target]])
                        known = reached.get((source, target), way)
                        reached[source, target] = min(known, way)
            found |= {pair: links for pair, (_, _, links) in reached.items()}
            cost |= {pair: total for pair, (total, _, _) in reached.items()}
            fresh = list(reached)
        if len(found) < self.size**2:
            missing = next(
                (a, b) for a in range(self.size) for b in range(self.size) if (a, b) not in found
            )
            raise InvalidArgumentError(
                f"no route of the network's links leads from rank {missing[0]} to {missing[1]}"
            )
        hops = max(1, *map(len, found.values()))
        table = np.full((self.size**2, hops), -1)
        for (source, target), links in found.items():
            table[source * self.size + target, : len(links)] = links
        return table

    def routes(self, source: IntArray, target: IntArray) -> IntArray:
        """Return the links of the shortest route."""
        found: IntArray = self._table[source * self.size + target]
        return found

    def cuts(self) -> list[tuple[int, float]]:
        """Return each rank with the most that one of them has, and the cut that takes longest.

        Of a cut the larger part counts, with the better of the two ways, so that a bound is one
        for all operations.
        """
        sums = np.zeros((2, self.size))
        for (source, target), spec in self.edges.items():
            sums[0, source] += spec.gbps
            sums[1, target] += spec.gbps
        found = [(1, float(sums.max()))]
        if 2 < self.size <= _CUT_RANKS:
            masks = np.arange(1, 1 << self.size)[:, None] >> np.arange(self.size) & 1
            members = masks.sum(axis=1)
            large = (2 * members >= self.size) & (members < self.size)
            masks, members = masks[large], members[large]
            out, into = np.zeros((2, len(masks)))
            for (source, target), spec in self.edges.items():
                out += spec.gbps * (masks[:, source] > masks[:, target])
                into += spec.gbps * (masks[:, source] < masks[:, target])
            best = np.maximum(out, into)
            worst = int(np.argmax((self.size - members) / best))
            found.append((int(members[worst]), float(best[worst])))
        return found
