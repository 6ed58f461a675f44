"""NCCL's tuning model: the latency of each algorithm and protocol.

NCCL predicts a call as latency + nbytes / bandwidth. The latencies are constants of NCCL 2.30.7,
here for NVLink inside a node and a network between nodes. The bandwidths depend on what NCCL finds
on a machine, and are not here. Times are microseconds.

Source: NCCL 2.30.7, src/graph/tuning.cc: ncclTunerConstantsDefaults, ncclTopoTuneModel.
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


def latency_us(collective: str, algorithm: str, protocol: str, ranks: int, nodes: int = 1) -> float:
    """Return NCCL's latency of one call.

      ring  base + (steps - s) max(NVLink, post) + s network, s = steps between nodes
      tree  base + 2 ((ranks per node - 1) NVLink + floor(lg nodes) network)

    A tree serves all_reduce only. For broadcast and reduce a ring takes base + 1 step, because the
    chunks are pipelined.

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
