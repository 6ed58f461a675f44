"""Measure how long a job stands still after `kill -9` of one of its ranks.

    python benchmarks/membership.py [--ranks 4] [--mib 16] [--rounds 5]

A step is an all_reduce of 1,000 doubles and a commit. The parent kills the last rank between two
steps. `survivors` is the time from the kill to the next committed step without that rank. In
`spare` a process waits in `init_process_group` (UNISONO_JOIN=1). It takes the place of the killed
rank and gets the state. The time ends with the next committed step.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import time

import numpy as np

import unisono as dist
from unisono.core.stores import TCPStore
from unisono.errors import StepAborted

STEPS = 100
DOCUMENT = "worker/attempt_0/unisono/membership/document"


def work(mib: int, ranks: int) -> None:
    """Make steps; report the times of the first step after each change."""
    shared = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    dist.init_process_group(timeout=60)
    state = {"step": 0, "model": np.zeros(mib << 17)}
    fresh = True
    while not shared.check(["over"]):
        try:
            if fresh:
                dist.sync_state(state)
            with dist.step() as s:
                dist.all_reduce(np.ones(1000))
                s.commit()
            state["step"] += 1
            if fresh and dist.get_rank() == 0:
                shared.set(f"generation/{dist.get_world_size()}", repr(time.monotonic()))
            if state["step"] == STEPS + 1 and dist.get_rank() == 0:
                shared.set("ready", b"")
            # From the first call on, no process joins while all ranks are there.
            fresh = s.changed or state["step"] == STEPS
        except StepAborted:
            fresh = True
        if fresh:
            dist.reconfigure(max_size=ranks)
    os._exit(0)


def measure(ranks: int, mib: int, *, spare: bool) -> float:
    """Return the seconds from the kill to the next committed step."""
    with TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) as store:
        env = dict(os.environ) | {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "WORLD_SIZE": str(ranks),
        }
        command = [sys.executable, __file__, "--work", "--ranks", str(ranks), "--mib", str(mib)]
        processes = []
        try:
            for rank in range(ranks):
                processes.append(subprocess.Popen(command, env=env | {"RANK": str(rank)}))
            store.wait(["ready"], 120)
            if spare:
                processes.append(subprocess.Popen(command, env=env | {"UNISONO_JOIN": "1"}))
                while b'"waiting":[{' not in store.get(DOCUMENT):
                    time.sleep(0.01)
            key = f"generation/{ranks if spare else ranks - 1}"
            store.delete_key(key)
            killed_s = time.monotonic()
            os.kill(processes[ranks - 1].pid, signal.SIGKILL)
            return float(store.get(key, 120)) - killed_s
        finally:
            store.set("over", b"")
            for process in processes:
                process.kill()
            for process in processes:
                process.wait()


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--mib", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.mib, options.ranks)
        return
    print(f"{options.ranks} ranks, {options.mib} MiB, {options.rounds} rounds: seconds")
    for name, spare in (("survivors", False), ("spare", True)):
        times = [measure(options.ranks, options.mib, spare=spare) for _ in range(options.rounds)]
        print(
            f"{name:10} median {statistics.median(times):.2f}, {min(times):.2f} to "
            f"{max(times):.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
