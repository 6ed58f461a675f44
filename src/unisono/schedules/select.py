"""Which algorithm to use: a few thresholds by size and scale, and the user's word.

The default rule is small on purpose; where thresholds come from is said at each. A choice depends
on nothing but the call and the world, so all ranks choose alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from unisono.errors import InvalidArgumentError
from unisono.schedules.ir import REDUCING, is_power_of_two
from unisono.schedules.override import EVERY, parse_override
from unisono.schedules.registry import available, entry

__all__ = ["Choice", "Topology", "select"]

KIB = 1024
# Bytes that follow one another through a pipeline: large enough to hide a latency, small enough
# to stay in cache. Precedents: Open MPI han 512 KiB, NCCL 1 MiB, xhc 16 KiB.
SEGMENT = 256 * KIB
MAX_PIPELINE = 128


class Choice(NamedTuple):
    """What `select` says: the algorithm, and how deep to pipeline it."""

    algorithm: str
    pipeline: int


@dataclass(frozen=True)
class Topology:
    """What the choice depends on besides the call.

    Attributes:
        world_size: How many ranks take part.
        shared_memory: Whether all ranks can read one another's memory.
        local: Ranks per host if all hosts have as many, numbered host by host; 1 if nothing is
            known about that.
    """

    world_size: int
    shared_memory: bool = False
    local: int = 1


def select(
    collective: str,
    nbytes: int,
    topology: Topology,
    algorithm: str | None = None,
    override: str = "",
    *,
    uneven: bool = False,
    ordered: bool = False,
) -> Choice:
    """Return the algorithm for one call.

    Args:
        collective: "all_reduce", "broadcast", ...
        nbytes: Bytes of the whole data: the vector, or all p blocks. All ranks must give the
            same number.
        topology: Where the ranks are.
        algorithm: The caller's choice for this call; beats `override`.
        override: The user's choice, the text of UNISONO_ALGO; see `override`. Among the
            permitted algorithms the default rule's favourite wins.
        uneven: Whether blocks differ in size.
        ordered: Whether to reduce in the order of ranks, which makes the result's bits the same
            whatever is selected.

    Raises:
        InvalidArgumentError: Unknown names; an algorithm that does not serve this call; the
            text lists those that do.
    """
    p, local = topology.world_size, topology.local
    names = available(collective, p, uneven=uneven, ordered=ordered, local=local)
    if algorithm is not None:
        needs = entry(collective, algorithm).needs
        if algorithm not in names:
            raise _unusable(collective, f"algorithm {algorithm!r}", needs, topology, names)
        chosen = algorithm
    else:
        permitted = _permitted(collective, names, topology, override)
        favourites = _favourites(collective, nbytes, topology)
        if ordered and collective in REDUCING:
            favourites = _ordered(collective, nbytes, p)
        chosen = next((name for name in favourites if name in permitted), permitted[0])
    # Over shared memory the engine itself cuts the data into pieces that follow one another.
    shared = topology.shared_memory
    depth = 1 if shared else _pipeline(collective, chosen, nbytes, topology.world_size)
    return Choice(chosen, depth)


def _permitted(
    collective: str, names: tuple[str, ...], topology: Topology, override: str
) -> list[str]:
    """Return the algorithms that the override leaves, never none."""
    parsed = parse_override(override)
    if collective in parsed:
        permitted = parsed[collective].among(names)
        if not permitted:
            wish = f"the override '{collective}:{parsed[collective]}'"
            raise _unusable(collective, wish, "another world or call", topology, names)
        return permitted
    if EVERY in parsed:
        # An entry for all collectives says nothing about those that lack its algorithms.
        return parsed[EVERY].among(names) or list(names)
    return list(names)


def _unusable(
    collective: str, wish: str, needs: str, topology: Topology, names: tuple[str, ...]
) -> InvalidArgumentError:
    """Return the error of a wish; `names` are the algorithms that serve this very call."""
    p, local = topology.world_size, topology.local
    everything = available(collective, p, local=local)
    kind = ""
    if names != everything and names == available(collective, p, ordered=True, local=local):
        kind, needs = ", deterministic,", "no particular order of reduction"
    elif names != everything:
        kind, needs = " with blocks of different size", "blocks of equal size"
    return InvalidArgumentError(
        f"{wish} does not serve {collective}{kind} on {p} ranks: it needs {needs} "
        f"(usable: {', '.join(names)})"
    )


def _favourites(collective: str, nbytes: int, topology: Topology) -> tuple[str, ...]:
    """Return the default rule's choice, then what to take where that does not apply."""
    if topology.shared_memory:
        return (_shared(collective, nbytes, topology.world_size),)
    flat = _messages(collective, nbytes, topology.world_size)
    return ("two_level", *flat) if _has_levels(collective, nbytes, topology) else flat


