"""Ranks that make different calls: every rank names both sides, and no array is changed."""

import re
import time
import warnings

import numpy as np
import pytest

import unisono as dist
from tests.core.collectives import test_refusal
from tests.core.groups import test_subgroups
from tests.support.calls import blocks, check_usable, f32, later
from tests.support.lateness import Lateness, best_s
from unisono.errors import CollectiveMismatchError, UsageError
from unisono.testing import run

PREMUL_SUM, MAX = dist.ReduceOp.PREMUL_SUM, dist.ReduceOp.MAX


def exchanged(extra):
    """Return a call that exchanges rows of 1 element; it expects `extra` more from rank 0."""

    def call(**how):
        p = dist.get_world_size()
        outs = [1 + extra, *[1] * (p - 1)]
        return dist.all_to_all_single(f32(sum(outs)), f32(p), outs, [1] * p, **how)

    return call


def table(*shape):
    return lambda: f32(6).reshape(shape)


def lists(*counts):
    return lambda: [f32(count) for count in counts]


# name -> (the call of the odd rank, the call of the others, both texts)
CASES = {
    "op": (later("all_reduce", f32), later("broadcast", f32, 0),
        "all_reduce(float32[4], SUM)", "broadcast(float32[4], src=0)"),
    "barrier": (later("barrier"), later("all_reduce", f32),
        "barrier()", "all_reduce(float32[4], SUM)"),
    "dtype": (later("all_reduce", lambda: np.ones(4, np.int32)), later("all_reduce", f32),
        "all_reduce(int32[4], SUM)", "all_reduce(float32[4], SUM)"),
    "count": (later("all_reduce", lambda: f32(5)), later("all_reduce", f32),
        "all_reduce(float32[5], SUM)", "all_reduce(float32[4], SUM)"),
    "shape": (later("all_reduce", table(2, 3)), later("all_reduce", table(3, 2)),
        "all_reduce(float32[2, 3], SUM)", "all_reduce(float32[3, 2], SUM)"),
    "shape of reduce": (
        later("reduce", lambda: f32(1).reshape(()), 0), later("reduce", lambda: f32(1), 0),
        "reduce(float32[], SUM, dst=0)", "reduce(float32[1], SUM, dst=0)"),
    "count of blocks": (
        later("all_gather", lambda: blocks(5), lambda: f32(5)), later("all_gather", blocks, f32),
        "all_gather(float32[5])", "all_gather(float32[4])"),
    "root": (later("broadcast", f32, 1), later("broadcast", f32, 0),
        "broadcast(float32[4], src=1)", "broadcast(float32[4], src=0)"),
    "reduce op": (later("all_reduce", f32, MAX), later("all_reduce", f32),
        "all_reduce(float32[4], MAX)", "all_reduce(float32[4], SUM)"),
    "factor": (later("all_reduce", f32, PREMUL_SUM(2)), later("all_reduce", f32, PREMUL_SUM(3)),
        "all_reduce(float32[4], PREMUL_SUM(2.0))", "all_reduce(float32[4], PREMUL_SUM(3.0))"),
    "algorithm": (later("all_reduce", f32, algorithm="ring"), later("all_reduce", f32),
        "all_reduce(float32[4], SUM, algorithm=ring)", "all_reduce(float32[4], SUM)"),
    "algorithm of a barrier": (later("barrier", algorithm="linear"), later("barrier"),
        "barrier(algorithm=linear)", "barrier()"),
    "coalesced sizes": (
        later("all_reduce_coalesced", lists(2, 4)), later("all_reduce_coalesced", lists(3, 3)),
        "all_reduce_coalesced(float32[2 + 4], SUM)", "all_reduce_coalesced(2 x float32[3], SUM)"),
    "coalesced or not": (later("all_reduce_coalesced", lists(2, 2)), later("all_reduce", f32),
        "all_reduce_coalesced(2 x float32[2], SUM)", "all_reduce(float32[4], SUM)"),
    "split sizes": (exchanged(2), exchanged(0),
        "rank 0 sends 1 elements to rank 1, which expects 3", "all_to_all_single"),
    "all_to_all or gather": (exchanged(0), later("all_gather", lambda: blocks(1), lambda: f32(1)),
        "all_to_all_single(float32[", "all_gather(float32[1])"),
}  # fmt: skip


