"""What the search changes: a shipped algorithm, levels of mixed radix, or trees on given links."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations, product
from math import gcd, isfinite
from random import Random

from unisono.core.schedules.algorithms.multi_level import COLLECTIVES, Level, digits, levelled
from unisono.core.schedules.ir import ROOTED, Schedule
from unisono.core.schedules.pipeline import MAX_PIPELINE
from unisono.core.schedules.registry import build, entry
from unisono.workbench.simulate import FullyConnected, Graph, Machine, Network, Torus
from unisono.workbench.synthesize.trees import schedule_of, spread

# An all_to_all has a tree per pair of ranks, which these are not.
_WITH_TREES = COLLECTIVES[:-1]
# The random search of trees on more ranks takes seconds for each.
_TREE_RANKS = 64
_LENGTHS, _PIECES = (1, 1, 2, 2, 3, 4), (1, 2, 3, 4, 6, 8, 12, 16)
# Orders of more levels are left to the changes.
_ORDERED = 3


@dataclass(frozen=True)
class Problem:
    """What is searched for.

    Attributes:
        op: "all_reduce", ...
        ranks: World size.
        local: Ranks per host, or 1.
        root: The root, or -1.
        nbytes: Size of the whole data.
        machine: The machine.
        network: Its links.
    """

    op: str
    ranks: int
    local: int
    root: int
    nbytes: int
    machine: Machine
    network: Network


@dataclass(frozen=True)
class Shipped:
    """A shipped algorithm, with a pipeline depth."""

    name: str
    depth: int

    def __str__(self) -> str:
        """Return the name and the depth."""
        return self.name + _pieces(self.depth)

    def schedule(self, problem: Problem) -> Schedule:
        """Return its schedule."""
        root = problem.root if problem.op in ROOTED else -1
        return build(problem.op, self.name, problem.ranks, root, self.depth, problem.local)

    def changed(self, problem: Problem, random: Random) -> Shipped:
        """Return the algorithm with another depth."""
        depth = _other_depth(self.depth, random)
        return replace(self, depth=depth) if entry(problem.op, self.name).pipelined else self


@dataclass(frozen=True)
class Levels:
    """Levels in their order, with a pipeline depth."""

    levels: tuple[Level, ...]
    depth: int = 1

    def __str__(self) -> str:
        """Return each level as radix x distance, and its way."""
        each = [f"{level.radix} x {level.stride} {level.way}" for level in self.levels]
        return f"levels {', '.join(each)}" + _pieces(self.depth)

    def schedule(self, problem: Problem) -> Schedule:
        """Return their schedule."""
        root = problem.root if problem.op in ROOTED else -1
        return levelled(problem.op, problem.ranks, self.levels, self.depth, root)

    def changed(self, problem: Problem, random: Random) -> Levels:
        """Return the levels with another order, way, radix, depth or number of whole levels."""
        levels, kind = list(self.levels), random.randrange(6)
        at = random.randrange(len(levels))
        if kind == 0 and problem.op in _WITH_TREES:
            return replace(self, depth=_other_depth(self.depth, random))
        if kind == 1:
            other = random.randrange(len(levels))
            levels[at], levels[other] = levels[other], levels[at]
        elif kind == 2:
            way = "ring" if levels[at].way == "at once" else "at once"
            levels[at] = levels[at]._replace(way=way)
        elif kind == 3:
            levels = _split(levels, at, random)
        elif kind == 4:
            levels = _merged(levels, at)
        whole = sum(level.way == "whole" for level in levels)
        if kind == 5 and problem.op == "all_reduce":
            whole += random.choice((-1, 1))
        return replace(self, levels=_with_whole(levels, whole))


@dataclass(frozen=True)
class Trees:
    """Chunks of each owner, the rounds of each step, and the number of the random search."""

    pieces: int
    lengths: tuple[int, ...]
    seed: int

    def __str__(self) -> str:
        """Return the chunks and the steps."""
        steps = "+".join(map(str, self.lengths))
        return f"trees, {self.pieces} chunks, steps of {steps} rounds (search {self.seed})"

    def schedule(self, problem: Problem) -> Schedule | None:
        """Return their schedule, or None if no link leads on."""
        p, rooted = problem.ranks, problem.op in ROOTED
        owners = [problem.root] if rooted else list(range(p))
        lanes = links_of(problem.network)
        found = spread(
            p, lanes, [r for r in owners for _ in range(self.pieces)], self.lengths,
            Random(self.seed),
        )  # fmt: skip
        root = problem.root if rooted else -1
        return found and schedule_of(problem.op, p, self.pieces, found, root)

    def changed(self, problem: Problem, random: Random) -> Trees:
        """Return another search, with other chunks or steps."""
        lengths, pieces, kind = list(self.lengths), self.pieces, random.randrange(5)
        if kind == 0:
            pieces = random.choice(_pieces_of(problem.op))
        elif kind == 1:
            lengths[random.randrange(len(lengths))] = random.choice(_LENGTHS)
        elif kind == 2:
            lengths = [*lengths, random.choice(_LENGTHS)] if len(lengths) < 8 else lengths[:-1]
        elif kind == 3 and len(lengths) > 1:
            lengths.pop(random.randrange(len(lengths)))
        return Trees(pieces, tuple(lengths), random.randrange(1 << 16))


Plan = Shipped | Levels | Trees


def links_of(network: Network) -> dict[tuple[int, int], int]:
    """Return how often each link has the least bandwidth; {} if ranks have no links of their own.

    A link of less than a 16th of the widest counts as that, one of no limit as the widest.
    """
    p = network.size
    gbps: dict[tuple[int, int], float] = {}
    if isinstance(network, Graph):
        gbps = {ends: spec.gbps for ends, spec in network.edges.items()}
    elif isinstance(network, FullyConnected):
        gbps = dict.fromkeys(permutations(range(p), 2), 1.0)
    elif isinstance(network, Torus):
        wide, high = network.width, network.height
        for rank in range(p):
            y, x = divmod(rank, wide)
            ways = [(y, x + 1), (y, x - 1), (y + 1, x), (y - 1, x)]
            ends = {(y % high) * wide + x % wide for y, x in ways} - {rank}
            gbps |= {(rank, end): 1.0 for end in ends}
    if p > _TREE_RANKS or not gbps:
        return {}
    widest = max(filter(isfinite, gbps.values()), default=1.0)
    gbps = {ends: min(each, widest) for ends, each in gbps.items()}
    least = max(min(gbps.values()), widest / 16)
    return {ends: max(1, round(each / least)) for ends, each in gbps.items()}


def first_plans(problem: Problem, random: Random) -> Iterator[Plan]:
    """Yield the plans from which the search begins, apart from the shipped algorithms."""
    p, local = problem.ranks, problem.local
    if problem.op in COLLECTIVES and p > 1:
        sizes = {tuple(n for n in (local, p // local) if n > 1), (p,), tuple(_primes(p))}
        if local > 1:
            sizes.add((local, *_primes(p // local)))
        for radices in sorted(sizes):
            levels = list(digits(p, radices))
            orders = permutations(levels) if len(levels) <= _ORDERED else [levels, levels[::-1]]
            for order in orders:
                for ways in sorted(set(_ways(len(levels)))):
                    named = [x._replace(way=way) for x, way in zip(order, ways, strict=True)]
                    yield Levels(tuple(named))
                if problem.op == "all_reduce":
                    for whole in range(1, len(levels) + 1):
                        yield Levels(_with_whole(list(order), whole))
    if problem.op in _WITH_TREES and links_of(problem.network):
        for pieces in _pieces_of(problem.op):
            for lengths in ((1,), (1, 2), (2, 1), (3, 2), (2, 2, 3)):
                yield Trees(pieces, lengths, random.randrange(1 << 16))


def _ways(count: int) -> Iterator[tuple[str, ...]]:
    ways = ("at once", "ring")
    if count <= _ORDERED:
        yield from product(ways, repeat=count)
    else:
        yield from ((way,) * count for way in ways)


def _with_whole(levels: Sequence[Level], whole: int) -> tuple[Level, ...]:
    """Return the levels, of which the last ones are whole."""
    first = len(levels) - min(max(whole, 0), len(levels))
    return tuple(
        level._replace(
            way="whole" if i >= first else "at once" if level.way == "whole" else level.way
        )
        for i, level in enumerate(levels)
    )


def _split(levels: list[Level], at: int, random: Random) -> list[Level]:
    level = levels[at]
    parts = [n for n in range(2, level.radix) if level.radix % n == 0]
    if not parts:
        return levels
    near = random.choice(parts)
    two = [
        level._replace(radix=near),
        level._replace(radix=level.radix // near, stride=level.stride * near),
    ]
    random.shuffle(two)
    return [*levels[:at], *two, *levels[at + 1 :]]


def _merged(levels: list[Level], at: int) -> list[Level]:
    level = levels[at]
    beyond = level.stride * level.radix
    for other in levels:
        if other.stride == beyond:
            joined = level._replace(radix=level.radix * other.radix)
            return [joined if x is level else x for x in levels if x is not other]
    return levels


def _other_depth(depth: int, random: Random) -> int:
    return max(1, min(MAX_PIPELINE, depth * 2 if random.random() < 0.6 else depth // 2))


def _primes(n: int) -> Iterator[int]:
    for factor in range(2, n + 1):
        while gcd(n, factor) == factor:
            yield factor
            n //= factor


def _pieces_of(op: str) -> list[int]:
    """Return numbers of chunks per owner; a root owns all chunks."""
    return [count * 8 if op in ROOTED and count > 1 else count for count in _PIECES]


def _pieces(depth: int) -> str:
    return f", {depth} pieces" if depth > 1 else ""