def _has_levels(collective: str, nbytes: int, topology: Topology) -> bool:
    """Whether to save traffic between hosts, for a round or two more."""
    block = nbytes // topology.world_size
    # Where the ranks share two cores; those with a core each gain earlier.
    moved = 128 * KIB
    least = {"all_reduce": 4 * KIB, "reduce_scatter": KIB, "broadcast": moved, "reduce": moved}
    return topology.local > 1 and block >= least.get(collective, 0)


def _ordered(collective: str, nbytes: int, p: int) -> tuple[str, ...]:
    """Choose among the algorithms that reduce in the order of ranks."""
    if collective == "all_reduce" and (p - 1) * nbytes <= 64 * KIB:
        return ("one_shot", "rank_order", "linear")
    return ("rank_order", "linear")


def _shared(collective: str, nbytes: int, p: int) -> str:
    """Choose where ranks read one another's memory."""
    if collective in ("all_reduce", "reduce"):
        # PyTorch's IntraNodeComm and MSCCL++ end one-shot at 16 to 256 KiB; what counts is what
        # a rank has to read, which grows with the world.
        return "one_shot" if (p - 1) * nbytes <= 256 * KIB else "two_shot"
    if collective == "barrier":
        return "one_shot" if p <= 16 else "dissemination"
    if collective in ("scan", "exscan"):
        # The engine lets pieces follow one another along the chain.
        return "recursive_doubling" if nbytes <= 32 * KIB else "linear"
    return "one_shot"


def _messages(collective: str, nbytes: int, p: int) -> tuple[str, ...]:
    """Choose where ranks send messages."""
    block = nbytes // p
    match collective:
        case "all_reduce" if nbytes <= 8 * KIB:  # Open MPI: 4 to 8 KiB for 4 to 31 ranks
            return ("recursive_doubling",)
        case "all_reduce" if block >= 64 * KIB:  # a ring's messages must outweigh its latencies
            return ("ring",)
        case "all_reduce":  # MPICH: Rabenseifner; NCCL: two trees, which need no power of two
            return ("halving_doubling",) if is_power_of_two(p) else ("double_tree",)
        case "broadcast" if nbytes <= 12 * KIB or p == 2:  # MPICH: 12,288 bytes
            return ("binomial",)
        case "broadcast" if nbytes <= 512 * KIB:  # MPICH: from 8 ranks on scatter + all-gather
            return ("halving_doubling",) if p >= 8 else ("binomial",)
        case "broadcast":
            return ("double_tree",)
        case "reduce" if nbytes <= (256 if p <= 4 else 2) * KIB:  # MPICH: 2,048 bytes
            return ("binomial",)  # with few ranks one round less counts for more
        case "reduce":
            return ("halving_doubling",)
        case "all_gather" | "reduce_scatter" if p == 2 and nbytes <= 512 * KIB:
            return ("linear",)  # what it sends lies in INPUT, and can go out with the agreement
        case "all_gather" if nbytes < 80 * KIB:  # MPICH: 81,920 bytes
            return ("recursive_doubling", "bruck", "ring")
        case "all_gather" if nbytes < 512 * KIB:  # MPICH: 524,288 bytes
            return ("recursive_doubling", "ring")
        case "all_gather":
            return ("ring",)
        case "reduce_scatter" if nbytes < 512 * KIB:  # MPICH: 524,288 bytes
            return ("halving_doubling",)
        case "reduce_scatter":
            return ("pairwise",)
        # All at once: with 4, 8 and 16 ranks on two hosts 0.5 to 0.95 of the time of rounds.
        case "all_to_all" if p <= 16:
            return ("linear", "pairwise")
        case "all_to_all" if block <= 256:  # MPICH: 256 bytes
            return ("bruck", "pairwise")
        case "all_to_all":  # so many ranks would be in each other's way
            return ("pairwise",)
        case "gather" | "scatter" if block <= 2 * KIB:  # Open MPI: binomial for small blocks
            return ("binomial", "linear")
        case "scan" | "exscan" if nbytes <= 32 * KIB:
            return ("recursive_doubling",)
        case "barrier":
            return ("dissemination",)
    return ("linear",)


def _pipeline(collective: str, algorithm: str, nbytes: int, p: int) -> int:
    """Return how many segments of data follow one another, a power of two."""
    if not entry(collective, algorithm).pipelined:
        return 1
    streams = {"double_tree": 2, "two_shot": p, "rank_order": p, "two_level": p}.get(algorithm, 1)
    segments = -(-nbytes // (streams * SEGMENT))
    # Powers of two, so that a program of many sizes builds few schedules.
    return min(1 << (max(segments, 1) - 1).bit_length(), MAX_PIPELINE)
