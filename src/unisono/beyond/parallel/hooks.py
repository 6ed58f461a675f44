"""Communication hooks, which average the gradients of a bucket over all ranks.

The reducer calls `hook(state, bucket)` when all gradients of the bucket have arrived. A hook
returns a future of the flat tensor that replaces them. For these hooks the state is the process
group.

Source: torch.distributed.algorithms.ddp_comm_hooks.default_hooks (2.13).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from unisono.beyond.parallel.buckets import Bucket
from unisono.core.groups.process_group import ProcessGroup
from unisono.core.operations.work import Future

__all__ = [
    "Hook",
    "all_reduce_hook",
    "bf16_compress_hook",
    "fp16_compress_hook",
    "sum_flat",
]

Hook = Callable[[Any, Bucket], Future]


def all_reduce_hook(group: ProcessGroup, bucket: Bucket) -> Future:
    """Average the gradients: divide them by the number of ranks, then add up those of all ranks.

    Cost: one all_reduce of the bucket.
    """
    return sum_flat(group, bucket.buffer().div_(group.size()))


def fp16_compress_hook(group: ProcessGroup, bucket: Bucket) -> Future:
    """Average the gradients as float16: half the bytes, 11 significant bits."""
    return _compressed(group, bucket, torch.float16)


def bf16_compress_hook(group: ProcessGroup, bucket: Bucket) -> Future:
    """Average the gradients as bfloat16: half the bytes, float32's range, 8 significant bits."""
    return _compressed(group, bucket, torch.bfloat16)


def _compressed(group: ProcessGroup, bucket: Bucket, dtype: torch.dtype) -> Future:
    buffer = bucket.buffer()
    small = buffer.to(dtype).div_(group.size())
    return sum_flat(group, small).then(lambda done: buffer.copy_(done.value()))


def sum_flat(group: ProcessGroup, flat: Tensor) -> Future:
    """Return a future of `flat`, which becomes its sum over all ranks."""
    future = group.all_reduce(flat, async_op=True).get_future()
    return future.then(lambda done: done.value()[0])