def error_of(call):
    """Return the mismatch that a call, or the wait for it, ends with; None if it succeeds."""
    try:
        work = call()
        if work is not None:
            work.wait()
    except CollectiveMismatchError as error:
        return error
    return None


def make_every_case(rank, async_op=False):
    """Let rank 1 make the odd call of each case, and check the line that every rank reads."""
    warnings.simplefilter("error")
    p = dist.get_world_size()
    for name, (different, usual, odd_text, usual_text) in CASES.items():
        call = different if rank == 1 else usual
        error = error_of(lambda call=call: call(async_op=async_op))
        assert error is not None, f"{name}: no error on rank {rank}"
        line = error.what
        assert "\n" not in line
        assert odd_text in line, (name, line)
        assert usual_text in line, (name, line)
        assert f"on rank {rank} of {p}: " in line, (name, line)
        assert name == "split sizes" or f"rank 1 called {odd_text}" in line, (name, line)
        assert error.context.usable is True, name
        assert error.context.peers, (name, error.context)
        assert set(error.context.peers) <= set(range(p)), (name, error.context)
        check_usable()
        if (p, name) == (3, "op"):
            sides = [f"ranks 0 and 2 called {usual_text}", f"rank 1 called {odd_text}"]
            start = f"{'all_reduce' if rank == 1 else 'broadcast'} #1 in group 'default'"
            sides = "; ".join(sides[:: -1 if rank == 1 else 1])
            line = re.sub(r" at (calls|on_numpy)\.py:\d+", "", line)
            assert line == f"{start} does not match on rank {rank} of 3: {sides}"


@pytest.mark.sweep(3)
@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
@pytest.mark.ranks(2, 3, 4, 5)
def test_every_rank_names_both_sides(rank, async_op):
    make_every_case(rank, async_op)


@pytest.mark.ranks(3, kind="both", transport="tcp")
def test_every_rank_names_both_sides_over_tcp(rank):
    make_every_case(rank)


TRAIN = """
def first(x): return dist.all_reduce(x, async_op=True)
def second(x): return dist.all_reduce(x, async_op=True)
def third(x): return dist.broadcast(x, 0)
def wrong(x): return dist.broadcast(x, 7)
"""


@pytest.mark.ranks(4, kind="both")
def test_the_line_of_each_ranks_call_is_named(rank):
    program = {"dist": dist}
    exec(compile(TRAIN, "/folder/train.py", "exec"), program)
    names = ["second", "first"] if rank == 1 else ["first", "second"]
    # Both calls are made before the first is waited for.
    works = [program[name](f32(4 + (rank == 1))) for name in names]
    for work, (mine, other) in zip(works, [(2, 3), (3, 2)], strict=True):
        told = error_of(lambda work=work: work).what
        assert f"ranks 0, 2 and 3 called all_reduce(float32[4], SUM) at train.py:{mine}" in told
        assert f"rank 1 called all_reduce(float32[5], SUM) at train.py:{other}" in told
    if rank == 1:
        with pytest.raises(ValueError, match="7"):
            program["wrong"](f32())
    else:
        told = error_of(lambda: program["third"](f32())).what
        assert "ranks 0, 2 and 3 called broadcast(float32[4], src=0) at train.py:4; " in told
        assert "rank 1 called broadcast at train.py:5, but refused it: " in told
    work = program["first" if rank % 2 else "second"](f32(4 + (rank == 3)))
    told = error_of(lambda: work).what
    called = re.search(r"ranks 0, 1 and 2 called (.*?)(;|$)", told)[1]
    assert called == "all_reduce(float32[4], SUM) at train.py:2, train.py:3"
    check_usable()


