"""Functions that the programs beside this file call on the ranks of a group."""

import asyncio
import os
import threading
import time

import numpy as np

import unisono as dist
from unisono.core.base import config


def summed(scale):
    """Return the rank, the number of ranks, and a sum that depends on all ranks."""
    x = np.full(4, scale * (dist.get_rank() + 1.0))
    dist.all_reduce(x)
    return dist.get_rank(), dist.get_world_size(), x.tolist()


def expected(size, scale):
    """Return what `summed` returns on all ranks."""
    total = scale * sum(range(1, size + 1))
    return [(rank, size, [total] * 4) for rank in range(size)]


def mismatched():
    dist.all_reduce(np.zeros(3 + dist.get_rank()))


def raising(rank):
    """Raise an error on one rank while the others wait for it."""
    if dist.get_rank() == rank:
        raise KeyError(f"of rank {rank}")
    dist.barrier()


def cancelled(rank):
    """Raise what is no Exception on one rank while the others wait for it."""
    if dist.get_rank() == rank:
        raise asyncio.CancelledError
    dist.barrier()


def working(seconds, rank):
    """Raise an error on one rank while the others work without communication."""
    if dist.get_rank() == rank:
        raise KeyError(f"of rank {rank}")
    time.sleep(seconds)


def dying(rank, calls):
    """Kill one rank after a number of calls; the other ranks go on."""
    x = np.zeros(1000)
    for number in range(10**9):
        if dist.get_rank() == rank and number == calls:
            os.kill(os.getpid(), 9)
        dist.all_reduce(x)


def dying_alone(rank):
    """Kill one rank; the other ranks work without communication."""
    if dist.get_rank() == rank:
        os.kill(os.getpid(), 9)
    time.sleep(4)


def token():
    """Return the token in the environment of this rank, and the time-out of its group."""
    return config.get("UNISONO_TOKEN"), dist.group.WORLD.timeout_s


def engine():
    """Return the name of the group's engine."""
    return repr(dist.group.WORLD).partition("engine=")[2].split()[0]


def left_over():
    """Make a default group and leave it behind."""
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)


_held = threading.Event()
_released = threading.Event()


def hold():
    """Work until another thread of this process calls `release`."""
    _held.set()
    assert _released.wait(100)


def is_held():
    return _held.is_set()


def release():
    _released.set()


def trained(steps):
    """Train a torch module on this rank's half of the data; return its parameters."""
    import torch

    from unisono.parallel import DistributedDataParallel

    model = torch.nn.Linear(3, 1)
    torch.nn.init.zeros_(model.weight)
    torch.nn.init.zeros_(model.bias)
    model = DistributedDataParallel(model)
    points = torch.arange(24.0).reshape(8, 3) / 24
    mine = points[dist.get_rank() :: dist.get_world_size()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        ((model(mine) - mine.sum(1, keepdim=True)) ** 2).mean().backward()
        optimizer.step()
    return [parameter.detach().numpy().ravel().tolist() for parameter in model.parameters()]


def expected_training(steps):
    """Return the parameters that NumPy computes from all data."""
    x, w, b = np.arange(24.0).reshape(8, 3) / 24, np.zeros(3), 0.0
    for _ in range(steps):
        error = x @ w + b - x.sum(1)
        w, b = w - 0.1 * 2 * (error @ x) / 8, b - 0.1 * 2 * error.mean()
    return [w.tolist(), [b]]
