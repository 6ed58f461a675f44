"""What a function of the user raises on a thread of the library ends that function only."""

import asyncio
import logging
import threading

import numpy as np
import pytest

import unisono as dist
from tests.support.calls import fails
from unisono.core.operations.dispatch import dispatcher
from unisono.errors import CollectiveAbortedError

LIMIT_S = 30.0

# That these are no sub-classes of Exception matters: `except Exception` misses them.
ENDS = [asyncio.CancelledError, SystemExit, KeyboardInterrupt, GeneratorExit]


@pytest.fixture
def no_log(monkeypatch):
    """Keep pytest from keeping the log, whose tracebacks would keep the groups alive."""
    monkeypatch.setattr(logging.getLogger("unisono.groups.work"), "disabled", True)


@pytest.mark.ranks(2, kind="both")
def test_no_exception_of_a_callback_ends_the_thread_that_runs_the_calls(rank, no_log):
    """The calls after it end, and the future that `then` returned has the exception."""
    names = []
    dist.all_reduce(np.ones(2))  # the first call of a group takes another way
    for number, error in enumerate(ENDS):

        def end(future, error=error):
            names.append(threading.current_thread().name)
            raise error

        late = number % 2
        if rank == late:
            dist.recv(np.zeros(1), 1 - late)
        work = dist.all_reduce(np.ones(1000), async_op=True)
        future = work.get_future()
        future.add_done_callback(end)
        chained = future.then(end)
        last = chained.then(lambda f: type(f.exception()))
        if rank != late:
            # The call ends after this rank has added its callbacks.
            dist.send(np.zeros(1), late)
        assert work.wait(LIMIT_S)
        assert last.wait(LIMIT_S) is error
        with pytest.raises(error):
            chained.wait(LIMIT_S)
        x = np.full(1000, rank + 1.0)
        assert dist.all_reduce(x, async_op=True).wait(LIMIT_S)
        assert (x == 3).all()
    ran = [name for name in names if name.startswith("unisono-progress")]
    assert len(ran) >= len(ENDS), names


def end_a_stream(rank, group, compute, end, error, told):
    """Let `end` raise `error` in a stream of rank 1, before a call, which then fails on both."""
    with dist.stream(compute):
        if rank == 1:
            compute.submit(end)
        work = dist.all_reduce(np.ones(2), group=group, async_op=True)
    if rank == 1:
        with pytest.raises(error):
            work.wait_on_host()
        with pytest.raises(error):
            compute.synchronize(LIMIT_S)
    else:
        with fails(CollectiveAbortedError, told):
            work.wait()


@pytest.mark.ranks(2, kind="both")
def test_no_exception_in_a_stream_keeps_the_calls_behind_it_waiting(rank):
    for error in ENDS:
        group, compute = dist.new_group(), dist.Stream("compute")

        def end(error=error):
            raise error

        told = f"{error.__name__} in the stream before all_reduce () on rank 1"
        end_a_stream(rank, group, compute, end, error, told)
        seen = []
        compute.submit(seen.append, 1)
        compute.synchronize(LIMIT_S)
        assert seen == [1]
        dist.barrier()


class Unshown(Exception):
    """An exception without a text."""

    def __str__(self):
        raise RuntimeError("no text")

    __repr__ = __str__


@pytest.mark.ranks(2, kind="both")
def test_an_exception_that_cannot_be_shown_ends_the_calls_behind_it_too(rank):
    group, compute = dist.new_group(), dist.Stream("compute")

    def end(*_):
        raise Unshown

    end_a_stream(rank, group, compute, end, Unshown, "Unshown, which cannot be shown")
    work = dist.barrier(async_op=True)
    chained = work.get_future().then(end)
    assert work.wait(LIMIT_S)
    with pytest.raises(Unshown):
        chained.wait(LIMIT_S)
    assert dist.barrier(async_op=True).wait(LIMIT_S)


@pytest.mark.ranks(2, kind="processes")
def test_a_wrapper_that_raises_ends_the_call_in_a_stream(rank):
    compute, begun = dist.Stream("compute"), []

    def wrapper(schema, device, kernel):
        def run(*arguments):
            begun.append(threading.current_thread().name)
            raise asyncio.CancelledError

        return run

    dist.barrier()
    remove = dispatcher.register_wrapper(wrapper)
    try:
        with dist.stream(compute):
            work = dist.all_reduce(np.ones(2), async_op=True)
        with pytest.raises(asyncio.CancelledError):
            work.wait_on_host()
    finally:
        remove()
    assert begun == ["unisono-stream-communication-default"]
    x = np.ones(2)
    with dist.stream(compute):
        assert dist.all_reduce(x, async_op=True).wait_on_host()
    assert (x == 2).all()
