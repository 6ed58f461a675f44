"""Derive the rules of a table from measured times.

Two measurements of one call differ by more than most algorithms do. An algorithm thus replaces the
built-in choice only if it is faster by a margin in the mean, and faster in each pass.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

from unisono.core.schedules.choice.select import Topology, select
from unisono.core.schedules.choice.tables import GroupShape, Measured, Rule

# The mean time of a new choice, relative to the built-in choice. Nearer to 1, noise makes rules
# that lose in the next run. Farther from 1, real gains are left out.
MARGIN = 0.9
# One pass cannot show that a choice wins again.
LEAST_PASSES = 2
# A choice also holds for sizes up to this multiple of the largest measured size.
BEYOND = 4


def rules_of(measured: Measured, topology: Topology) -> tuple[Rule, ...]:
    """Return the rules that measured times give.

    A rule reaches half the way to the next size, on a logarithmic scale. The rule of the smallest
    size reaches to 0.

    Args:
        measured: Times of algorithms, in the same passes for all algorithms of a size.
        topology: The group that was measured.
    """
    rules: list[Rule] = []
    for collective in dict.fromkeys(collective for collective, _ in measured):
        sizes = sorted(nbytes for name, nbytes in measured if name == collective)
        cells = [measured[collective, nbytes] for nbytes in sizes]
        built_in = [select(collective, nbytes, topology).algorithm for nbytes in sizes]
        chosen = [_winner(cell, name) for cell, name in zip(cells, built_in, strict=True)]
        _join(chosen, cells, built_in)
        middles = [math.isqrt(low * high) for low, high in pairwise(sizes)]
        for at, name in enumerate(chosen):
            if name is None:
                continue
            least = middles[at - 1] + 1 if at else 0
            most = middles[at] if at < len(middles) else BEYOND * sizes[at]
            if rules and rules[-1] == (collective, rules[-1].least, least - 1, name):
                least = rules.pop().least
            rules.append(Rule(collective, least, most, name))
    return tuple(rules)


def topology_of(shape: GroupShape) -> Topology:
    """Return the properties of a group of this shape on which choices depend."""
    shared = shape.over == "shared-memory"
    return Topology(shape.ranks, shared, shape.local, shape.round_trip_us)


def mean_us(times: Sequence[float]) -> float:
    """Return the geometric mean of times."""
    return math.exp(sum(map(math.log, times)) / len(times))


def _winner(cell: Mapping[str, tuple[float, ...]], built_in: str) -> str | None:
    """Return the algorithm that replaces the built-in choice, or None."""
    base = cell.get(built_in, ())
    full = {name: times for name, times in cell.items() if times and len(times) == len(base)}
    if len(base) < LEAST_PASSES:
        return None
    best = min(full, key=lambda name: mean_us(full[name]))
    wins = all(own < other for own, other in zip(full[best], base, strict=True))
    return best if wins and mean_us(full[best]) < MARGIN * mean_us(base) else None


def _join(
    chosen: list[str | None],
    cells: Sequence[Mapping[str, tuple[float, ...]]],
    built_in: Sequence[str],
) -> None:
    """Close a hole of one size between two equal choices, if the choice loses nothing there."""
    for at in range(1, len(chosen) - 1):
        before, name, after = chosen[at - 1 : at + 2]
        if name is None and before is not None and before == after:
            own, base = cells[at].get(before, ()), cells[at].get(built_in[at], ())
            if own and base and mean_us(own) <= mean_us(base):
                chosen[at] = before
