"""A world of torch.distributed inside a rank of `unisono.testing.run`."""

import contextlib
import warnings
from datetime import timedelta

import torch
import torch.distributed as torch_dist

import unisono
import unisono.torch


@contextlib.contextmanager
def torch_world(backend, path, timeout_s=60):
    """Make torch's default group of all ranks, and destroy it."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    torch_dist.init_process_group(
        backend,
        init_method=f"file://{path}-{backend}",
        rank=unisono.get_rank(),
        world_size=unisono.get_world_size(),
        timeout=timedelta(seconds=timeout_s),
    )
    try:
        yield torch_dist.distributed_c10d._get_default_group()
    finally:
        torch_dist.destroy_process_group()
