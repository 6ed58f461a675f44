"""Asynchronous calls: order, errors and memory, whether C++ or Python runs them."""

import gc
import os
import random
import select
import signal
import sys
import threading
import time
import weakref
from functools import partial

import numpy as np
import pytest

import unisono as dist
from tests.support.calls import wait_until
from unisono.core.backends import p2p
from unisono.core.base.deadline import Deadline
from unisono.core.engines.native_queue import QueuedCall
from unisono.core.recorder import open_calls
from unisono.errors import (
    ClosedError,
    CollectiveTimeoutError,
    UnisonoError,
)

LIMIT_S = 60.0


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.ranks(3, kind="both")
def test_calls_of_all_kinds_on_one_array_in_any_order(rank, seed):
    p, chosen = dist.get_world_size(), random.Random(seed)
    x, works, futures = np.arange(6.0) + rank, [], []
    values = [np.arange(6.0) + r for r in range(p)]
    for number in range(40):
        kind = chosen.choice(["native", "finish", "sync", "root", "strided", "callback"])
        root = chosen.randrange(p)
        if kind == "sync":
            dist.all_reduce(x, dist.ReduceOp.MAX)
        elif kind == "finish":
            works.append(dist.all_reduce(x, dist.ReduceOp.AVG, async_op=True))
        elif kind == "strided":
            works.append(dist.broadcast(x[::2], root, async_op=True))
        elif kind == "root":
            works.append(dist.broadcast(x, root, async_op=True))
        else:
            works.append(dist.all_reduce(x, dist.ReduceOp.MAX, async_op=True))
        if kind == "callback":
            futures.append((works[-1].get_future().then(lambda f, n=number: n), number))
        if kind in ("root", "strided"):
            part = slice(None, None, 2 if kind == "strided" else 1)
            for value in values:
                value[part] = values[root][part]
        elif kind == "finish":
            values = [np.mean(values, axis=0) for _ in range(p)]
        else:
            values = [np.max(values, axis=0) for _ in range(p)]
        if kind == "sync" or chosen.random() < 0.1:
            dist.barrier()
            assert np.allclose(x, values[rank], rtol=1e-12), (number, kind)
    for work in reversed(works):
        assert work.wait(LIMIT_S)
    assert np.allclose(x, values[rank], rtol=1e-12)
    dist.barrier()
    assert all(future.wait(LIMIT_S) == number for future, number in futures)


@pytest.mark.native
@pytest.mark.ranks(2, kind="processes", engine="native")
def test_calls_end_while_python_is_busy(rank):
    p, x, y = dist.get_world_size(), np.zeros(8), np.zeros(100_000)
    gate = np.zeros(1)
    for array in (x, y, gate):
        dist.all_reduce(array)
    x[:], y[:] = 1, 1
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e6)
    try:
        works = [dist.all_reduce(array, async_op=True) for array in (x, y, y, gate)]
        ends_s = time.monotonic() + LIMIT_S
        # Nothing in this loop waits, so this thread keeps the interpreter.
        while not works[-1].is_completed() and time.monotonic() < ends_s:
            pass
        assert all(work.is_success() for work in works)
    finally:
        sys.setswitchinterval(before)
    assert (x == p).all()
    assert (y == p * p).all()


class Traced(np.ndarray):
    """An array that can be referred to weakly."""


def traced():
    """Return an array, and a weak reference to it."""
    x = np.ones(1000).view(Traced)
    return x, weakref.ref(x)


