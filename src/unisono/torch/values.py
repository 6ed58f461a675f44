"""Tensors whose numbers lie elsewhere, or nowhere: what a group communicates in their place."""

from __future__ import annotations

import sys
from typing import Any

import torch

from unisono.base.types import RedOpType, ReduceOp, all_dtypes
from unisono.errors import UnsupportedError

__all__ = ["are_fake", "dense", "done"]

_KNOWN = {getattr(torch, dtype.name, None) for dtype in all_dtypes()}
_LINEAR = {RedOpType.SUM, RedOpType.AVG, RedOpType.PREMUL_SUM}


def are_fake(value: Any) -> bool:
    """Whether the first tensor in nested lists has a shape but no numbers (FakeTensorMode).

    Gloo leaves these alone as well: torch has kernels for them that do nothing.
    """
    if isinstance(value, (list, tuple)):
        return bool(value) and are_fake(value[0])
    fakes = getattr(sys.modules.get("torch._subclasses.fake_tensor"), "FakeTensor", ())
    return isinstance(value, fakes)


def done(outputs: Any) -> Any:
    """Return torch's work of a call that has nothing to do."""
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(outputs)
    return torch._C._distributed_c10d._create_work_from_future(future)


def dense(value: Any, op: Any = None) -> Any:
    """Return tensors in nested lists as those that an engine knows, over the same memory.

    Results of functional collectives are waited for. complex32, which NumPy lacks, counts as pairs
    of float16; other types of one byte that only torch knows (float8_e8m0fnu) move as bytes.

    Args:
        value: Tensors and anything else, which is returned as it is.
        op: unisono's reduce op, if the operation has one.

    Raises:
        UnsupportedError: A DTensor; or a reduce op that complex32 has not.
    """
    if isinstance(value, (list, tuple)):
        return [dense(each, op) for each in value]
    if not isinstance(value, torch.Tensor):
        return value
    if hasattr(value, "trigger_wait"):
        value = value.trigger_wait()
    if hasattr(value, "to_local"):
        raise UnsupportedError(
            "torch.distributed's collectives take no DTensor",
            hint="pass tensor.to_local(), or let tensor.redistribute() communicate",
        )
    if value.dtype in _KNOWN or value.is_quantized:
        return value
    if value.dtype is torch.complex32:
        if isinstance(op, ReduceOp) and op.op not in _LINEAR:
            raise UnsupportedError(f"reduce op {op.name} is not defined on complex32")
        return torch.view_as_real(value)
    return value.view(torch.uint8) if op is None and value.element_size() == 1 else value
