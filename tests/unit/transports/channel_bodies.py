"""Bodies of ranks with several connections to one another."""

from __future__ import annotations

import contextlib
import os
import resource

import numpy as np

import unisono as dist
from unisono.errors import CollectiveTimeoutError, PeerLostError


def without_descriptors(rank):
    """Rank 0 sends a large message when it can open nothing any more; return its error."""
    small, text = np.zeros(1), None
    # What is imported when it is first needed, also for errors, takes descriptors.
    dist.send(small, 1 - rank)
    dist.recv(small, 1 - rank)
    with contextlib.suppress(CollectiveTimeoutError):
        dist.recv(small, 1 - rank, tag=1, timeout=0.01)
    if rank == 0:
        read, write = os.pipe()
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(read, write) + 10, hard))
        fillers = [read, write]
        with contextlib.suppress(OSError):
            while True:
                fillers.append(os.dup(read))
        try:
            # It may go over the first connection alone.
            dist.send(np.zeros(8 << 20, np.uint8), 1, timeout=20.0)
            dist.recv(small, 1, tag=1, timeout=20.0)
        except PeerLostError as error:
            text = str(error)
        for fd in fillers:
            os.close(fd)
    else:
        with contextlib.suppress(PeerLostError):
            dist.recv(small, 0, tag=1, timeout=20.0)
    return text
