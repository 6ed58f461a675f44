"""Calls made in streams: what waits for what, and who does not."""

import asyncio
import threading

import numpy as np
import pytest

import unisono as dist
from unisono.errors import (
    ClosedError,
    CollectiveAbortedError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    InvalidArgumentError,
)


class Gate:
    """Something that a stream does not get past before the test says so."""

    def __init__(self, compute):
        self._open = threading.Event()
        compute.submit(lambda: self._open.wait(60))
        self.open = self._open.set


def chain(rank):
    """compute -> communication -> end event -> another stream; the host never waits."""
    p, x, y = dist.get_world_size(), np.zeros(4), np.zeros(4)
    compute, other = dist.Stream("compute"), dist.Stream("other")
    gate = Gate(compute)
    with dist.stream(compute):
        compute.submit(np.copyto, x, rank + 1.0)
        work = dist.all_reduce(x, async_op=True)
    with dist.stream(other):
        assert work.wait() is True  # the host goes on, `other` waits
        other.submit(np.multiply, x, 10, y)
        end = other.record_event()
    assert not compute.query()
    assert not work.is_completed()
    assert not end.query()
    assert not other.query()
    assert (x == 0).all()
    gate.open()
    end.synchronize(60)
    assert end.query()
    assert work.is_completed()
    assert work.is_success()
    total = p * (p + 1) / 2
    assert (x == total).all()
    assert (y == 10 * total).all()
    assert work.result()[0] is x
    compute.synchronize(60)


def not_waited_for(rank):
    """What the stream does after the call does not wait for it, unless told to."""
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


def synchronous(rank):
    """A synchronous call in a stream is a call and a wait of that stream."""
    p, x, y = dist.get_world_size(), np.ones(3), np.zeros(3)
    compute = dist.Stream("compute")
    gate = Gate(compute)
    with dist.stream(compute):
        compute.submit(np.multiply, x, 2, x)
        assert dist.all_reduce(x) is None
        compute.submit(np.copyto, y, x)
        outs = [np.zeros(3) for _ in range(p)]
        dist.all_gather(outs, y)
        assert not compute.query()
        assert (x == 1).all()
        gate.open()
        compute.synchronize(60)
        assert (x == 2 * p).all()
        assert (np.stack(outs) == 2 * p).all()
        # A barrier stops the host, as in torch.
        compute.submit(np.copyto, x, 5)
        dist.barrier()
        assert (x == 5).all()


def order(rank):
    """Calls without a stream queue behind those that wait for one: the host's order holds."""
    p, x, y = dist.get_world_size(), np.zeros(2), np.ones(2)
    compute = dist.Stream("compute")
    gate = Gate(compute)
    with dist.stream(compute):
        compute.submit(np.copyto, x, 3)
        first = dist.all_reduce(x, async_op=True)
    second = dist.broadcast(y, 0, async_op=True)
    assert not second.is_completed()
    gate.open()
    dist.all_reduce(y)
    assert first.is_completed()
    assert (x == 3 * p).all()
    assert (y == p).all()
    # Nothing waits any more: calls go straight to the engine again.
    dist.all_reduce(y)
    assert (y == p * p).all()


def point_to_point(rank):
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
            assert dist.recv(theirs, tag=3) == 0  # stops the host: it says who sent
            assert (theirs == 10).all()
        compute.synchronize(60)


def layouts(rank):
    """Nothing is read at the time of the call, of a strided array neither."""
    p, table = dist.get_world_size(), np.zeros((4, 3))
    compute = dist.Stream("compute")
    gate = Gate(compute)
    with dist.stream(compute):
        compute.submit(np.copyto, table, 1.0)
        dist.all_reduce(table[:, 1])
        dist.all_reduce(table[:, 2], dist.ReduceOp.PREMUL_SUM(2))
    gate.open()
    compute.synchronize(60)
    assert (table == [1, p, 2 * p]).all()


def objects(rank):
    """Object collectives look at what they receive, so they stop the host."""
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


def futures(rank):
    """Futures, callbacks and await of calls in streams."""
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


def bad_argument(rank):
    """An argument that is found wrong when the call begins: its work and its stream say so."""
    compute, x = dist.Stream("compute"), np.ones(2)
    frozen = np.ones(2)
    frozen.flags.writeable = False
    with dist.stream(compute):
        work = dist.all_reduce(frozen, async_op=True)
        with pytest.raises(InvalidArgumentError, match="read-only"):
            work.wait(60)
        dist.all_reduce(frozen)
        compute.submit(np.copyto, x, 9)
        with pytest.raises(InvalidArgumentError, match="read-only"):
            compute.synchronize(60)
        assert (x == 1).all()
        dist.all_reduce(x)
        compute.synchronize(60)
    assert (x == dist.get_world_size()).all()


def refused_behind_another(rank):
    """A call that is found wrong while it queues behind one in a stream is refused once."""
    compute, x = dist.Stream("compute"), np.ones(2)
    gate = Gate(compute)
    with dist.stream(compute):
        first = dist.all_reduce(x, async_op=True)
    opener = threading.Timer(0.02, gate.open)
    opener.start()
    if rank == 1:
        frozen = np.ones(2)
        frozen.flags.writeable = False
        with pytest.raises(InvalidArgumentError, match="read-only"):
            dist.all_reduce(frozen)
    else:
        with pytest.raises(CollectiveMismatchError, match="rank 1 called all_reduce, but refused"):
            dist.all_reduce(np.ones(2))
    opener.join()
    first.wait()
    assert (x == dist.get_world_size()).all()
    dist.all_reduce(x)
    assert (x == dist.get_world_size() ** 2).all()


def failure_before_the_call(rank):
    """What failed in the stream before the call reaches the ranks that wait for it."""
    compute, x = dist.Stream("compute"), np.ones(2)
    group = dist.new_group()
    with dist.stream(compute):
        if rank == 1:
            compute.submit(lambda: 1 / 0)
        work = dist.all_reduce(x, group=group, async_op=True)
    told = None
    if rank == 1:
        with pytest.raises(ZeroDivisionError):
            work.wait_on_host()
        with pytest.raises(ZeroDivisionError):
            compute.synchronize(60)
    else:
        with pytest.raises(CollectiveAbortedError) as caught:
            work.wait()
        told = caught.value.what
    with pytest.raises(CollectiveAbortedError):
        dist.all_reduce(x, group=group)
    dist.barrier()
    return told


def stream_that_never_comes(rank):
    """The time-out of a call counts while it waits for its stream."""
    compute, group = dist.Stream("compute"), dist.new_group()
    gate = Gate(compute)
    told = None
    if rank == 0:
        with dist.stream(compute):
            work = dist.all_reduce(np.ones(1), group=group, async_op=True, timeout=0.1)
        with pytest.raises(CollectiveTimeoutError) as caught:
            work.wait()
        told = caught.value.what
    else:
        with pytest.raises(CollectiveAbortedError) as caught:
            dist.all_reduce(np.ones(1), group=group)
        told = caught.value.what
    gate.open()
    compute.synchronize(60)
    dist.barrier()
    return told


def destroyed(rank):
    """A group that is destroyed ends the calls that wait for their streams."""
    compute, group = dist.Stream("compute"), dist.new_group()
    gate = Gate(compute)
    with dist.stream(compute):
        work = dist.all_reduce(np.ones(1), group=group, async_op=True)
    dist.destroy_process_group(group)
    with pytest.raises(ClosedError) as caught:
        work.wait()
    gate.open()
    compute.synchronize(60)
    dist.barrier()
    return caught.value.what
