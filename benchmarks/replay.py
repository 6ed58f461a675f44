"""Judge `unisono replay`: recordings at 2, 4 and 8 ranks, predicted from each other.

    python benchmarks/replay.py [--steps 30] [--rounds 3] [--work MS] [--folder FOLDER]

A job of N ranks sleeps (its compute), makes an all_reduce of 1 MiB beside more of it, then two
small ones that block. It is recorded on one host and, with root, on two (network namespaces).
A network is fitted to the calls of one recording: the work per message to the smallest, and that
per byte to the largest. Then `unisono replay -p N` predicts the steps of the other recordings.
All sizes take turns in each round, and the round with the median step counts.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from unisono.testing.hosts import Host, Network, why_no_hosts
from unisono.workbench.cli.main import main as unisono
from unisono.workbench.cli.replay import read_job
from unisono.workbench.replay.engine import play
from unisono.workbench.replay.job import Job
from unisono.workbench.replay.pricing import RecordedTimes, Simulated
from unisono.workbench.simulate import machine

SIZES = (2, 4, 8)
CORES = os.cpu_count() or 1

PROGRAM = """
import sys, time
import numpy as np
import unisono as dist
dist.init_process_group(timeout=120)
steps, work_s = int(sys.argv[2]), float(sys.argv[3]) / 1000
large, middle, small = (np.ones(n, np.float32) for n in (1 << 18, 1 << 14, 1 << 8))
for step in range(steps):
    time.sleep(2 * work_s)
    work = dist.all_reduce(large, async_op=True)
    time.sleep(work_s)
    work.wait()
    dist.all_reduce(middle)
    time.sleep(work_s)
    dist.all_reduce(small)
dist.write_trace(sys.argv[1])
dist.destroy_process_group()
"""


def record(folder: Path, n: int, hosts: list[Host], options: argparse.Namespace) -> None:
    """Run the job on `n` ranks and keep its files."""
    nodes: list[Host | None] = [*hosts] or [None]
    words = [sys.executable, "-m", "unisono", "run", "-n", str(n // len(nodes))]
    program = folder.parent / "program.py"
    program.write_text(PROGRAM)
    job = [str(program), str(folder), str(options.steps), str(options.work)]
    env = os.environ | {"UNISONO_INSECURE": "1", "OMP_NUM_THREADS": "1"}
    running = []
    for number, host in enumerate(nodes):
        if host is None:
            command = [*words, *job]
        else:
            where = ["--nnodes", "2", "--node-rank", str(number), "--master-port", "29571"]
            command = host.inside(*words, *where, "--master-addr", hosts[0].v4, *job)
        running.append(subprocess.Popen(command, env=env))
    for process in running:
        if process.wait(300):
            raise SystemExit(f"the job of {n} ranks ended with {process.returncode}")


def taken_us(job: Job) -> dict[int, float]:
    """Return how long calls of each size take after their last rank, median of all calls."""
    found: dict[int, list[float]] = {}
    for call in job.calls:
        spent = max(call.ends_ps.values()) - max(call.begins_ps.values())
        found.setdefault(call.nbytes, []).append(spent / 1e6)
    return {size: statistics.median(us) for size, us in found.items()}


def net_text(message_us: float, gbps: float, n: int, hosts: int) -> str:
    """Return a network in which all time is work of the ranks, on the cores of this machine."""
    return (
        f"ranks_per_host = {n // hosts}\ncores = {max(1, CORES // hosts)}\n"
        f"send_us = {message_us}\nrecv_us = {message_us}\nmessage_gbps = {gbps}\n"
    )


def fitted(job: Job, hosts: int) -> tuple[float, float]:
    """Return microseconds per message and GB/s with which calls take as long as recorded."""
    taken, n = taken_us(job), len(job.steps)
    least, most = min(taken), max(taken)
    calls = {size: next(i for i, c in enumerate(job.calls) if c.nbytes == size) for size in taken}

    def simulated(size: int, us: float, gbps: float) -> float:
        net = machine("fitted", net_text(us, gbps, n, hosts))
        ends = Simulated(job, net, n, range(n), {}).ends(calls[size], dict.fromkeys(range(n), 0))
        return max(ends.values()) / 1e6

    us, gbps = 10.0, 1.0
    for _ in range(20):
        us *= min(4.0, max(0.25, taken[least] / simulated(least, us, gbps)))
        gbps *= min(4.0, max(0.25, simulated(most, us, gbps) / taken[most]))
    return us, gbps


def step_ms(job: Job) -> float:
    """Return the median recorded step."""
    marks = play(job, RecordedTimes(job)).marks_ps
    return statistics.median(b - a for a, b in itertools.pairwise(marks)) / 1e9


def predicted_ms(source: Path, n: int, net: Path, hosts: int) -> tuple[float, float]:
    """Return the step that the command predicts, and its exposed share."""
    out = net.with_suffix(".json")
    words = ["replay", str(source), "--net", str(net), "-p", str(n), "--hosts", str(hosts)]
    with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):
        assert unisono([*words, "--json", str(out)]) == 0
    outcome = json.loads(out.read_text())[-1]
    return outcome["step_us"] / 1000, outcome["exposed"]


def judge(place: str, folder: Path, hosts: int, options: argparse.Namespace) -> None:
    """Print a row per pair of recordings."""
    middle: dict[int, Path] = {}
    for n in SIZES:
        runs = [folder / f"{place}-{n}-{each}" for each in range(options.rounds)]
        middle[n] = sorted(runs, key=lambda run: step_ms(read_job([str(run)])))[len(runs) // 2]
    jobs = {n: read_job([str(run)]) for n, run in middle.items()}
    for source in SIZES:
        us, gbps = fitted(jobs[source], hosts)
        for n in SIZES:
            net = folder / f"{place}.toml"
            net.write_text(net_text(us, gbps, n, hosts))
            found, exposed = predicted_ms(middle[source], n, net, hosts)
            real = step_ms(jobs[n])
            print(
                f"{place:<8}{source:>6}{n:>4}{real:>11.2f}{found:>13.2f}{found / real:>8.3f}"
                f"{exposed:>9.1%}{us:>10.1f}{gbps:>8.2f}", flush=True,
            )  # fmt: skip


def main() -> None:
    """Record, then predict."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work", type=float, default=20.0, help="milliseconds of a sleep")
    parser.add_argument("--folder", help="keep the recordings here, or use those of an earlier run")
    options = parser.parse_args()
    places = {"host": 1} | ({} if why_no_hosts() else {"2 hosts": 2})
    with contextlib.ExitStack() as stack:
        folder = Path(options.folder or stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(exist_ok=True)
        network = stack.enter_context(Network(2)) if len(places) > 1 else None
        for number in range(options.rounds):
            for place, hosts in places.items():
                for n in SIZES:
                    run = folder / f"{place}-{n}-{number}"
                    if not run.exists():
                        record(run, n, network.hosts if network and hosts > 1 else [], options)
        print("place     from  to    real ms predicted ms   ratio  exposed us/message  GB/s")
        for place, hosts in places.items():
            judge(place, folder, hosts, options)


if __name__ == "__main__":
    main()
