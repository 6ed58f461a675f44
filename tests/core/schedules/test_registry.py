import pytest

from unisono.core.schedules.ir import COLLECTIVES, REDUCING, ROOTED
from unisono.core.schedules.registry import ALGORITHMS, available, build, entry
from unisono.core.schedules.verify import verify
from unisono.errors import InvalidArgumentError, ScheduleError

PAIRS = sorted({(c, a) for c in COLLECTIVES for p in (1, 8, 12) for a in available(c, p)})
WORLD_SIZES = [*range(1, 34), 64]
# Small ones, powers of two and their neighbours: where algorithms fold, wrap and end.
CORNERS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17)


def worlds(collective, algorithm, sizes):
    """Give (world size, root, pipeline) for all that an algorithm must be proved for."""
    for p in sizes:
        if algorithm not in available(collective, p):
            continue
        roots = sorted({0, 1 % p, p // 2, p - 1}) if collective in ROOTED else [-1]
        for i, root in enumerate(roots):
            yield p, root, 1
            if entry(collective, algorithm).pipelined and i == 0:
                yield p, roots[-1], 3


@pytest.mark.parametrize(("collective", "algorithm"), PAIRS)
def test_proved_right_for_every_world_size(collective, algorithm, drawn):
    sizes = drawn(WORLD_SIZES, 2, always=CORNERS)
    for p, root, pipeline in worlds(collective, algorithm, sizes):
        verify(build(collective, algorithm, p, root, pipeline))


@pytest.mark.parametrize(
    ("collective", "algorithm"),
    [pair for pair in PAIRS if pair[0] in ("all_gather", "gather", "reduce_scatter", "scatter")],
)
def test_right_when_the_block_is_part_of_the_blocks(collective, algorithm):
    for p in range(1, 18):
        if algorithm in available(collective, p):
            root = p - 1 if collective in ROOTED else -1
            verify(build(collective, algorithm, p, root), in_place=True)


REDUCTIONS = [pair for pair in PAIRS if pair[0] in REDUCING]


@pytest.mark.parametrize(("collective", "algorithm"), REDUCTIONS)
def test_the_order_of_reduction_is_proved_or_refuted(collective, algorithm):
    """An algorithm says that it reduces in the order of ranks exactly if it always does."""
    refuted, told = [], set()
    for p, root, pipeline in worlds(collective, algorithm, (1, 2, 3, 5, 8, 12)):
        try:
            verify(build(collective, algorithm, p, root, pipeline), rank_order=True)
        except ScheduleError as error:
            refuted.append(p)
            told.add(error.what.endswith("is not reduced in the order of ranks"))
    assert told <= {True}
    assert bool(refuted) != entry(collective, algorithm).ordered
    assert not refuted or max(refuted) >= 8


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_every_collective_has_an_algorithm_for_every_world_size(collective):
    for world_size in WORLD_SIZES:
        assert "linear" in available(collective, world_size)
        assert "linear" in available(collective, world_size, uneven=collective == "all_to_all")


@pytest.mark.parametrize(("collective", "algorithm"), PAIRS)
def test_schedule_describes_itself(collective, algorithm):
    root = 3 if collective in ROOTED else -1
    schedule = build(collective, algorithm, 8, root)
    assert (schedule.collective, schedule.algorithm) == (collective, algorithm)
    assert (schedule.world_size, schedule.root) == (8, root)
    assert schedule.uneven_ok == entry(collective, algorithm).uneven
    assert build(collective, algorithm, 8, root) is schedule


@pytest.mark.parametrize(("collective", "algorithm"), PAIRS)
def test_docstring_names_cost_and_source(collective, algorithm):
    doc = entry(collective, algorithm).builder.__doc__
    assert "Cost:" in doc
    assert "Source:" in doc


def test_powers_of_two_only():
    assert "recursive_doubling" in available("all_gather", 16)
    assert "recursive_doubling" not in available("all_gather", 12)
    assert "cube_mesh" in available("all_reduce", 8)
    assert "cube_mesh" not in available("all_reduce", 16)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("all_redcue", "ring", 4), ["'all_redcue'", *COLLECTIVES]),
        (("all_reduce", "rign", 4), ["'rign'", "ring", "halving_doubling", "one_shot"]),
        (("all_gather", "recursive_doubling", 6), ["power of two", "got 6", "ring", "bruck"]),
        (("all_reduce", "cube_mesh", 4), ["world size 8", "got 4"]),
        (("broadcast", "ring", 4), ["root is -1", "0..3"]),
        (("broadcast", "ring", 4, 4), ["root is 4", "0..3"]),
        (("broadcast", "ring", 4, 0, 0), ["pipeline depth is 0", "1 or more"]),
    ],
)
def test_bad_arguments_are_named(arguments, words):
    with pytest.raises(InvalidArgumentError) as caught:
        build(*arguments)
    for word in words:
        assert word in caught.value.what


def test_algorithms_lists_all():
    assert set(ALGORITHMS) == {algorithm for _, algorithm in PAIRS} | {
        "two_level", "node_tree", "multi_level"
    }  # fmt: skip
