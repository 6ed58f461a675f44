"""Bodies of ranks whose messages go over wires."""

from __future__ import annotations

import os
import resource
import signal
import time

import numpy as np

import unisono as dist
from unisono.errors import PeerLostError


def large_both_ways(rank, nbytes):
    """Both send first, more than sockets take; return whether all arrived as sent."""
    assert os.environ["UNISONO_SHARED_MEMORY"] == "0"
    peer = 1 - rank
    data = np.arange(nbytes // 8, dtype=np.int64) * (rank + 1)
    into = np.zeros_like(data)
    dist.send(data, peer)
    dist.recv(into, peer)
    return bool((into == np.arange(nbytes // 8, dtype=np.int64) * (peer + 1)).all())


def unasked(rank, count, nbytes):
    """Rank 0 sends what rank 1 asks for later, and in another order."""
    done = np.zeros(1)
    if rank == 0:
        for tag in range(count):
            dist.send(np.full(nbytes, tag, np.uint8), 1, tag=tag)
        dist.send(done, 1, tag=count)
        return True
    good = True
    for tag in reversed(range(count)):
        into = np.zeros(nbytes, np.uint8)
        dist.recv(into, 0, tag=tag)
        good &= bool((into == tag).all())
    dist.recv(done, 0, tag=count)
    return good


def last_words(rank):
    """Rank 1 sends and leaves at once; rank 0 asks when it has gone."""
    words = np.arange(300_000)
    if rank == 1:
        dist.isend(words, 0, tag=1)
        return None
    caught = None
    try:
        dist.recv(np.zeros(1), 1, tag=2, timeout=20.0)
    except PeerLostError as error:
        caught = error
    into = np.zeros_like(words)
    dist.recv(into, 1, tag=1)
    return caught.context.peers, bool((into == words).all())


def any_source(rank, count):
    """All send to rank 0, which takes them as they come; return how many came from each."""
    size = dist.get_world_size()
    seen = [0] * size
    if rank == 0:
        into = np.zeros(1000)
        for _ in range(count * (size - 1)):
            source = dist.recv(into)
            assert (into == source * 1000 + seen[source]).all()
            seen[source] += 1
    else:
        for i in range(count):
            dist.send(np.full(1000, rank * 1000.0 + i), 0)
    return seen


def blocked(rank, seconds):
    """Return the seconds of processor time that a wait of so many seconds took."""
    into = np.zeros(1)
    dist.all_reduce(np.ones(1 << 20))  # over all channels
    dist.barrier()
    if rank == 0:
        time.sleep(seconds)
        dist.send(into, 1)
        return 0.0
    before = resource.getrusage(resource.RUSAGE_SELF)
    dist.recv(into, 0)
    after = resource.getrusage(resource.RUSAGE_SELF)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def killed_while_it_sends(rank, path):
    """Rank 1 dies in the middle of a large message; return (kind, peers, seconds after)."""
    dist.barrier()
    if rank == 1:
        dist.isend(np.zeros(64 << 20, np.uint8), 0)
        path.write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
    first = None
    try:
        # Its own message is too large for the sockets, and nobody takes it.
        dist.send(np.zeros(64 << 20, np.uint8), 1)
    except PeerLostError as error:
        first = error.context.peers, time.monotonic() - float(path.read_text())
    try:
        dist.recv(np.zeros(64 << 20, np.uint8), 1)
    except PeerLostError as error:
        return [first, (error.context.peers, 0.0)]
    return None


def mixed(rank, path, settings):
    """Messages between all pairs, and a collective, in a world whose ranks differ."""
    size = dist.get_world_size()
    dist.destroy_process_group()
    os.environ.update(settings[rank])
    store = dist.FileStore(path, size)
    dist.init_process_group(store=store, rank=rank, world_size=size, timeout=30.0)
    works = [dist.isend(np.full(5, rank), peer) for peer in range(size) if peer != rank]
    boxes = {peer: np.zeros(5, int) for peer in range(size) if peer != rank}
    for peer, box in boxes.items():
        dist.recv(box, peer)
    for work in works:
        work.wait()
    x = np.full(100_000, rank + 1.0)
    dist.all_reduce(x)
    return sorted(int(box[0]) for box in boxes.values()), float(x.min()), float(x.max())
