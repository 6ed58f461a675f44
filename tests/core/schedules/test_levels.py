"""Levels of mixed radix: each order, way and depth is proved; rounds and bytes equal formulas."""

import random
from fractions import Fraction
from itertools import permutations, product
from math import prod

import pytest

from unisono.core.schedules.algorithms.multi_level import COLLECTIVES, Level, digits, levelled
from unisono.core.schedules.cost import cost
from unisono.core.schedules.msccl import from_msccl, to_msccl
from unisono.core.schedules.verify import verify
from unisono.errors import InvalidArgumentError

RADICES = [(2,), (3,), (5,), (2, 2), (3, 2), (2, 3), (4, 2), (2, 2, 2), (3, 2, 2), (2, 4, 2)]


def cases(collective):
    """Yield the levels in each order and way, and with the last ones whole."""
    for radices in RADICES:
        for order in permutations(digits(prod(radices), radices)):
            for ways in product(("at once", "ring"), repeat=len(order)):
                levels = [each._replace(way=way) for each, way in zip(order, ways, strict=True)]
                yield levels
                for whole in range(1, len(levels) + 1 if collective == "all_reduce" else 1):
                    kept = levels[: len(levels) - whole]
                    yield kept + [x._replace(way="whole") for x in levels[len(kept) :]]


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_levels_are_proved(collective):
    every, chance = list(cases(collective)), random.Random(7)
    for levels in chance.sample(every, 60):
        p = prod(level.radix for level in levels)
        root = chance.randrange(p) if collective in ("broadcast", "reduce") else -1
        depth = 1 if collective == "all_to_all" else chance.choice((1, 3))
        verify(levelled(collective, p, levels, depth, root))


@pytest.mark.parametrize("radices", RADICES)
@pytest.mark.parametrize("way", ["at once", "ring"])
def test_rounds_and_bytes(radices, way):
    p = prod(radices)
    levels = [level._replace(way=way) for level in digits(p, radices)]
    turns = sum(radix - 1 if way == "ring" else 1 for radix in radices)
    for collective, ways in (("all_gather", 1), ("reduce_scatter", 1), ("all_reduce", 2)):
        counted = cost(levelled(collective, p, levels))
        assert counted.rounds == ways * turns
        assert counted.bytes_sent == Fraction(ways * (p - 1), p)
        assert cost(levelled(collective, p, levels, 4)).rounds == ways * turns + 3
    whole = [level._replace(way="whole") for level in levels]
    counted = cost(levelled("all_reduce", p, whole))
    assert (counted.rounds, counted.bytes_sent) == (len(radices), sum(radices) - len(radices))


def test_a_program_of_msccl_that_is_read_back_is_the_same():
    levels = [Level(4, 1), Level(2, 4, "ring"), Level(2, 8, "whole")]
    for collective in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        chosen = levels if collective == "all_reduce" else [x._replace(way="ring") for x in levels]
        schedule = levelled(collective, 16, chosen)
        again = from_msccl(to_msccl(schedule))
        verify(again)
        first, second = cost(schedule), cost(again)
        assert (first.messages, first.bytes_sent) == (second.messages, second.bytes_sent)


@pytest.mark.parametrize(
    ("collective", "p", "levels", "depth"),
    [
        ("all_reduce", 8, [Level(4, 1)], 1),
        ("all_reduce", 4, [Level(2, 1), Level(2, 1)], 1),
        ("all_reduce", 4, [Level(4, 1, "sideways")], 1),
        ("all_reduce", 4, [Level(2, 1, "whole"), Level(2, 2)], 1),
        ("all_gather", 4, [Level(2, 1), Level(2, 2, "whole")], 1),
        ("all_gather", 4, [Level(4, 1)], 0),
        ("all_to_all", 4, [Level(4, 1)], 2),
        ("barrier", 4, [Level(4, 1)], 1),
    ],
)
def test_wrong_levels_are_refused(collective, p, levels, depth):
    with pytest.raises(InvalidArgumentError, match="expected each digit once, and whole levels "):
        levelled(collective, p, levels, depth)
