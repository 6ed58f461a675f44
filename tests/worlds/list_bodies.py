"""Collectives with a list of arrays, first in Python and then repeated by C++."""

from __future__ import annotations

import numpy as np

import unisono as dist
from tests.worlds.quick_bodies import repeats
from unisono.errors import CollectiveMismatchError, CollectiveTimeoutError, InvalidArgumentError


def apart_or_rows(p, n, dtype, rows):
    """Return p arrays of n elements that lie one after another, or do not."""
    if rows:
        return list(np.empty((p, n), dtype))
    return [np.empty(n + 1, dtype)[1:] for _ in range(p)]


def every_function(rank, n, dtype, rows):
    """Each function four times with new values; the rounds in which C++ repeated some of them."""
    p, wrong, quick = dist.get_world_size(), 0, []
    inputs, outputs = (apart_or_rows(p, n, dtype, rows) for _ in range(2))
    x, root = np.empty(n, dtype), p - 1
    spread = root if p > 1 else None

    def value(source, target, k):
        return np.arange(n).astype(dtype) + np.array(5 * source + 3 * target + k, dtype)

    for k in range(4):
        before = repeats()

        def check(got, source, target, k=k):
            nonlocal wrong
            wrong += int((got != value(source, target, k)).sum())

        x[:] = value(rank, 0, k)
        dist.all_gather(outputs, x)
        for source in range(p):
            check(outputs[source], source, 0)
            outputs[source][:] = 0
        dist.gather(x, outputs if rank == root else None, dst=root)
        dist.gather(x, outputs if rank == 0 else [])
        if rank in (0, root):
            for source in range(p):
                check(outputs[source], source, 0)
        for target in range(p):
            inputs[target][:] = value(rank, target, k)
        dist.scatter(x, inputs if rank == root else None, src=spread)
        check(x, root, rank)
        dist.all_to_all(outputs, inputs)
        for source in range(p):
            check(outputs[source], source, rank)
        dist.reduce_scatter(x, inputs)
        wrong += int((x != sum(value(source, rank, k) for source in range(p))).sum())
        quick.append(repeats() > before)
    return wrong, quick


def layouts(rank):
    """Entries of several kinds of memory, several times each."""
    p, n, results = dist.get_world_size(), 6, []
    for make in (
        lambda: np.zeros(2 * n)[::2],
        lambda: np.zeros(n, ">f8"),
        lambda: np.zeros((2, 3)).T,
        lambda: np.zeros((3, 2)),
        lambda: bytearray(8 * n),
    ):
        for _ in range(3):
            outputs = [np.zeros(n), *(make() for _ in range(p - 1))]
            raw = type(outputs[-1]) is bytearray
            if raw:
                outputs = [bytearray(8 * n) for _ in range(p)]
            mine = np.arange(n) + 10.0 * rank
            dist.all_gather(outputs, mine.view(np.uint8) if raw else mine)
            arrays = [np.frombuffer(o) if raw else np.asarray(o) for o in outputs]
        results.append([[float(v) for v in array.ravel()] for array in arrays])
    return results


def shared_memory_of_arguments(rank):
    """Inputs that are a part of the output, and one input that is sent to all."""
    p, results = dist.get_world_size(), []
    for _ in range(3):
        outputs = list(np.zeros((p, 2)))
        outputs[rank][:] = rank + 1
        dist.all_gather(outputs, outputs[rank])
        results.append([float(o[0]) for o in outputs])
        both = [np.full(3, 10.0 * rank + r) for r in range(p)]
        dist.all_to_all(both, both[::-1])
        results.append([float(o[0]) for o in both])
        same, x = np.full(2, 7.0), np.zeros(2)
        dist.scatter(x, [same] * p if rank == 0 else None, src=0)
        results.append(x.tolist())
        told = None
        try:
            dist.all_gather([x] * p, same)
        except InvalidArgumentError as error:
            told = str(error)
        results.append("share memory" in told)
    return results


def wrong_on_one_rank(rank):
    """After some repetitions rank 1 brings a wrong list; all hear of it, and go on."""
    p, x = dist.get_world_size(), np.ones(4)
    outputs, texts = [np.zeros(4) for _ in range(p)], []
    wrong = (
        outputs[:-1],
        [*outputs[:-1], np.zeros(4, np.float32)],
        [np.zeros(5) for _ in range(p)],
    )
    for bad in wrong:
        for _ in range(3):
            dist.all_gather(outputs, x)
        try:
            dist.all_gather(bad if rank == 1 else outputs, x)
        except (InvalidArgumentError, CollectiveMismatchError) as error:
            texts.append(str(error).partition("\n")[0])
    x[:] = rank
    dist.all_gather(outputs, x)
    return texts, [float(o[3]) for o in outputs]


def sizes_change(rank):
    """A repeated gather and scatter, in which some ranks have another size now and then."""
    p, rounds = dist.get_world_size(), []
    for k in range(6):
        sizes = [3] * p if k % 3 else [3 + (r == p - 1) for r in range(p)]
        parts = [np.full(n, -1.0) for n in sizes]
        mine = np.full(sizes[rank], rank + k / 10)
        dist.gather(mine, parts if rank == 0 else None, dst=0)
        rounds.append([p.tolist() for p in parts] if rank == 0 else [])
        dist.scatter(mine, parts if rank == 0 else None, src=0)
        assert mine.tolist() == [rank + k / 10] * sizes[rank]
    return rounds


def disagreement(rank):
    """The root's list fits its own array, but not what rank 1 sends after some good rounds."""
    p, texts = dist.get_world_size(), []
    parts = [np.zeros(3) for _ in range(p)]
    for k in range(5):
        mine = np.ones(4 if rank == 1 and k % 2 else 3)
        try:
            dist.gather(mine, parts if rank == 0 else None)
        except CollectiveMismatchError as error:
            texts.append((k, str(error).partition("\n")[0]))
    return texts, [float(part[0]) for part in parts]


def asynchronous(rank):
    """Lists in calls that end later, mixed with repeated ones."""
    p, wrong = dist.get_world_size(), 0
    for k in range(20):
        mine, outputs = np.full(3, rank + k), [np.zeros(3, np.int64) for _ in range(p)]
        again = [np.zeros(3, np.int64) for _ in range(p)]
        work = dist.all_gather(outputs, mine, async_op=True)
        dist.all_gather(again, mine)
        work.wait()
        for r in range(p):
            wrong += int((outputs[r] != r + k).sum() + (again[r] != r + k).sum())
    return wrong


def missing(rank, timeout_s):
    """A repeated gather to which rank 1 does not come any more."""
    pg, x = dist.group.WORLD, np.ones(2)
    parts, told = [np.zeros(2) for _ in range(dist.get_world_size())], None
    for _ in range(3):
        dist.gather(x, parts if rank == 0 else None)
    pg.set_timeout(timeout_s)
    if rank != 1:
        try:
            dist.gather(x, parts if rank == 0 else None)
        except CollectiveTimeoutError as error:
            told = str(error)
    pg.store.barrier("end", dist.get_world_size(), 60.0)
    return told
