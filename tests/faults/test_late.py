"""Ranks that never arrive: the others say who."""

from __future__ import annotations

import re

import pytest

from tests.faults import late_bodies
from tests.faults.fault_calls import BUSY_S, COLLECTIVES
from tests.support.lateness import best_s
from unisono.testing import run

# At least; so long that a rank which came is not late as well, only because the machine is busy.
TIMEOUT_S = 1.5

WORLDS = [
    (2, (1,)),
    (3, (0,)),
    (5, (1, 3, 4)),
]


# On a busy machine a rank may be late to say, or to repeat, that it did not come.
BLAMED = (
    r"ranks? ([\d, and]+) "
    r"(?:never entered it|had not entered it [\d.]+ s ago and did not answer again|did not answer)"
)


def blamed(first_line):
    """Return the ranks that a time-out says did not come; it may say nothing else of any rank."""
    told = re.sub(r" \(found by rank \d+\)$", "", first_line.split(": ", 1)[1])
    assert re.fullmatch(f"{BLAMED}(?:, {BLAMED})*", told), first_line
    found = [re.findall(r"\d+", ranks) for ranks in re.findall(BLAMED, told)]
    return sorted(int(rank) for ranks in found for rank in ranks)


def check_late(results, present, missing):
    for rank in present:
        timeout_s, found, later, shown = results[rank]
        assert set(found) == set(COLLECTIVES)
        for op, caught in found.items():
            assert (caught.kind, caught.peers) == ("CollectiveTimeoutError", missing), caught.text
            first = caught.text.splitlines()[0]
            assert first.startswith(f"{op} #1 in group '{op}' timed out after {timeout_s:.1f} s")
            assert f"on rank {rank} of " in first
            assert blamed(first) == list(missing)
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

    def most_questions():
        return max(run(late_bodies.count_questions, 2, ranks="processes", args=(1.9,)))

    # On a busy machine a call may be late indeed.
    assert best_s(most_questions, 1) == 0


@pytest.mark.parametrize("ranks", ["threads", "processes"])
def test_an_old_answer_is_told_as_such(ranks):
    first, second, _ = run(late_bodies.silent_after_a_first_answer, 3, ranks=ranks)
    for caught in (first, second):
        assert (caught.kind, caught.peers) == ("CollectiveTimeoutError", (2,)), caught.text
        told = r": rank 2 had not entered it \d+\.\d s ago and did not answer again"
        assert re.search(told, caught.text), caught.text
