"""Calls that repeat an earlier one, which C++ answers without Python code, in every company."""

from __future__ import annotations

import re
import signal
import threading

import numpy as np

import unisono as dist
from unisono.errors import CollectiveAbortedError, CollectiveMismatchError, CollectiveTimeoutError
from unisono.groups.dispatch import dispatcher


def repeats():
    """Return how many calls of the default group were repeated so far, at least."""
    calls = dist.group.WORLD.calls
    last = None if calls is None else calls.last()
    return 0 if last is None else last[0]


def every_function(rank):
    """Each function with three fillings of two sizes and dtypes; results of all rounds."""
    p, seen, wrong = dist.get_world_size(), [], []
    for n in (1, 40_000):
        for dtype in (np.float32, np.int64):
            x, y = np.empty(n, dtype), np.empty((n, 2), dtype)
            big, part = np.empty(n * p, dtype), np.empty(n, dtype)
            swapped = np.empty(n * p, dtype)
            for k in range(1, 4):
                before = repeats()
                ours = [np.full(n, r + k, dtype) for r in range(p)]
                x[:], y[:] = rank + k, rank * k
                dist.all_reduce(x)
                dist.all_reduce(y, dist.ReduceOp.MAX)
                wrong.append((x != sum(ours)).sum() + (y != (p - 1) * k).sum())
                x[:] = rank + k
                dist.all_gather_into_tensor(big, x)
                wrong.append((big != np.concatenate(ours)).sum())
                dist.reduce_scatter_tensor(part, big, op=dist.ReduceOp.SUM)
                wrong.append((part != ours[rank] * p).sum())
                big[:] = np.repeat(np.arange(p) + rank * 100 + k, n)
                dist.all_to_all_single(swapped, big)
                wrong.append((swapped != np.repeat(np.arange(p) * 100 + rank + k, n)).sum())
                dist.broadcast(x, p - 1)
                wrong.append((x != ours[p - 1]).sum())
                x[:] = rank + k
                dist.reduce(x, 0)
                wrong.append((x != (sum(ours) if rank == 0 else ours[rank])).sum())
                dist.barrier()
                seen.append(repeats() > before)
    return int(sum(wrong)), seen


def other_arguments(rank):
    """Repeat a call, then change one thing about it."""
    p, results = dist.get_world_size(), []

    def both(x, **how):
        for _ in range(2):
            mine = x.copy()
            dist.all_reduce(mine, **how)
        results.append(mine.tolist())

    both(np.full(4, rank + 1.0))
    both(np.full((2, 2), rank + 1.0))
    both(np.full(4, rank + 1))
    both(np.full(4, rank + 1.0), op=dist.ReduceOp.MAX)
    both(np.full(4, rank + 1.0), op=dist.ReduceOp.AVG)
    both(np.full(4, rank + 1.0), op=dist.ReduceOp.PREMUL_SUM(2.0))
    both(np.full(4, rank + 1.0), algorithm="ring")
    both(np.full(4, rank + 1.0).astype(">f8"))
    strided = np.full(8, rank + 1.0)
    dist.all_reduce(strided[::2])
    dist.all_reduce(strided[::2])
    results.append(strided.tolist())
    overlapping = np.zeros(2 * p)
    overlapping[2 * rank : 2 * rank + 2] = rank
    for _ in range(2):
        dist.all_gather_into_tensor(overlapping, overlapping[2 * rank : 2 * rank + 2])
    results.append(overlapping.tolist())
    return results


def other_groups(rank):
    """The same array in two groups of opposite order, in turn."""
    p = dist.get_world_size()
    front, all_of_us = dist.new_group([0, 1]), dist.new_group(list(range(p)))
    sums = []
    for k in range(3):
        x = np.full(3, float(rank + k))
        dist.all_reduce(x, group=all_of_us)
        if rank < 2:
            dist.all_reduce(x, group=front)
        sums.append(float(x[0]))
    return sums


def odd_one(rank):
    """One rank makes another call than the one that all have repeated; then all the same again."""
    x, texts = np.ones(3, np.float32), []
    for k in range(4):
        x[:] = 1
        dist.all_reduce(x)
        try:
            if rank == 1:
                dist.broadcast(x, 0)
            else:
                dist.all_reduce(x)
        except CollectiveMismatchError as error:
            texts.append((k, str(error)))
    dist.all_reduce(x)
    return texts, x.tolist()


