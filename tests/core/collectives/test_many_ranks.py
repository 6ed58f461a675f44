"""More ranks on a host than those that read from all others: rounds instead of pairs."""

import os

import numpy as np
import pytest

import unisono as dist
from unisono.core.schedules import Topology, select

SIZES = (1, 1000, 20_000, 80_000)


@pytest.mark.ranks(33, 64, kind="threads", engine="native")
def test_results_of_many_ranks_equal_the_formula(rank):
    p = dist.get_world_size()
    chosen = {select("all_reduce", 8 * n, Topology(p, shared_memory=True)).algorithm for n in SIZES}
    assert chosen == {"recursive_doubling", "tree", "halving_doubling"}
    for count in SIZES:
        wave = np.arange(count, dtype=np.float64) % 97
        x = wave + rank
        dist.all_reduce(x)
        assert np.array_equal(x, p * wave + p * (p - 1) / 2)
        x = wave * rank
        dist.reduce(x, p // 2)
        assert np.array_equal(x, wave * (p * (p - 1) / 2 if rank == p // 2 else rank))
        dist.broadcast(x, p // 2)
        assert np.array_equal(x, wave * (p * (p - 1) / 2))
        dist.barrier()


def pidfds():
    kinds = []
    for number in os.listdir("/proc/self/fd"):
        try:
            kinds.append(os.readlink(f"/proc/self/fd/{number}"))
        except FileNotFoundError:
            continue
    return sum("pidfd" in kind for kind in kinds)


@pytest.mark.ranks(3, kind="processes", engine="native")
def test_all_groups_share_the_descriptors_of_processes(rank):
    """A descriptor per group and rank: four groups of 256 ranks would reach `ulimit -n`."""
    dist.barrier()
    before = pidfds()
    groups = [dist.new_group() for _ in range(5)]
    for group in groups:
        x = np.ones(3)
        dist.all_reduce(x, group=group)
        assert x.tolist() == [3, 3, 3]
    assert before in (2, 3)
    assert pidfds() == before
    dist.barrier()
