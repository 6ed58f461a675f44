"""Measure what `unisono top` costs a running job, and how long it takes to refresh.

    python benchmarks/top.py [--ranks 64] [--rounds 10] [--seconds 4]

The ranks call all_reduce of 8 bytes. Periods with a viewer, which refreshes once a second, and
periods without take turns. The viewer runs on the same host, so its own work counts. On a busy
host these times prove little. So the CPU time of the threads that answer is measured, too.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

_REFRESH_S = 1.0
_START_S = 300.0


def be_rank(counter: str) -> None:
    """Call all_reduce until the end of the process; rank 0 counts the calls in a file."""
    import unisono as dist

    dist.init_process_group()
    x = np.zeros(1)
    calls = np.memmap(counter, np.int64, "r+", shape=1)
    while True:
        dist.all_reduce(x)
        if dist.get_rank() == 0:
            calls[0] += 1


def answering_s(pid: int) -> list[float]:
    """Return the CPU time so far of each rank's thread that answers viewers."""
    from unisono.core.transports.tcp.status import THREAD
    from unisono.workbench.cli.look.ask import _candidates

    found = []
    for rank in _candidates(str(pid)):
        for task in Path(f"/proc/{rank}/task").iterdir():
            if (task / "comm").read_text().startswith(THREAD):
                found.append(int((task / "schedstat").read_text().split()[0]) / 1e9)
    return found


def look(pid: int, size: int) -> float:
    """Refresh once, and return the CPU time."""
    from unisono.workbench.cli.look.ask import ask_job
    from unisono.workbench.cli.look.verdict import jobs_of, verdict_of

    begun_s = time.process_time()
    (job,) = jobs_of(ask_job(str(pid)))
    assert len(job.states) == size, f"{len(job.states)} of {size} ranks answered"
    verdict_of(job)
    return time.process_time() - begun_s


def period(calls: np.memmap, seconds: float, pid: int, size: int) -> tuple[float, list[float]]:
    """Return the calls per second of a period, and the CPU and wall times of its refreshes.

    Args:
        calls: The counter of the job.
        seconds: Length of the period.
        pid: The launcher; 0: no viewer.
        size: Number of ranks.
    """
    times = []
    begun_s, begun = time.monotonic(), int(calls[0])
    while (left_s := begun_s + seconds - time.monotonic()) > 0:
        if pid:
            at_s = time.monotonic()
            cpu_s = look(pid, size)
            times.append((cpu_s, time.monotonic() - at_s))
            left_s = min(left_s, at_s + _REFRESH_S - time.monotonic())
        time.sleep(max(0.0, left_s))
    return (int(calls[0]) - begun) / (time.monotonic() - begun_s), times


def main() -> None:
    """Print the cost and the times."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--be", metavar="COUNTER", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.be:
        be_rank(asked.be)
    with tempfile.TemporaryDirectory() as folder:
        counter = str(Path(folder, "calls"))
        calls = np.memmap(counter, np.int64, "w+", shape=1)
        words = ["-m", "unisono", "run", "-n", str(asked.ranks), __file__, "--be", counter]
        with subprocess.Popen([sys.executable, *words], env=os.environ) as job:
            try:
                limit_s = time.monotonic() + _START_S
                while calls[0] < 100:
                    assert time.monotonic() < limit_s, "the job does not start"
                    assert job.poll() is None, "the job has ended"
                    time.sleep(0.1)
                ratios, refreshes, answers = [], [], []
                for _ in range(asked.rounds):
                    plain, _ = period(calls, asked.seconds, 0, asked.ranks)
                    before = answering_s(job.pid)
                    viewed, times = period(calls, asked.seconds, job.pid, asked.ranks)
                    used = np.subtract(answering_s(job.pid), before)
                    answers += (used / len(times)).tolist()
                    ratios.append(plain / viewed)
                    refreshes += times
            finally:
                job.terminate()
    cpu_s, wall_s = np.array(refreshes).T
    print(f"{asked.ranks} ranks on {os.cpu_count()} cores, {asked.rounds} rounds")
    print(f"time of a call, viewed over not viewed: {statistics.median(ratios):.3f} (median)")
    print(f"  of the rounds: {' '.join(f'{ratio:.3f}' for ratio in sorted(ratios))}")
    print(f"refresh: median {np.median(wall_s):.3f} s, longest {wall_s.max():.3f} s")
    print(f"CPU time of the viewer for a refresh: {1e3 * np.median(cpu_s):.0f} ms (median)")
    median_s, worst_s = np.median(answers), max(answers)
    print(
        f"CPU time of a rank for a refresh: {1e3 * median_s:.2f} ms, at most {1e3 * worst_s:.2f} ms"
    )


if __name__ == "__main__":
    main()
