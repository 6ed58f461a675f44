"""Several threads of one rank on one group."""

import threading

import numpy as np
import pytest

import unisono as dist
from unisono.errors import UsageError
from unisono.groups.dispatch import dispatcher


class Entered:
    """Tells when a call of this rank's group `group` has entered its kernel."""

    def __init__(self, group):
        self.inside = threading.Event()

        def wrapper(schema, device, kernel):
            def told(called, device, *arguments):
                if called is group:
                    self.inside.set()
                return kernel(called, device, *arguments)

            return told

        self.remove = dispatcher.register_wrapper(wrapper)


def overlapping(rank):
    """A second thread calls while the first one waits for the other rank."""
    group, x, y = dist.GroupMember.WORLD, np.ones(3), np.ones(3)
    told = None
    if rank == 0:
        entered = Entered(group)
        first = threading.Thread(target=lambda: dist.all_reduce(x, group=group), name="first")
        try:
            first.start()
            assert entered.inside.wait(30)
        finally:
            entered.remove()
        with pytest.raises(UsageError) as caught:
            group.broadcast(y, 0)
        told = str(caught.value), caught.value.context.usable
        with pytest.raises(UsageError):
            group.broadcast(y, 0, async_op=True)
        # Point-to-point calls are matched by peer and tag, whatever thread makes them.
        group.send(np.arange(3.0), 1)
        first.join()
        assert group.barrier(async_op=True).wait()
    else:
        group.recv(y, 0)
        assert (y == [0, 1, 2]).all()
        group.all_reduce(x)
        group.barrier()
    assert (x == 2).all()
    group.all_reduce(y)
    return told


def overlapping_objects(rank):
    """A second thread calls while the first one is between two messages of an object call."""
    group, large = dist.GroupMember.WORLD, np.arange(300_000)
    got = [None] * 2 if rank == 0 else None
    if rank == 0:
        dist.gather_object(large, got, 0)
        assert all((one == large).all() for one in got)
        dist.barrier()
        return None
    inside, go_on = threading.Event(), threading.Event()

    def wrapper(schema, device, kernel):
        def held(called, device, *arguments):
            if called is group and schema.name == "send":
                inside.set()
                assert go_on.wait(30)
            return kernel(called, device, *arguments)

        return held

    remove = dispatcher.register_wrapper(wrapper)
    first = threading.Thread(target=lambda: dist.gather_object(large, group=group), name="first")
    try:
        first.start()
        assert inside.wait(30)
        with pytest.raises(UsageError) as caught:
            dist.gather_object(-large, timeout=5)
        with pytest.raises(UsageError):
            dist.all_reduce(np.ones(3), timeout=5)
    finally:
        go_on.set()
        first.join()
        remove()
    dist.barrier()
    return str(caught.value)


def overlapping_repeated(rank):
    """A call that the C++ engine would repeat comes between two messages of an object call."""
    group, x = dist.GroupMember.WORLD, np.ones(3)
    for _ in range(3):
        dist.all_reduce(x, dist.ReduceOp.MAX, group)
    if rank == 0:
        inside, go_on = threading.Event(), threading.Event()

        def held(a, b):
            inside.set()
            assert go_on.wait(30)
            return a + b

        first = threading.Thread(
            target=lambda: dist.all_reduce_object(1, held, group), name="first"
        )
        try:
            first.start()
            assert inside.wait(30)
            with pytest.raises(UsageError) as caught:
                dist.all_reduce(x, dist.ReduceOp.MAX, group)
        finally:
            go_on.set()
            first.join()
    else:
        assert dist.all_reduce_object(1, None, group) == 2
    dist.all_reduce(x, dist.ReduceOp.MAX, group)
    assert (x == 1).all()
    return str(caught.value) if rank == 0 else None


def one_after_another(rank):
    """Threads that take turns are fine: each call has ended before the next one begins."""
    x = np.ones(2)
    for _ in range(3):
        thread = threading.Thread(target=dist.GroupMember.WORLD.all_reduce, args=(x,))
        thread.start()
        thread.join()
    dist.all_reduce(x)
    assert (x == dist.get_world_size() ** 4).all()


def from_a_callback(rank):
    """A callback that runs inside a call may make the next one."""
    x, y = np.ones(2), np.ones(2)
    work = dist.all_reduce(x, async_op=True)
    started = work.get_future().then(lambda f: dist.all_reduce(y, async_op=True))
    started.wait(30).wait()
    assert (y == dist.get_world_size()).all()
