"""The table of all schedules: (collective, algorithm) -> builder and conditions of use."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b

import numpy as np

from unisono.core.schedules.algorithms import (
    bruck,
    double_tree,
    far_first,
    halving_doubling,
    linear,
    multi_level,
    node_tree,
    pairwise,
    recursive_doubling,
    ring,
    scan,
    swing,
    torus,
    tree,
    two_level,
)
from unisono.core.schedules.algorithms.shared_memory import (
    cube_mesh,
    one_shot,
    rank_order,
    two_shot,
)
from unisono.core.schedules.families import PROVED_RANKS, ScheduleFamily
from unisono.core.schedules.ir import COLLECTIVES, REDUCING, ROOTED, Schedule, is_power_of_two
from unisono.errors import InvalidArgumentError, ScheduleError

_log = logging.getLogger("unisono.schedules")


@dataclass(frozen=True)
class AlgorithmEntry:
    """One algorithm for one collective.

    Attributes:
        builder: Function that returns the schedule. Its arguments: the world size, the ranks per
            host (if `two_level`), the root (if there is one), the depth (if `pipelined`).
        applies: Function that returns whether the algorithm works for a world size; None: for each.
        needs: The condition of `applies` in words, for error messages.
        pipelined: Whether the algorithm can cut the data into a pipeline of chunks.
        uneven: Whether blocks may differ in size; equals `Schedule.uneven_ok`.
        ordered: Whether the algorithm reduces in the order of ranks; see `rank_order`.
        two_level: Whether the algorithm needs several hosts with equally many ranks, numbered
            host by host, or such nodes of one host.
        registered: Whether a user added the algorithm, so that it may differ on the ranks.
    """

    builder: Callable[..., Schedule]
    applies: Callable[[int], bool] | None = None
    needs: str = "any world size"
    pipelined: bool = False
    uneven: bool = False
    ordered: bool = False
    two_level: bool = False
    registered: bool = False


def _power_of_two(builder: Callable[..., Schedule], *, uneven: bool = False) -> AlgorithmEntry:
    return AlgorithmEntry(builder, is_power_of_two, "a power of two as world size", uneven=uneven)


def _levels(builder: Callable[..., Schedule], *, pipelined: bool = False) -> AlgorithmEntry:
    needs = (
        "several hosts with equally many ranks, two at least, numbered host by host, or such nodes "
        "of one host"
    )
    return AlgorithmEntry(builder, needs=needs, pipelined=pipelined, two_level=True)


_TABLE: dict[str, dict[str, AlgorithmEntry]] = {
    "all_reduce": {
        "linear": AlgorithmEntry(linear.all_reduce, ordered=True),
        "ring": AlgorithmEntry(ring.all_reduce),
        "two_way_ring": AlgorithmEntry(ring.two_way_all_reduce),
        "torus": AlgorithmEntry(
            torus.all_reduce, lambda p: torus.width(p) > 1, "a product of two numbers"
        ),
        "tree": AlgorithmEntry(tree.all_reduce, pipelined=True),
        "double_tree": AlgorithmEntry(double_tree.all_reduce, pipelined=True),
        "recursive_doubling": AlgorithmEntry(recursive_doubling.all_reduce),
        "recursive_multiplying": AlgorithmEntry(recursive_doubling.multiplying),
        "halving_doubling": AlgorithmEntry(halving_doubling.all_reduce),
        "swing": AlgorithmEntry(swing.all_reduce),
        "one_shot": AlgorithmEntry(one_shot.all_reduce, ordered=True),
        "two_shot": AlgorithmEntry(two_shot.all_reduce, pipelined=True),
        "rank_order": AlgorithmEntry(rank_order.all_reduce, pipelined=True, ordered=True),
        "cube_mesh": AlgorithmEntry(
            cube_mesh.all_reduce, lambda p: p == cube_mesh.RANKS, "world size 8"
        ),
        "two_level": _levels(two_level.all_reduce, pipelined=True),
        "node_tree": _levels(node_tree.all_reduce, pipelined=True),
        "multi_level": _levels(multi_level.all_reduce),
    },
    "broadcast": {
        "linear": AlgorithmEntry(linear.broadcast),
        "ring": AlgorithmEntry(ring.broadcast, pipelined=True),
        "binomial": AlgorithmEntry(tree.binomial_broadcast),
        "bine": _power_of_two(swing.broadcast),
        "tree": AlgorithmEntry(tree.broadcast, pipelined=True),
        "double_tree": AlgorithmEntry(double_tree.broadcast, pipelined=True),
        "halving_doubling": AlgorithmEntry(halving_doubling.broadcast),
        "one_shot": AlgorithmEntry(one_shot.broadcast),
        "two_level": _levels(two_level.broadcast, pipelined=True),
    },
    "reduce": {
        "linear": AlgorithmEntry(linear.reduce),
        "ring": AlgorithmEntry(ring.reduce, pipelined=True),
        "binomial": AlgorithmEntry(tree.binomial_reduce),
        "bine": _power_of_two(swing.reduce),
        "tree": AlgorithmEntry(tree.reduce, pipelined=True),
        "double_tree": AlgorithmEntry(double_tree.reduce, pipelined=True),
        "halving_doubling": AlgorithmEntry(halving_doubling.reduce),
        "one_shot": AlgorithmEntry(one_shot.reduce_to_root),
        "two_shot": AlgorithmEntry(two_shot.reduce),
        "rank_order": AlgorithmEntry(rank_order.reduce, ordered=True),
        "two_level": _levels(two_level.reduce, pipelined=True),
    },
    "all_gather": {
        "linear": AlgorithmEntry(linear.all_gather, uneven=True),
        "ring": AlgorithmEntry(ring.all_gather, uneven=True),
        "two_way_ring": AlgorithmEntry(ring.two_way_all_gather, uneven=True),
        "recursive_doubling": _power_of_two(recursive_doubling.all_gather, uneven=True),
        "bruck": AlgorithmEntry(bruck.all_gather),
        "far_first": AlgorithmEntry(far_first.all_gather),
        "one_shot": AlgorithmEntry(one_shot.all_gather, uneven=True),
        "two_level": _levels(two_level.all_gather),
    },
    "gather": {
        "linear": AlgorithmEntry(linear.gather, uneven=True),
        "pairwise": AlgorithmEntry(pairwise.gather, uneven=True),
        "binomial": AlgorithmEntry(tree.binomial_gather),
        "one_shot": AlgorithmEntry(one_shot.gather, uneven=True),
    },
    "reduce_scatter": {
        "linear": AlgorithmEntry(linear.reduce_scatter, uneven=True),
        "ring": AlgorithmEntry(ring.reduce_scatter),
        "halving_doubling": AlgorithmEntry(halving_doubling.reduce_scatter, uneven=True),
        "far_first": AlgorithmEntry(far_first.reduce_scatter),
        "pairwise": AlgorithmEntry(pairwise.reduce_scatter, uneven=True),
        "one_shot": AlgorithmEntry(one_shot.reduce_scatter, uneven=True),
        "rank_order": AlgorithmEntry(rank_order.reduce_scatter, uneven=True, ordered=True),
        "two_level": _levels(two_level.reduce_scatter, pipelined=True),
    },
    "scatter": {
        "linear": AlgorithmEntry(linear.scatter, uneven=True),
        "pairwise": AlgorithmEntry(pairwise.scatter, uneven=True),
        "binomial": AlgorithmEntry(tree.binomial_scatter),
        "one_shot": AlgorithmEntry(one_shot.scatter, uneven=True),
    },
    "all_to_all": {
        "linear": AlgorithmEntry(linear.all_to_all, uneven=True),
        "pairwise": AlgorithmEntry(pairwise.all_to_all, uneven=True),
        "bruck": AlgorithmEntry(bruck.all_to_all),
        "one_shot": AlgorithmEntry(one_shot.all_to_all, uneven=True),
        "two_level": _levels(two_level.all_to_all),
    },
    "scan": {
        "linear": AlgorithmEntry(scan.scan_chain, pipelined=True, ordered=True),
        "recursive_doubling": AlgorithmEntry(scan.scan_doubling),
    },
    "exscan": {
        "linear": AlgorithmEntry(scan.exscan_chain, pipelined=True, ordered=True),
        "recursive_doubling": AlgorithmEntry(scan.exscan_doubling),
    },
    "barrier": {
        "linear": AlgorithmEntry(linear.barrier),
        "dissemination": AlgorithmEntry(recursive_doubling.barrier),
        "one_shot": AlgorithmEntry(one_shot.barrier),
    },
}


def known_algorithms() -> list[str]:
    """Return the names of all algorithms, and of those that are registered."""
    return sorted({name for table in _TABLE.values() for name in table})


def operations_of(algorithm: str) -> dict[str, Callable[..., Schedule]]:
    """Return the builders of an algorithm by operation; {} if it is unknown."""
    found = {op: table[algorithm].builder for op, table in _TABLE.items() if algorithm in table}
    return {op: getattr(builder, "__wrapped__", builder) for op, builder in found.items()}


def entry(collective: str, algorithm: str) -> AlgorithmEntry:
    """Return the table's entry.

    Raises:
        InvalidArgumentError: Unknown collective or algorithm; the text lists the known names.
    """
    if collective not in _TABLE:
        raise InvalidArgumentError(
            f"unknown collective {collective!r} (known: {', '.join(COLLECTIVES)})"
        )
    if algorithm not in _TABLE[collective]:
        from difflib import get_close_matches  # slow to import, and needed for this error only

        known = ", ".join(_TABLE[collective])
        like = get_close_matches(algorithm, _TABLE[collective], 1)
        hint = f"is {like[0]!r} meant?" if like else None
        raise InvalidArgumentError(
            f"{collective} has no algorithm {algorithm!r} (it has: {known})", hint=hint
        )
    return _TABLE[collective][algorithm]


ALGORITHMS = tuple(known_algorithms())


def register_schedule(schedule: Schedule) -> None:
    """Prove a schedule, and let calls choose it by its name with `algorithm=`.

    It serves groups of its world size. Every rank must register it. A call in which a rank has
    not done so, or has another name for it or another schedule, raises an error on all ranks.

    Args:
        schedule: A schedule of a collective without a root, for instance of `from_msccl`.

    Raises:
        ScheduleError: The schedule is wrong.
        InvalidArgumentError: The collective has a root, or another algorithm has the name.
    """
    collective, name = schedule.collective, schedule.algorithm
    if collective in ROOTED:
        raise InvalidArgumentError(f"register {name!r}: {collective} has a root, expected none")
    size = schedule.world_size
    found = _TABLE[collective].get(name)
    if found is not None:
        if not (
            found.registered
            and name in available(collective, size)
            and digest(found.builder(size)) == digest(schedule)
        ):
            raise _taken(collective, name)
        return
    # Few processes register a schedule, and the proof is imported for these only.
    from unisono.core.schedules.verify import verify

    verify(schedule)
    _TABLE[collective][name] = AlgorithmEntry(
        lambda p: schedule,
        lambda p: p == size,
        f"world size {size}",
        uneven=schedule.uneven_ok,
        registered=True,
    )


def register_algorithm(
    collective: str,
    name: str,
    builder: Callable[..., Schedule],
    applies: Callable[[int], bool] | None = None,
) -> None:
    """Let calls choose a family of schedules by its name with `algorithm=`.

    The builder takes the world size, and by their names what it needs of `local` (ranks per host;
    it then serves several hosts with equally many), `root` and `pipeline`. Every rank must
    register the family. The schedule of a call is proved when it is built. Above 512 ranks up to
    three smaller worlds are proved in its place, unless the builder raises for them. A function
    that is defined again may be registered again. What groups have prepared stays.

    Args:
        collective: "all_reduce", "broadcast", ...
        name: The name of the algorithm.
        builder: Function that returns the schedule.
        applies: Function that returns whether the family has a world size; None: it has each.

    Raises:
        InvalidArgumentError: The collective is unknown, another algorithm has the name, the
            builder takes no root for a collective that has one, or `applies` raises for a size.
    """
    from inspect import signature

    entry(collective, "linear")
    takes = signature(builder).parameters
    if ("root" in takes) != (collective in ROOTED):
        needs = "a parameter" if collective in ROOTED else "no parameter"
        raise InvalidArgumentError(f"register {name!r}: {collective} needs {needs} `root`")
    serves = _never_raising(name, applies or (lambda size: True))
    names = [key for key in ("local", "root", "pipeline") if key in takes]
    family = ScheduleFamily(collective, name, builder, names, serves)

    def proved(size: int, *values: int) -> Schedule:
        given = dict(zip(names, values, strict=True))
        family.prove_size(size, given)
        return family.built(size, given)

    found = _TABLE[collective].get(name)
    known = None if found is None else getattr(found.builder, "__wrapped__", None)
    if found is not None and known != builder:
        if known is None or not _redefines(builder, known):
            raise _taken(collective, name)
        build.cache_clear()
        proved_sizes.cache_clear()
    proved.__wrapped__ = builder  # type: ignore[attr-defined]
    proved.family = family  # type: ignore[attr-defined]
    _TABLE[collective][name] = AlgorithmEntry(
        proved, serves, "what its family has", "pipeline" in takes,
        two_level="local" in takes, registered=True,
    )  # fmt: skip


@lru_cache(maxsize=256)
def proved_sizes(
    collective: str, algorithm: str, world_size: int, root: int = -1, local: int = 1
) -> tuple[int, ...]:
    """Return the world sizes whose proof stands for that of `world_size`.

    It is `world_size` itself, which `build` proves, except for a user's function above 512 ranks.

    Raises:
        ScheduleError: A smaller schedule is wrong.
    """
    family = getattr(entry(collective, algorithm).builder, "family", None)
    if family is None or world_size <= PROVED_RANKS:
        return (world_size,)
    values = {"local": local, "root": root, "pipeline": 1}
    found: tuple[int, ...] = family.prove_size(
        world_size, {key: values[key] for key in family.takes}
    )
    return found


def unproved(
    collective: str, algorithm: str, world_size: int, root: int, pipeline: int, local: int
) -> tuple[Schedule, ScheduleError | None]:
    """Return a schedule of a user's function, and how its proof fails, or None.

    Raises:
        InvalidArgumentError: The algorithm is shipped, hence proved. Or the function raises.
    """
    family = getattr(entry(collective, algorithm).builder, "family", None)
    if family is None:
        raise InvalidArgumentError(
            f"{collective} ({algorithm}) is proved: it is no user's function"
        )
    values = {"local": local, "root": root, "pipeline": pipeline}
    built: Schedule = family.built(world_size, {key: values[key] for key in family.takes})
    try:
        family.prove(built)
    except ScheduleError as error:
        return built, error
    return built, None


def _taken(collective: str, name: str) -> InvalidArgumentError:
    """Return the error for a name that another algorithm has."""
    owner = "was registered" if _TABLE[collective][name].registered else "comes with unisono"
    return InvalidArgumentError(
        f"register {name!r}: {collective} has another such algorithm",
        hint=f"{name!r} {owner}: rename yours",
    )


def _never_raising(name: str, applies: Callable[[int], bool]) -> Callable[[int], bool]:
    """Return a condition that is False where `applies` raises; it must not for 1 to 8 ranks."""
    for size in range(1, 9):
        try:
            applies(size)
        except Exception as error:
            raise InvalidArgumentError(
                f"register {name!r}: `applies` raised {error!r} for {size} ranks"
            ) from error

    def serves(size: int) -> bool:
        try:
            return bool(applies(size))
        except Exception as error:
            # Calls of other algorithms ask, too.
            _log.warning("%r does not serve %d ranks: `applies` raised %r", name, size, error)
            return False

    return serves


def _redefines(new: Callable[..., Schedule], old: Callable[..., Schedule]) -> bool:
    """Return whether a function has the place of another, as a cell that runs again makes it."""
    places = [(getattr(f, "__module__", ""), getattr(f, "__qualname__", "<")) for f in (new, old)]
    return places[0] == places[1] and "<" not in places[0][1]


def _same(first: Schedule, second: Schedule) -> bool:
    """Return whether two schedules of the same ranks have the same rows."""
    ranks = np.arange(first.world_size)
    return first.stages == second.stages and all(
        np.array_equal(first.steps(k, ranks), second.steps(k, ranks)) for k in range(first.stages)
    )


def digest(schedule: Schedule) -> str:
    """Return a text that is equal for two schedules with the same chunks and rows of all ranks."""
    ranks = np.arange(schedule.world_size)
    chunks = (schedule.input_chunks, schedule.output_chunks, schedule.scratch_chunks)
    found = blake2b(repr((schedule.stages, *chunks)).encode(), digest_size=8)
    for k in range(schedule.stages):
        rows = schedule.steps(k, ranks)
        found.update(len(rows).to_bytes(8, "little") + rows.tobytes())
    return found.hexdigest()


def available(
    collective: str,
    world_size: int,
    *,
    uneven: bool = False,
    ordered: bool = False,
    local: int = 1,
) -> tuple[str, ...]:
    """Return the algorithms that serve `collective` for this world size.

    Args:
        collective: "all_reduce", "broadcast", ...
        world_size: Number of ranks that take part.
        uneven: Return only algorithms that allow blocks of different size.
        ordered: For a collective that reduces, return only algorithms that reduce in the order
            of ranks.
        local: Ranks per host, if they are numbered host by host.

    Raises:
        InvalidArgumentError: Unknown collective.
    """
    entry(collective, "linear")
    known = tuple(_TABLE[collective].items())
    return _available(known, world_size, uneven, ordered and collective in REDUCING, local)


@lru_cache(maxsize=256)
def _available(
    known: tuple[tuple[str, AlgorithmEntry], ...],
    world_size: int,
    uneven: bool,
    ordered: bool,
    local: int,
) -> tuple[str, ...]:
    found, levels = [], 1 < local < world_size and world_size % local == 0
    for name, each in known:
        fits = (each.uneven or not uneven) and (each.ordered or not ordered)
        fits = fits and (levels or not each.two_level)
        if fits and (each.applies is None or each.applies(world_size)):
            found.append(name)
    return tuple(found)


@lru_cache(maxsize=4096)
def build(
    collective: str,
    algorithm: str,
    world_size: int,
    root: int = -1,
    pipeline: int = 1,
    local: int = 1,
) -> Schedule:
    """Return the schedule; the same object for the same arguments.

    Args:
        collective: "all_reduce", "broadcast", ...
        algorithm: "ring", "linear", ...; see `available`.
        world_size: Number of ranks that take part.
        root: The root's rank; -1 for a collective without a root.
        pipeline: Number of chunks in the pipeline; 1 for algorithms without a pipeline.
        local: Ranks per host or node, for algorithms with two levels; see `Topology.local`.

    Raises:
        InvalidArgumentError: A name is unknown, or the algorithm does not serve this world size.
            The root is outside the world or not needed, or the pipeline depth is not allowed.
    """
    found = entry(collective, algorithm)
    name = f"{collective} ({algorithm})"
    if world_size < 1:
        raise InvalidArgumentError(f"{name}: world size is {world_size}, expected 1 or more")
    serving = available(collective, world_size, local=local)
    if algorithm not in serving:
        usable = ", ".join(serving)
        raise InvalidArgumentError(
            f"{name} needs {found.needs}, got {world_size} (for {world_size}: {usable})"
        )
    if pipeline < 1 or (pipeline > 1 and not found.pipelined):
        expected = "1 or more" if found.pipelined else "1: it has no pipeline"
        raise InvalidArgumentError(f"{name}: pipeline depth is {pipeline}, expected {expected}")
    if collective not in ROOTED and root != -1:
        raise InvalidArgumentError(f"{name} has no root, got root {root}")
    if collective in ROOTED and not 0 <= root < world_size:
        raise InvalidArgumentError(f"{name}: root is {root}, expected 0..{world_size - 1}")
    extra = [local] if found.two_level else []
    extra += [root] if collective in ROOTED else []
    extra += [pipeline] if found.pipelined else []
    return found.builder(world_size, *extra)


@lru_cache(maxsize=4096)
def own_digest(
    collective: str, algorithm: str, world_size: int, root: int, pipeline: int, local: int
) -> str:
    """Return the digest of a user's schedule, of which the name says nothing; else ""."""
    if not entry(collective, algorithm).registered:
        return ""
    return digest(build(collective, algorithm, world_size, root, pipeline, local))
