"""Large moves of arrays that NumPy puts into huge pages, if the system has any."""

import numpy as np

import unisono as dist


def moves(rank, size):
    """Move blocks of `size` numbers about; every round has other numbers in the same arrays."""
    p = dist.get_world_size()
    given, got = np.empty(p * size, np.int64), np.empty(p * size, np.int64)
    mine = slice(rank * size, (rank + 1) * size)
    own, block = np.empty(size, np.int64), np.empty(size, np.int64)
    step = np.arange(size)
    for k in range(4):
        root = k % p
        for to in range(p):
            given[to * size : (to + 1) * size] = _number(rank, to, k) + step
        dist.all_to_all_single(got, given)
        for source in range(p):
            part = got[source * size : (source + 1) * size]
            assert (part == _number(source, rank, k) + step).all()
        own[:] = given[mine]
        dist.all_gather_into_tensor(got, own)
        for source in range(p):
            part = got[source * size : (source + 1) * size]
            assert (part == _number(source, source, k) + step).all()
        dist.broadcast(own, root)
        assert (own == _number(root, root, k) + step).all()
        parts = np.split(given, p) if rank == root else None
        dist.scatter(block, parts, root)
        assert (block == _number(root, rank, k) + step).all()
        parts = np.split(got, p) if rank == root else None
        dist.gather(block, parts, root)
        if rank == root:
            for source in range(p):
                assert (parts[source] == _number(root, source, k) + step).all()
        # What was posted may be written again at once.
        given[:] = own[:] = block[:] = -1


def _number(source, to, k):
    return 1_000_000_000 * (source + 10 * to + 100 * k)
