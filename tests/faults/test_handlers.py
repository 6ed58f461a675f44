"""A signal handler that uses a group, or a store, inside a call of its own thread."""

import functools
import itertools
import re
import threading
import time

import numpy as np
import pytest

import unisono as dist
from tests.faults.fault_calls import BUSY_S, attempt, store
from tests.support.handlers import at_each_line, in_a_handler
from unisono.core.backends import cpu
from unisono.core.base.threads import completion
from unisono.core.engines import native_engine, native_queue, queue, reference
from unisono.core.groups import process_group
from unisono.core.operations import stream_queue, work
from unisono.core.transports import api, control, mailbox, native_messages
from unisono.core.transports.tcp import link, transport
from unisono.testing import run

ENGINES = pytest.mark.parametrize("engine", ["native", "reference"])

REFUSED = {
    "barrier": dist.barrier,
    "object": lambda: dist.all_gather_object([None, None], "x"),
    "should_stop": dist.should_stop,
    "wrong": lambda: dist.all_reduce("no array"),
}

# How a call is made, by the way that it takes; see docs/explanation/data-path.md.
WAYS = {
    "plain": lambda x, group: dist.all_reduce(x, group=group),
    "strided": lambda x, group: dist.all_reduce(np.repeat(x, 2)[::2], group=group),
    "asynchronous": lambda x, group: dist.all_reduce(x, group=group, async_op=True).wait(),
    "recv": lambda x, group: dist.recv(x, 1),
}


def handled(way, x, *actions, group=None):
    """Make a call, and actions in a signal handler when it blocks; return how each ended."""
    ended = []
    with in_a_handler(lambda: ended.extend(map(attempt, actions))):
        outer = attempt(WAYS[way], x, group)
    return outer, ended


def release(way):
    """Return a function that lets rank 1 go on."""
    return lambda: store().set(way, "")


def call_in_handlers(rank):
    dist.barrier()
    for way in ("plain", "strided"):
        x = np.full(2, rank + 1.0)
        if rank == 0:
            outer, ended = handled(way, x, *REFUSED.values(), release(way))
            assert outer.kind == "", outer
            assert ended.pop().kind == ""
            for name, each in zip(REFUSED, ended, strict=True):
                assert each.kind == "UsageError", (way, name, each)
                assert each.took_s < BUSY_S
                assert each.usable
                where = r"this thread is inside all_reduce #\d+ at \S*test_handlers.py:\d+, and"
                assert re.search(where, each.text), each.text
        else:
            store().wait([way], 60.0)
            WAYS[way](x, None)
        if way == "plain":
            assert x.tolist() == [3.0, 3.0]
    # The group goes on, and no rank has counted a call too many.
    dist.barrier()


@ENGINES
def test_a_call_inside_a_call_of_the_same_group_is_refused_at_once(engine):
    run(call_in_handlers, 2, ranks="processes", engine=engine, timeout=25.0)


def wait_in_handlers(rank):
    dist.barrier()
    for way in ("asynchronous", "recv"):
        x, y = np.full(2, rank + 1.0), np.full(3, rank + 1.0)
        if rank == 0:
            next_call = functools.partial(dist.all_reduce, y)
            outer, ended = handled(way, x, release(way), next_call)
            assert [outer.kind, *(each.kind for each in ended)] == [""] * 3, (outer, ended)
        else:
            store().wait([way], 60.0)
            dist.all_reduce(x) if way == "asynchronous" else dist.send(x, 0)
            dist.all_reduce(y)
        assert y.tolist() == [3.0] * 3
        assert rank == 1 or x.tolist() == [3.0 if way == "asynchronous" else 2.0] * 2
    dist.barrier()


@ENGINES
def test_a_call_inside_a_wait_is_the_next_call(engine):
    run(wait_in_handlers, 2, ranks="processes", engine=engine, timeout=60.0)


