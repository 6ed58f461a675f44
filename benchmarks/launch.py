"""Compare `unisono run` with torchrun on this machine.

    python benchmarks/launch.py [--rounds 3] [--kills 20] [--launches 50]

Only ratios count: both launchers run in turns, under the same load. torch must be installed.
Each row states its goal, so that the table needs no other document.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

LIMIT_S = 120.0
UNISONO = [sys.executable, "-m", "unisono", "run"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]

NUMPY_SCRIPT = """
import numpy as np
import unisono as dist
dist.init_process_group()
x = np.ones(1)
dist.all_reduce(x)
assert x[0] == dist.get_world_size()
dist.destroy_process_group()
"""

TORCH_SCRIPT = """
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
x = torch.ones(1)
dist.all_reduce(x)
assert x[0] == dist.get_world_size()
dist.destroy_process_group()
"""

# Reduces for ever. Prints rank, process id and the time of its first reduction.
NUMPY_LOOP = """
import os, sys, time
import numpy as np
import unisono as dist
dist.init_process_group(timeout=60)
x = np.ones(1)
dist.all_reduce(x)
os.write(1, f"up {os.environ['RANK']} {os.getpid()} {time.time()}\\n".encode())
while not os.path.exists(sys.argv[1]):
    dist.barrier()
    time.sleep(0.01)
os._exit(0)
"""

TORCH_LOOP = """
import os, sys, time
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
x = torch.ones(1)
dist.all_reduce(x)
os.write(1, f"up {os.environ['RANK']} {os.getpid()} {time.time()}\\n".encode())
while not os.path.exists(sys.argv[1]):
    dist.barrier()
    time.sleep(0.01)
os._exit(0)
"""


def wall_s(command: Sequence[str]) -> float:
    """Run a command to its end and return how long that took."""
    start = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True, timeout=LIMIT_S)
    return time.perf_counter() - start


def in_turns(rounds: int, **commands: Sequence[str]) -> dict[str, float]:
    """Return the median wall time of each command, run in turns."""
    times: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(rounds):
        for name, command in commands.items():
            times[name].append(wall_s(command))
    return {name: statistics.median(each) for name, each in times.items()}


class Job:
    """A launcher whose workers reduce until `end`."""

    def __init__(self, command: Sequence[str], folder: Path) -> None:
        self._end = folder / f"end-{time.monotonic_ns()}"
        self._popen = subprocess.Popen(
            [*command, str(self._end)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        assert self._popen.stdout is not None
        self._fd = self._popen.stdout.fileno()
        os.set_blocking(self._fd, False)
        self._text = ""

    def ups(self, count: int, limit_s: float = 45.0) -> list[tuple[int, int, float]] | None:
        """Return (rank, pid, time) of the next `count` workers; None after `limit_s`."""
        give_up = time.monotonic() + limit_s
        while time.monotonic() < give_up:
            try:
                data = os.read(self._fd, 65536)
            except BlockingIOError:
                time.sleep(0.002)
                continue
            if not data:
                return None
            self._text += data.decode()
            found = re.findall(r"up (\d+) (\d+) (\S+)\n", self._text)
            if len(found) >= count:
                self._text = ""
                return [(int(rank), int(pid), float(when)) for rank, pid, when in found]
        return None

    def memory_bytes(self) -> int:
        """Return the launcher's peak resident memory, the sum of its one or two processes."""
        first = Path(f"/proc/{self._popen.pid}")
        children = (first / f"task/{self._popen.pid}/children").read_text().split()
        # The second process is a fork, so it has the same command line.
        words = (first / "cmdline").read_bytes()
        both = [Path(f"/proc/{pid}") for pid in children]
        both = [first, *(path for path in both if (path / "cmdline").read_bytes() == words)]
        found = 0
        for path in both:
            match = re.search(r"VmHWM:\s+(\d+) kB", (path / "status").read_text())
            assert match is not None
            found += int(match[1]) * 1024
        return found

    def end(self) -> int:
        """Let the workers end without error; return the launcher's exit code."""
        self._end.touch()
        try:
            return self._popen.wait(30)
        except subprocess.TimeoutExpired:
            return -1
        finally:
            self.close()

    def close(self) -> None:
        """End the launcher, by SIGKILL if it ignores SIGTERM."""
        if self._popen.poll() is None:
            self._popen.terminate()
            try:
                self._popen.wait(10)
            except subprocess.TimeoutExpired:
                self._popen.kill()
                self._popen.wait()
        assert self._popen.stdout is not None
        self._popen.stdout.close()


def kills_in_a_row(
    command: Sequence[str], folder: Path, count: int, *, running_s: float = 0.0
) -> tuple[list[float], int, int]:
    """Kill a worker `count` times; return the recovery times, memory and exit code.

    Before each kill the workers have been running for `running_s`.
    """
    job = Job(command, folder)
    times: list[float] = []
    memory = 0
    ups = job.ups(2)
    for _ in range(count):
        if ups is None:
            break
        victim = next(pid for rank, pid, _ in ups if rank == 1)
        time.sleep(running_s)
        start = time.time()
        os.kill(victim, signal.SIGKILL)
        ups = job.ups(2)
        if ups is not None:
            times.append(max(when for _, _, when in ups) - start)
            memory = job.memory_bytes()
    if ups is None:
        job.close()
        return times, memory, -1
    return times, memory, job.end()


