"""Choose the algorithm of a call: a few thresholds by size and world size, and the user's setting.

The default rule is small on purpose. A comment at each threshold gives its source. A choice depends
only on the call and the world, so all ranks choose the same algorithm.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from unisono.core.schedules.choice.far import far_apart, fastest, overflows
from unisono.core.schedules.choice.nodes import over_nodes
from unisono.core.schedules.choice.override import EVERY, parse_override
from unisono.core.schedules.choice.tables import ChoiceTable
from unisono.core.schedules.ir import REDUCING, ROOTED, ceil_log2, is_power_of_two
from unisono.core.schedules.pipeline import depth_of
from unisono.core.schedules.registry import available, entry
from unisono.errors import InvalidArgumentError

KIB = 1024
# The number of ranks of a host up to which each rank reads from all other ranks.
FEW_RANKS = 32
# The number of ranks from which a choice between hosts counts the bytes that a host's ranks share.
_MANY_RANKS = 32


# Algorithms whose ranks send everything at once, and what to take if a switch may lose it.
_AT_ONCE = ("linear", "one_shot", "two_shot")
_PAIRED = {
    "all_to_all": ("pairwise",),
    "reduce_scatter": ("pairwise",),
    "all_gather": ("ring",),
    "reduce": ("halving_doubling", "binomial"),
    "gather": ("pairwise",),
    "scatter": ("pairwise",),
}


class Choice(NamedTuple):
    """The result of `select`: the algorithm and its pipeline depth."""

    algorithm: str
    pipeline: int


@dataclass(frozen=True)
class Topology:
    """The properties of the world on which the choice depends.

    Attributes:
        world_size: Number of ranks that take part.
        shared_memory: Whether all ranks can read one another's memory.
        local: Ranks of the inner level, which is a host; if all ranks have one host, its NUMA
            node. Ranks per host if that is equal on all hosts, and ranks are numbered host by
            host, else 1. On one host likewise per node, else the number of all ranks.
        round_trip_us: Between hosts, as a `round_trip_class`; 0: there is one host.
    """

    world_size: int
    shared_memory: bool = False
    local: int = 1
    round_trip_us: int = 0


def select(
    collective: str,
    nbytes: int,
    topology: Topology,
    algorithm: str | None = None,
    override: str = "",
    *,
    uneven: bool = False,
    ordered: bool = False,
    table: ChoiceTable | None = None,
) -> Choice:
    """Return the algorithm for one call.

    Args:
        collective: "all_reduce", "broadcast", ...
        nbytes: Bytes of the whole data: the vector, or all p blocks. All ranks must give the
            same number.
        topology: The world size and the hosts of the ranks.
        algorithm: The caller's choice for this call; takes precedence over `override`.
        override: The user's choice, the text of UNISONO_ALGO; see `override`. Among the
            permitted algorithms the choice of the default rule is taken.
        uneven: Whether blocks differ in size.
        ordered: Whether to reduce in the order of ranks. The bits of the result are then the same
            for every algorithm.
        table: Measured choices, equal on all ranks. They take precedence over the default rule,
            unless the call must reduce in the order of ranks.

    Raises:
        InvalidArgumentError: A name is unknown, or the algorithm does not serve this call. The
            text lists the algorithms that serve it.
    """
    p, local = topology.world_size, topology.local
    names = available(collective, p, uneven=uneven, ordered=ordered, local=local)
    if algorithm is not None:
        needs = entry(collective, algorithm).needs
        if algorithm not in names:
            raise _unusable(f"algorithm {algorithm!r}", collective, needs, topology, names)
        chosen = algorithm
    else:
        permitted = _permitted(collective, names, topology, override)
        favourites = _favourites(collective, nbytes, topology)
        if ordered and collective in REDUCING:
            favourites = _ordered(collective, nbytes, p)
        elif table is not None and (rule := table.rule(collective, nbytes)):
            favourites = (rule.algorithm, *favourites)
        chosen = next((name for name in favourites if name in permitted), permitted[0])
    # Over shared memory the engine itself cuts the data into pieces and pipelines them.
    if topology.shared_memory or not entry(collective, chosen).pipelined:
        return Choice(chosen, 1)
    return Choice(chosen, depth_of(chosen, nbytes, p, topology.round_trip_us))


def _permitted(
    collective: str, names: tuple[str, ...], topology: Topology, override: str
) -> list[str]:
    """Return the algorithms that the override permits, at least one."""
    parsed = parse_override(override) if override else {}
    if collective in parsed:
        permitted = parsed[collective].among(names)
        if not permitted:
            setting = f"the override '{collective}:{parsed[collective]}'"
            raise _unusable(setting, collective, "another world or call", topology, names)
        return permitted
    if EVERY in parsed:
        # An entry for all collectives does not restrict a collective without its algorithms.
        return parsed[EVERY].among(names) or list(names)
    return list(names)


def _unusable(
    setting: str, collective: str, needs: str, topology: Topology, names: tuple[str, ...]
) -> InvalidArgumentError:
    """Return the error of a setting; `names` are the algorithms that serve this call."""
    p, local = topology.world_size, topology.local
    everything = available(collective, p, local=local)
    kind = ""
    if names != everything and names == available(collective, p, ordered=True, local=local):
        kind, needs = ", deterministic,", "no particular order of reduction"
    elif names != everything:
        kind, needs = " with blocks of different size", "blocks of equal size"
    return InvalidArgumentError(
        f"{setting} does not serve {collective}{kind} on {p} ranks: it needs {needs} "
        f"(usable: {', '.join(names)})"
    )


def _favourites(collective: str, nbytes: int, topology: Topology) -> tuple[str, ...]:
    """Return the choice of the default rule, then the choices to fall back to."""
    p = topology.world_size
    if topology.shared_memory:
        name = _shared(collective, nbytes, p)
        apart = 1 < topology.local < p
        return over_nodes(collective, nbytes, p, topology.local, name) if apart else (name,)
    if far_apart(p, topology.round_trip_us):
        return fastest(collective, nbytes, p, topology.local, topology.round_trip_us)
    flat = _messages(collective, nbytes, p)
    if flat[0] in _AT_ONCE and collective in _PAIRED and topology.round_trip_us:
        # A root gets or sends everything.
        most = (1 if collective in ROOTED else topology.local) * (p - topology.local)
        size = nbytes if flat[0] == "one_shot" and collective == "reduce" else nbytes // p
        if overflows(most, most * size):
            flat = _PAIRED[collective]
    if p >= _MANY_RANKS and 1 < topology.local < p:
        return (*_over_hosts(collective, nbytes, topology), *flat)
    if not _has_levels(collective, nbytes, topology):
        return flat
    if topology.round_trip_us and _passes_along(collective, nbytes, topology):
        return ("ring", *flat)  # 0.6 of two_level with 4 hosts of 2 ranks
    if collective == "all_reduce" and nbytes < 64 * KIB * min(topology.world_size, 8):
        return ("node_tree", "two_level", *flat)  # 0.6 to 0.95 of two_level
    return ("two_level", *flat)


def _passes_along(collective: str, nbytes: int, topology: Topology) -> bool:
    """Return whether a pipeline along all ranks is faster than trees over the hosts.

    The host of the root sends its data once per level of a tree, and once in a pipeline.
    """
    if collective not in ("broadcast", "reduce"):
        return False
    p = topology.world_size
    chunks = depth_of("ring", nbytes, p, topology.round_trip_us)
    return chunks * (ceil_log2(p // topology.local) - 1) > p - 2 - chunks


def _over_hosts(collective: str, nbytes: int, topology: Topology) -> tuple[str, ...]:
    """Choose for many ranks, several of which share the interface of their host.

    Judged in virtual time: 32 to 192 ranks, 2 and 8 per host, interfaces of 25 and 100 Gb/s.
    """
    p, local = topology.world_size, topology.local
    block, hosts = nbytes // p, p // local
    of_host = block * local
    match collective:
        case "all_reduce" if nbytes < 8 * KIB:
            return ("recursive_doubling",)
        case "all_reduce" if of_host < 32 * KIB:  # 2 rounds per level of hosts
            return ("multi_level",)
        case "all_reduce" | "reduce_scatter" if block >= 32 * KIB:
            return ("ring",)  # enters and leaves each host once
        case "all_gather" | "reduce_scatter" if of_host < 24 * KIB:
            return ("far_first",)
        case "all_reduce" | "all_gather" | "reduce_scatter":
            return ("two_level",)
        case "broadcast" | "reduce" if nbytes <= (16 if collective == "broadcast" else 8) * KIB:
            return ("binomial",)
        case "broadcast" | "reduce" if _passes_along(collective, nbytes, topology):
            return ("ring",)
        case "broadcast" if hosts > 8 and nbytes >= 1024 * KIB:
            return ("halving_doubling",)  # its scatter halves what each level of hosts sends
        case "reduce" if hosts > 8 and nbytes >= 2048 * KIB:
            return ("double_tree",)
        case "broadcast" | "reduce" if collective == "broadcast" or local >= 4:
            return ("two_level",)
        case "all_to_all" if 256 < block < 4 * KIB and local >= 4:
            return ("two_level",)  # one message per pair of hosts
        case "all_to_all" if block <= KIB:
            return ("bruck",)
    return ()


def _has_levels(collective: str, nbytes: int, topology: Topology) -> bool:
    """Return whether to save traffic between hosts at the price of one or two rounds."""
    block = nbytes // topology.world_size
    # Measured with all ranks on two cores. Ranks with a core each gain from smaller sizes on.
    moved = 64 * KIB
    least = {"all_reduce": 4 * KIB, "reduce_scatter": KIB, "broadcast": moved, "reduce": moved}
    # two_level all_to_all packs blocks twice, and has not been measured to gain.
    gains = topology.local > 1 and collective != "all_to_all"
    return gains and block >= least.get(collective, 0)


def _ordered(collective: str, nbytes: int, p: int) -> tuple[str, ...]:
    """Choose among the algorithms that reduce in the order of ranks."""
    if collective == "all_reduce" and (p - 1) * nbytes <= 64 * KIB:
        return ("one_shot", "rank_order", "linear")
    return ("rank_order", "linear")


def _shared(collective: str, nbytes: int, p: int) -> str:
    """Choose for ranks that read one another's memory."""
    if p > FEW_RANKS and collective in ("all_reduce", "reduce"):
        return _shared_by_many(collective, nbytes)
    if collective in ("all_reduce", "reduce"):
        # PyTorch's IntraNodeComm and MSCCL++ use one-shot up to 16 to 256 KiB. The threshold here
        # is on the bytes that a rank has to read, which grow with the world size. Two ranks share
        # the work of an all_reduce in two shots with one wait more.
        most = 256 if collective == "reduce" else 32 if p == 2 else 128
        return "one_shot" if (p - 1) * nbytes <= most * KIB else "two_shot"
    if collective == "barrier":
        return "one_shot" if p <= 16 else "dissemination"
    if collective in ("scan", "exscan"):
        # The engine pipelines the pieces along the chain.
        return "recursive_doubling" if nbytes <= 32 * KIB else "linear"
    return "one_shot"


