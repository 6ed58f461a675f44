"""Ranks that never arrive: the others say who."""

from __future__ import annotations

import late_bodies
import pytest
from fault_calls import BUSY_S, COLLECTIVES

from unisono.testing import run

# At least; so long that a rank which came is not late as well, only because the machine is busy.
TIMEOUT_S = 1.5

WORLDS = [
    (2, (1,)),
    (3, (0,)),
    (5, (1, 3, 4)),
]


def blamed(missing):
    names = [str(rank) for rank in missing]
    if len(names) == 1:
        return f"rank {names[0]} never entered it"
    return f"ranks {', '.join(names[:-1])} and {names[-1]} never entered it"


def check_late(results, present, missing):
    for rank in present:
        timeout_s, found, later, shown = results[rank]
        assert set(found) == set(COLLECTIVES)
        for op, caught in found.items():
            assert (caught.kind, caught.peers) == ("CollectiveTimeoutError", missing), caught.text
            first = caught.text.splitlines()[0]
            assert first.startswith(f"{op} #1 in group '{op}' timed out after {timeout_s:.1f} s")
            assert f"on rank {rank} of " in first
            assert blamed(missing) in first
            assert caught.usable is False
            assert caught.took_s < timeout_s + BUSY_S
        for op, caught in later.items():
            assert (caught.kind, caught.peers) == ("CollectiveTimeoutError", missing), (op, caught)
            assert "the group is broken" in caught.text
        # They do not wait once more; some may be late for another reason.
        assert sorted(caught.took_s for caught in later.values())[len(later) // 2] < timeout_s
        assert "broken: timed out after" in shown


@pytest.mark.parametrize(("world_size", "missing"), WORLDS)
@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("ranks", ["threads", "processes"])
def test_every_operation_names_the_ranks_that_did_not_come(ranks, mode, world_size, missing):
    results = run(late_bodies.leave_out, world_size, ranks=ranks, args=(missing, TIMEOUT_S, mode))
    present = set(range(world_size)) - set(missing)
    check_late(results, present, missing)


@pytest.mark.parametrize("ranks", ["threads", "processes"])
def test_sub_group_is_told_in_global_ranks(ranks):
    members, missing = (1, 2, 4), (4,)
    results = run(late_bodies.leave_out, 5, ranks=ranks, args=(missing, TIMEOUT_S, "sync", members))
    check_late(results, {1, 2}, missing)


@pytest.mark.parametrize("ranks", ["threads", "processes"])
def test_new_world_after_a_time_out(ranks):
    results = run(late_bodies.new_world_afterwards, 3, ranks=ranks, args=((1,), 0.5))
    assert [first and first.kind for first, _ in results] == [
        "CollectiveTimeoutError",
        None,
        "CollectiveTimeoutError",
    ]
    assert [x for _, x in results] == [[6.0] * 5] * 3


def test_a_short_time_out_asks_nobody_at_once(monkeypatch):
    monkeypatch.setenv("UNISONO_SHARED_MEMORY", "0")
    questions = run(late_bodies.count_questions, 2, ranks="processes", timeout=1.9)
    assert questions == [0, 0]