def at_once(command: Sequence[str], count: int) -> tuple[int, float]:
    """Start `count` launches at once; return how many failed, and the wall time of all."""
    start = time.perf_counter()
    running = [
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        for _ in range(count)
    ]
    failed = 0
    for popen in running:
        _, err = popen.communicate(timeout=600)
        if popen.returncode != 0:
            failed += 1
            print(err.decode()[-500:], file=sys.stderr)
    return failed, time.perf_counter() - start


def row(what: str, got: str, goal: str, reached: bool) -> None:
    """Print a line of the table."""
    print(f"| {what} | {got} | {goal} | {'yes' if reached else 'NO'} |", flush=True)


def starting(options: argparse.Namespace, script: Callable[[str, str], str]) -> None:
    """Print the rows about the time to start."""
    numpy_script = script("numpy_script.py", NUMPY_SCRIPT)
    torch_script = script("torch_script.py", TORCH_SCRIPT)
    four = ["--standalone", "--nproc-per-node", "4"]
    times = in_turns(
        options.rounds,
        unisono=[*UNISONO, *four, numpy_script],
        torchrun=[*TORCHRUN, *four, torch_script],
        unisono_torch=[*UNISONO, *four, torch_script],
    )
    ratio = times["unisono"] / times["torchrun"]
    both = f"{times['unisono']:.2f} s : {times['torchrun']:.2f} s = {ratio:.2f}"
    row("start, reduce, end of 4 ranks; NumPy : torch+gloo", both, "<= 0.25", ratio <= 0.25)
    ratio = times["unisono_torch"] / times["torchrun"]
    both = f"{times['unisono_torch']:.2f} s : {times['torchrun']:.2f} s = {ratio:.2f}"
    row("the same torch script under both", both, "<= 0.85", ratio <= 0.85)


def restarting(
    options: argparse.Namespace, script: Callable[[str, str], str], folder: Path
) -> None:
    """Print the rows about restarts."""
    kills = options.kills
    flags = ["--standalone", "--nproc-per-node", "2", "--max-restarts", str(kills)]
    ours = [*UNISONO, *flags, script("numpy_loop.py", NUMPY_LOOP)]
    ours_torch = [*UNISONO, *flags, script("torch_loop.py", TORCH_LOOP)]
    theirs = [*TORCHRUN, *flags, script("torch_loop.py", TORCH_LOOP)]
    times, memory, code = kills_in_a_row(ours, folder, kills)
    done = f"{len(times)} of {kills}, exit code {code}"
    row("kill -9 of a worker in a row", done, "all, 0", len(times) == kills and code == 0)
    row("launcher memory", f"{memory / 2**20:.0f} MiB", "<= 60 MiB", memory <= 60 * 2**20)
    early_times: list[float] = []
    torch_times: list[float] = []
    their_times: list[float] = []
    for _ in range(options.trials):
        early_times += kills_in_a_row(ours_torch, folder, 1)[0]
        torch_times += kills_in_a_row(ours_torch, folder, 1, running_s=options.running)[0]
        their_times += kills_in_a_row(theirs, folder, 1, running_s=options.running)[0]
    worked = f"{len(their_times)} of {options.trials} restarts of torchrun worked"
    for what, ours_s in (
        ("NumPy script : torch script", times),
        (f"same torch script, after {options.running:g} s", torch_times),
        ("same torch script, killed at its first collective", early_times),
    ):
        what = f"kill -9 to next collective, {what}"
        if not (ours_s and their_times):
            row(what, f"nothing to compare; {worked}", "<= 0.5", False)
            continue
        mine_s, theirs_s = statistics.median(ours_s), statistics.median(their_times)
        ratio = mine_s / theirs_s
        text = f"{mine_s:.2f} s : {theirs_s:.2f} s = {ratio:.2f} (n={len(ours_s)}; {worked})"
        row(what, text, "<= 0.5", ratio <= 0.5)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--trials", type=int, default=5, help="restarts tried with torchrun")
    parser.add_argument("--running", type=float, default=6.0, help="seconds before a kill")
    parser.add_argument("--launches", type=int, default=50)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def script(file: str, text: str) -> str:
            (folder / file).write_text(text)
            return str(folder / file)

        print("| what | figure | must reach | reached |\n|---|---|---|---|", flush=True)
        starting(options, script)
        restarting(options, script, folder)
        two = ["--nproc-per-node", "2", script("numpy_script.py", NUMPY_SCRIPT)]
        failed, took_s = at_once([*UNISONO, *two], options.launches)
        text = f"{failed} failed, {took_s:.1f} s"
        row(f"{options.launches} launches at once", text, "0 failed", failed == 0)


if __name__ == "__main__":
    main()
