"""Work and Future: waiting, polling, chaining, awaiting."""

import asyncio
import logging
import threading

import numpy as np
import pytest

import unisono as dist
from tests.support.calls import fails
from tests.support.together import on_threads
from unisono import Future, collect_all, wait_all
from unisono.errors import (
    ClosedError,
    CollectiveAbortedError,
    CollectiveTimeoutError,
    UnsupportedError,
    UsageError,
)


@pytest.mark.ranks(2, kind="both")
def test_a_work_before_and_after_its_end(rank):
    """A work before and after its end; wait with a limit that expires and later succeeds."""
    x = np.full(3, 1.0)
    gate = np.zeros(1)
    if rank == 0:
        work = dist.all_reduce(x, async_op=True)
        assert not work.is_completed()
        assert not work.is_success()
        assert work.exception() is None
        assert repr(work) == "<Work all_reduce pending>"
        with pytest.raises(CollectiveTimeoutError) as caught:
            work.wait(0.02)
        assert caught.value.what == "all_reduce was not done after 0.02 s of waiting; it goes on"
        with pytest.raises(CollectiveTimeoutError, match=r"no value after 0\.02 s"):
            work.get_future().wait(0.02)
        dist.send(gate, 1)
    else:
        dist.recv(gate, 0)
        work = dist.all_reduce(x, async_op=True)
    assert work.wait(30) is True
    assert work.wait() is True
    assert work.wait(0) is True
    work.synchronize()
    assert work.is_completed()
    assert work.is_success()
    assert work.exception() is None
    assert work.result()[0] is x
    assert work.source_rank() == -1
    assert repr(work) == "<Work all_reduce done>"
    assert (x == 2).all()


@pytest.mark.ranks(2, kind="both")
def test_a_call_happens_though_its_work_is_dropped(rank):
    p, x = dist.get_world_size(), np.ones(4)
    for _ in range(20):
        dist.all_reduce(x, async_op=True)
        x = x  # the work is gone
    dist.barrier()
    assert (x == float(p) ** 20).all()
    y = np.ones(2)
    ten_times = threading.Event()

    def times_ten(future):
        y.__imul__(10)
        ten_times.set()

    dist.all_reduce(y, async_op=True).get_future().then(times_ten)
    dist.barrier()
    # The call has ended everywhere; its callbacks run beside what comes after it.
    assert ten_times.wait(60)
    assert (y == 10 * p).all()


