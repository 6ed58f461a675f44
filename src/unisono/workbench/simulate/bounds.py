"""The least time of a collective on a network, whatever the algorithm is.

Some ranks must receive bytes that others have. They share links of a known bandwidth, so the bytes
take a time. A message over the longest route takes its latency.
"""

from __future__ import annotations

import numpy as np

from unisono.core.schedules.ir import VECTOR_COLLECTIVES
from unisono.workbench.simulate.evaluators.costs import Costs
from unisono.workbench.simulate.networks import Network


def least_us(
    collective: str,
    nbytes: int,
    network: Network,
    costs: Costs,
    *,
    root: int = 0,
    ranks: int = 0,
    itemsize: int = 1,
    switched: bool = False,
) -> float:
    """Return a lower bound in microseconds.

    Let g groups of ranks have links of bandwidth B each, n the bytes:

      all_reduce                                      2 (g-1)/g n/B
      all_gather, reduce_scatter, gather, scatter       (g-1)/g n/B
      broadcast, reduce                                         n/B
      all_to_all, r ranks per group                   r (g-1)/g n/B

    Where switches reduce for the ranks of a host, a rank sends n of an all_reduce.

    Args:
        collective: "all_reduce", "broadcast", ...
        nbytes: Size of the whole data: the vector, or all p blocks.
        network: The links.
        costs: The work of ranks; a message costs a send and a receive.
        root: The root, if there is one.
        ranks: Number of ranks; that of the network by default. `Channels` have more.
        itemsize: Bytes per element; as in `simulate`, only whole elements of equal blocks count.
        switched: Whether switches reduce for the ranks of a host.
    """
    p = ranks or network.size
    if p == 1:
        return costs.start_ps / 1e6
    whole = itemsize if collective in VECTOR_COLLECTIVES else itemsize * p
    nbytes -= nbytes % whole
    if not nbytes and collective != "barrier":
        return 0.0
    source, target = np.full(p, max(root, 0)), np.arange(p)
    if collective in ("reduce", "gather"):
        source, target = target, source
    latency, _ = network.alone(source, target, np.zeros(p, np.int64))
    others = np.delete(latency, max(root, 0))
    moving = 0.0
    for members, gbps in network.cuts():
        g = p / members
        factor = 0.0
        if g > 1:
            part = (g - 1) / g
            factor = {
                "all_reduce": 1.0 if switched and members == 1 else 2 * part,
                "all_to_all": members * part, "broadcast": 1.0, "reduce": 1.0,
                "scan": 0.0, "exscan": 0.0, "barrier": 0.0,
            }.get(collective, part)  # fmt: skip
        moving = max(moving, factor * nbytes / gbps * 1000)
    works = costs.start_ps + costs.send_ps + costs.recv_ps
    return (works + max(float(others.max()), float(others.min()) + moving)) / 1e6
