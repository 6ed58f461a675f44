"""Groups made and destroyed many times."""

import gc
import itertools
import tracemalloc

import numpy as np

import unisono as dist

WINDOWS = 5


def grown(step, warm, rounds):
    """Return by how many bytes Python's memory grows over `rounds` calls of `step`.

    The least of WINDOWS equal parts counts: what leaks grows in each of them, while a table that
    doubles or a block that another thread has yet to give back shows in one or two.
    """
    for _ in range(warm):
        step()
    gc.collect()
    tracemalloc.start(1)
    try:
        sizes = [traced_after(step, warm)]
        for _ in range(WINDOWS):
            sizes.append(traced_after(step, rounds // WINDOWS))
        return WINDOWS * min(after - before for before, after in itertools.pairwise(sizes))
    finally:
        tracemalloc.stop()


def traced_after(step, rounds):
    for _ in range(rounds):
        step()
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


def one_group(rank):
    group = dist.new_group()
    x = np.ones(3)
    dist.all_reduce(x, group=group)
    dist.all_reduce(x, group=group, async_op=True).wait()
    dist.destroy_process_group(group)


def sub_groups(rank, rounds):
    """Two ranks; only rank 0 measures, for tracemalloc sees all threads."""
    if rank == 0:
        return grown(lambda: one_group(0), 20, rounds)
    for _ in range(40 + rounds):
        one_group(1)
    return None
