"""The MPI engine beside the library itself: MPI_Allreduce from C, and mpi4py.

    python benchmarks/mpi.py [--of all_reduce messages file] [--library FOLDER ...] [--rounds 50]
    python benchmarks/mpi.py --hosts

2 ranks on one host. all_reduce is the sum of float32 in place. A library is a virtual environment
with its mpiexec. Without the option it is that of this Python. With `--hosts` each rank is on a
network namespace of this machine. MPICH or Intel MPI then needs no mpiexec, and the native engine
over TCP takes part. Needs a C++ compiler, and root for `--hosts`.

The ways take turns in each round. The time of a round is the mean of a loop on the slowest rank.
The tables have the fastest round of each way, in microseconds. A message is half a ping-pong. A
file has a block of each rank, and is on the disk when the time ends.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

SIZES = (8, 64 * 1024, 1024 * 1024, 16 * 1024 * 1024)
# Calls of a loop.
REPS, LOOP_BYTES = 300, 4 * 1024 * 1024
DRIVER = "mpi_loop.so"
Way = Callable[[int], float]


class World(NamedTuple):
    """Libraries and folder of a measurement: unisono, mpi4py, and a folder."""

    dist: Any
    MPI: Any
    comm: Any
    native: Any
    loop: Any
    folder: str


def python_loop(call: Callable[[], object]) -> Way:
    """Return a way that makes a call from Python."""

    def measure(reps: int) -> float:
        began = time.perf_counter()
        for _ in range(reps):
            call()
        return (time.perf_counter() - began) / reps * 1e6

    return measure


def c_loop(loop: Any, x: Any, comm: Any) -> Way:
    """Return a way that calls MPI_Allreduce from C."""
    from unisono.adapters.mpi.calls import address, handle
    from unisono.adapters.mpi.library import library

    MPI = library().MPI
    here = int(MPI.IN_PLACE)
    words = [here, x.ctypes.data, x.size, handle(MPI.FLOAT), handle(MPI.SUM), handle(comm)]
    arguments = (ctypes.c_int64 * 6)(*words)
    function = ctypes.c_void_p(address("MPI_Allreduce"))
    return lambda reps: float(loop(function, arguments, reps))


def all_reduce_ways(world: World, nbytes: int) -> dict[str, Way]:
    """Return the ways to add an array; the first two without unisono."""
    dist, MPI, comm = world.dist, world.MPI, world.comm
    x = np.zeros(nbytes // 4, np.float32)
    ways = {
        "MPI from C": c_loop(world.loop, x, comm),
        "mpi4py": python_loop(lambda: comm.Allreduce(MPI.IN_PLACE, x)),
        "unisono on MPI": python_loop(lambda: dist.all_reduce(x)),
    }
    if world.native is not None:
        ways["unisono over TCP"] = python_loop(lambda: dist.all_reduce(x, group=world.native))
    return ways


def message_ways(world: World, nbytes: int) -> dict[str, Way]:
    """Return the ways to send an array to the other rank."""
    dist, comm, rank = world.dist, world.comm, world.comm.rank
    x = np.zeros(nbytes, np.uint8)

    def half(send: Callable[[], object], recv: Callable[[], object]) -> Way:
        loop = python_loop(lambda: (send(), recv()) if rank == 0 else (recv(), send()))
        return lambda reps: loop(reps) / 2

    return {
        "mpi4py": half(lambda: comm.Send(x, 1 - rank), lambda: comm.Recv(x, 1 - rank)),
        "unisono": half(lambda: dist.send(x, 1 - rank), lambda: dist.recv(x, 1 - rank)),
    }


def file_ways(world: World, nbytes: int) -> dict[str, Way]:
    """Return the ways to write one file."""
    dist, MPI, comm, rank = world.dist, world.MPI, world.comm, world.comm.rank
    x, path = np.full(nbytes, rank, np.uint8), f"{world.folder}/file"

    def by_mpi() -> None:
        file = MPI.File.Open(comm, path + ".new", MPI.MODE_CREATE | MPI.MODE_WRONLY)
        file.Write_at_all(rank * nbytes, x)
        file.Sync()
        file.Close()
        if rank == 0:
            os.replace(path + ".new", path)

    def by_unisono() -> None:
        with dist.open_file(path, "w") as file:
            file.write_block(x, (comm.size * nbytes,), (rank * nbytes,))

    return {"mpi4py": python_loop(by_mpi), "unisono": python_loop(by_unisono)}


OPERATIONS = {
    "all_reduce": (all_reduce_ways, SIZES),
    "messages": (message_ways, SIZES),
    "file": (file_ways, SIZES[2:]),
}


def measure_as_rank(folder: str, of: list[str], rounds: int, with_tcp: bool) -> None:
    """Measure as one of the ranks; rank 0 prints."""
    import unisono as dist

    dist.init_process_group("mpi")
    from mpi4py import MPI

    from unisono.adapters.mpi.library import library

    loop = ctypes.CDLL(f"{folder}/{DRIVER}").loop
    loop.restype = ctypes.c_double
    native = dist.new_group(backend="unisono") if with_tcp else None
    comm = MPI.COMM_WORLD.Dup()
    world = World(dist, MPI, comm, native, loop, folder)
    for name in of:
        make, sizes = OPERATIONS[name]
        for nbytes in sizes:
            ways = make(world, nbytes)
            # Some milliseconds: a short loop may run undisturbed on a busy machine.
            reps = max(1, min(REPS, LOOP_BYTES // nbytes))
            if comm.rank == 0 and nbytes == sizes[0]:
                load = os.getloadavg()[0]
                print(f"\n{name}, {library().name}, load {load:.1f}\n")
                print(f"| bytes | {' | '.join(ways)} | ratio |\n" + "|---:" * (len(ways) + 2) + "|")
            best = measure(list(ways.values()), reps, rounds, comm, MPI.MAX)
            if comm.rank == 0:
                times = dict(zip(ways, best, strict=True))
                ours = times.get("unisono on MPI", times.get("unisono", 0.0))
                cells = [f"{us:.3g}" for us in best]
                print(f"| {nbytes} | {' | '.join(cells)} | {ours / best[0]:.2f} |", flush=True)
    dist.destroy_process_group()


def measure(ways: list[Way], reps: int, rounds: int, comm: Any, slowest: Any) -> list[float]:
    """Return the fastest round of each way in microseconds."""
    best = [float("inf")] * len(ways)
    gc.disable()
    for way in ways:
        way(3)
    for _ in range(rounds):
        for index, way in enumerate(ways):
            comm.Barrier()
            best[index] = min(best[index], comm.allreduce(way(reps), slowest))
    gc.enable()
    return best


def on_one_host(folder: Path, words: list[str]) -> None:
    """Start 2 ranks by the mpiexec of an environment, with this Python."""
    mpiexec, lib = folder / "bin/mpiexec", folder / "lib"
    found = [lib / name for name in ("libmpi.so.40", "libmpi.so.12") if (lib / name).exists()]
    open_mpi = found[0].name == "libmpi.so.40"
    extra = ["--allow-run-as-root", "--oversubscribe"] if open_mpi else []
    env = os.environ | {"MPI4PY_LIBMPI": str(found[0])}
    command = [mpiexec, *extra, "-n", "2", sys.executable, *words]
    subprocess.run(list(map(str, command)), env=env, check=True)


def on_hosts(words: list[str]) -> None:
    """Start a rank on each of 2 network namespaces."""
    from unisono.testing.hosts import Network

    env = os.environ | {"UNISONO_TOKEN": secrets.token_hex(), "UNISONO_SHARED_MEMORY": "0"}
    with Network(2) as network:
        started = [
            subprocess.Popen(
                host.inside(
                    *(sys.executable, "-m", "unisono", "run", "--nnodes", "2", "--node-rank"),
                    *(str(index), "--master-addr", network.hosts[0].v4, *words),
                ),
                env=env,
            )
            for index, host in enumerate(network.hosts)
        ]
        codes = [process.wait() for process in started]
        if any(codes):
            raise SystemExit("a rank failed")


def main() -> None:
    """Print a table per library."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", type=Path, nargs="+", default=[Path(sys.prefix)])
    parser.add_argument("--of", nargs="+", default=[*OPERATIONS], choices=OPERATIONS)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--hosts", action="store_true", help="each rank on a namespace")
    parser.add_argument("--be-rank", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.be_rank:
        measure_as_rank(asked.be_rank, asked.of, asked.rounds, asked.hosts)
        return
    compiler = os.environ.get("CXX") or shutil.which("c++") or "g++"
    with tempfile.TemporaryDirectory() as folder:
        source = str(Path(__file__).with_name("mpi_loop.cpp"))
        options = ["-std=c++17", "-O2", "-shared", "-fPIC"]
        subprocess.run([compiler, *options, "-o", f"{folder}/{DRIVER}", source], check=True)
        words = [os.path.abspath(__file__), "--be-rank", folder, "--rounds", str(asked.rounds)]
        words += ["--of", *asked.of]
        if asked.hosts:
            on_hosts([*words, "--hosts"])
            return
        for library in asked.library:
            on_one_host(library, words)


if __name__ == "__main__":
    main()
