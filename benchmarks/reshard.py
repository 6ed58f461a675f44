"""A reshard beside the bytes alone, and beside a gather to one rank and a broadcast.

Run from the repository root:

    python benchmarks/reshard.py [MIB [ROUNDS]]                  # one host
    python benchmarks/reshard.py [MIB [ROUNDS]] --gbps 1         # trainers and engines on two hosts

4 trainer ranks have an array split by rows, 2 engine ranks get it split by columns. The bytes alone
are contiguous messages of the same sizes between the same ranks. The three ways take turns in the
same processes. A time is that of the slowest rank, and the table has medians.

Memory is the growth of a rank's peak of resident memory, divided by the size of its array; the
largest of all ranks. The first turn of each way is not timed, and touches all memory.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import unisono as dist
from unisono.testing.hosts import Network, ShapedLink

TRAINERS, ENGINES = [0, 1, 2, 3], [4, 5]


def main() -> None:
    """Start the ranks, or be one."""
    parser = argparse.ArgumentParser()
    parser.add_argument("mib", type=int, nargs="?", default=1024)
    parser.add_argument("rounds", type=int, nargs="?", default=7)
    parser.add_argument("--gbps", type=float, default=0.0)
    given = parser.parse_args()
    if "RANK" in os.environ:
        measure(given.mib, given.rounds)
    elif given.gbps:
        on_two_hosts(given.gbps)
    else:
        words = [sys.executable, "-m", "unisono", "run", "-n", "6", *sys.argv]
        sys.exit(subprocess.call(words))


def on_two_hosts(gbps: float) -> None:
    """Start the trainers on one host and the engines on another."""
    with Network(2, ShapedLink(gbps=gbps)) as network:
        ranks = []
        for rank in TRAINERS + ENGINES:
            host = network.hosts[rank in ENGINES]
            count = len(ENGINES if rank in ENGINES else TRAINERS)
            local = rank - min(ENGINES) if rank in ENGINES else rank
            words = {
                "RANK": rank, "WORLD_SIZE": 6, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": count,
                "MASTER_ADDR": network.hosts[0].v4, "MASTER_PORT": 29400,
                "UNISONO_TOKEN": "the token of this benchmark",
            }  # fmt: skip
            env = [f"{name}={value}" for name, value in words.items()]
            command = host.inside(
                "env", *env, sys.executable, os.path.abspath(__file__), *sys.argv[1:]
            )
            ranks.append(subprocess.Popen(command))
        if any(list(map(subprocess.Popen.wait, ranks))):
            sys.exit("a rank failed")


def measure(mib: int, rounds: int) -> None:
    """Time the three ways on this rank; rank 0 prints the table."""
    dist.init_process_group(timeout=300)
    rank, n = dist.get_rank(), int((mib << 18) ** 0.5) // 8 * 8
    trains = rank in TRAINERS
    shape = (n // len(TRAINERS), n) if trains else (n, n // len(ENGINES))
    local = np.full(shape, float(rank), np.float32)
    rows = dist.Sharded(local if trains else None, (n, n), mesh=TRAINERS, placements=[0])
    columns = dist.Sharded(None if trains else local, (n, n), mesh=ENGINES, placements=[1])
    began = _resident("VmRSS")
    plan = dist.reshard(rows, columns)
    ways = {
        "bytes alone": lambda: _bytes_alone(rank, local),
        "reshard": plan.run,
        "gather + broadcast": lambda: _by_way_of_one(rank, local, n),
    }
    # In this order, because a peak stays.
    peaks = {}
    for name in ("reshard", "bytes alone", "gather + broadcast"):
        if not trains:
            local[:] = -1
        ways[name]()
        peaks[name] = (_resident("VmHWM") - began) / local.nbytes
        if name != "bytes alone" and not trains:
            expected = np.repeat(np.arange(4, dtype=np.float32), n // 4)
            assert all((row == value).all() for row, value in zip(local, expected, strict=True))
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            times[name].append(_timed(way))
    worst = np.array([peaks[name] for name in ways])
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    if rank == 0:
        print(f"{4 * n * n / 2**20:.0f} MiB, 4 ranks by rows -> 2 ranks by columns, {rounds} turns")
        print("| way | s | of the bytes alone | GB/s | memory beside the arrays |")
        print("|---|---|---|---|---|")
        alone = statistics.median(times["bytes alone"])
        for (name, each), memory in zip(times.items(), worst, strict=True):
            middle = statistics.median(each)
            ratio = statistics.median(
                a / b for a, b in zip(each, times["bytes alone"], strict=True)
            )
            print(
                f"| {name} | {middle:.3f} (least {min(each):.3f}) | {middle / alone:.2f} "
                f"(turn by turn {ratio:.2f}) | {4e-9 * n * n / middle:.2f} | {memory:.2f} |"
            )
    dist.destroy_process_group()


def _bytes_alone(rank: int, local: np.ndarray) -> None:
    works = []
    if rank in TRAINERS:
        parts = local.reshape(len(ENGINES), -1)
        works = [dist.isend(part, peer) for part, peer in zip(parts, ENGINES, strict=True)]
    else:
        parts = local.reshape(len(TRAINERS), -1)
        works = [dist.irecv(part, peer) for part, peer in zip(parts, TRAINERS, strict=True)]
    dist.wait_all(works)


def _by_way_of_one(rank: int, local: np.ndarray, n: int) -> None:
    """Gather the rows to rank 0, broadcast the whole, and take the columns of it."""
    whole = np.empty((n, n), np.float32) if rank in [0, *ENGINES] else None
    works = []
    if rank in TRAINERS[1:]:
        works.append(dist.isend(local, 0))
    if rank == 0:
        quarters = np.split(whole, len(TRAINERS))
        quarters[0][:] = local
        works += [dist.irecv(quarters[peer], peer) for peer in TRAINERS[1:]]
    dist.wait_all(works)
    if whole is not None:
        dist.broadcast(whole, 0, group=_receivers())
    if rank in ENGINES:
        half = n // len(ENGINES)
        local[:] = whole[:, (rank - 4) * half : (rank - 3) * half]


_MADE: list[dist.ProcessGroup] = []


def _receivers() -> dist.ProcessGroup:
    if not _MADE:
        _MADE.append(dist.new_group([0, *ENGINES], use_local_synchronization=True))
    return _MADE[0]


def _timed(way: Callable[[], object]) -> float:
    """Return the seconds of the slowest rank."""
    dist.barrier()
    begin = time.perf_counter()
    way()
    took = np.array([time.perf_counter() - begin])
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took[0])


def _resident(name: str) -> int:
    """Return this process's resident memory in bytes, now (VmRSS) or at its peak (VmHWM)."""
    text = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(text.partition(f"{name}:")[2].split()[0]) << 10


if __name__ == "__main__":
    main()
