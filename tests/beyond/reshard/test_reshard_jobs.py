"""Reshards between two jobs that were launched separately, and meet at a store."""

import secrets

import unisono as dist
from tests.support.launches import Launch

TRAINERS, ENGINES, N = 3, 2, 24

PROGRAM = f"""
import os
import signal
import sys

import numpy as np

import unisono as dist
from unisono.errors import CommunicationError

job, host, port, number, victim = sys.argv[1:]
dist.init_process_group(timeout=60)
rank, size, trains = dist.get_rank(), dist.get_world_size(), job == "trainers"
# Each job knows its own ranks only: both meshes begin at 0.
mesh = dist.init_device_mesh("cpu", (size,))
N = {N}
data = np.arange(N * N, dtype=float).reshape(N, N)
cut = slice(rank * N // size, (rank + 1) * N // size)
wanted = data[cut] if trains else data[:, cut]
x = np.zeros(wanted.shape)
mine = dist.Sharded(x, (N, N), mesh=mesh, placements=[0 if trains else 1])
store = dist.TCPStore(host, int(port))


def meet(number):
    place = rank + (0 if trains else {TRAINERS})
    meeting = dist.PrefixStore("bridge " + str(number), store)
    bridge = dist.ProcessGroup(meeting, place, {TRAINERS + ENGINES}, timeout=60, name="bridge")
    there = dist.reshard(mine if trains else None, None if trains else mine, bridge)
    back = dist.reshard(None if trains else mine, mine if trains else None, bridge)
    for turn in range(1, 4):
        if trains:
            x[...] = turn * wanted
        there.run()
        if not trains:
            np.testing.assert_array_equal(x, turn * wanted)
            x[...] *= -1
        back.run()
        if trains:
            np.testing.assert_array_equal(x, -turn * wanted)
    bridge.barrier()
    return bridge, there


def serve(number, victim):
    bridge, there = meet(number)
    try:
        for turn in range(1000):
            if turn == 2 and victim == f"{{job}} {{rank}}":
                os.kill(os.getpid(), signal.SIGKILL)
            there.run()
    except CommunicationError as error:
        print(job, rank, type(error).__name__, *error.context.peers, flush=True)
    bridge.close()


serve(int(number), victim)
if trains:
    # The rest of the job goes on without the other one, and meets the next one.
    x[:1] = 1
    dist.all_reduce(x)
    assert (x[0] == size).all()
    serve(int(number) + 1, "trainers 1")
dist.destroy_process_group()
"""


def test_two_jobs_of_which_each_dies_once(tmp_path, monkeypatch):
    monkeypatch.setenv("UNISONO_TOKEN", secrets.token_hex())
    script = tmp_path / "job.py"
    script.write_text(PROGRAM)
    started = []
    with dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) as store:

        def start(job, size, number, victim):
            words = "-n", size, script, job, store.host, store.port, number, victim
            started.append(Launch(*words, cwd=tmp_path))
            return started[-1]

        try:
            trainers = start("trainers", TRAINERS, 0, "engines 1")
            first = start("engines", ENGINES, 0, "engines 1")
            told = trainers.lines(TRAINERS, "trainers")
            # The launcher ends the other engine, which may be lost first.
            assert {" ".join(line.split()[2:]) for line in told} <= {
                f"PeerLostError {rank}" for rank in (3, 4)
            }, told
            assert first.finish()[0] != 0
            second = start("engines", ENGINES, 1, "trainers 1")
            told = second.lines(ENGINES, "engines")
            assert {line.split()[2] for line in told} == {"PeerLostError"}, told
            assert {int(line.split()[3]) for line in told} <= set(range(TRAINERS)), told
            assert second.finish()[0] == 0, second.err
            assert trainers.finish()[0] != 0
        finally:
            for launch in started:
                launch.close()
