"""Groups made and destroyed many times."""

import gc
import tracemalloc

import numpy as np

import unisono as dist


def grown(step, warm, rounds):
    """Return by how many bytes Python's memory grows over `rounds` calls of `step`."""
    for _ in range(warm):
        step()
    gc.collect()
    tracemalloc.start(1)
    try:
        for _ in range(warm):
            step()
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(rounds):
            step()
        gc.collect()
        return tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()


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
