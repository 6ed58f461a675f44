"""Messages of one tag come in their order, whatever calls send and receive them."""

import random
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from unisono import MPI

comm = MPI.COMM_WORLD
rank, peer = comm.rank, 1 - comm.rank
signal = np.zeros(1)
rng = random.Random(int(sys.argv[1]))  # the same draws on both ranks


def exchange(count, tag, kinds):
    """Send 0, 1, ... from rank 1; a kind is a size, and whether objects, synchronous, and any."""
    if rank == 1:
        requests = []
        for k, (size, is_object, is_sync, _) in zip(range(count), kinds, strict=True):
            if is_object:
                requests.append((comm.issend if is_sync else comm.isend)(k, peer, tag))
            else:
                call = comm.Issend if is_sync else comm.Isend
                requests.append(call(np.full(size, float(k)), peer, tag))
        MPI.Request.Waitall(requests)
        return
    arrays, requests = [], []
    for size, is_object, _, from_any in kinds:
        source = MPI.ANY_SOURCE if from_any else peer
        arrays.append(np.full(size, -1.0))
        if is_object:
            requests.append(comm.irecv(source=source, tag=tag))
        else:
            requests.append(comm.Irecv(arrays[-1], source, tag))
    comm.Send(signal, peer, 100 + tag)
    values = [request.wait() for request in requests]
    found = [int(array[-1]) if v is None else v for v, array in zip(values, arrays, strict=True)]
    assert found == list(range(count)), found


def round_of(count, tag, kinds):
    if rank == 1:
        comm.Recv(np.empty(1), peer, 100 + tag)
    exchange(count, tag, kinds)


for _ in range(100):
    round_of(2, 1, [(1, False, True, False)] * 2)
for _ in range(20):
    mixed = [
        (rng.choice([1, 100_000]), rng.random() < 0.3, rng.random() < 0.8, rng.random() < 0.3)
        for _ in range(10)
    ]
    round_of(10, 1, mixed)
sys.setswitchinterval(1e-5)
single = [(1, False, True, False)] * 10
with ThreadPoolExecutor(3) as pool:
    for _ in range(10):
        list(pool.map(round_of, [10] * 3, [1, 2, 3], [single] * 3))

print("done")
