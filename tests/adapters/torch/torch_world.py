"""A world of torch.distributed inside a rank of `unisono.testing.run`, and a model to train."""

import contextlib
import warnings
from datetime import timedelta

import torch
import torch.distributed as torch_dist

import unisono


@contextlib.contextmanager
def torch_world(backend, folder):
    """Make torch's default group of all ranks, and destroy it."""
    warnings.simplefilter("ignore")
    torch_dist.init_process_group(
        backend,
        init_method=f"file://{folder}/{backend}",
        rank=unisono.get_rank(),
        world_size=unisono.get_world_size(),
        timeout=timedelta(seconds=60),
    )
    try:
        yield torch_dist.distributed_c10d._get_default_group()
    finally:
        torch_dist.destroy_process_group()


def make_model(seed, wide=False):
    """Convolution with batch norm (which has buffers), then layers of several sizes."""
    hidden = 1050 if wide else 30
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3, padding=1),
        torch.nn.BatchNorm2d(4),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(4 * 25, hidden),
        torch.nn.ReLU(),
        torch.nn.Linear(hidden, hidden),
        torch.nn.ReLU(),
        torch.nn.Linear(hidden, 3),
    )
    # Threads that act as ranks share torch's own generator.
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.data = torch.randn(p.shape, generator=generator) / 8
    return model


def batch(rank, step, n=4):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return (
        torch.randn(n, 1, 5, 5, generator=generator),
        torch.randint(0, 3, (n,), generator=generator),
    )


def loss_of(model, rank, step):
    x, target = batch(rank, step)
    return torch.nn.functional.cross_entropy(model(x), target)