def slowest_s(rank):
    """Return the seconds of the slowest call that fails, less what the machine was late."""
    most_s = 0.0
    for different, usual in [case[:2] for table in FAILING for case in table]:
        dist.barrier()
        with Lateness() as lateness:
            began_s = time.monotonic()
            with pytest.raises((CollectiveMismatchError, UsageError)):
                (different if rank == 1 else usual)()
            took_s = time.monotonic() - began_s
        most_s = max(most_s, took_s - lateness.slack_s)
    return most_s


FAILING = [each.values() for each in (CASES, test_refusal.CASES, test_subgroups.DIFFERENT)]


@pytest.mark.alone
@pytest.mark.sweep(1)
@pytest.mark.parametrize("engine", ["native", "reference"])
def test_every_rank_raises_within_a_second(engine):
    where = {"ranks": "processes", "engine": engine}
    assert best_s(lambda: max(run(slowest_s, 3, **where)), 1.0) < 1.0


@pytest.mark.ranks(3, kind="both")
def test_no_array_is_changed(rank):
    x = np.full(3 + (rank == 1), float(rank))
    outs = [np.full(x.size, 9.0) for _ in range(3)]
    calls = [
        lambda: dist.all_reduce(x),
        lambda: dist.all_reduce(x, PREMUL_SUM(2)),
        lambda: dist.broadcast(x, 0),
        lambda: dist.all_gather(outs, x),
        lambda: dist.all_reduce_coalesced([x, x * 2]),
        lambda: dist.gather(x, outs if rank == 0 else None, 0),
    ]
    for number, call in enumerate(calls):
        assert error_of(call) is not None, f"call {number} was accepted"
        assert (x == rank).all(), f"call {number} changed an array"
        assert all((out == 9).all() for out in outs), f"call {number} changed an output"
    check_usable()


@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
@pytest.mark.ranks(2, kind="both")
def test_two_calls_in_another_order_fail_both(rank, async_op):
    arrays = [np.ones(3), np.ones(3, np.int16)]
    calls = [
        lambda x=x: dist.all_reduce(x, async_op=async_op) for x in arrays[:: 1 if rank else -1]
    ]
    if async_op:
        works = [call() for call in calls]  # both are queued before the first wait
        calls = [lambda work=work: work for work in works]
    for number, call in enumerate(calls, 1):
        line = error_of(call).what
        assert f"all_reduce #{number} in group 'default' does not match" in line
        assert "all_reduce(float64[3], SUM)" in line
        assert "all_reduce(int16[3], SUM)" in line
    assert all((x == 1).all() for x in arrays)
    check_usable()


def check_last_call(rank):
    """Leave right after the error, as a script does that does not catch it."""
    told = error_of(lambda: dist.all_reduce(f32(4 + rank))).what
    for other in range(4):
        assert f"rank {other} called all_reduce(float32[{4 + other}], SUM)" in told


@pytest.mark.ranks(4, kind="both")
def test_ranks_that_leave_at_once_still_name_both_sides(rank):
    check_last_call(rank)


@pytest.mark.ranks(4, transport="tcp")
def test_ranks_that_leave_at_once_still_name_both_sides_over_tcp(rank):
    check_last_call(rank)


@pytest.mark.ranks(4, kind="both")
def test_errors_of_a_sub_group_have_the_ranks_of_the_world(rank):
    group = dist.new_group([2, 3])
    if rank >= 2:
        error = error_of(lambda: dist.all_reduce(f32(4 + rank), group=group))
        assert f"does not match on rank {rank} of 4: rank {rank} called" in error.what
        assert f"rank {5 - rank} called" in error.what
        context = error.context
        assert (context.rank, context.world_size, context.peers) == (rank, 4, (5 - rank,))
