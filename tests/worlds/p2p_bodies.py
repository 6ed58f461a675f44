"""Point-to-point calls."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import unisono as dist
from unisono.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    InvalidArgumentError,
    UnisonoError,
)


def pairs(rank):
    """Blocking and non-blocking, tags out of order, any source, to oneself."""
    p = dist.get_world_size()
    right, left = (rank + 1) % p, (rank - 1) % p
    x, y = np.full(3, float(rank)), np.zeros(3)
    works = [dist.isend(x, right, tag=4), dist.irecv(y, left, tag=4)]
    assert [work.wait() for work in works] == [True, True]
    assert (y == left).all()
    assert works[1].source_rank() == left
    for tag in (1, 2):
        dist.send(np.full(2, tag, np.int8), right, tag=tag) if rank % 2 == 0 else None
    if rank % 2:
        for tag in (2, 1):
            z = np.zeros(2, np.int8)
            assert dist.recv(z, left, tag=tag) == left
            assert (z == tag).all()
    me = np.zeros(3)
    got = dist.irecv(me, rank)
    dist.isend(x, rank).wait()
    got.wait()
    assert (me == rank).all()
    with pytest.raises(InvalidArgumentError, match="send to this rank itself"):
        dist.send(x, rank)
    dist.barrier()
    if rank == 0:
        heard = {}
        for _ in range(p - 1):
            z = np.zeros(1, int)
            source = dist.recv(z)
            heard[source] = int(z[0])
        assert heard == {r: 10 * r for r in range(1, p)}
    else:
        dist.send(np.array([10 * rank]), 0)


def order(rank):
    """Messages of one tag and pair arrive in the order they were sent."""
    if rank == 0:
        works = [dist.isend(np.array([i]), 1) for i in range(20)]
    else:
        got = [np.zeros(1, int) for _ in range(20)]
        works = [dist.irecv(g, 0) for g in got]
    for work in works:
        work.wait()
    if rank == 1:
        assert [int(g[0]) for g in got] == list(range(20))


def batches(rank):
    p = dist.get_world_size()
    right, left = (rank + 1) % p, (rank - 1) % p
    x, y, z = np.full(4, float(rank)), np.zeros(4), np.zeros(4)[::-1]
    ops = [
        dist.P2POp(dist.irecv, y, left),
        dist.P2POp(dist.isend, x, right),
        dist.P2POp(dist.isend, x * 2, group_peer=right, group=dist.group.WORLD),
        dist.P2POp(dist.irecv, z, group_peer=left),
    ]
    assert (ops[0].peer, ops[0].group_peer, ops[0].tag) == (left, left, 0)
    assert repr(ops[1]) == f"P2POp(isend, peer={right}, tag=0)"
    works = dist.batch_isend_irecv(ops)
    assert len(works) == 4
    for work in works:
        work.wait()
    assert (y == left).all()
    assert (z == 2 * left).all()


def failed_batch(rank):
    """A batch with a mistake leaves no receive behind that would swallow a later message."""
    if rank == 0:
        lost = np.zeros(2)
        ops = [dist.P2POp(dist.irecv, lost, 1), dist.P2POp(dist.isend, [1, 2], 1)]
        with pytest.raises(TypeError, match="must be an array"):
            dist.batch_isend_irecv(ops)
    dist.barrier()
    if rank == 1:
        dist.send(np.ones(2), 0)
    else:
        got = np.zeros(2)
        dist.recv(got, 1)
        assert (got == 1).all()
        assert (lost == 0).all()


def in_group(rank):
    group = dist.new_group([2, 0], sort_ranks=False)
    x = np.zeros(1)
    if rank == 2:
        dist.send(np.array([5.0]), 0, group)
        dist.send(np.array([6.0]), group=group, group_dst=1)
        dist.send(np.array([7.0]), group=group, group_dst=1)
    elif rank == 0:
        assert dist.recv(x, 2, group) == 2
        assert x[0] == 5
        assert dist.recv(x, group=group, group_src=0) == 2
        assert dist.recv(x, group=group) == 2
        assert x[0] == 7


def layouts_and_sizes(rank):
    shapes = [(), (0,), (3,), (2, 3)]
    for shape in shapes:
        for dtype in (np.float32, np.complex128, np.bool_, np.int8):
            x = np.ones(shape, dtype)
            if rank == 0:
                dist.send(x, 1)
            else:
                y = np.zeros(shape, dtype)
                dist.recv(y, 0)
                assert (y == x).all()
                assert y.shape == x.shape
    grid = np.arange(24.0).reshape(4, 6)
    if rank == 0:
        dist.send(grid[::-1, ::2], 1)
        dist.send(np.broadcast_to(np.float64(3), 5), 1)
    else:
        out = np.zeros((3, 4)).T
        dist.recv(out, 0)
        assert (out == grid[::-1, ::2]).all()
        row = np.zeros(10)
        dist.recv(row[::2], 0)
        assert row.tolist() == [3, 0] * 5


def mistakes(rank):
    """Wrong size or dtype; nobody sends: errors name the other side, the group stays usable."""
    told = []
    cases = [(np.ones(4), np.zeros(3)), (np.ones(2, np.float32), np.zeros(2, np.int32)),
             (np.ones(2, np.float32), np.zeros(1))]  # fmt: skip
    for sent, into in cases:
        if rank == 0:
            dist.send(sent, 1)
        else:
            with pytest.raises(CollectiveMismatchError) as caught:
                dist.recv(into, 0)
            assert (into == 0).all()
            told.append(caught.value.what)
        dist.barrier()
    if rank == 1:
        x = np.zeros(2)
        for source in (0, None):
            with pytest.raises(CollectiveTimeoutError) as caught:
                dist.recv(x, source, timeout=0.05)
            told.append(caught.value.what)
        work = dist.irecv(x, 0, tag=9, timeout=0.05)
        with pytest.raises(CollectiveTimeoutError) as caught:
            work.get_future().wait()
        told.append(caught.value.what)
        assert (x == 0).all()
    dist.barrier()
    if rank == 0:
        dist.send(np.full(2, 8.0), 1)
    else:
        dist.recv(x, 0)
        assert (x == 8).all()
    return told


def bad_arguments(rank):
    x = np.ones(1)
    for bad in ({"dst": 5}, {"dst": -1}, {}, {"dst": 0, "group_dst": 0}, {"dst": 1, "tag": -1},
                {"dst": 1, "tag": 2**63}, {"dst": 1, "tag": 0.5}, {"group_dst": 1.5},
                {"group_dst": True}):  # fmt: skip
        with pytest.raises(UnisonoError):
            dist.isend(x, **bad)
    for bad in ({"src": 5}, {"src": 0, "group_src": 0}, {"src": 1, "tag": "a"}):
        with pytest.raises(UnisonoError):
            dist.irecv(x, **bad)
    with pytest.raises(InvalidArgumentError, match="op must be unisono"):
        dist.P2POp(dist.send, x, 0)
    other = dist.new_group()
    ops = [dist.P2POp(dist.isend, x, 0), dist.P2POp(dist.isend, x, 0, other)]
    with pytest.raises(InvalidArgumentError, match="same group"):
        dist.batch_isend_irecv(ops)
    with pytest.raises(InvalidArgumentError, match="p2p_op_list is empty"):
        dist.batch_isend_irecv([])
    with pytest.raises(InvalidArgumentError, match="must be a list of P2POp"):
        dist.batch_isend_irecv([1])
    (late,) = dist.batch_isend_irecv([dist.P2POp(dist.irecv, x, 0, tag=404)], timeout=0.05)
    with pytest.raises(TimeoutError, match="tag=404"):
        late.wait()
    # A rank that leaves earlier would be the other one's reason.
    dist.barrier()


def destroyed_under_a_receive(rank):
    """A receive that waits when its group is destroyed ends at once, and says why."""
    told = []
    for is_waited in (False, True):
        group, waits = dist.new_group(), threading.Event()
        if rank == 0:
            work = dist.irecv(np.zeros(1), 1, group, timeout=600)

            def ended(work=work, waits=waits):
                waits.set()
                with pytest.raises(UnisonoError) as caught:
                    work.wait(30)
                return type(caught.value).__name__, caught.value.what

            pool = ThreadPoolExecutor(1)
            if is_waited:
                end = pool.submit(ended)
                waits.wait(30)
        # As long as this takes, the other thread should be in its wait.
        for _ in range(5):
            dist.barrier()
        if rank == 0:
            dist.destroy_process_group(group)
            told.append(end.result() if is_waited else ended())
            pool.shutdown()
    dist.barrier()
    return told


def both_send_first(rank):
    """Two ranks that both send first come to their receives, whatever the size."""
    for size in (1, 1000, 1_000_000):
        x, y = np.full(size, rank + 1.0), np.zeros(size)
        dist.send(x, 1 - rank)
        assert dist.recv(y, 1 - rank) == 1 - rank
        assert (y == 2 - rank).all()


def far_ahead(rank):
    """A sender far ahead of its receiver, who is busy elsewhere and then asks in another order."""
    sizes = [(i * 37) % 5000 for i in range(150)]
    if rank == 0:
        for tag, size in enumerate(sizes):
            dist.send(np.full(size, tag, np.int32), 1, tag=tag)
    dist.barrier()
    if rank == 1:
        for tag, size in reversed(list(enumerate(sizes))):
            got = np.zeros(size, np.int32)
            dist.recv(got, None, tag=tag)
            assert (got == tag).all()


def without_waiting(rank):
    """What was started goes on while the caller does something else, dropped works too."""
    size = 700_000
    x, y, z = np.full(size, rank + 1.0), np.zeros(size), np.zeros(size)
    dist.isend(x, 1 - rank)
    works = [
        dist.irecv(y, 1 - rank),
        dist.isend(x, 1 - rank, tag=1),
        dist.irecv(z, 1 - rank, tag=1),
    ]
    ends = [work.get_future() for work in works]
    give_up = time.monotonic() + 60
    while not all(end.done() for end in ends) and time.monotonic() < give_up:
        time.sleep(0.001)
    assert [end.exception() for end in ends] == [None] * 3
    assert (y == 2 - rank).all()
    assert (z == 2 - rank).all()


def asked_in_other_ways(rank):
    """A small receive that is polled, chained to, dropped, or ended by another one's wait."""
    x = np.arange(4.0)
    polled, chained, dropped, last = (np.zeros(4) for _ in range(4))
    if rank == 0:
        dist.barrier()
        for tag in range(4):
            dist.isend(x + tag, 1, tag=tag)
    else:
        one, other = dist.irecv(polled, 0, tag=0), dist.irecv(chained, 0, tag=1)
        dist.irecv(dropped, 0, tag=2)
        assert not one.is_completed()
        dist.barrier()
        give_up = time.monotonic() + 60
        while not one.is_completed() and time.monotonic() < give_up:
            time.sleep(0.001)
        assert one.is_success()
        assert one.source_rank() == 0
        seen = other.get_future().then(lambda done: done.value()[0].sum()).wait(60)
        assert seen == x.sum() + 4
        assert dist.irecv(last, 0, tag=3).wait()
        assert [polled.sum(), dropped.sum(), last.sum()] == [6, 14, 18]
    dist.barrier()


def plain_mistakes(rank):
    """Mistakes in calls of the plainest kind, which take the short way."""
    told = []
    if rank == 0:
        dist.send(np.ones(4), 1)
        dist.send(np.ones(2, np.float32), 1)
        with pytest.raises(InvalidArgumentError, match="global rank 7 is not in group"):
            dist.send(np.ones(2), 7)
    else:
        for into in (np.zeros(3), np.zeros(1)):
            with pytest.raises(CollectiveMismatchError) as caught:
                dist.recv(into, 0)
            assert (into == 0).all()
            told.append(caught.value.what)
    dist.barrier()
    group = dist.group.WORLD
    usual = group.timeout_s
    group.set_timeout(0.05)
    if rank == 1:
        x = np.zeros(2)
        for source in (0, None):
            with pytest.raises(CollectiveTimeoutError) as caught:
                dist.recv(x, source)
            told.append(caught.value.what)
    group.set_timeout(usual)
    dist.barrier()
    if rank == 0:
        dist.send(np.full(2, 8.0), 1)
    else:
        dist.recv(x, 0)
        assert (x == 8).all()
    return told
