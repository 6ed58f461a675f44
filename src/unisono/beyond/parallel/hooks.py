"""Communication hooks, which average the gradients of a bucket over all ranks.

The reducer calls `hook(state, bucket)` when all gradients of the bucket have arrived. A hook
returns a future of the flat tensor that replaces them. For these hooks the state is the process
group, also torch's; None is the default group. They fit torch's DistributedDataParallel as well.

Source: torch.distributed.algorithms.ddp_comm_hooks.default_hooks (2.13).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from unisono.beyond.parallel.buckets import Bucket
from unisono.core.groups.process_group import ProcessGroup
from unisono.core.groups.world import Group, require_group
from unisono.core.operations.work import Future

__all__ = [
    "Hook",
    "all_reduce_hook",
    "bf16_compress_hook",
    "for_reducer",
    "fp16_compress_hook",
    "sum_flat",
]

Hook = Callable[[Any, Bucket], Future]


def all_reduce_hook(group: Group, bucket: Bucket) -> Future:
    """Average the gradients: divide them by the number of ranks, then add up those of all ranks.

    Cost: one all_reduce of the bucket.
    """
    members = require_group(group)
    summed = sum_flat(members, bucket.buffer().div_(members.size()))
    return for_reducer(bucket, summed)


def fp16_compress_hook(group: Group, bucket: Bucket) -> Future:
    """Average the gradients as float16: half the bytes, 11 significant bits."""
    return _compressed(group, bucket, torch.float16)


def bf16_compress_hook(group: Group, bucket: Bucket) -> Future:
    """Average the gradients as bfloat16: half the bytes, float32's range, 8 significant bits."""
    return _compressed(group, bucket, torch.bfloat16)


def _compressed(group: Group, bucket: Bucket, dtype: torch.dtype) -> Future:
    buffer, members = bucket.buffer(), require_group(group)
    small = buffer.to(dtype).div_(members.size())
    summed = sum_flat(members, small).then(lambda done: buffer.copy_(done.value()))
    return for_reducer(bucket, summed)


def for_reducer(bucket: Any, future: Future) -> Future:
    """Return a hook's future for the reducer of the bucket, which may be torch's."""
    if not isinstance(bucket, torch.distributed.GradBucket):
        return future
    # An error that a callback raises becomes one of the C++ future. With `set_exception` it would
    # stay a Python value, on which torch's reducer fails with a segmentation fault.
    gate: Any = torch.futures.Future()
    given: Future = gate.then(lambda _: future.value())
    future.add_done_callback(lambda _: gate.set_result(None))
    return given


def sum_flat(group: ProcessGroup, flat: Tensor) -> Future:
    """Return a future of `flat`, which becomes its sum over all ranks."""
    future = group.all_reduce(flat, async_op=True).get_future()
    return future.then(lambda done: done.value()[0])


# torch's class takes no other annotation of a bucket than its own.
for _hook in (all_reduce_hook, fp16_compress_hook, bf16_compress_hook):
    _hook.__annotations__.clear()
