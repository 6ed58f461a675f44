"""Collectives on two levels, against NumPy."""

import numpy as np

import unisono as dist

COUNTS = [1, 7, 1000, 70_001]


def two_levels(rank, algorithm):
    """Run each collective that has two levels, and check every result; small whole numbers."""
    p = dist.get_world_size()
    for count in COUNTS:
        rows = np.arange(p * p * count, dtype=np.float32).reshape(p, p * count) % 101
        whole = rows[:, :count]
        total = whole.sum(0)
        for root in range(p):
            x = whole[rank].copy()
            dist.broadcast(x, root, algorithm=algorithm)
            assert (x == whole[root]).all()
            x = whole[rank].copy()
            dist.reduce(x, root, algorithm=algorithm)
            assert (x == (total if rank == root else whole[rank])).all()
        x = whole[rank].copy()
        dist.all_reduce(x, algorithm=algorithm)
        assert (x == total).all()
        out = np.zeros(p * count, np.float32)
        dist.all_gather_into_tensor(out, whole[rank], algorithm=algorithm)
        assert (out == whole.reshape(-1)).all()
        part = np.zeros(count, np.float32)
        dist.reduce_scatter_tensor(part, rows[rank].copy(), algorithm=algorithm)
        assert (part == rows.sum(0)[rank * count : (rank + 1) * count]).all()
    return repr(dist.group.WORLD)