def one_uneven(rank):
    """Rank 0 repeats an even exchange, which the others turn out to be part of an uneven one."""
    out, x = np.full(3, -1), np.arange(3) + 10 * rank
    rounds = []
    for k in range(4):
        if k % 2 == 0 or rank == 0:
            dist.all_to_all_single(out, x)
        else:
            # Ranks 1 and 2 swap two rows, and keep none.
            splits = [1, 0, 2] if rank == 1 else [1, 2, 0]
            dist.all_to_all_single(out, x, splits, splits)
        rounds.append(out.tolist())
    return rounds


def check_one_uneven(results):
    """The even rounds and the uneven ones have their own results."""
    even = [[0, 10, 20], [1, 11, 21], [2, 12, 22]]
    odd = [[0, 10, 20], [1, 21, 22], [2, 11, 12]]
    assert results == [[e, o, e, o] for e, o in zip(even, odd, strict=True)]


# A rank that is busy with something else may be late to say that it never came.
NO_RANK_1 = r"ranks? [\d, and]*\b1\b[\d, and]* (never entered it|.*did not answer)"


def missing(rank, timeout_s):
    """Repeat a call that rank 1 does not make any more."""
    pg = dist.group.WORLD
    x = np.ones(2)
    for _ in range(3):
        dist.all_reduce(x)
    pg.set_timeout(timeout_s)
    told = None
    if rank != 1:
        try:
            dist.all_reduce(x)
        except CollectiveTimeoutError as error:
            told = str(error)
        try:
            dist.all_reduce(x)
        except CollectiveTimeoutError as error:
            told += str(error)
    pg.store.barrier("end", dist.get_world_size(), 60.0)
    return told, "broken" in repr(pg)


def check_missing(results, timeout_s):
    """The ranks that waited name rank 1, and their group is broken."""
    assert results[1][0] is None
    for told, broken in (results[0], results[2]):
        assert f"timed out after {timeout_s} s" in told
        assert re.search(NO_RANK_1, told)
        assert broken


def aborted(rank):
    """Repeat a call; rank 0 aborts the group while the others are in it."""
    x = np.ones(2)
    for _ in range(3):
        dist.all_reduce(x)
    pg = dist.group.WORLD
    if rank == 0:
        # Sooner, and the others might still be in the calls before.
        pg.store.wait(["1", "2"], 30.0)
        pg.abort("enough")
        return "aborted"
    pg.store.set(str(rank), b"")
    try:
        dist.all_reduce(x)
    except CollectiveAbortedError as error:
        return str(error)
    return None


def check_aborted(results):
    """Rank 0 aborted, and the others read why."""
    assert results[0] == "aborted"
    assert all("enough" in result for result in results[1:])


def between_async(rank):
    """Repeated calls and asynchronous ones on one array, in one order."""
    p, x, y = dist.get_world_size(), np.ones(1), np.ones(1)
    for _ in range(2):
        dist.all_reduce(y)
    y[:] = 1
    for _ in range(50):
        work = dist.all_reduce(x, async_op=True)
        dist.all_reduce(y)
        y /= p
        assert work.is_completed()  # it came first
        x /= p
    return float(x[0]), float(y[0])


def wrapped(rank):
    """A wrapper sees calls although they were made before, and no more once it is removed."""
    seen, x = [], np.zeros(2)
    for _ in range(2):
        dist.all_reduce(x)

    def wrapper(schema, device, kernel):
        def run(group, *arguments):
            if group is mine:
                seen.append(schema.name)
            return kernel(group, *arguments)

        return run

    mine = dist.group.WORLD
    remove = dispatcher.register_wrapper(wrapper)
    try:
        dist.all_reduce(x)
        dist.barrier()
    finally:
        dist.group.WORLD.store.barrier("wrapped", dist.get_world_size(), 30.0)
        remove()
    dist.all_reduce(x)
    return seen


