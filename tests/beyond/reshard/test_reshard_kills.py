"""Ranks that are killed at a random moment of a reshard; `whole` tests make 60 such rounds."""

import os
import signal
import threading
import time

import numpy as np
import pytest

import unisono as dist
from tests.support.calls import wait_until
from tests.support.forks import all_ended, end_all, forked
from unisono.errors import CollectiveAbortedError, PeerLostError

N = 1200
SOURCES, TARGETS = [0, 1, 2], [2, 3]


def reshards_until_killed(rank, folder, kill_s, victim):
    store = dist.FileStore(str(folder / "meeting"), 4)
    group = dist.ProcessGroup(store, rank, 4, timeout=60)
    rows, columns = np.zeros((N // 3, N)), np.zeros((N, N // 2))
    src = dist.Sharded(rows if rank in SOURCES else None, (N, N), mesh=SOURCES, placements=[0])
    dst = dist.Sharded(columns if rank in TARGETS else None, (N, N), mesh=TARGETS, placements=[1])
    plan = dist.reshard(src, dst, group)
    group.barrier()
    if rank == victim:
        threading.Timer(kill_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
    turn = 0
    try:
        while True:
            turn += 1
            rows[:] = 10 * turn + rank
            plan.run()
            if rank in TARGETS:
                wanted = np.repeat([10.0 * turn + source for source in SOURCES], N // 3)
                assert (columns == wanted[:, None]).all()
    except (PeerLostError, CollectiveAbortedError) as error:
        at_s = time.monotonic()
        (folder / f"told {rank}").write_text(f"{at_s} {error.context.peers} {error.what}")
        if victim not in error.context.peers:
            raise
        # A rank that leaves could be taken for the first that was lost.
        wait_until(lambda: len(list(folder.glob("told *"))) == 3, 20)
    finally:
        group.close()


def one_round(folder, seed):
    """Kill one of 4 ranks; the others must learn which, within seconds."""
    random = np.random.default_rng(seed)
    victim, kill_s = int(random.integers(4)), float(random.exponential(0.05))
    ranks = [forked(reshards_until_killed, rank, folder, kill_s, victim) for rank in range(4)]
    ended = {}
    wait_until(lambda: all_ended(ranks, ended), 60)
    end_all(ranks, ended)
    texts = [path.read_text() for path in folder.glob("told *")]
    assert [ended.get(pid) for pid in ranks] == [9 * (r == victim) for r in range(4)], texts


def test_a_killed_rank_is_named(tmp_path):
    for seed in range(3):
        folder = tmp_path / str(seed)
        folder.mkdir()
        one_round(folder, seed)


@pytest.mark.whole("60 kills take a minute")
def test_60_killed_ranks(tmp_path):
    for seed in range(1000, 1060):
        folder = tmp_path / str(seed)
        folder.mkdir()
        one_round(folder, seed)