def exit_code_of_fork(body):
    """Run a function in the child of a fork; return 42 if it returned True."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = 42 if body() else 2
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def at_lines_of_the_queue(at_line):
    """Call a function at each line of the queue that is traced; it returns whether to go on."""

    def trace(frame, event, arg):
        if not frame.f_code.co_filename.endswith("core/engines/native_queue.py"):
            return None
        at_line(frame, event)
        return trace

    return trace


@pytest.mark.ranks(2, kind="both")
def test_the_array_of_a_dropped_work_lives_as_long_as_the_call(rank):
    gate = np.zeros(1)
    dist.barrier()
    x, alive = traced()
    if rank == 1:
        dist.recv(gate, 0)
    dist.all_reduce(x, async_op=True)
    del x
    if rank == 0:
        assert alive() is not None
        dist.send(gate, 1)
    assert wait_until(lambda: alive() is None)


@pytest.mark.ranks(2, kind="both")
def test_a_last_call_releases_its_array(rank):
    dist.barrier()
    for op, chained in ((dist.ReduceOp.AVG, False), (dist.ReduceOp.SUM, True)):
        x, alive = traced()
        work = dist.all_reduce(x, op, async_op=True)
        if chained:
            work.get_future().then(lambda _: None).wait()
        work.wait(LIMIT_S)
        del x, work
        assert wait_until(lambda alive=alive: alive() is None, 10.0), (op, chained)


@pytest.mark.native
@pytest.mark.ranks(2, kind="processes", engine="native")
def test_ctrl_c_while_a_call_is_queued_frees_no_memory_in_use(rank):
    gate = np.zeros(1)
    dist.barrier()
    if rank == 1:
        dist.recv(gate, 0)
        dist.all_reduce(np.ones(1000), async_op=True).wait(LIMIT_S)
        dist.barrier()
        return

    def interrupt(frame, _):
        turn = getattr(frame.f_locals.get("self"), "_turn", None)
        if turn is not None and not turn.is_free():
            sys.settrace(None)
            raise KeyboardInterrupt

    x, alive = traced()
    sys.settrace(at_lines_of_the_queue(interrupt))
    try:
        # Not with pytest.raises: the traceback that it keeps would keep the array alive.
        dist.all_reduce(x, async_op=True)
        raise AssertionError("not interrupted")
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)
    del x
    assert alive() is not None
    dist.send(gate, 1)
    dist.barrier()


@pytest.mark.native
@pytest.mark.ranks(2, kind="processes", engine="native")
def test_a_signal_handler_may_make_calls_between_all_lines(rank):
    sums = [np.full(4, rank + 1.0) for _ in range(300)]
    left, works, freed = list(sums), [], 0
    dist.barrier()

    def call():
        works.append(dist.all_reduce(left.pop(), async_op=True))

    def call_others(frame, event):
        nonlocal freed
        # What a trace function calls is not traced.
        name, queued = frame.f_code.co_name, frame.f_locals.get("queued")
        if event != "line" or len(left) <= 20 or name not in ("_put", "_discard_ended", "is_over"):
            return
        if name != "_put" or queued is not None:
            call()
        if name == "_put" and queued is not None:
            freed += queued.native is None  # before C++ has it

    if rank == 0:
        sys.settrace(at_lines_of_the_queue(call_others))
    try:
        for _ in range(20):
            call()
            assert all(work.wait(LIMIT_S) for work in works)
    finally:
        sys.settrace(None)
    while left:
        call()
    assert all(work.wait(LIMIT_S) for work in works)
    assert freed == 0
    assert all((each == 3.0).all() for each in sums)


@pytest.fixture
def no_shared_memory(monkeypatch):
    monkeypatch.setenv("UNISONO_SHARED_MEMORY", "0")


@pytest.mark.native
@pytest.mark.ranks(2, kind="processes")
def test_a_message_does_not_wait_for_a_call_that_its_receiver_makes_later(rank, no_shared_memory):
    store = dist.group.WORLD.store
    x, data = np.ones(24 * 1024, np.float32), np.full(1 << 20, 5.0)
    dist.all_reduce(x)
    if rank == 0:
        work = dist.all_reduce(x, async_op=True)
        # Then the call has sent what it sends, before the other one comes.
        assert wait_until(lambda: dist.trace_records()[-1].waited_for == 1)
        assert dist.isend(data, 1).wait(LIMIT_S / 4)
        store.set("sent", b"1")
        assert work.wait(LIMIT_S)
        return
    store.wait(["sent"])
    data[:] = 0
    dist.recv(data, 0)
    dist.all_reduce(x)
    assert (data == 5).all()
    assert (x == 4).all()


@pytest.mark.ranks(2, kind="processes")
def test_a_child_of_a_fork_cannot_wait_for_a_call_of_its_parent(rank):
    gate = np.zeros(1)
    dist.barrier()
    if rank == 1:
        dist.recv(gate, 0)
    work = dist.all_reduce(np.ones(1), async_op=True)

    def wait():
        with pytest.raises(UnisonoError, match="parent of this fork"):
            work.wait()
        return True

    if rank == 0:
        assert exit_code_of_fork(wait) == 42
        dist.send(gate, 1)
    assert work.wait()


@pytest.mark.ranks(2, kind="processes")
def test_a_child_of_a_fork_is_refused_beside_a_call_of_another_thread(rank):
    busy, gate = dist.new_group([0, 1]), np.zeros(1)
    if rank == 1:
        dist.recv(gate, 0)
        works = [dist.isend(gate, 0), dist.all_reduce_coalesced([gate], async_op=True)]
        dist.barrier(group=busy)
        assert all(work.wait() is not False for work in works)
        return
    works = [dist.irecv(gate, 1), dist.all_reduce_coalesced([np.ones(1)], async_op=True)]
    called_by = threading.Thread(target=busy.barrier)
    called_by.start()
    limit = Deadline(60.0)
    while busy._part.guard.caller == 0:
        assert not limit.expired()

    def be_refused():
        for refused in [busy.barrier, *(work.wait for work in works)]:
            with pytest.raises(ClosedError, match="parent of this fork"):
                refused()
        busy.abort()
        dist.group.WORLD.abort()
        return True

    assert exit_code_of_fork(be_refused) == 42
    dist.send(np.ones(1), 1)
    called_by.join(60.0)
    assert all(work.wait() is not False for work in works)


@pytest.mark.ranks(2, kind="processes")
def test_a_child_of_a_fork_takes_no_message_of_its_parent(rank):
    data, gate, count = np.zeros(4), np.zeros(1), 300
    if rank == 1:
        dist.recv(gate, 0)
        for i in range(count):
            dist.send(np.full(500, float(i)), 0, tag=6)
        dist.send(np.arange(4.0), 0, tag=5)
        dist.barrier()
        return
    work, shorter = dist.irecv(data, 1, tag=5), dist.irecv(gate, 1, tag=7, timeout=0.1)
    (looks, looked), (runs, ends) = os.pipe(), os.pipe()
    if (child := os.fork()) == 0:
        status = 1
        try:
            os.close(ends)
            with pytest.raises(ClosedError, match="parent of this fork"):
                shorter.wait()
            assert not work.is_completed()
            os.write(looked, b".")
            while not select.select([runs], [], [], 0)[0]:
                assert not work.is_completed()
            status = 42
        finally:
            os._exit(status)
    os.read(looks, 1)
    dist.send(gate, 1)
    received = np.zeros(500)
    for i in range(count):
        dist.recv(received, 1, tag=6)
        assert (received == i).all()
    assert work.wait()
    assert data.tolist() == [0, 1, 2, 3]
    os.close(ends)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42
    for fd in (looks, looked, runs):
        os.close(fd)
    with pytest.raises(CollectiveTimeoutError):
        shorter.wait()
    dist.barrier()


@pytest.mark.ranks(2)
def test_a_receive_has_its_results_although_another_thread_ends_it(rank, monkeypatch):
    if rank == 1:
        dist.send(np.arange(4.0), 0, tag=3)
        dist.barrier()
        return
    data = np.zeros(4)
    work = dist.irecv(data, 1, tag=3)
    assert work.wait()
    finish, (inside, over) = p2p.Message.finish, (threading.Event(), threading.Event())

    def slowly(message, error=None):
        if not inside.is_set():
            inside.set()
            assert over.wait(60)
        return finish(message, error)

    monkeypatch.setattr(p2p.Message, "finish", slowly)
    first = threading.Thread(target=work.tag)
    first.start()
    assert inside.wait(60)
    found = work.source_rank(), work.tag(), work._received(), work.is_completed()
    over.set()
    first.join(60)
    assert found == (1, 3, 4, True)
    dist.barrier()


@pytest.mark.ranks(2)
def test_the_record_of_a_receive_that_failed_at_once_ends(rank):
    if rank == 1:
        dist.send(np.zeros(5), 0, tag=2)
        dist.barrier()
        return
    dist.barrier()
    dist.probe(1, tag=2)
    dist.irecv(np.zeros(4), 1, tag=2)
    received = [each for each in dist.trace_records() if (each.op, each.tag) == ("recv", 2)]
    assert [each.outcome for each in received] == ["mismatch"]


@pytest.mark.ranks(3, kind="both")
def test_repeated_calls_on_lists_that_are_emptied_at_once(rank):
    p = dist.get_world_size()
    kept = []
    for number in range(6):
        outputs = [np.zeros(50) for _ in range(p)]
        pieces = [np.full(50, rank * p + r + number) for r in range(p)]
        part = np.zeros(50, pieces[0].dtype)
        works = [
            dist.all_gather(outputs, np.full(50, float(rank + number)), async_op=True),
            dist.reduce_scatter(part, pieces, async_op=True),
            dist.barrier(async_op=True),
        ]
        kept.append((number, list(outputs), part, works))
        outputs.clear()
        pieces.clear()
    for number, outputs, part, works in kept:
        for work in works:
            assert work.wait(LIMIT_S)
        assert len(works[0].result()) == p
        assert works[1].result()[0] is part
        assert works[2].result() == []
        assert all((output == r + number).all() for r, output in enumerate(outputs))
        assert (part == sum(r * p + rank + number for r in range(p))).all()
    assert repr(works[0]) == "<Work all_gather done>"


@pytest.mark.native
@pytest.mark.ranks(2, kind="processes", engine="native")
def test_a_callback_runs_outside_the_lock(rank):
    """A call finds a call that is over and not watched yet, and runs its callback."""
    originals = QueuedCall.is_over, QueuedCall.watch
    lock = dist.group.WORLD.backends["cpu"]._engine._changed
    begun, was_free = [], []

    def begin():
        begun.append(dist.all_reduce(np.ones(3), async_op=True))

    def take():
        was_free.append(lock.acquire(timeout=LIMIT_S / 6))
        lock.release()

    def take_elsewhere(_):
        thread = threading.Thread(target=take, daemon=True)
        thread.start()
        thread.join()

    def watch(queued):
        # The callback is known; that there is one, not yet.
        QueuedCall.is_over, QueuedCall.watch = originals
        assert queued.engine.turn.wait(queued.seq, LIMIT_S)
        begin()
        return queued.watch()

    dist.barrier()
    # C++ makes all calls but the first of a group.
    for _ in range(3):
        QueuedCall.is_over, QueuedCall.watch = (lambda queued: False), watch
        begin()
        begun[-1]._pending.add_callback(take_elsewhere)
    for work in begun:
        work.wait(LIMIT_S)
    assert was_free == [True] * 3
    assert [work.result()[0][0] for work in begun] == [2.0] * 6


@pytest.mark.ranks(2, kind="both")
def test_a_message_that_has_arrived_is_found_by_polling(rank):
    first, second = np.zeros(3), np.zeros(3)
    if rank == 1:
        dist.recv(first, 0)  # so irecv comes first; otherwise it would end at once
        dist.send(np.full(3, 5.0), 0, tag=1)
        dist.send(np.full(3, 6.0), 0, tag=2)
        return
    work = dist.irecv(first, 1, tag=1)
    dist.send(second, 1)
    dist.recv(second, 1, tag=2)  # the first message has come before it
    assert wait_until(work.is_completed, 10.0)
    assert (first.tolist(), second.tolist()) == ([5.0] * 3, [6.0] * 3)


@pytest.mark.native
@pytest.mark.ranks(2, kind="processes", engine="native")
def test_a_call_in_which_a_collection_of_garbage_closes_the_group(rank):
    """The call is refused, and its record does not stay open."""
    group, x, closed = dist.new_group(), np.ones(1), []
    for _ in range(2):
        dist.all_reduce(x, group=group, async_op=True).wait()
    trace = group.backends["cpu"]._engine.comm.trace
    call = partial(dist.all_reduce, x, group=group, async_op=True)

    def close(phase, info):
        if not closed:
            closed.append(phase)
            group.close()

    before, refused = gc.get_threshold(), None
    gc.callbacks.append(close)
    try:
        gc.set_threshold(1)
        call()
    except ClosedError as error:
        refused = error.what
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(close)
    assert closed
    assert refused == "all_reduce on group '1', which was destroyed"
    assert open_calls(trace)["open"] == []


@pytest.mark.native
@pytest.mark.ranks(2, kind="processes", engine="native")
def test_a_signal_in_the_wait_for_a_small_call_leaves_the_call(rank):
    """The waiting thread runs such a call itself, unless another rank comes late."""
    late, x = dist.new_group(), np.ones(2)
    for _ in range(200):
        x[:] = 1 + rank
        work = dist.all_reduce(x, async_op=True)
        assert work.wait()
        assert x.tolist() == [3.0, 3.0]

    def stop(number, frame):
        raise InterruptedError

    signal.signal(signal.SIGUSR1, stop)
    for _ in range(3):
        x[:] = 1 + rank
        work = dist.all_reduce(x, async_op=True) if rank == 0 else None
        if rank == 0:
            sender = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGUSR1))
            with pytest.raises(InterruptedError):
                (sender.start(), work.wait())
            sender.join()
            dist.send(np.zeros(1), 1, group=late)
        else:
            dist.recv(np.zeros(1), 0, group=late)
            work = dist.all_reduce(x, async_op=True)
        assert work.wait()
        assert x.tolist() == [3.0, 3.0]
