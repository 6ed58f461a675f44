"""Calls made in streams: what waits for what, and what does not."""

import asyncio
import threading

import numpy as np
import pytest

import unisono as dist
from tests.support.calls import fails, frozen
from unisono.errors import (
    ClosedError,
    CollectiveAbortedError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    InvalidArgumentError,
    UsageError,
)


def gated(name="compute"):
    """Return a stream that stands still, and a function that lets it go on."""
    stream, is_open = dist.Stream(name), threading.Event()
    stream.submit(lambda: is_open.wait(60))
    return stream, is_open.set


@pytest.mark.sweep(1)
@pytest.mark.ranks(2, 3, kind="both")
def test_the_host_never_waits_in_a_chain_of_streams(rank):
    """compute -> communication -> end event -> another stream; the host never waits."""
    p, x, y = dist.get_world_size(), np.zeros(4), np.zeros(4)
    compute, open_gate = gated()
    other = dist.Stream("other")
    with dist.stream(compute):
        compute.submit(np.copyto, x, rank + 1.0)
        work = dist.all_reduce(x, async_op=True)
    with dist.stream(other):
        assert work.wait() is True  # the host goes on, `other` waits
        other.submit(np.multiply, x, 10, y)
        end = other.record_event()
    assert not any((compute.query(), work.is_completed(), end.query(), other.query()))
    assert (x == 0).all()
    open_gate()
    end.synchronize(60)
    assert end.query()
    assert work.is_completed()
    assert work.is_success()
    total = p * (p + 1) / 2
    assert (x == total).all()
    assert (y == 10 * total).all()
    assert work.result()[0] is x
    compute.synchronize(60)


@pytest.mark.ranks(2, kind="both")
def test_a_stream_does_not_wait_for_a_call_by_itself(rank):
    x, seen = np.ones(2), []
    compute = dist.Stream("compute")
    with dist.stream(compute):
        if rank == 0:
            work = dist.all_reduce(x, async_op=True)
            compute.submit(seen.append, work.is_completed())
            compute.synchronize(60)
            assert seen == [False]
            dist.send(np.ones(1), 1)
        else:
            with dist.stream(dist.default_stream()):
                dist.recv(np.ones(1), 0)
            work = dist.all_reduce(x, async_op=True)
        work.synchronize()
        compute.synchronize(60)
    assert (x == 2).all()


@pytest.mark.sweep(1)
@pytest.mark.ranks(2, 3, kind="both")
def test_a_synchronous_call_is_a_call_and_a_wait_of_its_stream(rank):
    p, x, y = dist.get_world_size(), np.ones(3), np.zeros(3)
    compute, open_gate = gated()
    with dist.stream(compute):
        compute.submit(np.multiply, x, 2, x)
        assert dist.all_reduce(x) is None
        compute.submit(np.copyto, y, x)
        outs = [np.zeros(3) for _ in range(p)]
        dist.all_gather(outs, y)
        assert not compute.query()
        assert (x == 1).all()
        open_gate()
        compute.synchronize(60)
        assert (x == 2 * p).all()
        assert (np.stack(outs) == 2 * p).all()
        # A barrier stops the host, as in torch.
        compute.submit(np.copyto, x, 5)
        dist.barrier()
        assert (x == 5).all()


@pytest.mark.sweep(1)
@pytest.mark.ranks(2, 3, kind="both")
def test_calls_without_a_stream_queue_behind_those_that_wait_for_a_stream(rank):
    p, x, y = dist.get_world_size(), np.zeros(2), np.ones(2)
    compute, open_gate = gated()
    with dist.stream(compute):
        compute.submit(np.copyto, x, 3)
        first = dist.all_reduce(x, async_op=True)
    second = dist.broadcast(y, 0, async_op=True)
    assert not second.is_completed()
    open_gate()
    dist.all_reduce(y)
    assert first.is_completed()
    assert (x == 3 * p).all()
    assert (y == p).all()
    # No call waits any more: calls go straight to the engine again.
    dist.all_reduce(y)
    assert (y == p * p).all()


