"""SIGKILL of a rank before, inside and between collectives: the others know who, and at once."""

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

import unisono as dist
from tests.faults.fault_calls import (
    BUSY_S,
    COLLECTIVES,
    NOTICE_S,
    Doom,
    attempt,
    attempt_async,
    attempt_at_once,
    calls_in,
    groups_for,
    store,
    wait_for_count,
)
from tests.support.calls import wait_until
from tests.support.lateness import best_s
from unisono.beyond import counters
from unisono.testing import run

ANY_SOURCE = "recv from any"
RECV = "recv"


def die(folder):
    """Write down the time and be killed."""
    Path(folder, "died_s").write_text(repr(time.monotonic()))
    os.kill(os.getpid(), signal.SIGKILL)


def kill_while_all_wait(rank, folder, victim, mode, members=None):
    """Kill a rank that never came while the others wait in every operation there is."""
    names = [*COLLECTIVES, RECV, ANY_SOURCE]
    groups = groups_for(names, members, 60.0)
    waiting = [r for r in members or range(dist.get_world_size()) if r != victim]
    dist.barrier()
    if rank == victim:
        store().wait([f"waiting/{r}" for r in waiting], 60.0)
        die(folder)
    if rank not in waiting:
        wait_for_count("heard", len(waiting))
        return None
    calls = calls_in(groups)
    source = groups[RECV].group_rank(victim)
    box = np.zeros(2)
    calls[RECV] = lambda **how: groups[RECV].recv(box, source, **how)
    calls[ANY_SOURCE] = lambda **how: groups[ANY_SOURCE].recv(box, None, **how)
    run = attempt_async if mode == "async" else attempt_at_once
    results = run(calls, lambda: store().set(f"waiting/{rank}", "yes"))
    results["again"] = attempt(calls["all_reduce"])
    results["on a fresh group"] = attempt(dist.barrier)
    # A rank that leaves is lost as well; first let everybody hear of the one that was killed.
    store().add("heard", 1)
    wait_for_count("heard", len(waiting))
    return results


def kill_inside(rank, folder, victim, moment, count):
    """Kill a rank in the middle of large async all_reduces; return the first failure."""
    world_size = dist.get_world_size()
    want = np.full(count, world_size * (world_size + 1) / 2)
    dist.barrier()
    if rank == victim:
        Doom(moment, lambda: die(folder))
    right = True
    while right:
        x = np.full(count, rank + 1.0)
        caught = attempt(lambda x=x: dist.all_reduce(x, async_op=True).wait())
        if caught.kind:
            break
        right = np.array_equal(x, want)
    after = attempt(dist.barrier)
    store().add("heard", 1)
    wait_for_count("heard", world_size - 1)
    return caught, right, after


def kill_with_lock(rank, waiting, name):
    """Kill rank 1 while it holds a lock, or waits for it; return the errors of the other ranks."""
    lock = dist.Lock(name=name)
    if rank == 1:
        store().set("pid", str(os.getpid()))
    if rank == (0 if waiting else 1):
        lock.acquire()
    dist.barrier()
    if waiting and rank != 1:
        cells = lock._cells
        if cells is None:
            lock._store.wait(["rank/1"], 60.0)  # rank 1 waits with ticket 1
        else:
            assert wait_until(lambda: cells.read(counters._DRAWN)[0] >= 2)
    if rank == 0:
        os.kill(int(store().get("pid")), signal.SIGKILL)
        if waiting:
            lock.release()
    if rank == 1 and not waiting:
        signal.pause()
    caught = attempt(lock.acquire)
    store().add("heard", 1)
    wait_for_count("heard", 2)
    return caught


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


@pytest.mark.sweep(5)
@pytest.mark.parametrize(("world_size", "victim"), [(2, 0), (2, 1), (3, 1), (4, 3), (5, 0), (5, 3)])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_all_that_wait_hear_of_a_killed_rank(tmp_path, mode, world_size, victim):
    results = run(
        kill_while_all_wait,
        world_size,
        ranks="processes",
        args=(str(tmp_path), victim, mode),
        dead={victim},
    )
    died_s = float(Path(tmp_path, "died_s").read_text())
    check_waiting(results, set(range(world_size)) - {victim}, victim, died_s)


def test_sub_group_hears_of_a_killed_rank(tmp_path):
    results = run(
        kill_while_all_wait,
        5,
        ranks="processes",
        args=(str(tmp_path), 3, "sync", (0, 2, 3)),
        dead={3},
    )
    assert results[1] is results[4] is None
    check_waiting(results, {0, 2}, 3, float(Path(tmp_path, "died_s").read_text()))


@pytest.mark.parametrize("waiting", [False, True])
@pytest.mark.parametrize("name", ["a", None], ids=["store", "memory"])
def test_killed_with_a_lock(waiting, name):
    results = run(kill_with_lock, 3, ranks="processes", args=(waiting, name), dead={1})
    for rank in (0, 2):
        caught = results[rank]
        assert (caught.kind, caught.peers, caught.usable) == ("PeerLostError", (1,), True)
        start = (
            f"acquire of Lock {name or 0!r} of group 'default' failed on rank {rank}: rank 1, whose"
        )
        assert caught.text.startswith(start)
        assert caught.took_s < BUSY_S


@pytest.mark.sweep(4)
@pytest.mark.parametrize(("world_size", "victim"), [(2, 1), (3, 0), (4, 2), (5, 4)])
@pytest.mark.parametrize("moment", [1, 5, 20, 45])
def test_killed_inside_a_large_all_reduce(tmp_path, moment, world_size, victim):
    results = run(
        kill_inside,
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


@pytest.mark.alone
@pytest.mark.sweep(1)
@pytest.mark.parametrize("per_host", [0, 1])
def test_all_hear_of_it_within_a_second(tmp_path, monkeypatch, per_host):
    """In the best of some rounds: in others the machine may be what is late."""
    monkeypatch.setenv("UNISONO_RANKS_PER_HOST", str(per_host))

    def late_s():
        args = (str(tmp_path), 1, 5, 100_000)
        results = run(kill_inside, 3, ranks="processes", args=args, dead={1})
        died_s = float(Path(tmp_path, "died_s").read_text())
        return max(caught.ended_s - died_s for caught, _, _ in (results[0], results[2]))

    assert best_s(late_s, NOTICE_S) < NOTICE_S


@pytest.mark.sweep(1)
@pytest.mark.parametrize("moment", [2, 9, 31])
def test_killed_with_several_connections_to_each_rank(tmp_path, monkeypatch, moment):
    monkeypatch.setenv("UNISONO_SHARED_MEMORY", "0")
    monkeypatch.setenv("UNISONO_CHANNELS", "4")
    test_killed_inside_a_large_all_reduce(tmp_path, moment, 3, 2)


def test_ranks_apart_hear_of_a_killed_rank(tmp_path, monkeypatch):
    """As if each had a host of its own; the last calls wait for ranks that live and never come."""
    monkeypatch.setenv("UNISONO_RANKS_PER_HOST", "1")
    test_sub_group_hears_of_a_killed_rank(tmp_path)
