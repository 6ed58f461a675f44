"""Work and Future on real operations."""

import asyncio
import threading

import numpy as np
import pytest

import unisono as dist
from unisono.errors import CollectiveTimeoutError, UsageError


def states(rank):
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


def dropped(rank):
    """Nobody keeps the handle: the operation happens nevertheless, in order."""
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


def chains(rank):
    """Chains; callbacks that start asynchronous operations, on whatever thread they run."""
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


def waiting_in_a_callback(rank):
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
    return told


def awaited(rank):
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


def threads(rank):
    """Calls of several threads on one group are put in some order; each has a group here."""
    p = dist.get_world_size()
    works = [dist.all_reduce(np.full(2, float(i)), async_op=True) for i in range(30)]
    seen = []
    watchers = [threading.Thread(target=lambda w=w: seen.append(w.wait())) for w in works]
    for watcher in watchers:
        watcher.start()
    for watcher in watchers:
        watcher.join()
    assert seen == [True] * 30
    assert [w.result()[0][0] for w in works] == [float(i * p) for i in range(30)]


def destroyed(rank):
    """Work that is queued when its group is destroyed ends, and says why."""
    group = dist.new_group()
    if rank == 1:
        dist.barrier()
        dist.destroy_process_group(group)
        return None
    first = dist.all_reduce(np.ones(1), group=group, async_op=True)
    second = dist.all_reduce(np.ones(1), group=group, async_op=True)
    dist.destroy_process_group(group)
    told = []
    for work in (first, second):
        with pytest.raises(RuntimeError) as caught:
            work.wait(30)
        told.append((type(caught.value).__name__, caught.value.what))
    dist.barrier()
    return told
