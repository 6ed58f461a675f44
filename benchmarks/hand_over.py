"""500 MB for 4 ranks: `launch` and `shared_array` beside a fork of multiprocessing.

Run from the repository root: `python benchmarks/hand_over.py`. A time begins before the processes
start and ends when each has summed the array and has ended. `shared_array` is timed in running
ranks: make it, fill it on rank 0, sync, sum. The ways take turns; a row has medians. Memory is the
part of the array's pages that the ranks together have (Pss), over the array's size.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import unisono as dist

RANKS = 4


def total(rank: int, array: Any) -> float:
    """Read the array."""
    return float(array.sum())


def forked(array: Any) -> float:
    """Hand the array over by a fork of multiprocessing; return the seconds."""
    context = multiprocessing.get_context("fork")
    began_s = time.perf_counter()
    processes = [context.Process(target=total, args=(rank, array)) for rank in range(RANKS)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return time.perf_counter() - began_s


def launched(array: Any, method: str) -> float:
    """Hand the array over by `launch`; return the seconds."""
    began_s = time.perf_counter()
    sums = dist.launch(total, RANKS, (array,), start_method=method)
    took_s = time.perf_counter() - began_s
    assert sums == [float(array.sum())] * RANKS
    return took_s


def shared_s(rank: int, count: int) -> float:
    """Make, fill and read a shared array; return the seconds."""
    dist.init_process_group()
    values = np.ones(count) if rank == 0 else None
    dist.barrier()
    began_s = time.perf_counter()
    shared = dist.shared_array(count)
    if values is not None:
        shared.array[:] = values
    shared.sync(src=0)
    assert total(rank, shared.array) == count
    dist.barrier()
    return time.perf_counter() - began_s


def share(rank: int, array: Any) -> int:
    """Return this rank's share of the memory of the array, in bytes."""
    dist.init_process_group()
    total(rank, array)
    dist.barrier()
    at, found = array.ctypes.data, 0
    for entry in re.split(r"\n(?=[0-9a-f]+-)", Path("/proc/self/smaps").read_text()):
        first, last = (int(part, 16) for part in entry.split(maxsplit=1)[0].split("-"))
        if first < at + array.nbytes and at < last:
            pss = re.search(r"^Pss: +(\d+) kB", entry, re.M)
            found += 1024 * int(pss[1]) if pss else 0
    dist.barrier()
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    array = np.ones(options.megabytes * 10**6 // 8)
    ways: dict[str, Callable[[], float]] = {"multiprocessing, fork": lambda: forked(array)}
    for method in ("fork", "forkserver", "spawn"):
        ways[f"launch, {method}"] = lambda method=method: launched(array, method)
    ways["launch, spawn, an array of 8 B"] = lambda: launched(array[:1], "spawn")
    ways["shared_array"] = lambda: max(dist.launch(shared_s, RANKS, (array.size,)))
    rounds = [{way: call() for way, call in ways.items()} for _ in range(options.rounds)]
    times = {way: statistics.median(each[way] for each in rounds) for way in ways}
    fork_s = times["multiprocessing, fork"]
    print(f"{options.megabytes} MB, {RANKS} ranks, {os.cpu_count()} cores")
    print("| way | s | over fork | memory |\n|---|---|---|---|")
    for way, median_s in times.items():
        memory = ""
        if way.startswith("launch") and not way.endswith("8 B"):
            method = way.removeprefix("launch, ")
            shares = dist.launch(share, RANKS, (array,), start_method=method)
            memory = f"{sum(shares) / array.nbytes:.2f}"
        print(f"| {way} | {median_s:.2f} | {median_s / fork_s:.2f} | {memory} |")


if __name__ == "__main__":
    main()
