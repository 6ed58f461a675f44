"""NCCL's tuning model: the latency of each algorithm and protocol, and the time of a call.

T = latency + nbytes / bandwidth, with the constants of NCCL 2.30.7 for NVLink inside a node and a
network between nodes. Times are microseconds. The bandwidths of the algorithms depend on the
topology that NCCL finds at run time, so the caller gives them.

Source: NCCL 2.30.7, src/graph/tuning.cc: ncclTunerConstantsDefaults, ncclTopoTuneModel,
ncclTopoGetAlgoTime.
"""

from __future__ import annotations

from unisono.errors import InvalidArgumentError

PROTOCOLS = ("LL", "LL128", "Simple")

# Per algorithm and protocol: before the first step, per step over NVLink and over the network.
_BASE = {"tree": (6.8, 14.0, 8.4), "ring": (6.6, 14.0, 8.4)}
_NVLINK = {"tree": (0.6, 1.25, 4.0), "ring": (0.6, 1.9, 3.4)}
_NETWORK = {"tree": (5.0, 8.5, 14.0), "ring": (2.7, 4.0, 14.0)}
# To post a message to the network interface; three times as long for Simple.
_POST_US = 1.0
# How often a chunk goes around the ring.
_LAPS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
# Divides the bandwidth of a tree, from 64 B on, per factor of 2 in size.
_TREE_CORRECTION = {
    "LL": "1 1 1 1 .9 .8 .7 .7 .7 .7 .6 .5 .4 .4 .5 .6 .7 .8 .9 1 1 1 1",
    "LL128": "1 1 1 1 1 .9 .8 .8 .8 .7 .6 .6 .6 .6 .6 .6 .8 .9 .9 .9 .9 1 1",
    "Simple": ".9 .9 .9 .9 .9 .9 .9 .8 .7 .6 .6 .5 .5 .5 .5 .6 .7 .8 .7 .7 .8 .9 .9",
}


def latency_us(collective: str, algorithm: str, protocol: str, ranks: int, nodes: int = 1) -> float:
    """Return NCCL's latency of one call.

    ring   base + (steps - s) max(NVLink, post) + s network, s = steps between nodes;
           broadcast and reduce: base + 1 step, because the chunks are pipelined
    tree   base + 2 ((ranks per node - 1) NVLink + floor(lg nodes) network); all_reduce only

    Args:
        collective: "all_reduce", "all_gather", "reduce_scatter", "broadcast" or "reduce".
        algorithm: "ring" or "tree".
        protocol: "LL", "LL128" or "Simple".
        ranks: World size.
        nodes: Nodes with equally many ranks.

    Raises:
        InvalidArgumentError: NCCL has no such algorithm for the collective, or the ranks do not
            fill the nodes.
    """
    known = algorithm == "tree" and collective == "all_reduce"
    known |= algorithm == "ring" and collective in (*_LAPS, "broadcast", "reduce")
    if not known or protocol not in PROTOCOLS:
        raise InvalidArgumentError(
            f"NCCL's model has no {collective} with {algorithm} and {protocol} (algorithms: ring, "
            f"and tree for all_reduce; protocols: {', '.join(PROTOCOLS)})"
        )
    if nodes < 1 or ranks < nodes or ranks % nodes:
        raise InvalidArgumentError(f"{ranks} ranks do not fill {nodes} nodes equally")
    which = PROTOCOLS.index(protocol)
    base, inside = _BASE[algorithm][which], _NVLINK[algorithm][which]
    # With one rank per node, NCCL takes the tree's network latency for the ring, too.
    between = _NETWORK["tree" if ranks == nodes else algorithm][which]
    if algorithm == "tree":
        return base + 2 * ((ranks // nodes - 1) * inside + (nodes.bit_length() - 1) * between)
    if collective not in _LAPS:
        return base + (between if nodes > 1 else inside)
    steps, away = (_LAPS[collective] * (count - 1) for count in (ranks, nodes))
    post = 0.0 if nodes == 1 else _POST_US * (3 if protocol == "Simple" else 1)
    return base + (steps - away) * max(inside, post) + away * between


def time_us(latency: float, algorithm: str, protocol: str, nbytes: int, gbps: float) -> float:
    """Return NCCL's time of one call: latency + nbytes / bandwidth.

    Args:
        latency: Of `latency_us`.
        algorithm: "ring" or "tree"; the tree's bandwidth is corrected for sizes below 512 MiB.
        protocol: "LL", "LL128" or "Simple".
        nbytes: The larger of what a rank sends and receives.
        gbps: The bandwidth of the algorithm, in 1e9 bytes per second.
    """
    order = (nbytes >> 6).bit_length() - 1
    factors = [float(text) for text in _TREE_CORRECTION[protocol].split()]
    if algorithm == "tree" and 0 <= order < len(factors):
        gbps *= factors[order]
    return latency + nbytes / (1000 * gbps)
