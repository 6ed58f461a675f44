"""One world after another by every method, and ranks that contradict each other."""

import os
import re
import subprocess
import sys
import time

import pytest

from unisono.core.stores import TCPStore

WORLDS = 3
LIMIT_S = 90

SCRIPT = """
import sys
import numpy as np
import unisono as dist
method, rank, world_size, worlds = sys.argv[1], *map(int, sys.argv[2:])
for turn in range(worlds):
    options = {"timeout": 30}
    if method == "store":
        if turn == 0:
            store = dist.TCPStore("127.0.0.1", PORT, timeout=30)
        options |= {"store": store, "rank": rank, "world_size": world_size}
    elif method == "env://":
        options["init_method"] = method
    else:
        options |= {"init_method": method, "rank": rank, "world_size": world_size}
    dist.init_process_group(**options)
    x = np.full(3, float(rank + turn))
    dist.all_reduce(x)
    assert (x == sum(each + turn for each in range(world_size))).all(), x
    group = dist.new_group()
    dist.all_reduce(x, group=group)
    # No barrier: who is quick begins the next world while others are in this one.
    dist.destroy_process_group()
"""


def start(script, *arguments, **variables):
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
    env = {name: text for name, text in os.environ.items() if name not in names}
    return subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)],
        env=env | variables,
        stderr=subprocess.PIPE,
        text=True,
    )


def ends(processes):
    """Wait for all; return exit codes and last lines of the errors."""
    told = [process.communicate(timeout=LIMIT_S)[1] for process in processes]
    return [(process.returncode, err) for process, err in zip(processes, told, strict=True)]


def first_to_end(processes):
    limit_s = time.monotonic() + LIMIT_S
    while time.monotonic() < limit_s:
        for process in processes:
            if process.poll() is not None:
                return process
        time.sleep(0.01)
    raise AssertionError("none has ended")


@pytest.mark.parametrize("method", ["env://", "tcp://", "file://", "store"])
def test_init_destroy_init(method, tmp_path, port):
    size = 3
    urls = {"tcp://": f"tcp://127.0.0.1:{port}", "file://": f"file://{tmp_path}/meet"}
    with TCPStore("127.0.0.1", 0, is_master=True) as store:
        processes = [
            start(
                SCRIPT.replace("PORT", str(store.port)),
                urls.get(method, method),
                rank,
                size,
                WORLDS,
                RANK=str(rank),
                WORLD_SIZE=str(size),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port),
            )
            for rank in range(size)
        ]
        assert ends(processes) == [(0, "")] * size
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("method", ["file://", "store"])
def test_two_processes_with_the_same_rank(method, tmp_path):
    """The second of them is told at once; who is right goes on."""
    with TCPStore("127.0.0.1", 0, is_master=True) as store:
        script = SCRIPT.replace("PORT", str(store.port))
        url = "store" if method == "store" else f"file://{tmp_path}/meet"
        twins = [start(script, url, 1, 2, 1) for _ in range(2)]
        # One of them ends while the other waits for rank 0.
        loser = first_to_end(twins)
        (winner,) = (twin for twin in twins if twin is not loser)
        rank0 = start(script, url, 0, 2, 1)
        ((code, err),) = ends([loser])
        assert code == 1
        assert re.search(
            rf"RendezvousError: rank 1 of 2 is process {winner.pid} on host .* already", err
        )
        assert ends([winner, rank0]) == [(0, "")] * 2
