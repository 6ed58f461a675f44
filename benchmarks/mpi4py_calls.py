"""Small reductions of unisono.MPI beside mpi4py on an MPI library.

    python benchmarks/mpi4py_calls.py [--turns 5]

2 ranks on one host. Each library runs in processes of its own, in turns; the library is that of the
mpiexec beside this Python. A turn has rounds of 100 calls for 8 s, and a round takes the time of
the slowest rank. The table has the fastest round of all turns and the least of the turns' medians,
in microseconds. On a busy machine a rank that polls loses its core for whole rounds.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

CALLS, TURN_S = 100, 8.0


def ways(MPI: Any) -> dict[str, Callable[[], object]]:
    """Return the calls, by name."""
    comm, made = MPI.COMM_WORLD, MPI.COMM_WORLD.Dup()
    x, y, here = np.zeros(1), np.zeros(1), MPI.IN_PLACE
    return {
        "Allreduce of 8 B in place": lambda: comm.Allreduce(here, x),
        "Allreduce of 8 B into another array": lambda: comm.Allreduce(y, x),
        "the same in place, of Dup()": lambda: made.Allreduce(here, x),
        "allreduce of a float": lambda: comm.allreduce(1.0),
        "allreduce of a list of 2 numbers": lambda: comm.allreduce([1, 2]),
    }


def measure(front: str) -> None:
    """Print the rounds' times of this library, on rank 0."""
    MPI = importlib.import_module(front)
    comm, found = MPI.COMM_WORLD, ways(MPI)
    times: dict[str, list[float]] = {name: [] for name in found}
    gc.disable()
    end = time.perf_counter() + TURN_S
    while comm.bcast(time.perf_counter() < end):
        for name, call in found.items():
            comm.Barrier()
            began = time.perf_counter()
            for _ in range(CALLS):
                call()
            mine = np.array([(time.perf_counter() - began) / CALLS * 1e6])
            comm.Allreduce(MPI.IN_PLACE, mine, MPI.MAX)
            times[name].append(float(mine[0]))
    if comm.rank == 0:
        print(json.dumps(times), flush=True)


def main() -> None:
    """Write the table to standard output."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--front", help="measure this library, in its ranks")
    given = parser.parse_args()
    if given.front:
        measure(given.front)
        return
    python, mpiexec = sys.executable, str(Path(sys.executable).with_name("mpiexec"))
    launchers = {
        "unisono.MPI": [python, "-m", "unisono", "run", "--nproc-per-node", "2"],
        "mpi4py.MPI": [mpiexec, "-n", "2", python],
    }
    best: dict[str, dict[str, list[float]]] = {}
    for _ in range(given.turns):
        for front, launcher in launchers.items():
            words = [*launcher, __file__, "--front", front]
            done = subprocess.run(words, capture_output=True, text=True, check=True)
            for name, times in json.loads(done.stdout.splitlines()[-1]).items():
                row = best.setdefault(name, {}).setdefault(front, [np.inf, np.inf])
                row[:] = min(row[0], *times), min(row[1], float(np.median(times)))
    print("| call | unisono.MPI | median | mpi4py | median |\n|---|---|---|---|---|")
    for name, rows in best.items():
        figures = " | ".join(f"{each:.2f}" for front in launchers for each in rows[front])
        print(f"| {name} | {figures} |")


if __name__ == "__main__":
    main()
