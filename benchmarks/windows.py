"""Windows beside those of MPI: put of 8 bytes and a signal, put of 64 MiB, fetch-and-add.

Run from the repository root, under the mpiexec of the library to compare with:

    mpiexec -n 2 python benchmarks/windows.py [ROUNDS [TURNS]]

Both libraries run in the same processes and take turns; a row has medians over rounds. MPI's
windows are those of MPI_Win_allocate, in one passive epoch (MPI_Win_lock_all). MPI has no signal:
the rank puts, flushes, and sets a flag behind the elements by MPI_Accumulate (MPI_REPLACE). The
target reads the flag in its own memory, with MPI_Win_sync and a probe, so that MPI makes progress.
"""

from __future__ import annotations

import importlib
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import unisono as dist

ROUNDS, TURNS, LARGE = *map(int, [*sys.argv[1:], 21, 200][:2]), 8 << 20

mpi: Any = importlib.import_module("mpi4py.MPI")


class Unisono:
    """Windows of this library."""

    def __init__(self, rank: int) -> None:
        self.rank, self.other = rank, 1 - rank
        self.small = dist.new_window(np.zeros(8))
        self.large = dist.new_window(np.zeros(LARGE))
        self.counter = dist.new_window(np.zeros(1, np.int64))

    def send(self, x: Any, number: int) -> None:
        """Put 8 bytes and signal."""
        self.small.put(x, self.other)
        self.small.signal(self.other)

    def wait(self, number: int) -> None:
        """Wait for the signal."""
        self.small.wait_signal(self.other)

    def put(self, x: Any) -> None:
        """Put a large array, and wait until it is there."""
        self.large.put(x, self.other)
        self.large.flush(self.other)

    def fetch_add(self) -> None:
        """Draw a number from the other rank."""
        self.counter.fetch_add(1, self.other)


class MPIWindows:
    """Windows of an MPI library."""

    def __init__(self, rank: int) -> None:
        self.rank, self.other, comm = rank, 1 - rank, mpi.COMM_WORLD
        self.comm = comm
        self.small = mpi.Win.Allocate(16, 8, comm=comm)
        self.large = mpi.Win.Allocate(8 * LARGE, 8, comm=comm)
        self.counter = mpi.Win.Allocate(8, 8, comm=comm)
        self.flag = np.frombuffer(self.small.tomemory(), np.int64)[1:2]
        self.flag[0] = 0
        for window in (self.small, self.large, self.counter):
            window.Lock_all()
        self.one, self.result = np.ones(1, np.int64), np.zeros(1, np.int64)

    def send(self, x: Any, number: int) -> None:
        """Put 8 bytes and set the flag."""
        self.small.Put(x, self.other, 0)
        self.small.Flush(self.other)
        flag = np.array([number])
        self.small.Accumulate(flag, self.other, 1, op=mpi.REPLACE)
        self.small.Flush(self.other)

    def wait(self, number: int) -> None:
        """Wait for the flag."""
        self.small.Sync()
        while self.flag[0] != number:
            self.comm.Iprobe()
            self.small.Sync()

    def put(self, x: Any) -> None:
        """Put a large array, and wait until it is there."""
        self.large.Put(x, self.other, 0)
        self.large.Flush(self.other)

    def fetch_add(self) -> None:
        """Draw a number from the other rank."""
        self.counter.Fetch_and_op(self.one, self.result, self.other)
        self.counter.Flush(self.other)


def latency_us(library: Any, x: Any, first: int) -> float:
    """Return half of a round trip of a put with a signal."""
    began_s = time.perf_counter()
    for number in range(first, first + TURNS):
        for sender in (0, 1):
            if library.rank == sender:
                library.send(x, number)
            else:
                library.wait(number)
    return (time.perf_counter() - began_s) / (2 * TURNS) * 1e6


def seconds(call: Callable[[], object], turns: int) -> float:
    """Return the time of one call."""
    began_s = time.perf_counter()
    for _ in range(turns):
        call()
    return (time.perf_counter() - began_s) / turns


def main() -> None:
    """Measure, and print a table."""
    dist.init_process_group()
    rank = dist.get_rank()
    libraries = {"unisono": Unisono(rank), "MPI": MPIWindows(rank)}
    small, large = np.ones(1), np.ones(LARGE)
    found: dict[str, dict[str, list[float]]] = {}
    for number in range(ROUNDS):
        for name, library in libraries.items():
            row = found.setdefault(name, {"latency": [], "large": [], "fetch": []})
            dist.barrier()
            latency = latency_us(library, small, 1 + number * TURNS)
            dist.barrier()
            if rank == 0:
                row["latency"].append(latency)
                row["large"].append(seconds(lambda put=library.put: put(large), 1))
                row["fetch"].append(1e6 * seconds(library.fetch_add, 200))
    dist.barrier()
    if rank == 0:
        version = mpi.Get_library_version().split("\n")[0].strip("\0 ")
        print(f"{version}; medians of {ROUNDS} rounds (the fastest)")
        print("| library | put 8 B + signal, us | put 64 MiB, GB/s | fetch-and-add, us |")
        print("|---|---|---|---|")
        for name, row in found.items():
            rates = [8 * LARGE / each / 1e9 for each in row["large"]]
            cells = [
                f"{statistics.median(row['latency']):.2f} ({min(row['latency']):.2f})",
                f"{statistics.median(rates):.1f} ({max(rates):.1f})",
                f"{statistics.median(row['fetch']):.2f} ({min(row['fetch']):.2f})",
            ]
            print(f"| {name} | {' | '.join(cells)} |")
    for window in (libraries["MPI"].small, libraries["MPI"].large, libraries["MPI"].counter):
        window.Unlock_all()
        window.Free()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
