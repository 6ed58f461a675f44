"""Asynchronous calls, which C++ runs where it can, in every company."""

import os
import random
import sys
import threading
import time
import weakref

import numpy as np
import pytest

import unisono as dist
from unisono.base.deadline import Deadline
from unisono.engines.native_queue import _Queued
from unisono.errors import ClosedError, CollectiveMismatchError, UnisonoError

LIMIT_S = 60.0


def any_order(rank, seed):
    """A random sequence of calls on one array, of kinds that run in different places."""
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
    return all(future.wait(LIMIT_S) == number for future, number in futures)


def while_python_is_busy(rank):
    """Calls end although no other thread of this process gets the interpreter meanwhile."""
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
        done = [work.is_success() for work in works]
    finally:
        sys.setswitchinterval(before)
    assert (x == p).all()
    assert (y == p * p).all()
    return done


def mismatch_in_the_queue(rank):
    """One of several calls under way does not match; those around it are as if it were not."""
    p = dist.get_world_size()
    dist.barrier()
    for _ in range(3):
        first, wrong, last = np.ones(4), np.ones(3 + rank % 2), np.ones(5)
        works = [dist.all_reduce(array, async_op=True) for array in (first, wrong, last)]
        works[2].wait(LIMIT_S)
        works[0].wait(LIMIT_S)
        error = works[1].exception()
        assert isinstance(error, CollectiveMismatchError)
        assert "all_reduce(float64[3], SUM)" in error.what, error.what
        assert "all_reduce(float64[4], SUM)" in error.what, error.what
        assert (first == p).all()
        assert (wrong == 1).all()
        assert (last == p).all()
    return True


def uneven_in_the_queue(rank):
    """Rank 0 gives to rank 1 what the others would not expect, in the midst of other calls."""
    p = dist.get_world_size()
    dist.barrier()
    ins = [2, 0, *[1] * (p - 2)] if rank == 0 else [1] * p
    outs = [2, *[1] * (p - 1)] if rank == 0 else [0 if rank == 1 else 1, *[1] * (p - 1)]
    given, got = np.full(sum(ins), 10.0 + rank), np.zeros(sum(outs))
    before, after = np.ones(3), np.ones(3)
    works = [
        dist.all_reduce(before, async_op=True),
        dist.all_to_all_single(got, given, outs, ins, async_op=True),
        dist.all_reduce(after, async_op=True),
    ]
    for work in works:
        work.wait(LIMIT_S)
    assert (before == p).all()
    assert (after == p).all()
    return got.tolist() == [10.0 + r for r, n in enumerate(outs) for _ in range(n)]


class Traced(np.ndarray):
    """An array that can be referred to weakly."""


def memory_of_a_dropped_work(rank):
    """Nobody waits for a call: its array lives as long as it does, and not much longer."""
    gate = np.zeros(1)
    dist.barrier()
    x = np.ones(1000).view(Traced)
    alive = weakref.ref(x)
    if rank == 1:
        dist.recv(gate, 0)
    dist.all_reduce(x, async_op=True)
    del x
    if rank == 0:
        held = alive() is not None
        dist.send(gate, 1)
    ends_s = time.monotonic() + LIMIT_S
    while alive() is not None and time.monotonic() < ends_s:
        time.sleep(0.001)
    return alive() is None and (rank != 0 or held)


def memory_of_a_last_call(rank):
    """A call that Python ends lets go of its array, though no call follows."""
    dist.barrier()
    for op, chained in ((dist.ReduceOp.AVG, False), (dist.ReduceOp.SUM, True)):
        x = np.ones(1000).view(Traced)
        alive = weakref.ref(x)
        work = dist.all_reduce(x, op, async_op=True)
        if chained:
            work.get_future().then(lambda _: None).wait()
        work.wait(LIMIT_S)
        del x, work
        ends_s = time.monotonic() + LIMIT_S / 6
        while alive() is not None and time.monotonic() < ends_s:
            time.sleep(0.001)
        if alive() is not None:
            return (str(op), chained)
    return True


def interrupt_while_queueing(rank):
    """Ctrl-C as soon as C++ has a call: its array lives until the call has ended."""
    gate = np.zeros(1)
    dist.barrier()
    if rank == 1:
        dist.recv(gate, 0)
        dist.all_reduce(np.ones(1000), async_op=True).wait(LIMIT_S)
        dist.barrier()
        return True

    def trace(frame, event, arg):
        if not frame.f_code.co_filename.endswith("engines/native_queue.py"):
            return None
        turn = getattr(frame.f_locals.get("self"), "_turn", None)
        if turn is not None and not turn.is_free():
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace

    x = np.ones(1000).view(Traced)
    alive = weakref.ref(x)
    interrupted = False
    sys.settrace(trace)
    try:
        dist.all_reduce(x, async_op=True)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        sys.settrace(None)
    del x
    assert interrupted
    assert alive() is not None
    dist.send(gate, 1)
    dist.barrier()
    return True


def calls_between_all_lines(rank):
    """A signal handler makes calls wherever it can come in the middle of others."""
    sums = [np.full(4, rank + 1.0) for _ in range(300)]
    left, works, freed = list(sums), [], 0
    dist.barrier()

    def call():
        works.append(dist.all_reduce(left.pop(), async_op=True))

    def trace(frame, event, arg):
        if not frame.f_code.co_filename.endswith("engines/native_queue.py"):
            return None
        # What a trace function calls is not traced.
        name, queued = frame.f_code.co_name, frame.f_locals.get("queued")
        if (
            event != "line"
            or len(left) <= 20
            or name not in ("_append", "_discard_ended", "is_over")
        ):
            return trace
        if name != "_append":
            call()
        elif queued is not None:
            call()
            nonlocal freed
            freed += queued.flight is None  # before C++ has it
        return trace

    if rank == 0:
        sys.settrace(trace)
    try:
        for _ in range(20):
            call()
            assert all(work.wait(LIMIT_S) for work in works)
    finally:
        sys.settrace(None)
    while left:
        call()
    assert all(work.wait(LIMIT_S) for work in works)
    return freed == 0 and all((each == 3.0).all() for each in sums)


