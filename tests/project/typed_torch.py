"""Calls with torch's tensors for a type checker; see typed_calls.py."""

from __future__ import annotations

from typing import assert_type

import torch

import unisono as dist


def tensors(module: torch.nn.Linear) -> None:
    x = torch.zeros(4)
    assert_type(dist.all_reduce(x, async_op=True), dist.Work)
    dist.all_reduce(module.weight)
    dist.all_gather(list(x.chunk(2)), x[:2])
    dist.all_gather(x.chunk(2), x[:2])
    dist.all_reduce(x.shape)  # wrong
    dist.all_reduce(x.item())  # wrong
    dist.all_reduce(module)  # wrong
