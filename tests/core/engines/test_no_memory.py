"""A rank that has no memory for a call."""

import numpy as np

import unisono as dist
from unisono.testing import run


def all_reduce(rank):
    """What each rank is told if rank 0 gets no memory."""

    def perform(task):
        raise MemoryError("too much")

    if rank == 0:
        dist.group.WORLD.backends["cpu"]._engine.perform = perform
    try:
        dist.all_reduce(np.ones(3))
    except dist.errors.UnisonoError as error:
        return type(error).__name__, str(error)


def test_all_are_told_which_rank_and_where_to_look():
    told = run(all_reduce, 2, ranks="threads")
    assert [name for name, _ in told] == ["InternalError", "PeerFailedError"]
    for _, text in told:
        assert "MemoryError on rank 0: too much" in text
        assert "hint: see what the processes of that rank's host use" in text
