"""Measure how a world grows: start, first calls, later calls, memory, descriptors.

    python benchmarks/growth.py [--ranks 2 8 32] [--library unisono mpi gloo] [--rounds 3]
                                [--hosts 8]

The libraries take turns. A column in seconds ends when the last rank is ready, and begins at the
end of the column before. `init` begins with the start of the processes, before imports. Memory is
a rank's share (PSS) after all calls, the mean over ranks. Descriptors are the most of a rank.
mpiexec starts all ranks. With `--mpi PYTHON` it and mpi4py may be in an environment of their own.
With `--hosts` the ranks are spread over hosts that are network namespaces of this machine.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import resource
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from unisono.testing.hosts import Host, Network

COLUMNS = ("init", "barrier", "all_reduce", "ten more")
COUNT = 1000
LATER = 10
WORLD = ("PMI_RANK", "PMI_SIZE", PORT := "STORE_PORT")
HOST = "STORE_HOST"

# (barrier, all_reduce in place, rank, world size)
Calls = tuple[Callable[[], object], Callable[[Any], object], int, int]
# Seconds of the columns, most descriptors of a rank, MiB.
Row = tuple[list[float], int, float]


def unisono() -> Calls:
    """Join a world of unisono."""
    dist: Any = importlib.import_module("unisono")
    rank, size, port = (int(os.environ[name]) for name in WORLD)
    store = dist.TCPStore(os.environ[HOST], port, wait_for_workers=False)
    dist.init_process_group(store=store, rank=rank, world_size=size)
    return dist.barrier, dist.all_reduce, rank, size


def gloo() -> Calls:
    """Join a world of Gloo."""
    torch: Any = importlib.import_module("torch")
    dist: Any = importlib.import_module("torch.distributed")
    rank, size, port = (int(os.environ[name]) for name in WORLD)
    # torch's client has no token, so a store of unisono would serve its own host only.
    host = os.environ[HOST]
    store = dist.TCPStore(host, port, is_master=rank == 0, wait_for_workers=False)
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


def start(library: str, size: int, mpi_python: str, hosts: list[Host]) -> Row:
    """Start a world and wait for its end; return the seconds, descriptors and MiB of a row."""
    dist: Any = importlib.import_module("unisono")
    address = hosts[0].v4 if hosts else "127.0.0.1"
    store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)
    # Gloo's rank 0 serves torch's own store, on this port.
    with contextlib.closing(store), tempfile.TemporaryDirectory() as folder:
        port = store.port
        if library == "gloo":
            store.close()
        python = mpi_python if library == "mpi" else sys.executable
        line = [str(Path(mpi_python).with_name("mpiexec")), *over(hosts, folder, size)]
        line += ["-n", str(size), python, str(Path(__file__)), "--be", library, folder]
        begin = time.monotonic()
        environment = os.environ | {PORT: str(port), HOST: address}
        words = hosts[0].inside(*line) if hosts else line
        subprocess.run(words, env=environment, check=True)
        answers = [json.loads(file.read_text()) for file in Path(folder).glob("*.json")]
    assert len(answers) == size, f"{len(answers)} of {size} ranks answered"
    ends = [begin, *np.max([times for times, _, _ in answers], axis=0)]
    most, shares = max(each[1] for each in answers), [each[2] for each in answers]
    return np.diff(ends).tolist(), most, statistics.mean(shares)


def over(hosts: list[Host], folder: str, size: int) -> list[str]:
    """Return mpiexec's options for equally many ranks on each host, numbered host by host."""
    if not hosts:
        return []
    # In place of ssh: mpiexec passes options, the address, and the command of its proxy.
    cases = [f'{host.v4}) exec {" ".join(host.inside("sh", "-c"))} "$*";;' for host in hosts]
    shell = Path(folder, "shell")
    shell.write_text(
        "\n".join(
            [
                "#!/bin/sh",
                'while [ "${1#-}" != "$1" ]; do shift; done',
                "host=$1; shift",
                f"case $host in {' '.join(cases)} esac",
            ]
        )
    )
    shell.chmod(0o755)
    names = ",".join(host.v4 for host in hosts)
    return [
        *("-launcher", "ssh", "-launcher-exec", str(shell), "-hosts", names),
        *("-ppn", str(size // len(hosts)), "-genvall"),
    ]


def main() -> None:
    """Print a row per library and number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8, 32])
    libraries = ["unisono", "mpi", "gloo"]
    parser.add_argument("--library", nargs="+", default=libraries, choices=libraries)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--hosts", type=int, default=0, help="spread the ranks over namespaces")
    parser.add_argument("--mpi", default=sys.executable, metavar="PYTHON")
    parser.add_argument("--be", nargs=2, metavar=("LIBRARY", "FOLDER"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.be:
        be_rank(*asked.be)
        return
    print(f"| ranks | library | {' | '.join(COLUMNS)} | sum, s | MiB | descriptors |")
    print("|---" * (len(COLUMNS) + 5) + "|")
    with contextlib.ExitStack() as stack:
        hosts: list[Host] = []
        if asked.hosts:
            os.environ |= {"UNISONO_TOKEN": secrets.token_hex(), "GLOO_SOCKET_IFNAME": "eth0"}
            hosts = stack.enter_context(Network(asked.hosts)).hosts
            # The store of this process is on the first host.
            hosts[0].enter()
        for size in asked.ranks:
            rows: dict[str, list[Row]] = {}
            for _ in range(asked.rounds):
                for library in asked.library:
                    rows.setdefault(library, []).append(start(library, size, asked.mpi, hosts))
            print_rows(size, rows)


def print_rows(size: int, rows: dict[str, list[Row]]) -> None:
    """Print the medians of each library."""
    for library, found in rows.items():
        seconds = np.median([row[0] for row in found], axis=0)
        share = statistics.median(row[2] for row in found)
        cells = [f"{s:.3g}" for s in (*seconds, sum(seconds))]
        print(f"| {size} | {library} | {' | '.join(cells)} | {share:.1f} | {found[0][1]} |")


if __name__ == "__main__":
    main()
