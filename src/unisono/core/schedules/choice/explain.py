"""Explain a choice of `select`: where it comes from, and at which sizes it changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from unisono.core.schedules.choice.far import far_apart
from unisono.core.schedules.choice.select import Topology, select
from unisono.core.schedules.choice.tables import ChoiceTable
from unisono.core.schedules.ir import REDUCING

# Sizes above this are not looked at.
_LARGEST = 1 << 40


class Interval(NamedTuple):
    """The sizes at which the default rule makes the same choice.

    Attributes:
        least: Smallest size in bytes.
        most: Largest size; None if there is no limit.
        below: The choice for smaller data, or None.
        above: The choice for larger data, or None.
    """

    least: int
    most: int | None
    below: str | None
    above: str | None


def interval(collective: str, nbytes: int, topology: Topology) -> Interval:
    """Return the sizes around `nbytes` at which the default rule makes the same choice."""

    def choice(size: int) -> str:
        return select(collective, size, topology).algorithm

    own = choice(nbytes)
    least, most, below, above = nbytes, nbytes, None, None
    while least and below is None:
        if (other := choice(least // 2)) != own:
            below, least = other, _border(choice, own, least, least // 2)
        else:
            least //= 2
    while most < _LARGEST and above is None:
        size = max(1, 2 * most)
        if (other := choice(size)) != own:
            above, most = other, _border(choice, own, most, size)
        else:
            most = size
    return Interval(least, None if above is None else most, below, above)


def reason(
    collective: str,
    nbytes: int,
    topology: Topology,
    algorithm: str | None = None,
    override: str = "",
    table: ChoiceTable | None = None,
    *,
    ordered: bool = False,
) -> str:
    """Return why `select` makes its choice, as the end of a sentence.

    Args:
        collective: As for `select`, like all other arguments.
        nbytes: Bytes of the whole data.
        topology: The world.
        algorithm: The caller's choice.
        override: The text of UNISONO_ALGO.
        table: Measured choices.
        ordered: Whether to reduce in the order of ranks.
    """
    chosen = select(
        collective, nbytes, topology, algorithm, override, ordered=ordered, table=table
    ).algorithm
    if algorithm is not None:
        return "the call asks for it"
    free = select(collective, nbytes, topology, ordered=ordered, table=table).algorithm
    if free != chosen:
        return f"UNISONO_ALGO={override} permits it, and does not permit {free}"
    if ordered and collective in REDUCING:
        return "UNISONO_DETERMINISTIC reduces in the order of ranks"
    rule = table and table.rule(collective, nbytes)
    if table is not None and rule and rule.algorithm == chosen:
        sizes = f"{nbytes_text(rule.least)} to {nbytes_text(rule.most)}"
        return f"table {table.digest} has it for {sizes}"
    found = interval(collective, nbytes, topology)
    if far_apart(topology.world_size, topology.round_trip_us):
        trip = f"{topology.round_trip_us / 1000:g} ms between hosts"
        return _rule_text(found, f"the built-in estimate for {trip} has it")
    p, local = topology.world_size, topology.local
    if topology.shared_memory and 1 < local < p:
        return _rule_text(found, f"the built-in estimate for {p // local} nodes has it")
    return _rule_text(found, "the built-in rule has it")


def _rule_text(found: Interval, text: str) -> str:
    if found.below is None and found.most is None:
        return f"{text} for all sizes"
    if found.below is not None:
        text += f" from {nbytes_text(found.least)} on ({found.below} below)"
    if found.most is not None:
        text += f" up to {nbytes_text(found.most)} ({found.above} above)"
    return text


def nbytes_text(nbytes: int) -> str:
    """Return a size with a unit if it is a whole number of units, else in bytes."""
    for shift, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if nbytes and nbytes % (1 << shift) == 0:
            return f"{nbytes >> shift} {unit}"
    return f"{nbytes:,} B"


def _border(choice: Callable[[int], str], own: str, inside: int, outside: int) -> int:
    """Return the last size, from `inside` to `outside`, at which the choice is `own`."""
    while abs(inside - outside) > 1:
        middle = (inside + outside) // 2
        if choice(middle) == own:
            inside = middle
        else:
            outside = middle
    return inside