def message_behind_a_call(rank):
    """A message does not wait for a call that its receiver makes later."""
    store = dist.group.WORLD.store
    x, data = np.ones(24 * 1024, np.float32), np.full(1 << 20, 5.0)
    dist.all_reduce(x)
    if rank == 0:
        work = dist.all_reduce(x, async_op=True)
        time.sleep(0.1)  # so that the call has sent what it sends before the other one comes
        assert dist.isend(data, 1).wait(LIMIT_S / 4)
        store.set("sent", b"1")
        return work.wait(LIMIT_S)
    store.wait(["sent"])
    data[:] = 0
    dist.recv(data, 0)
    dist.all_reduce(x)
    return bool((data == 5).all() and (x == 4).all())


def wait_in_a_forked_child(rank):
    """A child of a fork cannot wait for what its parent has begun, and hears so."""
    gate = np.zeros(1)
    dist.barrier()
    if rank == 1:
        dist.recv(gate, 0)
        return dist.all_reduce(np.ones(1), async_op=True).wait()
    work = dist.all_reduce(np.ones(1), async_op=True)
    child = os.fork()
    if child == 0:
        said = 1
        try:
            work.wait()
        except UnisonoError as error:
            said = 42 if "parent of this fork" in str(error) else 2
        finally:
            os._exit(said)
    _, status = os.waitpid(child, 0)
    dist.send(gate, 1)
    return os.waitstatus_to_exitcode(status) == 42 and work.wait()


def fork_beside_a_call(rank):
    """What a child of a fork hears of a group in which another thread of its parent is calling."""
    busy, gate = dist.new_group([0, 1]), np.zeros(1)
    if rank == 1:
        dist.recv(gate, 0)
        works = [dist.isend(gate, 0), dist.all_reduce_coalesced([gate], async_op=True)]
        dist.barrier(group=busy)
        return [work.wait() is not False for work in works]
    works = [dist.irecv(gate, 1), dist.all_reduce_coalesced([np.ones(1)], async_op=True)]
    called_by = threading.Thread(target=busy.barrier)
    called_by.start()
    limit = Deadline(60.0)
    while busy._guard.caller == 0:
        assert not limit.expired()
    child = os.fork()
    if child == 0:
        said = 1
        try:
            errors = []
            for refused in [busy.barrier, *(work.wait for work in works)]:
                with pytest.raises(ClosedError) as caught:
                    refused()
                errors.append(str(caught.value))
            busy.abort()
            dist.group.WORLD.abort()
            said = 42 if all("parent of this fork" in error for error in errors) else 2
        finally:
            os._exit(said)
    _, status = os.waitpid(child, 0)
    dist.send(np.ones(1), 1)
    called_by.join(60.0)
    heard = os.waitstatus_to_exitcode(status) == 42
    return [heard and work.wait() is not False for work in works]


def repeated_with_lists(rank):
    """Calls on lists that are emptied at once, and on arrays that nobody else keeps."""
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
    return repr(works[0])


def in_other_words_among_repeated(rank):
    """The same call again and again, which rank 0 makes in other words in the end."""
    p = dist.get_world_size()
    for number in range(4):
        given, got = np.arange(2.0 * p) + 100 * rank, np.zeros(2 * p)
        first = dist.all_reduce(np.ones(3), async_op=True)
        if number == 3 and rank == 0:
            split = [2] * p
            work = dist.all_to_all_single(got, given, split, split, async_op=True)
        else:
            work = dist.all_to_all_single(got, given, async_op=True)
        last = dist.all_reduce(np.ones(4), async_op=True)
        for each in (first, work, last):
            each.wait(LIMIT_S)
        expected = np.concatenate([np.arange(2.0) + 2 * rank + 100 * r for r in range(p)])
        assert (got == expected).all(), (number, got, expected)
        assert (last.result()[0] == p).all()
    return True


def aborted(rank):
    """Rank 0 aborts while another's repeated calls are under way and queued."""
    x, token = np.ones(2), np.zeros(1)
    for _ in range(3):
        dist.all_reduce(x, async_op=True).wait()
    if rank == 0:
        dist.recv(token, 1)
        dist.group.WORLD.abort("enough")
        return None
    works = [dist.all_reduce(x, async_op=True) for _ in range(3)]
    dist.send(token, 0)
    told = []
    for work in works:
        try:
            work.wait(LIMIT_S)
        except UnisonoError as error:
            told.append(type(error).__name__)
    return told


def callback_in_the_middle_of_a_call(rank):
    """A call finds one that is over and not watched yet: its callback holds no other thread up."""
    originals = _Queued.is_over, _Queued.watch
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
        _Queued.is_over, _Queued.watch = originals
        assert queued._turn.wait(queued.seq, LIMIT_S)
        begin()
        return queued.watch()

    dist.barrier()
    # The first is made in Python, the next ones by what repeats calls.
    for _ in range(3):
        _Queued.is_over, _Queued.watch = (lambda queued: False), watch
        begin()
        begun[-1]._pending.add_callback(take_elsewhere)
    for work in begun:
        work.wait(LIMIT_S)
    return was_free, [float(work.result()[0][0]) for work in begun]