@pytest.mark.sweep(1)
@pytest.mark.ranks(2, 3, kind="both")
def test_messages_in_streams(rank):
    """Sends and receives of a ring in streams; big enough that a send waits for its receive."""
    p = dist.get_world_size()
    mine, theirs = np.zeros(300_000), np.zeros(300_000)
    compute = dist.Stream("compute")
    with dist.stream(compute):
        compute.submit(np.copyto, mine, float(rank))
        ops = [
            dist.P2POp(dist.isend, mine, (rank + 1) % p),
            dist.P2POp(dist.irecv, theirs, (rank - 1) % p),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        compute.submit(np.add, theirs, 1, theirs)
        compute.synchronize(60)
        assert (theirs == (rank - 1) % p + 1).all()
        compute.submit(np.copyto, mine, float(10 + rank))
        if rank == 0:
            dist.send(mine, 1, tag=3)
        elif rank == 1:
            assert dist.recv(theirs, tag=3) == 0  # stops the host, because it returns the source
            assert (theirs == 10).all()
        compute.synchronize(60)


@pytest.mark.sweep(1)
@pytest.mark.ranks(2, 3, kind="both")
def test_a_strided_array_is_read_when_the_call_begins(rank):
    p, table = dist.get_world_size(), np.zeros((4, 3))
    compute, open_gate = gated()
    with dist.stream(compute):
        compute.submit(np.copyto, table, 1.0)
        dist.all_reduce(table[:, 1])
        dist.all_reduce(table[:, 2], dist.ReduceOp.PREMUL_SUM(2))
    open_gate()
    compute.synchronize(60)
    assert (table == [1, p, 2 * p]).all()


@pytest.mark.sweep(1)
@pytest.mark.ranks(2, 3, kind="both")
def test_object_calls_stop_the_host(rank):
    compute, x = dist.Stream("compute"), np.zeros(1)
    with dist.stream(compute):
        compute.submit(np.copyto, x, 1)
        dist.all_reduce(x)
        heard = [None] * dist.get_world_size()
        dist.all_gather_object(heard, {"rank": rank, "large": np.full(100_000, rank)})
        compute.synchronize(60)
    assert [one["rank"] for one in heard] == list(range(dist.get_world_size()))
    assert all((one["large"] == one["rank"]).all() for one in heard)
    assert x[0] == dist.get_world_size()


@pytest.mark.sweep(1)
@pytest.mark.ranks(2, 3, kind="both")
def test_futures_of_calls_in_streams_can_be_chained_and_awaited(rank):
    p, x, y = dist.get_world_size(), np.ones(2), np.ones(2)
    compute = dist.Stream("compute")
    with dist.stream(compute):
        future = dist.all_reduce(x, async_op=True).get_future()
        doubled = future.then(lambda f: f.value()[0] * 2)
        assert (doubled.wait(60) == 2 * p).all()

        async def body():
            return await dist.all_reduce(y, async_op=True)

        assert asyncio.run(body()) is True
        assert (y == p).all()


@pytest.mark.sweep(1)
@pytest.mark.ranks(2, 3, kind="both")
def test_an_argument_found_wrong_when_the_call_begins_fails_work_and_stream(rank):
    compute, x = dist.Stream("compute"), np.ones(2)
    with dist.stream(compute):
        work = dist.all_reduce(frozen(), async_op=True)
        with pytest.raises(InvalidArgumentError, match="read-only"):
            work.wait(60)
        dist.all_reduce(frozen())
        compute.submit(np.copyto, x, 9)
        with pytest.raises(InvalidArgumentError, match="read-only"):
            compute.synchronize(60)
        assert (x == 1).all()
        dist.all_reduce(x)
        compute.synchronize(60)
    assert (x == dist.get_world_size()).all()


@pytest.mark.sweep(1)
@pytest.mark.ranks(2, 3, kind="both")
def test_a_call_found_wrong_behind_a_call_in_a_stream_is_refused_once(rank):
    x = np.ones(2)
    compute, open_gate = gated()
    with dist.stream(compute):
        first = dist.all_reduce(x, async_op=True)
    opener = threading.Timer(0.02, open_gate)
    opener.start()
    if rank == 1:
        with pytest.raises(InvalidArgumentError, match="read-only"):
            dist.all_reduce(frozen())
    else:
        refused = r"rank 1 called all_reduce( at [\w.]+:\d+)?, but refused"
        with pytest.raises(CollectiveMismatchError, match=refused):
            dist.all_reduce(np.ones(2))
    opener.join()
    first.wait()
    assert (x == dist.get_world_size()).all()
    dist.all_reduce(x)
    assert (x == dist.get_world_size() ** 2).all()


@pytest.mark.ranks(3, kind="both")
def test_a_failure_before_the_call_reaches_the_other_ranks(rank):
    compute, x = dist.Stream("compute"), np.ones(2)
    group = dist.new_group()
    with dist.stream(compute):
        if rank == 1:
            compute.submit(lambda: 1 / 0)
        work = dist.all_reduce(x, group=group, async_op=True)
    if rank == 1:
        with pytest.raises(ZeroDivisionError):
            work.wait_on_host()
        with pytest.raises(ZeroDivisionError):
            compute.synchronize(60)
    else:
        # Whether this rank has entered the call by then or not.
        with fails(
            CollectiveAbortedError,
            f"on rank {rank} of 3: ",
            "ZeroDivisionError in the stream before all_reduce (division by zero) on rank 1",
        ):
            work.wait()
    with pytest.raises(CollectiveAbortedError):
        dist.all_reduce(x, group=group)
    dist.barrier()


@pytest.mark.ranks(2, kind="both")
def test_the_time_out_counts_while_a_call_waits_for_its_stream(rank):
    group = dist.new_group()
    compute, open_gate = gated()
    text = "all_reduce waited 0.1 s for the stream that it was called in"
    if rank == 0:
        with dist.stream(compute):
            work = dist.all_reduce(np.ones(1), group=group, async_op=True, timeout=0.1)
        with pytest.raises(CollectiveTimeoutError) as caught:
            work.wait()
        start = "all_reduce in group '1' did not begin: it"
        assert caught.value.what == f"{start} {text.partition(' ')[2]}"
    else:
        with fails(CollectiveAbortedError, "in group '1'", f"{text} on rank 0"):
            dist.all_reduce(np.ones(1), group=group)
    open_gate()
    compute.synchronize(60)
    dist.barrier()


@pytest.mark.ranks(2, kind="both")
def test_destroying_a_group_finishes_the_calls_that_wait(rank):
    group, x = dist.new_group(), np.ones(1)
    compute, open_gate = gated()
    with dist.stream(compute):
        work = dist.all_reduce(x, group=group, async_op=True)
    opener = threading.Timer(0.05, open_gate)
    opener.start()
    dist.destroy_process_group(group)
    opener.join()
    assert work.is_success()
    assert x == 2.0
    compute.synchronize(60)


@pytest.mark.ranks(2, kind="both")
def test_a_function_of_a_stream_cannot_wait_for_a_call_behind_it(rank):
    """It ends at once, however it waits: by a work, by another call, or by the end of the group."""
    world = dist.group.WORLD
    ways = {
        "work": lambda group, work: work.wait(),
        "call": lambda group, work: group.barrier(),
        "end": lambda group, work: group.close(),
    }
    for name, way in ways.items():
        group, stream, works = dist.new_group(timeout=30), dist.Stream(name), []
        made = threading.Event()

        def function(way=way, group=group, works=works, made=made):
            assert made.wait(60)
            way(group, works[0])

        with dist.stream(stream):
            if rank == 0:
                stream.submit(function)
            works.append(group.all_reduce(np.ones(2), async_op=True))
            made.set()
            if name == "end":
                error, text = (
                    (ClosedError, "was destroyed before this all_reduce began")
                    if rank == 0
                    else (
                        CollectiveAbortedError,
                        "rank 0 closed group .* in a function of a stream",
                    )
                )
            else:
                error, text = (
                    (UsageError, "would wait for itself")
                    if rank == 0
                    else (CollectiveAbortedError, "UsageError in the stream before all_reduce")
                )
            with pytest.raises(error, match=text):
                works[0].wait_on_host()
        if rank == 0 and name != "end":
            with pytest.raises(UsageError, match="would wait for itself"):
                stream.synchronize(60)
    world.barrier()


@pytest.mark.ranks(2, kind="both")
def test_after_an_error_destroying_a_group_ends_the_calls_that_wait(rank):
    group = dist.new_group()
    if rank == 1:
        with fails(CollectiveAbortedError, "rank 0 closed group '1' because of KeyError: 'x'"):
            dist.all_reduce(np.ones(1), group=group)
        dist.barrier()
        return
    compute, open_gate = gated()
    with dist.stream(compute):
        work = dist.all_reduce(np.ones(1), group=group, async_op=True)
    try:
        raise KeyError("x")
    except KeyError:
        dist.destroy_process_group(group)
    with pytest.raises(ClosedError) as caught:
        work.wait()
    open_gate()
    compute.synchronize(60)
    dist.barrier()
    assert caught.value.what == "group '1' was destroyed before this all_reduce began"


@pytest.mark.ranks(2, kind="both")
def test_a_call_does_not_overtake_the_calls_that_wait_for_their_streams(rank):
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
    # 1 + 2 = 3, 3 + 3 = 6, 6 * 6 = 36
    assert x.tolist() == [36.0, 36.0]
