"""Ranks that make different calls: everybody is told both sides, and nothing is changed."""

import pytest

from tests.support.lateness import best_s
from tests.worlds import mismatch_bodies
from tests.worlds.mismatch_bodies import CASES
from unisono.testing import run


def check(results, odd):
    p = len(results)
    for rank, told in enumerate(results):
        for name, (_, _, odd_text, usual_text) in CASES.items():
            line = told[name]
            assert "\n" not in line
            assert odd_text in line, (name, line)
            assert usual_text in line, (name, line)
            assert f"on rank {rank} of {p}: " in line, (name, line)
            if name != "split sizes":
                assert f"rank {odd} called {odd_text}" in line, (name, line)


@pytest.mark.parametrize("size", [2, 3, 4, 5])
@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
def test_every_rank_names_both_sides(size, async_op):
    check(run(mismatch_bodies.every_case, size, args=(1, async_op)), 1)


@pytest.mark.parametrize("transport", ["processes", "tcp"])
def test_over_tcp(transport):
    where = {"ranks": "processes"} if transport == "processes" else {"transport": "tcp"}
    check(run(mismatch_bodies.every_case, 3, args=(1, False), **where), 1)


@pytest.mark.parametrize("engine", [None, "reference"])
@pytest.mark.parametrize("size", [2, 4])
def test_every_rank_hears_within_a_second(engine, size):
    where = {"ranks": "processes", "engine": engine}
    slowest = mismatch_bodies.slowest_case
    assert best_s(lambda: max(run(slowest, size, args=(1,), **where)), 1.0) < 1.0


def test_the_whole_line():
    told = run(mismatch_bodies.every_case, 3, args=(1, False))
    assert told[0]["op"] == (
        "all_reduce #1 in group 'default' does not match on rank 0 of 3: ranks 0 and 2 called "
        "broadcast(float32[4], src=0); rank 1 called all_reduce(float32[4], SUM)"
    ).replace("all_reduce #1", "broadcast #1")
    assert told[1]["op"] == (
        "all_reduce #1 in group 'default' does not match on rank 1 of 3: rank 1 called "
        "all_reduce(float32[4], SUM); ranks 0 and 2 called broadcast(float32[4], src=0)"
    )


def test_layouts_may_differ(world):
    world(mismatch_bodies.layouts_meet, 4)


def test_no_array_is_changed(world):
    world(mismatch_bodies.keeps_buffers, 3)


@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
def test_two_calls_in_another_order(world, async_op):
    results = world(mismatch_bodies.swapped_order, 2, args=(async_op,))
    for errors in results:
        assert len(errors) == 2
        for number, line in enumerate(errors, 1):
            assert f"all_reduce #{number} in group 'default' does not match" in line
            assert "all_reduce(float64[3], SUM)" in line
            assert "all_reduce(int16[3], SUM)" in line


@pytest.mark.parametrize("where", [{}, {"transport": "tcp"}, {"ranks": "processes"}])
def test_both_sides_are_named_to_ranks_that_leave_at_once(where):
    size = 4
    for told in run(mismatch_bodies.last_call, size, **where):
        for rank in range(size):
            assert f"rank {rank} called all_reduce(float32[{4 + rank}], SUM)" in told


def test_ranks_of_a_sub_group_are_told_by_their_global_numbers(world):
    for rank, told in enumerate(world(mismatch_bodies.in_sub_group, 4)[2:], 2):
        line, *where = told
        assert f"does not match on rank {rank} of 4: rank {rank} called" in line
        assert f"rank {5 - rank} called" in line
        assert where == [rank, 4, (5 - rank,)]
