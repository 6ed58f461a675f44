"""all_reduce with `compress=` beside the plain one, over a link of a given rate.

Run from the repository root, as root (it makes network namespaces):

    python benchmarks/compress.py [MIB ...] [--gbps 1] [--rounds 9] [--plain-text]

2 ranks, each on a host of its own. The ways take turns in the same processes. A time is that of the
slower rank, and the table has medians of float32 sums. Without --plain-text the link is encrypted.
The error is the largest of the result, divided by the largest magnitude of the sum.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time

import numpy as np

import unisono as dist
from unisono.testing.hosts import Network, ShapedLink

WAYS = (None, "bf16", "fp8", "int8")


def main() -> None:
    """Start the ranks, or be one."""
    parser = argparse.ArgumentParser()
    parser.add_argument("mib", type=int, nargs="*", default=[1, 4, 16, 64])
    parser.add_argument("--gbps", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--plain-text", action="store_true")
    given = parser.parse_args()
    if "RANK" in os.environ:
        measure(given.mib, given.rounds)
    else:
        on_two_hosts(given.gbps, given.plain_text)


def on_two_hosts(gbps: float, plain_text: bool) -> None:
    """Start a rank on each of two hosts."""
    with Network(2, ShapedLink(gbps=gbps)) as network:
        ranks = []
        for rank, host in enumerate(network.hosts):
            words = {
                "RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1,
                "MASTER_ADDR": network.hosts[0].v4, "MASTER_PORT": 29400,
                "UNISONO_TOKEN": "the token of this benchmark",
                "UNISONO_TLS": "off" if plain_text else "on",
            }  # fmt: skip
            env = [f"{name}={value}" for name, value in words.items()]
            command = ["env", *env, sys.executable, os.path.abspath(__file__), *sys.argv[1:]]
            ranks.append(subprocess.Popen(host.inside(*command)))
        if any(list(map(subprocess.Popen.wait, ranks))):
            sys.exit("a rank failed")


def measure(sizes: list[int], rounds: int) -> None:
    """Time the ways on this rank; rank 0 prints the table."""
    dist.init_process_group(timeout=300)
    rank, load = dist.get_rank(), os.getloadavg()[0]
    if rank == 0:
        print(f"load {load:.1f}, {os.cpu_count()} cores, medians of {rounds} turns")
        print(f"{'MiB':>5}{'compress':>10}{'ms':>9}{'faster':>8}{'CPU ms':>8}{'error':>10}")
    for mib in sizes:
        both = [np.random.default_rng(r).normal(size=mib << 18).astype("f4") for r in (0, 1)]
        exact = both[0].astype("f8") + both[1]
        times: dict[str | None, list[float]] = {way: [] for way in WAYS}
        cpu: dict[str | None, list[float]] = {way: [] for way in WAYS}
        errors = {}
        for turn in range(rounds + 1):
            for way in WAYS:
                x = both[rank].copy()
                dist.barrier()
                begin, used = time.perf_counter(), time.process_time()
                dist.all_reduce(x, compress=way)
                took = np.array([time.perf_counter() - begin, time.process_time() - used])
                dist.all_reduce(took, dist.ReduceOp.MAX)
                errors[way] = float(abs(x - exact).max() / abs(exact).max())
                if turn:
                    times[way].append(took[0] * 1e3)
                    cpu[way].append(took[1] * 1e3)
        plain = statistics.median(times[None])
        for way in WAYS if rank == 0 else ():
            ms, used = statistics.median(times[way]), statistics.median(cpu[way])
            faster = f"{plain / ms:>8.2f}{used:>8.1f}{errors[way]:>10.1e}"
            print(f"{mib:>5}{way or '-':>10}{ms:>9.1f}{faster}", flush=True)


if __name__ == "__main__":
    main()
