"""SIGSTOP of a rank: the others time out and name it; after SIGCONT it hears of it, too."""

from __future__ import annotations

import re

import pytest

from tests.faults import killed_bodies, late_bodies
from tests.faults.fault_calls import BUSY_S, COLLECTIVES
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
            # On a busy machine it may have answered the first question before it was stopped.
            assert re.search(rf"rank {victim} (.* )?did not answer", caught.text)
            assert caught.took_s < TIMEOUT_S + BUSY_S
        assert after.took_s < BUSY_S


def test_stopped_with_several_connections_to_each_rank(monkeypatch):
    monkeypatch.setenv("UNISONO_SHARED_MEMORY", "0")
    monkeypatch.setenv("UNISONO_CHANNELS", "4")
    test_stopped_inside_a_large_all_reduce(12, 3, 1)


@pytest.mark.parametrize("per_host", [0, 1])
def test_stopped_before_every_operation(monkeypatch, per_host):
    monkeypatch.setenv("UNISONO_RANKS_PER_HOST", str(per_host))
    results = run(late_bodies.stop_before, 3, ranks="processes", args=(1, TIMEOUT_S))
    for rank in (0, 2):
        timeout_s, found = results[rank]
        assert set(found) == set(COLLECTIVES)
        for op, caught in found.items():
            # A busy machine may keep the other one from answering as well, with so many calls.
            assert (caught.kind, 1 in caught.peers) == ("CollectiveTimeoutError", True), (
                op,
                caught,
            )
            assert re.search(r"ranks? (0, |0 and |)1( and 2|) did not answer", caught.text), caught
            assert caught.took_s < timeout_s + BUSY_S