@pytest.mark.ranks(2, kind="both")
def test_futures_can_be_chained(rank):
    p = dist.get_world_size()
    x, y, z = np.ones(2), np.ones(3), np.ones(4)
    inner = []

    def second(future):
        assert (future.value()[0] == p).all()
        inner.append(dist.all_reduce(y, async_op=True))
        return "started"

    first = dist.all_reduce(x, async_op=True).get_future().then(second)
    third = first.then(lambda f: f.value() + "!")
    assert third.wait(30) == "started!"
    inner[0].wait()
    assert (y == p).all()
    broken = first.then(lambda f: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        broken.wait(30)
    with pytest.raises(ZeroDivisionError):
        broken.then(lambda f: f.value()).wait(30)
    futures = [dist.all_reduce(a, async_op=True).get_future() for a in (x, z)]
    assert dist.collect_all(futures).wait(30) == futures
    values = dist.collect_all(futures).then(lambda f: [v.value()[0] for v in f.value()]).wait(30)
    assert values[1] is z
    coalesced = dist.all_reduce_coalesced([x, z], async_op=True)
    assert coalesced.then(lambda f: len(f.value())).wait(30) == 2


@pytest.mark.ranks(2, kind="both")
def test_a_work_can_be_awaited(rank):
    async def body():
        x, y = np.ones(2), np.ones(3)
        assert await dist.all_reduce(x, async_op=True) is True
        await asyncio.gather(*[wait(dist.all_reduce(a, async_op=True)) for a in (x, y)])
        return x[0], y[0]

    async def wait(work):
        return await work

    async def too_late():
        with pytest.raises(CollectiveTimeoutError, match="timed out after 50 ms"):
            await dist.irecv(np.zeros(1), 0, tag=77, timeout=0.05)

    async def given_up():
        work = dist.irecv(np.zeros(1), 0, tag=78)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(wait(work), 0.02)
        return work

    result = asyncio.run(body())
    asyncio.run(too_late())
    work = asyncio.run(given_up())
    dist.barrier()
    # The loop is closed now; the message must not fall over it.
    if rank == 0:
        for to in range(dist.get_world_size()):
            dist.isend(np.ones(1), to, tag=78).wait()
    work.wait()
    return result


@pytest.mark.ranks(2, kind="both")
def test_several_threads_may_wait(rank):
    """Calls of several threads on one group are put in some order; each has a group here."""
    p = dist.get_world_size()
    works = [dist.all_reduce(np.full(2, float(i)), async_op=True) for i in range(30)]
    assert on_threads(*(work.wait for work in works)) == [True] * 30
    assert [w.result()[0][0] for w in works] == [float(i * p) for i in range(30)]


@pytest.mark.ranks(2)
def test_a_wait_in_a_callback_is_refused(rank):
    """On the progress thread a wait would be for itself: an error at once, no hang."""
    told = []

    def callback(future):
        for call in (
            lambda: dist.all_reduce(np.ones(1)),
            lambda: dist.all_reduce(np.ones(1), async_op=True).wait(),
            lambda: dist.all_reduce(np.ones(1), async_op=True).get_future().wait(),
        ):
            try:
                call()
            except UsageError as error:
                told.append(error.what)
        return True

    # The other rank comes once the callback is there, which so runs on the progress thread; the
    # second operation is queued behind it, so that a third one would have to wait.
    token = np.zeros(1)
    for turn in range(2):
        if rank != turn:
            dist.recv(token, turn)
        work = dist.all_reduce(np.ones(1), async_op=True)
        last = dist.all_reduce(np.ones(1), async_op=True)
        if rank == turn:
            done = work.get_future().then(callback)
            dist.send(token, 1 - turn)
            assert done.wait(30) is True
        else:
            for _ in range(2):
                dist.all_reduce(np.ones(1), async_op=True)
        last.wait()
        dist.barrier()
    itself = (
        "wait() in a callback, on the thread that runs the operations of this group, would wait "
        "for itself"
    )
    assert told == ["all_reduce on group 'default' waits for the thread it runs on", *[itself] * 2]


@pytest.mark.ranks(2)
def test_a_destroyed_group_finishes_what_is_queued(rank):
    group, x = dist.new_group(), np.ones(1)
    works = [dist.all_reduce(x, group=group, async_op=True) for _ in range(20)]
    dist.destroy_process_group(group)
    assert all(work.is_success() for work in works)
    assert x == 2.0**20


@pytest.mark.ranks(2)
def test_a_group_that_is_destroyed_after_an_error_ends_what_is_queued(rank, caplog):
    group = dist.new_group()
    if rank == 1:
        dist.barrier()
        with fails(CollectiveAbortedError, "rank 0 closed group '1' because of KeyError: 'x'"):
            dist.all_reduce(np.ones(1), group=group)
        return
    works = [dist.all_reduce(np.ones(1), group=group, async_op=True) for _ in range(2)]
    try:
        raise KeyError("x")
    except KeyError:
        dist.destroy_process_group(group)
    dist.barrier()
    with pytest.raises((CollectiveAbortedError, ClosedError), match=r"closed|destroyed"):
        works[0].wait(30)
    with pytest.raises(ClosedError) as caught:
        works[1].wait(30)
    text = "group '1' was destroyed before all_reduce(float64[1], SUM) ran"
    assert caught.value.what == text
    warning = "rank 0 closed group '1' because of KeyError: 'x'; calls that had not ended: 2"
    assert [record.getMessage() for record in caplog.records] == [warning]


@pytest.mark.ranks(2)
def test_a_group_that_is_destroyed_in_a_callback_ends_what_is_queued(rank):
    group = dist.new_group()
    if rank == 1:
        dist.recv(np.zeros(1), 0)
        dist.all_reduce(np.ones(1), group=group)
        text = "rank 0 closed group '1' in a callback of one of its calls"
        with fails(CollectiveAbortedError, text):
            dist.all_reduce(np.ones(1), group=group)
        dist.barrier()
        return
    ended = threading.Event()
    first = dist.all_reduce(np.ones(1), group=group, async_op=True).get_future()
    last = dist.all_reduce(np.ones(1), group=group, async_op=True)

    def destroy(_):
        group.close()
        ended.set()

    first.add_done_callback(destroy)
    dist.send(np.zeros(1), 1)
    assert ended.wait(30)
    with pytest.raises(ClosedError):
        last.wait(30)
    dist.barrier()


@pytest.mark.ranks(2)
def test_an_error_that_a_group_was_made_under_is_no_reason_to_cancel(rank):
    try:
        raise ImportError("no GPU")
    except ImportError:
        group, x = dist.new_group(), np.ones(1)
        dist.all_reduce(x, group=group, async_op=True)
        dist.destroy_process_group(group)
    assert x == 2.0


def test_a_future_by_hand(caplog):
    future, seen = Future(), []
    future.add_done_callback(lambda f: seen.append(f.value()))
    future.add_done_callback(lambda f: 1 / 0)
    with pytest.raises(UsageError, match="the future has no value yet"):
        future.value()
    assert (future.done(), future.exception(), repr(future)) == (False, None, "<Future pending>")
    with pytest.raises(CollectiveTimeoutError, match=r"no value after 0\.01 s"):
        future.wait(0.01)
    with caplog.at_level(logging.ERROR):
        future.set_result(5)
    assert "a done-callback raised" in caplog.text
    assert (future.wait(), future.value(), seen, future.done()) == (5, 5, [5], True)
    assert repr(future) == "<Future done>"
    for call in (lambda: future.set_result(6), lambda: future.set_exception(ValueError())):
        with pytest.raises(UsageError, match="the future is done already"):
            call()
    assert future.value() == 5, "a refused set_result must not change the value"
    future.add_done_callback(lambda f: seen.append("late"))
    assert seen == [5, "late"]


def test_a_failed_future():
    future = Future()
    chained = future.then(lambda f: f.value())
    handled = future.then(lambda f: type(f.exception()).__name__)
    future.set_exception(KeyError("x"))
    for failed in (future, chained):
        with pytest.raises(KeyError):
            failed.wait()
        assert isinstance(failed.exception(), KeyError)
    assert handled.wait() == "KeyError"
    assert repr(future) == "<Future failed: KeyError('x')>"


def test_a_callback_cannot_end_the_thread_it_runs_on():
    future = Future()
    ended = future.then(lambda f: exit(3))
    future.add_done_callback(lambda f: exit(3))
    future.set_result(None)
    assert isinstance(ended.exception(), SystemExit)


def test_collect_all():
    futures = [Future(), Future()]
    both = collect_all(futures)
    futures[1].set_result(1)
    assert not both.done()
    futures[0].set_result(0)
    assert [f.value() for f in both.wait()] == [0, 1]
    assert collect_all([]).wait() == []
    failed, other = Future(), Future()
    both = collect_all([failed, other])
    failed.set_exception(ValueError("no"))
    assert not both.done()
    other.set_result(1)
    with pytest.raises(ValueError, match="no"):
        both.wait()


def test_collect_all_is_that_of_torch():
    torch = pytest.importorskip("torch")
    outcomes = []
    for kind, collect in ((Future, collect_all), (torch.futures.Future, torch.futures.collect_all)):
        futures = [kind(), kind()]
        both = collect(futures)
        futures[1].set_exception(ValueError("no"))
        outcomes.append(both.done())
        futures[0].set_result(1)
        try:
            outcomes.append(len(both.wait()))
        except ValueError:
            outcomes.append("raised")
    assert outcomes[:2] == outcomes[2:] == [False, "raised"]


@pytest.mark.ranks(2, kind="both")
def test_every_function_given_to_on_end_runs_once(rank):
    """Also of a call that has ended, and if the caller polls or waits."""
    called, expected = [], []
    for turn in range(60):
        work = dist.all_reduce(np.ones(1), async_op=True)
        if turn % 3 == 0:
            work.is_completed()
        for part in range(2):
            work.on_end(lambda key=(turn, part): called.append(key))
        if turn % 2 == 0:
            assert work.wait()
        work.on_end(lambda key=(turn, 2): called.append(key))
        expected += [(turn, part) for part in range(3)]
    last = threading.Event()
    dist.all_reduce(np.ones(1), async_op=True).on_end(last.set)
    assert last.wait(30)
    assert sorted(called) == expected


@pytest.mark.ranks(2, kind="processes")
def test_functions_given_to_on_end_run_if_the_call_fails_or_is_dropped(rank):
    """Also beside one that raises."""
    group, told = dist.new_group(), []

    def fail():
        raise asyncio.CancelledError

    first = dist.all_reduce(np.ones(1), group=group, async_op=True)
    first.on_end(fail)
    first.wait()
    if rank == 1:
        dist.recv(np.zeros(1), 0)
        group.abort("the test says so")
        dist.barrier()
        return
    works = [dist.all_reduce(np.ones(1), group=group, async_op=True) for _ in range(3)]
    for work in works:
        work.on_end(fail)
        work.on_end(lambda work=work: told.append(work.exception()))
    ended = threading.Event()
    works[-1].on_end(ended.set)
    dist.send(np.zeros(1), 1)
    assert ended.wait(30)
    dist.destroy_process_group(group)
    assert len(told) == 3
    assert all(isinstance(error, CollectiveAbortedError) for error in told), told
    assert [work.exception() for work in works] == told
    dist.barrier()


@pytest.mark.ranks(2, kind="both")
def test_type_and_duration(rank):
    pg, x, y = dist.group.WORLD, np.ones(4), np.ones(8)
    durations = []
    for _ in range(3):  # C++ knows the call in the end
        works = [pg.all_reduce(x), dist.all_reduce(x, async_op=True)]
        wait_all(works)
        assert [work._get_op_type() for work in works] == [1, 1]
        durations += [work._get_duration() for work in works]
    records = [each for each in dist.trace_records() if each.op == "all_reduce"]
    recorded = [(each.ended_ns - each.started_ns) / 1e6 for each in records]
    assert durations == pytest.approx(recorded, abs=1e-3)
    assert min(durations) > 0
    works = [pg.all_gather_into_tensor(y, x), pg.broadcast(x), pg.barrier(), pg.reduce(x)]
    works += [pg.send(x, 1) if rank == 0 else pg.recv(x, 0), pg.reduce_scatter_tensor(x, y)]
    assert [work._get_op_type() for work in works] == [5, 0, 15, 3, 12 + rank, 16]
    with pytest.raises(
        UnsupportedError,
        match=r"has no duration: it is no collective, has not ended, or has no record",
    ):
        works[4]._get_duration()
    late = dist.barrier(async_op=True) if rank == 0 else None
    if late is not None:
        with pytest.raises(UnsupportedError, match=r"barrier has no duration: .*has not ended"):
            late._get_duration()
        dist.send(x, 1)
        late.wait()
        assert late._get_duration() > 0
    else:
        dist.recv(x, 0)
        dist.barrier()
    if rank == 0:
        assert dist.isend(x, 1)._get_op_type() == 12
    else:
        work = pg.recv(x)
        assert work._get_op_type() == 14
    assert pg.scan(x)._get_op_type() == 100
