"""Step and byte counts against the published formulas; n = 1, so bytes are factors of n."""

from fractions import Fraction
from math import ceil, log2

import pytest

from unisono.core.schedules.cost import cost
from unisono.core.schedules.registry import available, build

WORLD_SIZES = [*range(2, 34), 64]
POWERS = [2, 4, 8, 16, 32, 64]
OTHERS = [p for p in WORLD_SIZES if p not in POWERS]


def floor_lg(p):
    return p.bit_length() - 1


def ceil_lg(p):
    return ceil(log2(p))


def part(p):
    """(p-1)/p, the share of the data that has to leave a rank."""
    return Fraction(p - 1, p)


def popcounts(p):
    return sum(i.bit_count() for i in range(1, p))


# (collective, algorithm, world sizes, rounds, bytes sent, bytes reduced)
FORMULAS = [
    ("all_reduce", "ring", WORLD_SIZES, lambda p: 2 * (p - 1), lambda p: 2 * part(p), part),
    (
        "all_reduce",
        "two_way_ring",
        WORLD_SIZES,
        lambda p: 2 * (p - 1),
        lambda p: 2 * part(p),
        part,
    ),
    ("all_reduce", "swing", POWERS, lambda p: 2 * floor_lg(p), lambda p: 2 * part(p), part),
    (
        "all_reduce",
        "recursive_multiplying",
        POWERS,
        lambda p: ceil(floor_lg(p) / 2),
        lambda p: 3 * (floor_lg(p) // 2) + floor_lg(p) % 2,
        lambda p: 3 * (floor_lg(p) // 2) + floor_lg(p) % 2,
    ),
    ("all_gather", "two_way_ring", WORLD_SIZES, lambda p: p // 2, part, lambda p: 0),
    ("all_gather", "far_first", WORLD_SIZES, ceil_lg, part, lambda p: 0),
    ("reduce_scatter", "far_first", WORLD_SIZES, ceil_lg, part, part),
    ("broadcast", "bine", POWERS, floor_lg, floor_lg, lambda p: 0),
    ("reduce", "bine", POWERS, floor_lg, lambda p: 1, floor_lg),
    ("all_reduce", "recursive_doubling", POWERS, floor_lg, floor_lg, floor_lg),
    (
        "all_reduce",
        "recursive_doubling",
        OTHERS,
        lambda p: floor_lg(p) + 2,
        lambda p: floor_lg(p) + 1,
        lambda p: floor_lg(p) + 1,
    ),
    (
        "all_reduce",
        "halving_doubling",
        POWERS,
        lambda p: 2 * floor_lg(p),
        lambda p: 2 * part(p),
        part,
    ),
    (
        "all_reduce",
        "halving_doubling",
        OTHERS,
        lambda p: 2 * floor_lg(p) + 2,
        lambda p: 2 * part(1 << floor_lg(p)) + 1,
        lambda p: part(1 << floor_lg(p)) + 1,
    ),
    ("all_reduce", "one_shot", WORLD_SIZES, lambda p: 1, lambda p: p - 1, lambda p: p - 1),
    ("all_reduce", "two_shot", WORLD_SIZES, lambda p: 2, lambda p: 2 * part(p), part),
    ("all_reduce", "cube_mesh", [8], lambda p: 2, lambda p: 4, lambda p: 4),
    ("all_reduce", "linear", WORLD_SIZES, lambda p: 2 * (p > 1), lambda p: p - 1, lambda p: p - 1),
    ("reduce_scatter", "ring", WORLD_SIZES, lambda p: p - 1, part, part),
    ("reduce_scatter", "pairwise", WORLD_SIZES, lambda p: p - 1, part, part),
    ("reduce_scatter", "linear", WORLD_SIZES, lambda p: p - 1, part, part),
    ("reduce_scatter", "halving_doubling", POWERS, floor_lg, part, part),
    ("reduce_scatter", "one_shot", WORLD_SIZES, lambda p: 1, part, part),
    ("all_gather", "ring", WORLD_SIZES, lambda p: p - 1, part, lambda p: 0),
    ("all_gather", "recursive_doubling", POWERS, floor_lg, part, lambda p: 0),
    ("all_gather", "bruck", WORLD_SIZES, ceil_lg, part, lambda p: 0),
    ("all_gather", "linear", WORLD_SIZES, lambda p: p - 1, part, lambda p: 0),
    ("all_gather", "one_shot", WORLD_SIZES, lambda p: 1, part, lambda p: 0),
    ("all_to_all", "pairwise", WORLD_SIZES, lambda p: p - 1, part, lambda p: 0),
    ("all_to_all", "linear", WORLD_SIZES, lambda p: min(p - 1, 1), part, lambda p: 0),
    ("all_to_all", "one_shot", WORLD_SIZES, lambda p: 1, part, lambda p: 0),
    ("all_to_all", "bruck", WORLD_SIZES, ceil_lg, lambda p: Fraction(popcounts(p), p), lambda p: 0),
    ("all_to_all", "bruck", POWERS, ceil_lg, lambda p: Fraction(ceil_lg(p), 2), lambda p: 0),
    ("broadcast", "binomial", WORLD_SIZES, ceil_lg, ceil_lg, lambda p: 0),
    ("broadcast", "linear", WORLD_SIZES, lambda p: min(p - 1, 1), lambda p: p - 1, lambda p: 0),
    (
        "broadcast",
        "halving_doubling",
        POWERS,
        lambda p: 2 * floor_lg(p),
        lambda p: 2 * part(p),
        lambda p: 0,
    ),
    (
        "broadcast",
        "halving_doubling",
        OTHERS,
        lambda p: ceil_lg(p) + p - 1,
        lambda p: 2 * part(p),
        lambda p: 0,
    ),
    ("reduce", "binomial", WORLD_SIZES, ceil_lg, lambda p: 1, ceil_lg),
    ("reduce", "halving_doubling", POWERS, lambda p: 2 * floor_lg(p), None, part),
    ("reduce", "linear", WORLD_SIZES, lambda p: min(p - 1, 1), lambda p: 1, lambda p: p - 1),
    ("gather", "linear", WORLD_SIZES, lambda p: +(p > 1), lambda p: Fraction(1, p), lambda p: 0),
    ("gather", "pairwise", WORLD_SIZES, lambda p: p - 1, lambda p: Fraction(1, p), lambda p: 0),
    ("scatter", "linear", WORLD_SIZES, lambda p: min(p - 1, 1), part, lambda p: 0),
    ("scatter", "pairwise", WORLD_SIZES, lambda p: p - 1, part, lambda p: 0),
    ("scatter", "binomial", WORLD_SIZES, ceil_lg, part, lambda p: 0),
    ("barrier", "dissemination", WORLD_SIZES, ceil_lg, ceil_lg, lambda p: 0),
    ("barrier", "one_shot", WORLD_SIZES, lambda p: 1, lambda p: p - 1, lambda p: 0),
]


@pytest.mark.parametrize(
    ("collective", "algorithm", "world_sizes", "rounds", "sent", "reduced"), FORMULAS
)
def test_counts_equal_the_formulas(collective, algorithm, world_sizes, rounds, sent, reduced):
    rooted = collective in ("broadcast", "reduce", "gather", "scatter")
    for p in world_sizes:
        counted = cost(build(collective, algorithm, p, p // 2 if rooted else -1))
        assert counted.rounds == rounds(p), p
        assert counted.bytes_reduced == reduced(p), p
        if sent is not None:
            assert counted.bytes_sent == sent(p), p


@pytest.mark.parametrize("p", POWERS)
def test_reduce_by_halving_sends_at_most_twice_the_vector(p):
    # The last sender has given away all but its chunk, and then gives all it has gathered.
    counted = cost(build("reduce", "halving_doubling", p, 0))
    assert counted.bytes_sent <= 2 * part(p)
    assert counted.critical_bytes == 2 * part(p)


@pytest.mark.parametrize("p", WORLD_SIZES)
@pytest.mark.parametrize("m", [1, 2, 7])
def test_pipelined_chain(p, m):
    """p-2+m rounds of n/m bytes: T = (p-2+m)(alpha + beta n/m)."""
    counted = cost(build("broadcast", "ring", p, p - 1, m), 840)
    assert counted.rounds == p - 2 + m
    assert counted.bytes_sent == 840
    assert counted.critical_bytes == Fraction(840 * (p - 2 + m), m)
    assert counted.time(2.0, 0.5) == pytest.approx((p - 2 + m) * (2.0 + 0.5 * 840 / m))


@pytest.mark.parametrize("p", WORLD_SIZES)
@pytest.mark.parametrize("m", [1, 4])
def test_double_tree_bounds(p, m):
    both = cost(build("all_reduce", "double_tree", p, -1, m))
    assert both.rounds == 2 * ceil_lg(p) - 1 + m
    assert both.bytes_sent <= 2
    assert both.bytes_received <= 2
    assert both.bytes_reduced <= 1
    for collective in ("broadcast", "reduce"):
        one_way = cost(build(collective, "double_tree", p, p // 3, m))
        assert one_way.rounds <= 2 * ceil_lg(p) + 2 * m
        assert one_way.rounds == ceil_lg(p - 1) + m
        assert one_way.bytes_sent <= 1
        assert one_way.bytes_reduced <= 1


@pytest.mark.parametrize("p", WORLD_SIZES)
def test_binary_tree(p):
    height = floor_lg(p)
    assert cost(build("broadcast", "tree", p, 0, 3)).rounds == height + 2
    assert cost(build("reduce", "tree", p, 0, 3)).rounds == height + 2
    both = cost(build("all_reduce", "tree", p, -1, 3))
    assert both.rounds == 2 * height + 2
    assert both.bytes_sent <= 3


@pytest.mark.parametrize("p", WORLD_SIZES)
def test_two_shot_pipeline_reads_no_more(p):
    counted = cost(build("all_reduce", "two_shot", p, -1, 5))
    assert counted.rounds == 6
    assert counted.bytes_received == 2 * part(p)
    assert counted.bytes_reduced == part(p)


@pytest.mark.parametrize("p", OTHERS)
def test_folded_reduce_scatter(p):
    counted = cost(build("reduce_scatter", "halving_doubling", p))
    assert counted.rounds == floor_lg(p) + 2
    assert counted.bytes_sent <= part(p) + 1


@pytest.mark.parametrize("p", WORLD_SIZES)
def test_binomial_gather_fills_the_root(p):
    counted = cost(build("gather", "binomial", p, p - 1))
    assert counted.rounds == ceil_lg(p)
    assert counted.bytes_received == part(p)


def test_published_samples():
    """Values worked out by hand in the literature for 13, 6 and 1000 ranks."""
    assert cost(build("all_reduce", "ring", 13)).bytes_sent == Fraction(24, 13)
    doubling = cost(build("all_reduce", "recursive_doubling", 13))
    assert (doubling.rounds, doubling.bytes_sent) == (5, 4)
    rabenseifner = cost(build("all_reduce", "halving_doubling", 13))
    assert (rabenseifner.rounds, rabenseifner.bytes_sent) == (8, Fraction(11, 4))
    assert cost(build("all_gather", "bruck", 13)).rounds == 4
    assert cost(build("all_to_all", "bruck", 13)).bytes_sent == Fraction(22, 13)
    assert cost(build("all_to_all", "bruck", 6)).bytes_sent == Fraction(7, 6)
    thousand = cost(build("all_to_all", "bruck", 1000))
    assert (thousand.rounds, thousand.bytes_sent) == (10, Fraction(1233, 250))


@pytest.mark.parametrize(("p", "width"), [(16, 4), (64, 8), (12, 3), (24, 4), (30, 5)])
def test_grids(p, width):
    height = p // width
    torus = cost(build("all_reduce", "torus", p))
    assert torus.rounds == torus.messages == 2 * (width + height - 2)
    assert (torus.bytes_sent, torus.bytes_reduced) == (2 * part(p), part(p))
    exchange = cost(build("all_to_all", "two_level", p, local=width))
    assert exchange.rounds == exchange.messages == width + height - 2
    assert exchange.bytes_sent == part(width) + part(height)


def test_summit_scale_rounds():
    p = 24576
    assert build("all_reduce", "ring", p).rounds == 49150
    assert build("all_reduce", "recursive_doubling", p).rounds == 16
    assert build("all_reduce", "halving_doubling", p).rounds == 30
    assert build("all_reduce", "double_tree", p).rounds == 2 * 15


def test_messages_are_counted():
    assert cost(build("barrier", "dissemination", 13)).messages == 4
    assert cost(build("all_reduce", "ring", 6)).messages == 10
    assert cost(build("all_reduce", "one_shot", 6)).messages == 5
    assert cost(build("all_reduce", "two_way_ring", 16)).messages == 60
    assert cost(build("all_gather", "two_way_ring", 16)).messages == 15
    assert cost(build("all_gather", "far_first", 13)).messages == 4
    assert cost(build("all_to_all", "bruck", 13)).messages == 4


def test_a_world_of_one_costs_nothing():
    for collective in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        for algorithm in available(collective, 1):
            counted = cost(build(collective, algorithm, 1), 100)
            assert (counted.rounds, counted.messages, counted.bytes_sent) == (0, 0, 0)
