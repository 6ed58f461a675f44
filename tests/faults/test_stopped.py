"""SIGSTOP of a rank: the others time out and name it; after SIGCONT it hears of it, too."""

from __future__ import annotations

import killed_bodies
import pytest
from fault_calls import BUSY_S

from unisono.testing import run

# Much more than a call may take on a busy machine: one that is late before the stop is a failure.
TIMEOUT_S = 3.0


@pytest.mark.parametrize(("world_size", "victim"), [(2, 1), (3, 0), (4, 2)])
@pytest.mark.parametrize("moment", [1, 12])
def test_stopped_inside_a_large_all_reduce(moment, world_size, victim):
    results = run(
        killed_bodies.stop_inside,
        world_size,
        ranks="processes",
        args=(victim, moment, TIMEOUT_S),
    )
    for rank, (caught, right, after) in enumerate(results):
        assert right
        for each in (caught, after):
            assert (each.kind, each.peers) == ("CollectiveTimeoutError", (victim,)), (rank, each)
        if rank != victim:
            assert f"rank {victim} did not answer" in caught.text
            assert caught.took_s < TIMEOUT_S + BUSY_S
        assert after.took_s < BUSY_S


def test_stopped_with_several_connections_to_each_rank(monkeypatch):
    monkeypatch.setenv("UNISONO_SHARED_MEMORY", "0")
    monkeypatch.setenv("UNISONO_CHANNELS", "4")
    test_stopped_inside_a_large_all_reduce(12, 3, 1)
