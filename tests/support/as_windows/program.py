"""What runs on a system without the facilities of POSIX: 3 ranks as threads, in Python alone."""

import importlib
import sys
import tempfile
from pathlib import Path

import numpy as np

import unisono as dist
from unisono.testing import run

# They load libraries that choose their code by the system, or are for Linux.
OTHERS = ("torch", "ray", "dask", "spark", "clusters", "parallel", "nn", "__main__")
FOR_LINUX = ("unisono.testing.switch", "unisono.launcher.workers.warm_site.sitecustomize")


def modules():
    root = Path(dist.__file__).parent
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root.parent).with_suffix("").parts
        name = ".".join(parts).removesuffix(".__init__")
        if not set(parts) & set(OTHERS) and name not in FOR_LINUX:
            yield name


def use(rank):
    """Return what a collective, a sub-group, a message, objects and a scan leave."""
    size, total, first = dist.get_world_size(), np.full(1000, rank + 1.0), np.zeros(2)
    dist.all_reduce(total)
    pair = dist.new_group([0, 1])
    if rank < 2:
        dist.broadcast(first, src=0, group=pair)
        dist.send(np.full(2, 7.0), 1) if rank == 0 else dist.recv(first, 0)
    every = [None] * size
    dist.all_gather_object(every, f"rank {rank}")
    sums = np.array([rank + 1])
    dist.scan(sums)
    return total[-1], first[0], len(every), int(sums[0]), repr(dist.group.WORLD)


def use_stores(rank, port, folder):
    for store in (
        dist.TCPStore("127.0.0.1", port, is_master=False),
        dist.FileStore(f"{folder}/store", 3),
    ):
        store.add("came", 1)
        store.barrier("all", 3, 20.0)
        assert store.add("came", 0) == 3


if __name__ == "__main__":
    for name in modules():
        importlib.import_module(name)
    for transport in ("inproc", "tcp"):
        found = run(use, 3, transport=transport)
        assert [each[:4] for each in found] == [(6, 0, 3, 1), (6, 7, 3, 3), (6, 0, 3, 6)], found
        assert all(
            f"engine=reference over=messages transport={transport}" in each[4] for each in found
        ), found
    with tempfile.TemporaryDirectory() as folder, dist.TCPStore("127.0.0.1", 0, 1, True) as server:
        run(use_stores, 3, args=(server.port, folder))
    print(f"right on {sys.platform}")
