"""Replace special tensors (fake, asynchronous, complex32, ...) by tensors an engine can use."""

from __future__ import annotations

import sys
from typing import Any

import torch

from unisono.core.base.types import RedOpType, ReduceOp, all_dtypes
from unisono.errors import UnsupportedError

__all__ = ["are_fake", "dense", "done"]

_KNOWN = {getattr(torch, dtype.name, None) for dtype in all_dtypes()}
_LINEAR = {RedOpType.SUM, RedOpType.AVG, RedOpType.PREMUL_SUM}


def are_fake(value: Any) -> bool:
    """Return whether the first tensor in nested lists has a shape but no data (FakeTensorMode).

    Gloo does not communicate them either: torch has kernels for them that do nothing.
    """
    if isinstance(value, (list, tuple)):
        return bool(value) and are_fake(value[0])
    fakes = getattr(sys.modules.get("torch._subclasses.fake_tensor"), "FakeTensor", ())
    return isinstance(value, fakes)


def done(outputs: Any) -> Any:
    """Return torch's work of a call that is done already."""
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(outputs)
    return torch._C._distributed_c10d._create_work_from_future(future)


def dense(value: Any, op: Any = None) -> Any:
    """Return the tensors in nested lists with a type that an engine knows, over the same memory.

    The call waits for results of functional collectives. complex32, which NumPy lacks, becomes
    pairs of float16. Other types of 1 byte that only torch has (float8_e8m0fnu) become bytes.

    Args:
        value: Tensors in nested lists. Any other value is returned unchanged.
        op: unisono's reduce op, if the operation has a reduce op.

    Raises:
        UnsupportedError: A DTensor, or a reduce op that is not defined on complex32.
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