def _shared_by_many(collective: str, nbytes: int) -> str:
    """Choose for many ranks of a host, which wait less in rounds than they work for all pairs.

    Each rank works out the places of all posts: two_shot of 128 ranks has 49,000 rows, a tree 500.
    Measured with 32 to 128 ranks on two cores.
    """
    if collective == "reduce":  # only the root waits
        return "one_shot" if nbytes <= 512 * KIB else "tree"
    if nbytes <= 2 * KIB:
        return "recursive_doubling"
    return "tree" if nbytes <= 256 * KIB else "halving_doubling"


def _messages(collective: str, nbytes: int, p: int) -> tuple[str, ...]:
    """Choose for ranks that send messages."""
    block = nbytes // p
    match collective:
        case "all_reduce" if nbytes <= (32 if p <= 8 else 8) * KIB:  # Open MPI: 4 to 8 KiB
            return ("recursive_doubling",)
        case "all_reduce" if block >= 64 * KIB and not (p <= 8 and is_power_of_two(p)):
            return ("ring",)  # its messages must outweigh its latencies
        case "all_reduce":  # MPICH: Rabenseifner; NCCL: two trees, which need no power of two
            return ("halving_doubling",) if is_power_of_two(p) else ("double_tree",)
        case "broadcast" if nbytes <= 12 * KIB or p == 2:  # MPICH: 12,288 bytes
            return ("binomial",)
        case "broadcast" if nbytes <= 512 * KIB:  # MPICH: from 8 ranks on scatter + all-gather
            return ("halving_doubling",) if p > 8 else ("binomial",)
        case "broadcast":
            return ("double_tree",)
        case "reduce" if 2 < p <= 8:  # 0.6 to 0.9 of binomial and halving_doubling
            return ("one_shot",) if (p - 1) * nbytes <= 2048 * KIB else ("two_shot",)
        case "reduce" if p == 2 or nbytes <= 2 * KIB:  # MPICH: 2,048 bytes
            return ("binomial",)
        case "reduce":
            return ("halving_doubling",)
        case "all_gather" | "reduce_scatter" if p == 2 and nbytes <= 512 * KIB:
            return ("linear",)  # it sends from INPUT, so the data can travel with the agreement
        case "all_gather" if p <= 4 and 2 * KIB < nbytes <= 64 * KIB:
            return ("one_shot",)  # one round: 0.6 to 0.95 of two rounds on two cores
        case "all_gather" if nbytes < 80 * KIB:  # MPICH: 81,920 bytes
            return ("recursive_doubling", "bruck", "ring")
        case "all_gather" if nbytes < 512 * KIB:  # MPICH: 524,288 bytes
            return ("recursive_doubling", "ring")
        case "all_gather" if 2 < p <= 8:
            return ("one_shot",)  # sends as many bytes as a ring, in 0.7 to 0.95 of its time
        case "all_gather":
            return ("ring",)
        case "reduce_scatter" if p <= 8 and nbytes <= 4096 * KIB:
            return ("one_shot",)  # one round: 0.7 to 1.0 of more rounds on two cores
        case "reduce_scatter" if nbytes < 512 * KIB:  # MPICH: 524,288 bytes
            return ("halving_doubling",)
        case "reduce_scatter":
            return ("pairwise",)
        # One round: 0.5 to 0.95 of pairwise's time with 4, 8 and 16 ranks on two hosts.
        case "all_to_all" if p <= 16:
            return ("linear", "pairwise")
        case "all_to_all" if block <= 256:  # MPICH: 256 bytes
            return ("bruck", "pairwise")
        case "all_to_all":  # with more than 16 ranks, messages of one round delay one another
            return ("pairwise",)
        case "gather" | "scatter" if block <= 2 * KIB:  # Open MPI: binomial for small blocks
            return ("binomial", "linear")
        case "scan" | "exscan" if nbytes <= 32 * KIB:
            return ("recursive_doubling",)
        case "barrier":
            return ("dissemination",)
    return ("linear",)
