"""Thread rules: overlapping calls on one group are refused, with both call sites."""

import re
import threading
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest

import unisono as dist
from unisono.core.operations.dispatch import dispatcher
from unisono.errors import UsageError


def check_names_both(line, refused, under_way):
    here = r"\S*test_threads\.py:\d+"
    assert re.fullmatch(
        rf"{refused} on group 'default' at {here} \(thread '[^']+'\) overlaps {under_way} at "
        rf"{here} \(thread 'first'\)",
        line,
    ), line


@contextmanager
def in_a_call(call, *, held_in=None):
    """Make a call in another thread; the block runs once the call has entered its kernel.

    The kernel of the operation `held_in` begins when the block has ended.
    """
    group, inside, go_on = dist.group.WORLD, threading.Event(), threading.Event()

    def wrapper(schema, device, kernel):
        def run(called, *arguments):
            if called is group and held_in in (None, schema.name):
                inside.set()
                assert held_in is None or go_on.wait(30)
            return kernel(called, *arguments)

        return run

    first = threading.Thread(target=call, name="first")
    with ExitStack() as stack:
        stack.callback(dispatcher.register_wrapper(wrapper))
        first.start()
        stack.callback(first.join)
        stack.callback(go_on.set)
        assert inside.wait(30)
        yield


@pytest.mark.ranks(2, kind="both")
def test_an_overlapping_call_is_refused_and_both_call_sites_are_named(rank):
    group, x, y = dist.group.WORLD, np.ones(3), np.ones(3)
    if rank == 0:
        with in_a_call(lambda: dist.all_reduce(x, group=group)):
            with pytest.raises(UsageError) as caught:
                group.broadcast(y, 0)
            assert caught.value.context.usable
            line, where, hint = str(caught.value).splitlines()
            check_names_both(line, "broadcast", "all_reduce")
            assert where.strip() == "where: rank=0 group=default op=broadcast group_usable=yes"
            assert "new_group" in hint
            with pytest.raises(UsageError):
                group.broadcast(y, 0, async_op=True)
            # Messages are matched by peer and tag, whatever thread makes them.
            group.send(np.arange(3.0), 1)
        assert group.barrier(async_op=True).wait()
    else:
        group.recv(y, 0)
        assert (y == [0, 1, 2]).all()
        group.all_reduce(x)
        group.barrier()
    assert (x == 2).all()
    group.all_reduce(y)


@pytest.mark.ranks(2, kind="both")
def test_an_object_call_keeps_other_threads_out_between_its_messages(rank):
    group, large = dist.group.WORLD, np.arange(300_000)
    if rank == 0:
        got = [None] * 2
        dist.gather_object(large, got, 0)
        assert all((one == large).all() for one in got)
    else:
        with in_a_call(lambda: dist.gather_object(large, group=group), held_in="send"):
            with pytest.raises(UsageError) as caught:
                dist.gather_object(-large, timeout=5)
            with pytest.raises(UsageError):
                dist.all_reduce(np.ones(3), timeout=5)
        check_names_both(caught.value.what, "gather_object", "gather_object")
    dist.barrier()


@pytest.mark.sweep(2)
@pytest.mark.ranks(2, kind="both", engine="both")
def test_a_repeated_call_stays_out_of_an_object_call(rank):
    group, x = dist.group.WORLD, np.ones(3)
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
    if rank == 0:
        check_names_both(caught.value.what, "all_reduce", "all_reduce_object")


@pytest.mark.ranks(3, kind="both")
def test_threads_may_take_turns(rank):
    x = np.ones(2)
    for _ in range(3):
        thread = threading.Thread(target=dist.GroupMember.WORLD.all_reduce, args=(x,))
        thread.start()
        thread.join()
    dist.all_reduce(x)
    assert (x == dist.get_world_size() ** 4).all()
