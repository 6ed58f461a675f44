"""The nodes of a host: the ranks of a NUMA node, or of a shared cache, as all ranks know them.

A rank publishes its place beside its address, and each rank derives the same map from all places.
A rank that may run on several nodes has no place. Then its host counts as one node.
"""

from __future__ import annotations

from collections.abc import Sequence

from unisono.core.base import config
from unisono.core.platform.machine import allowed_cpus
from unisono.core.platform.nodes import numa_node, shared_cache
from unisono.errors import InvalidArgumentError

_NONE = "-"
_MOST = 1_000_000


def published() -> str:
    """Return this rank's place: "numa=1", "cache=8", or "each=4" for virtual nodes of 4 ranks.

    The number is "-" if the rank may run on several nodes, or nothing is known.

    Raises:
        InvalidArgumentError: UNISONO_NODES has an unknown value.
    """
    wish = config.get("UNISONO_NODES")
    if size := virtual_size(wish):
        return f"each={size}"
    if wish == "0":
        return f"numa={_NONE}"
    found = (shared_cache if wish == "cache" else numa_node)(allowed_cpus())
    return f"{wish}={_NONE if found is None else found}"


def virtual_size(wish: str) -> int:
    """Return the ranks of a virtual node; 0 if nodes are not virtual.

    Raises:
        InvalidArgumentError: The value of UNISONO_NODES is unknown.
    """
    if wish in ("numa", "cache", "0"):
        return 0
    if not wish.isdecimal() or not 1 <= int(wish) <= _MOST:
        raise InvalidArgumentError(
            f"environment variable UNISONO_NODES={wish!r} is neither numa nor cache, "
            f"nor a number of ranks from 0 to {_MOST}"
        )
    return int(wish)


def nodes_of(hosts: Sequence[str], places: Sequence[str]) -> tuple[int, ...]:
    """Return the number of each rank's node on its host, equal on ranks of one node.

    A host counts as one node, 0, if a rank of it has no place or a place of another kind.

    Args:
        hosts: Host id of each rank.
        places: What each rank has published.
    """
    nodes = [0] * len(hosts)
    for host in dict.fromkeys(hosts):
        ranks = [rank for rank, other in enumerate(hosts) if other == host]
        kinds, numbers = zip(*(places[rank].split("=") for rank in ranks), strict=True)
        if len({*kinds}) > 1 or _NONE in numbers:
            continue
        if kinds[0] != "each":
            found = [int(number) for number in numbers]
        elif len({*numbers}) == 1:
            found = [at // int(numbers[0]) for at in range(len(ranks))]
        else:
            continue
        for rank, node in zip(ranks, found, strict=True):
            nodes[rank] = node
    return tuple(nodes)
