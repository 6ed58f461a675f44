"""A reshard beside the bytes alone, and beside a gather to one rank and a broadcast.

Run from the repository root:

    python benchmarks/reshard.py [MIB [ROUNDS]]                  # one host
    python benchmarks/reshard.py [MIB [ROUNDS]] --gbps 1         # trainers and engines on two hosts

4 trainer ranks have an array split by rows, 2 engine ranks get it split by columns; or the other
way with --back. The bytes alone are contiguous messages of the same sizes between the same ranks.
The copies alone are those that shared memory needs: trainers copy the same pieces into slots of
2 MiB, engines out of slots, and no rank waits for another. All ways take turns in the same
processes. A time is that of the slowest rank, CPU is that of all ranks. The table has medians.

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
    parser.add_argument("--back", action="store_true")
    given = parser.parse_args()
    if "RANK" in os.environ:
        measure(given.mib, given.rounds, given.back)
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


def measure(mib: int, rounds: int, back: bool) -> None:
    """Time all ways on this rank; rank 0 prints the table."""
    dist.init_process_group(timeout=300)
    rank, n = dist.get_rank(), int((mib << 18) ** 0.5) // 8 * 8
    dims = (1, 0) if back else (0, 1)
    ranks, dim = (TRAINERS, dims[0]) if rank in TRAINERS else (ENGINES, dims[1])
    shape = [n, n]
    shape[dim] //= len(ranks)
    local = np.full(shape, float(rank), np.float32)
    given, wanted = (
        dist.Sharded(local if ranks is its else None, (n, n), mesh=its, placements=[cut])
        for its, cut in zip((TRAINERS, ENGINES), dims, strict=True)
    )
    began = _resident("VmRSS")
    plan = dist.reshard(given, wanted)
    ways = {
        "bytes alone": lambda: _bytes_alone(rank, local),
        "copies alone": lambda: _copies_alone(rank, local, dim),
        "reshard": plan.run,
        "gather + broadcast": lambda: _by_way_of_one(rank, local, n, dim),
    }
    # In this order, because a peak stays.
    peaks = {}
    for name in (
        "reshard",
        *(ways.keys() - {"reshard", "gather + broadcast"}),
        "gather + broadcast",
    ):
        if rank in ENGINES:
            local[:] = -1
        ways[name]()
        peaks[name] = (_resident("VmHWM") - began) / local.nbytes
        if name == "reshard" and rank in ENGINES:
            expected = np.repeat(np.arange(4, dtype=np.float32), n // 4)
            assert (local == (expected if back else expected[:, None])).all()
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            times[name].append(_timed(way))
    worst = np.array([peaks[name] for name in ways])
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    if rank == 0:
        way_of = "columns -> 2 ranks by rows" if back else "rows -> 2 ranks by columns"
        print(f"{4 * n * n / 2**20:.0f} MiB, 4 ranks by {way_of}, {rounds} turns")
        print("| way | s | of the bytes alone | CPU s | GB/s | memory beside the arrays |")
        print("|---|---|---|---|---|---|")
        alone = [wall for wall, _ in times["bytes alone"]]
        for (name, each), memory in zip(times.items(), worst, strict=True):
            walls = [wall for wall, _ in each]
            middle = statistics.median(walls)
            ratio = statistics.median(a / b for a, b in zip(walls, alone, strict=True))
            cpu = statistics.median(cpu for _, cpu in each)
            print(
                f"| {name} | {middle:.3f} (least {min(walls):.3f}) | "
                f"{middle / statistics.median(alone):.2f} (turn by turn {ratio:.2f}) | {cpu:.3f} | "
                f"{4e-9 * n * n / middle:.2f} | {memory:.2f} |"
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


def _copies_alone(rank: int, local: np.ndarray, dim: int) -> None:
    """Copy each piece that this rank sends or gets into a slot, or out of one."""
    trains = rank in TRAINERS
    for piece in np.array_split(local, len(ENGINES if trains else TRAINERS), axis=1 - dim):
        step = max(_SLOTS[0].nbytes // piece[0].nbytes, 1)
        for number, begin in enumerate(range(0, len(piece), step)):
            part = piece[begin : begin + step]
            slot = _SLOTS[number % 2][: part.size].reshape(part.shape)
            np.copyto(*((slot, part) if trains else (part, slot)))


_SLOTS = np.zeros((2, 1 << 19), np.float32)


def _by_way_of_one(rank: int, local: np.ndarray, n: int, dim: int) -> None:
    """Gather all parts to rank 0, broadcast the whole, and take this rank's part of it."""
    whole = np.empty((n, n), np.float32) if rank in [0, *ENGINES] else None
    works = []
    if rank in TRAINERS[1:]:
        works.append(dist.isend(local, 0))
    if rank == 0:
        quarters = np.split(whole, len(TRAINERS), axis=dim)
        quarters[0][:] = local
        works += [dist.irecv(quarters[peer], peer) for peer in TRAINERS[1:]]
    dist.wait_all(works)
    if whole is not None:
        dist.broadcast(whole, 0, group=_receivers())
    if rank in ENGINES:
        local[:] = np.split(whole, len(ENGINES), axis=dim)[rank - 4]


_MADE: list[dist.ProcessGroup] = []


def _receivers() -> dist.ProcessGroup:
    if not _MADE:
        _MADE.append(dist.new_group([0, *ENGINES], use_local_synchronization=True))
    return _MADE[0]


def _timed(way: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds of the slowest rank, and the CPU seconds of all ranks."""
    dist.barrier()
    begin, used = time.perf_counter(), time.process_time()
    way()
    cpu, took = np.array([time.process_time() - used]), np.array([time.perf_counter() - begin])
    dist.all_reduce(took, dist.ReduceOp.MAX)
    dist.all_reduce(cpu)
    return float(took[0]), float(cpu[0])


def _resident(name: str) -> int:
    """Return this process's resident memory in bytes, now (VmRSS) or at its peak (VmHWM)."""
    text = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(text.partition(f"{name}:")[2].split()[0]) << 10


if __name__ == "__main__":
    main()
