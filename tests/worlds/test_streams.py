"""Calls made in streams, on threads and on processes."""

import threading

import numpy as np
import pytest

import unisono as dist
from tests.support.several import run_all
from tests.worlds import stream_bodies


@pytest.mark.parametrize("size", [2, 3])
def test_calls_in_streams(world, size):
    world(
        run_all,
        size,
        args=(
            [
                stream_bodies.chain,
                stream_bodies.synchronous,
                stream_bodies.order,
                stream_bodies.point_to_point,
                stream_bodies.layouts,
                stream_bodies.objects,
                stream_bodies.futures,
                stream_bodies.bad_argument,
                stream_bodies.refused_behind_another,
            ],
        ),
    )


def test_a_stream_does_not_wait_unless_told_to(world):
    world(stream_bodies.not_waited_for, 2)


def test_a_failure_before_the_call_reaches_the_others(world):
    told = world(stream_bodies.failure_before_the_call, 3)
    assert told[1] is None
    for rank in (0, 2):
        # Whether it had entered the call by then or not.
        assert f"on rank {rank} of 3: " in told[rank]
        assert (
            "ZeroDivisionError in the stream before all_reduce (division by zero) on rank 1"
        ) in told[rank]


def test_the_time_out_counts_while_a_call_waits_for_its_stream(world):
    first, second = world(stream_bodies.stream_that_never_comes, 2)
    told = "all_reduce waited 0.1 s for the stream that it was called in"
    assert first == f"all_reduce in group '1' did not begin: it {told.partition(' ')[2]}"
    assert "in group '1'" in second
    assert f"{told} on rank 0" in second


def test_destroying_a_group_ends_the_calls_that_wait(world):
    for told in world(stream_bodies.destroyed, 2):
        assert told == "group '1' was destroyed before this all_reduce began"


def call_behind_two_streams(rank):
    x, gate, ready, later = np.full(2, rank + 1.0), threading.Event(), dist.Stream(), dist.Stream()
    later.submit(gate.wait, 60)
    works = []
    for stream in (ready, later):
        with dist.stream(stream):
            works.append(dist.all_reduce(x, async_op=True))
    works[0].wait()
    works.append(dist.all_reduce(x, dist.ReduceOp.PRODUCT, async_op=True))
    gate.set()
    for work in works:
        work.wait()
    return x.tolist()


def test_a_call_does_not_overtake_the_calls_that_wait_for_their_streams(world):
    # 1 + 2 = 3, 3 + 3 = 6, 6 * 6 = 36
    assert world(call_behind_two_streams, 2) == [[36.0, 36.0]] * 2
