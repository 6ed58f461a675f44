"""Every algorithm by name, per call and by UNISONO_ALGO."""

import os

import numpy as np

import unisono as dist
from unisono.errors import InvalidArgumentError
from unisono.schedules import available

COUNT = 11
# Function of unisono -> collective whose algorithms it takes.
COLLECTIVES = {
    "broadcast": "broadcast", "all_reduce": "all_reduce", "all_reduce_coalesced": "all_reduce",
    "reduce": "reduce", "all_gather": "all_gather", "all_gather_into_tensor": "all_gather",
    "all_gather_coalesced": "all_gather", "gather": "gather", "scatter": "scatter",
    "reduce_scatter": "reduce_scatter", "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all": "all_to_all", "all_to_all_single": "all_to_all", "barrier": "barrier",
}  # fmt: skip


def data(rank, block=0):
    return np.arange(COUNT) * 3 + 100 * rank + 10000 * block


def call(name, rank, p, root, **how):
    """Run one function; return (got, expected) as lists of arrays."""
    mine, total = data(rank), sum(data(r) for r in range(p))
    everybody = [data(r) for r in range(p)]
    blocks = [data(rank, to) for to in range(p)]
    received = [data(r, rank) for r in range(p)]
    outs = [np.zeros(COUNT, int) for _ in range(p)]
    out, big = np.zeros(COUNT, int), np.zeros(p * COUNT, int)
    at_root = rank == root
    match name:
        case "broadcast":
            dist.broadcast(mine, root, **how)
            return [mine], [data(root)]
        case "all_reduce":
            dist.all_reduce(mine, **how)
            return [mine], [total]
        case "all_reduce_coalesced":
            pair = [mine, mine[:3] + 1]
            dist.all_reduce_coalesced(pair, **how)
            return pair, [total, total[:3] + p]
        case "reduce":
            dist.reduce(mine, root, **how)
            return [mine], [total if at_root else data(rank)]
        case "all_gather":
            dist.all_gather(outs, mine, **how)
            return outs, everybody
        case "all_gather_into_tensor":
            dist.all_gather_into_tensor(big, mine, **how)
            return [big], [np.concatenate(everybody)]
        case "all_gather_coalesced":
            rows = [[o, np.zeros(2, int)] for o in outs]
            dist.all_gather_coalesced(rows, [mine, mine[:2]], **how)
            return [t for row in rows for t in row], [t for e in everybody for t in (e, e[:2])]
        case "gather":
            dist.gather(mine, outs if at_root else [], root, **how)
            return (outs, everybody) if at_root else ([], [])
        case "scatter":
            dist.scatter(out, blocks if at_root else None, root, **how)
            return [out], [data(root, rank)]
        case "reduce_scatter":
            dist.reduce_scatter(out, blocks, **how)
            return [out], [sum(received)]
        case "reduce_scatter_tensor":
            dist.reduce_scatter_tensor(out, np.concatenate(blocks), **how)
            return [out], [sum(received)]
        case "all_to_all":
            dist.all_to_all(outs, blocks, **how)
            return outs, received
        case "all_to_all_single":
            dist.all_to_all_single(big, np.concatenate(blocks), **how)
            return [big], [np.concatenate(received)]
    dist.barrier(**how)
    return [], []


def check(name, rank, p, root, **how):
    got, expected = call(name, rank, p, root, **how)
    case = (name, p, root, how, os.environ.get("UNISONO_ALGO"))
    for a, b in zip(got, expected, strict=True):
        assert (a == b).all(), f"{case}: got {a}, expected {b}"


def every_algorithm(rank):
    p, calls = dist.get_world_size(), 0
    for name, collective in COLLECTIVES.items():
        for algorithm in available(collective, p):
            for root in {0, p - 1}:
                check(name, rank, p, root, algorithm=algorithm)
                calls += 1
    return calls


def by_environment(rank):
    """What UNISONO_ALGO says holds for every rank: the test sets it around the world."""
    for name in COLLECTIVES:
        check(name, rank, dist.get_world_size(), 0)
    return True


def bad_names(rank):
    told = {}
    for name in COLLECTIVES:
        for bad in ("rign", "cube_mesh"):
            try:
                call(name, rank, dist.get_world_size(), 0, algorithm=bad)
            except InvalidArgumentError as error:
                told[name, bad] = error.what
        check(name, rank, dist.get_world_size(), 0)
    return told