def own_group_per_thread(rank):
    """Two threads repeat calls on a group each, at the same time."""
    p = dist.get_world_size()
    groups = [dist.new_group(list(range(p))) for _ in range(2)]
    sums = [0.0, 0.0]

    def body(which):
        x = np.empty(100)
        for k in range(200):
            x[:] = k * (which + 1)
            dist.all_reduce(x, group=groups[which])
            sums[which] += x[7]

    threads = [threading.Thread(target=body, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sums


def destroyed(rank):
    """A group that was destroyed, and the next one, with the same call."""
    x = np.ones(2)
    group = dist.new_group(list(range(dist.get_world_size())))
    for _ in range(3):
        dist.all_reduce(x, group=group)
    dist.destroy_process_group(group)
    try:
        dist.all_reduce(x, group=group)
    except dist.errors.ClosedError as error:
        return str(error)
    return None


def overlapping(rank):
    """A second thread calls while the first one repeats a call, and waits for the other rank."""
    group, x = dist.group.WORLD, np.ones(3)
    for _ in range(2):
        dist.all_reduce(x)
    told = None
    if rank == 0:
        first = threading.Thread(target=dist.all_reduce, args=(x,), kwargs={"group": group})
        first.start()
        while group.calls.caller == 0 and first.is_alive():
            first.join(0.001)
        try:
            dist.all_reduce(np.ones(2))
        except dist.errors.UsageError as error:
            told = str(error)
        group.send(np.zeros(1), 1)
        first.join()
    else:
        group.recv(np.zeros(1), 0)
        dist.all_reduce(x)
    dist.barrier()
    return told, x.tolist()


def in_stream(rank):
    """A repeated call in a stream belongs to the stream's order."""
    x, seen = np.full(2, rank + 1.0), []
    for _ in range(2):
        dist.all_reduce(x)
    gate = threading.Event()
    with dist.stream(dist.Stream()):
        dist.current_stream().submit(gate.wait)
        dist.all_reduce(x)
        seen.append(x.tolist())
        gate.set()
        dist.current_stream().synchronize()
    seen.append(x.tolist())
    dist.all_reduce(x)
    seen.append(x.tolist())
    return seen


def interrupted_by_others(rank):
    """A signal handler makes many calls in the middle of one that C++ repeats, which then fails."""
    store, x = dist.group.WORLD.store, np.ones(1000)
    for _ in range(3):
        dist.all_reduce(x)
    works, sums = [], [np.full(n, rank + 1.0) for n in range(1, 500)]

    def call_others(*_):
        if rank == 0 and dist.group.WORLD.calls.caller == 0:
            signal.setitimer(signal.ITIMER_REAL, 0.01)  # too early
            return
        works.extend(dist.all_reduce(each, async_op=True) for each in sums)
        store.set("others", "called")

    if rank == 0:
        signal.signal(signal.SIGALRM, call_others)
        signal.setitimer(signal.ITIMER_REAL, 0.01)
    else:
        store.wait(["others"])
    try:
        dist.all_reduce(x if rank == 0 else x.astype(int))
        told = ""
    except CollectiveMismatchError as error:
        told = str(error)
    if rank != 0:
        call_others()
    ended = all(work.wait() for work in works)
    return ended and all((each == 3).all() for each in sums), told


def messages_in_cpp(rank):
    """Send and receive around a ring with the group's own methods out of order."""
    p, found = dist.get_world_size(), []
    group = dist.group.WORLD
    to, source = (rank + 1) % p, (rank - 1) % p
    # Once in Python's way: what C++ needs to know is there then.
    dist.barrier()

    def refuse(*args, **how):
        raise RuntimeError("came to Python")

    group.send = group.recv = refuse
    try:
        for k, how in enumerate([{}, {"tag": 3}, {"group": group, "tag": 4}, {"group": group}]):
            mine, got = np.full(5, 10 * rank + k), np.zeros(5, int)
            dist.send(mine, to, **how)
            who = dist.recv(got, source_of(k, source), **how)
            found.append(who == source and got.tolist() == [10 * source + k] * 5)
        for call in (dist.send, dist.recv):
            try:
                call(np.ones((4, 4))[:, 1], to)
            except RuntimeError as error:
                found.append(str(error) == "came to Python")
    finally:
        del group.send, group.recv
    dist.barrier()
    return found


def source_of(k, source):
    """From this rank, or from any."""
    return source if k % 2 else None


def with_algorithms(rank):
    """Repeat calls that name an algorithm, two of them and none in turn; a wrong name each time."""
    results, repeated, texts = [], [], []
    for _ in range(3):
        for how in ({"algorithm": "ring"}, {"algorithm": "recursive_doubling"}, {}):
            before, x = repeats(), np.full(9, rank + 1.0)
            dist.all_reduce(x, **how)
            results.append(x.tolist())
            repeated.append(repeats() > before)
        try:
            dist.all_reduce(x, algorithm="no such")
        except dist.errors.InvalidArgumentError as error:
            texts.append("no such" in str(error))
    return results, repeated, texts
