"""SIGKILL of a rank before, inside and between collectives: the others know who, and at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults import killed_bodies
from tests.faults.fault_calls import BUSY_S, COLLECTIVES, NOTICE_S
from tests.support.lateness import best_s
from unisono.testing import run


def check_waiting(results, survivors, victim, died_s):
    for rank in survivors:
        found = results[rank]
        assert len(found) == len(COLLECTIVES) + 4
        for op, caught in found.items():
            assert (caught.kind, caught.peers) == ("PeerLostError", (victim,)), (op, caught)
            assert f"rank {victim} was lost: " in caught.text.splitlines()[0]
            if op not in ("again", "on a fresh group"):
                assert caught.ended_s - died_s < BUSY_S, (op, caught)
                assert caught.ended_s > died_s, (op, caught)
            else:
                assert caught.took_s < BUSY_S, (op, caught)


@pytest.mark.parametrize(("world_size", "victim"), [(2, 0), (2, 1), (3, 1), (4, 3), (5, 0), (5, 3)])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_all_that_wait_hear_of_a_killed_rank(tmp_path, mode, world_size, victim):
    results = run(
        killed_bodies.kill_while_all_wait,
        world_size,
        ranks="processes",
        args=(str(tmp_path), victim, mode),
        dead={victim},
    )
    died_s = float(Path(tmp_path, "died_s").read_text())
    check_waiting(results, set(range(world_size)) - {victim}, victim, died_s)


def test_sub_group_hears_of_a_killed_rank(tmp_path):
    results = run(
        killed_bodies.kill_while_all_wait,
        5,
        ranks="processes",
        args=(str(tmp_path), 3, "sync", (0, 2, 3)),
        dead={3},
    )
    assert results[1] is results[4] is None
    check_waiting(results, {0, 2}, 3, float(Path(tmp_path, "died_s").read_text()))


@pytest.mark.parametrize(("world_size", "victim"), [(2, 1), (3, 0), (4, 2), (5, 4)])
@pytest.mark.parametrize("moment", [1, 5, 20, 45])
def test_killed_inside_a_large_all_reduce(tmp_path, moment, world_size, victim):
    results = run(
        killed_bodies.kill_inside,
        world_size,
        ranks="processes",
        args=(str(tmp_path), victim, moment, 1_000_000),
        dead={victim},
    )
    died_s = float(Path(tmp_path, "died_s").read_text())
    for caught, right, after in (r for r in results if r is not None):
        assert right
        assert (caught.kind, caught.peers) == ("PeerLostError", (victim,)), caught
        assert caught.ended_s - died_s < BUSY_S, caught
        assert (after.kind, after.peers) == ("PeerLostError", (victim,)), after
        assert after.took_s < BUSY_S


@pytest.mark.parametrize("per_host", [0, 1])
def test_all_hear_of_it_within_a_second(tmp_path, monkeypatch, per_host):
    """In the best of some rounds: in others the machine may be what is late."""
    monkeypatch.setenv("UNISONO_RANKS_PER_HOST", str(per_host))

    def late_s():
        args = (str(tmp_path), 1, 5, 100_000)
        results = run(killed_bodies.kill_inside, 3, ranks="processes", args=args, dead={1})
        died_s = float(Path(tmp_path, "died_s").read_text())
        return max(caught.ended_s - died_s for caught, _, _ in (results[0], results[2]))

    assert best_s(late_s, NOTICE_S) < NOTICE_S


@pytest.mark.parametrize("moment", [2, 9, 31])
def test_killed_with_several_connections_to_each_rank(tmp_path, monkeypatch, moment):
    monkeypatch.setenv("UNISONO_SHARED_MEMORY", "0")
    monkeypatch.setenv("UNISONO_CHANNELS", "4")
    test_killed_inside_a_large_all_reduce(tmp_path, moment, 3, 2)


def test_ranks_apart_hear_of_a_killed_rank(tmp_path, monkeypatch):
    """As if each had a host of its own; the last calls wait for ranks that live and never come."""
    monkeypatch.setenv("UNISONO_RANKS_PER_HOST", "1")
    test_sub_group_hears_of_a_killed_rank(tmp_path)


# Four rounds each: one rank fewer after every one.
@pytest.mark.parametrize("per_host", [0, 1])
@pytest.mark.parametrize("seed", range(6))
def test_chaos(tmp_path, monkeypatch, seed, per_host):
    monkeypatch.setenv("UNISONO_RANKS_PER_HOST", str(per_host))
    results = run(
        killed_bodies.chaos,
        5,
        ranks="processes",
        args=(str(tmp_path), seed),
        dead=set(range(5)),
    )
    survivors = [told for told in results if told is not None]
    assert len(survivors) == 1
    for told in survivors:
        assert len(told) == 4
        for victim, members, right, caught in told:
            assert right, (victim, members, caught)
            assert (caught.kind, caught.peers) == ("PeerLostError", (victim,)), caught
