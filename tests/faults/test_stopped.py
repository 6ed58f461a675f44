"""SIGSTOP of a rank: the others time out and name it; after SIGCONT it hears of it, too."""

import os
import re
import signal
from datetime import timedelta

import numpy as np
import pytest

import unisono as dist
from tests.faults.fault_calls import (
    BUSY_S,
    Doom,
    attempt,
    pids,
    store,
    wait_for_count,
)
from unisono.testing import run


def stop_inside(rank, victim, moment, timeout_s):
    """Stop a rank in the middle of large all_reduces; wake it when the others have given up."""
    everybody, world_size = pids(), dist.get_world_size()
    dist.barrier()
    doom = None
    if rank == victim:
        doom = Doom(moment, lambda: os.kill(os.getpid(), signal.SIGSTOP))
    right = True
    while right:
        x = np.ones(300_000)
        # Python makes a call with a timedelta, so that the doom counts its functions.
        caught = attempt(dist.all_reduce, x, timeout=timedelta(seconds=timeout_s))
        if caught.kind:
            break
        right = bool((x == world_size).all())
    if doom is not None:
        # If a call failed before its time, nobody would wake it any more.
        doom.call_off()
    if rank != victim:
        store().add("gave up", 1)
        if rank == min(r for r in range(world_size) if r != victim):
            wait_for_count("gave up", world_size - 1)
            os.kill(everybody[victim], signal.SIGCONT)
    after = attempt(dist.barrier)
    store().barrier("end", world_size, 60.0)
    return caught, right, after


# Much more than a call may take on a busy machine: one that is late before the stop is a failure.
TIMEOUT_S = 3.0


@pytest.mark.sweep(1)
@pytest.mark.parametrize(("world_size", "victim"), [(2, 1), (3, 0), (4, 2)])
@pytest.mark.parametrize("moment", [1, 12])
def test_stopped_inside_a_large_all_reduce(moment, world_size, victim):
    results = run(
        stop_inside,
        world_size,
        ranks="processes",
        args=(victim, moment, TIMEOUT_S),
    )
    for rank, (caught, right, after) in enumerate(results):
        assert right
        for each in (caught, after):
            assert (each.kind, each.peers) == ("CollectiveTimeoutError", (victim,)), (rank, each)
        if rank != victim:
            # On a busy machine it may have answered the first question before it was stopped.
            assert re.search(rf"rank {victim} (.* )?did not answer", caught.text)
            assert caught.took_s < TIMEOUT_S + BUSY_S
        assert after.took_s < BUSY_S


def test_stopped_with_several_connections_to_each_rank(monkeypatch):
    monkeypatch.setenv("UNISONO_SHARED_MEMORY", "0")
    monkeypatch.setenv("UNISONO_CHANNELS", "4")
    test_stopped_inside_a_large_all_reduce(12, 3, 1)
