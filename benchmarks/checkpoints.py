"""Checkpoints: save on 4 ranks, load on 6, beside torch's distributed checkpoint (DCP).

Run from the repository root:

    python benchmarks/checkpoints.py [MIB [ROUNDS]]

An array is split by rows on 4 ranks that save it, and by columns on 6 that load it. DCP gets the
same parts as DTensors, over the backend unisono. Both write below the same temporary folder, and
take turns. A time is that of the slowest rank, and the table has medians. Memory is the growth of a
rank's peak of resident memory beside its array; the largest of all ranks. It includes the pages of
a mapped file, which are the page cache of the machine.
"""

from __future__ import annotations

import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor, Shard, init_device_mesh

import unisono as dist

SAVERS, LOADERS = 4, 6
WAYS = ("unisono", "DCP")


def main() -> None:
    """Start the ranks, or be one."""
    mib, rounds = (int(word) for word in (sys.argv[1:] + ["192", "5"][len(sys.argv) - 1 :])[:2])
    if "RANK" in os.environ:
        measure(mib, rounds, sys.argv[3], sys.argv[4])
        return
    folder = tempfile.mkdtemp()
    print("| way | save on 4 | load on 6 | memory of a save | of a load |\n|---|---|---|---|---|")
    try:
        for way in WAYS:
            row = []
            for act, ranks in (("save", SAVERS), ("load", LOADERS)):
                words = [str(mib), str(rounds), f"{way} {act}", folder]
                command = ["-m", "unisono", "run", "-n", str(ranks), __file__, *words]
                row.append(subprocess.check_output([sys.executable, *command], text=True).split())
            seconds, memory = zip(*row, strict=True)
            print(f"| {way} | {' s | '.join(seconds)} s | {' | '.join(memory)} |", flush=True)
    finally:
        shutil.rmtree(folder)


def measure(mib: int, rounds: int, what: str, folder: str) -> None:
    """Time one way on this rank; rank 0 prints the seconds, and the memory by that of an array."""
    torch.distributed.init_process_group("unisono")
    dist.init_process_group()
    act = what.split()[1]
    rank, size = dist.get_rank(), dist.get_world_size()
    n = int((mib << 18) ** 0.5) // 12 * 12
    cut = slice(rank * n // size, (rank + 1) * n // size)
    data = torch.arange(n, dtype=torch.float32)
    # Row i of the array is i; so a loader knows what must come.
    if act == "save":
        local, dim = data[cut, None].repeat(1, n), 0
    else:
        local, dim = torch.zeros(n, n // size), 1
    shard = DTensor.from_local(local, init_device_mesh("cpu", (size,)), [Shard(dim)])
    began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    file = os.path.join(folder, "x.safetensors")
    calls: dict[str, Callable[[], Any]] = {
        "unisono save": lambda: dist.save_arrays({"w": shard}, file),
        "unisono load": lambda: dist.load_arrays({"w": shard}, file),
        "DCP save": lambda: dcp.save({"w": shard}, checkpoint_id=os.path.join(folder, "dcp")),
        "DCP load": lambda: dcp.load({"w": shard}, checkpoint_id=os.path.join(folder, "dcp")),
    }
    times = []
    for _ in range(rounds):
        dist.barrier()
        begin = time.perf_counter()
        calls[what]()
        took = np.array([time.perf_counter() - begin])
        dist.all_reduce(took, dist.ReduceOp.MAX)
        times.append(float(took[0]))
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - began) * 1024
    worst = np.array([grown / (4 * local.numel())])
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    assert act == "save" or torch.equal(local, data[:, None].repeat(1, n // size))
    if rank == 0:
        print(f"{statistics.median(times):.2f} {worst[0]:.2f}")
    dist.destroy_process_group()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
