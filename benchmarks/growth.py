"""Measure how a world grows on one host: start, first calls, later calls, memory, descriptors.

    python benchmarks/growth.py [--ranks 2 8 32] [--library unisono mpi gloo] [--rounds 3]

The libraries take turns. A column in seconds ends when the last rank is ready, and begins at the
end of the column before. `init` begins with the start of the processes, before imports. Memory is
a rank's share (PSS) after all calls, the mean over ranks. Descriptors are the most of a rank.
mpiexec starts all ranks. With `--mpi PYTHON` it and mpi4py may be in an environment of their own.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

COLUMNS = ("init", "barrier", "all_reduce", "ten more")
COUNT = 1000
LATER = 10
WORLD = ("PMI_RANK", "PMI_SIZE", PORT := "STORE_PORT")

# (barrier, all_reduce in place, rank, world size)
Calls = tuple[Callable[[], object], Callable[[Any], object], int, int]


def unisono() -> Calls:
    """Join a world of unisono."""
    dist: Any = importlib.import_module("unisono")
    rank, size, port = (int(os.environ[name]) for name in WORLD)
    store = dist.TCPStore("127.0.0.1", port, wait_for_workers=False)
    dist.init_process_group(store=store, rank=rank, world_size=size)
    return dist.barrier, dist.all_reduce, rank, size


def gloo() -> Calls:
    """Join a world of Gloo."""
    torch: Any = importlib.import_module("torch")
    dist: Any = importlib.import_module("torch.distributed")
    rank, size, port = (int(os.environ[name]) for name in WORLD)
    store = dist.TCPStore("127.0.0.1", port, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    return dist.barrier, lambda x: dist.all_reduce(torch.from_numpy(x)), rank, size


def mpi() -> Calls:
    """Join a world of MPI; the import does it."""
    library: Any = importlib.import_module("mpi4py.MPI")
    comm = library.COMM_WORLD
    return comm.Barrier, lambda x: comm.Allreduce(library.IN_PLACE, x), comm.rank, comm.size


def be_rank(library: str, folder: str) -> None:
    """Be one rank: join, call, and write the times of this rank into the folder."""
    # mpiexec needs more descriptors than a rank, and leaves some of them open in each rank.
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
    before = len(os.listdir("/proc/self/fd"))
    join = {"unisono": unisono, "gloo": gloo, "mpi": mpi}[library]
    barrier, all_reduce, rank, size = join()
    times = [time.monotonic()]
    barrier()
    times.append(time.monotonic())
    x = np.full(COUNT, rank + 1.0)
    all_reduce(x)
    times.append(time.monotonic())
    assert (x == size * (size + 1) / 2).all(), "the sum is wrong"
    for _ in range(LATER):
        all_reduce(x)
    times.append(time.monotonic())
    descriptors = len(os.listdir("/proc/self/fd")) - before
    share = next(
        int(line.split()[1])
        for line in Path("/proc/self/smaps_rollup").read_text().splitlines()
        if line.startswith("Pss:")
    )
    Path(f"{folder}/{rank}.json").write_text(json.dumps([times, descriptors, share / 1024]))
    barrier()


def start(library: str, size: int, mpi_python: str) -> tuple[list[float], int, float]:
    """Start a world and wait for its end; return the seconds, descriptors and MiB of a row."""
    dist: Any = importlib.import_module("unisono")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder, contextlib.closing(store):
        python = mpi_python if library == "mpi" else sys.executable
        mpiexec = str(Path(mpi_python).with_name("mpiexec"))
        line = [mpiexec, "-n", str(size), python, str(Path(__file__)), "--be", library, folder]
        begin = time.monotonic()
        subprocess.run(line, env=os.environ | {PORT: str(store.port)}, check=True)
        answers = [json.loads(file.read_text()) for file in Path(folder).glob("*.json")]
    assert len(answers) == size, f"{len(answers)} of {size} ranks answered"
    ends = [begin, *np.max([times for times, _, _ in answers], axis=0)]
    most, shares = max(each[1] for each in answers), [each[2] for each in answers]
    return np.diff(ends).tolist(), most, statistics.mean(shares)


def main() -> None:
    """Print a row per library and number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8, 32])
    libraries = ["unisono", "mpi", "gloo"]
    parser.add_argument("--library", nargs="+", default=libraries, choices=libraries)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mpi", default=sys.executable, metavar="PYTHON")
    parser.add_argument("--be", nargs=2, metavar=("LIBRARY", "FOLDER"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.be:
        be_rank(*asked.be)
        return
    print(f"| ranks | library | {' | '.join(COLUMNS)} | sum, s | MiB | descriptors |")
    print("|---" * (len(COLUMNS) + 5) + "|")
    for size in asked.ranks:
        rows: dict[str, list[tuple[list[float], int, float]]] = {}
        for _ in range(asked.rounds):
            for library in asked.library:
                rows.setdefault(library, []).append(start(library, size, asked.mpi))
        for library, found in rows.items():
            seconds = np.median([row[0] for row in found], axis=0)
            share = statistics.median(row[2] for row in found)
            cells = [f"{s:.3g}" for s in (*seconds, sum(seconds))]
            print(f"| {size} | {library} | {' | '.join(cells)} | {share:.1f} | {found[0][1]} |")


if __name__ == "__main__":
    main()