ENDINGS = {
    "abort": (lambda group: group.abort("enough"), "enough on rank 0"),
    "destroy": (
        dist.destroy_process_group,
        "' inside a call of the same thread",
    ),
}


def end_in_handlers(rank, ending):
    end, reason = ENDINGS[ending]
    for way in ("plain", "strided", "asynchronous"):
        group, x = dist.new_group(), np.ones(2)
        group.barrier()
        if rank == 0:
            outer, (ended,) = handled(way, x, functools.partial(end, group), group=group)
            assert ended.kind == "", ended
            assert outer.ended_s - ended.began_s < 8.0
            release(way)()
        else:
            store().wait([way], 60.0)
            outer = attempt(WAYS[way], x, group)
        assert outer.kind == "CollectiveAbortedError", outer
        assert reason in outer.text, outer
        dist.barrier()
    end_s = time.monotonic() + BUSY_S
    while any(thread.name.startswith("unisono-close") for thread in threading.enumerate()):
        assert time.monotonic() < end_s
        time.sleep(0.01)


@ENGINES
@pytest.mark.parametrize("ending", ENDINGS)
def test_a_group_ends_inside_a_call(ending, engine):
    run(end_in_handlers, 2, args=(ending,), ranks="processes", engine=engine, timeout=60.0)


MODULES = [queue, native_queue, work, completion, cpu, process_group, stream_queue]
LAST = 100.0


def call_at_lines(rank):
    """Rank 1 makes calls until it meets the last one of rank 0, whatever their number is."""
    if rank == 1:
        x = np.ones(4)
        while x[0] < LAST:
            x[:] = 1.0
            dist.all_reduce(x)
        return
    begun, ended, numbers = [], {"": 0, "UsageError": 0}, itertools.count()

    def begin(value):
        begun.append((value, dist.all_reduce(value, async_op=True)))

    def begin_and_wait(value):
        dist.all_reduce(value, async_op=True).wait()

    def handle():
        value, call = np.full(4, 2.0), (begin, dist.all_reduce, begin_and_wait)[next(numbers) % 3]
        caught = attempt(call, value)
        ended[caught.kind] += 1
        assert call is begin or caught.kind or value.tolist() == [3.0] * 4

    for way in ("plain", "strided", "asynchronous"):
        x = np.full(4, 2.0)
        with at_each_line(MODULES, handle, 300):
            WAYS[way](x, None)
        assert way == "strided" or x.tolist() == [3.0] * 4
    for value, each in begun:
        each.wait()
        assert value.tolist() == [3.0] * 4
    dist.all_reduce(np.full(4, LAST))
    assert all(ended.values()), ended


@ENGINES
def test_a_handler_at_any_line_of_a_call_makes_calls_or_is_refused_at_once(engine):
    run(call_at_lines, 2, ranks="processes", engine=engine, timeout=60.0)


BELOW = [*MODULES, native_engine, reference]
BELOW += [api, control, mailbox, native_messages, link, transport]


def abort_at_lines(rank):
    """Abort a new group at one line of each call: the call ends, and so does that of rank 1."""
    for at in range(1, 400, 27):
        for way in ("plain", "strided", "asynchronous"):
            group, lines = dist.new_group(), itertools.count()
            group.barrier()

            def handle(group=group, lines=lines, at=at):
                if next(lines) == at:
                    group.abort("enough")

            with at_each_line(BELOW if rank == 0 else [], handle):
                caught = attempt(WAYS[way], np.ones(4), group)
            # Unless the call had fewer lines.
            aborted = caught.kind == "CollectiveAbortedError"
            assert aborted or not caught.kind, (way, at, caught)
            assert not aborted or "enough on rank 0" in caught.text
            assert caught.took_s < BUSY_S
            dist.barrier()


@ENGINES
def test_an_abort_at_any_line_of_a_call_ends_it_at_once(engine):
    run(abort_at_lines, 2, ranks="processes", engine=engine, timeout=60.0)
