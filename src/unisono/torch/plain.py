"""Plain synchronous calls: unisono's public functions on arrays, which C++ repeats.

`engines/quick.py` remembers calls of those functions on NumPy arrays. A torch tensor of a plain
kind is such an array at the same address; a description of the memory at an address stays true
whoever owns it, so descriptions are kept and making them costs nothing the next time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from unisono.base.buffers import alias_torch
from unisono.base.types import ReduceOp, dtype_named
from unisono.groups import collectives
from unisono.groups.process_group import ProcessGroup

__all__ = ["PLAIN", "all_reduce", "as_array"]

# Types that NumPy has as well. Complex tensors may be conjugate views, and arrive as real ones.
_DTYPES = {
    getattr(torch, name): dtype_named(name)
    for name in (
        "bool",
        "uint8",
        "int8",
        "int16",
        "int32",
        "int64",
        "float16",
        "float32",
        "float64",
    )
}
_KINDS = (torch.Tensor, torch.nn.Parameter)

_MAX_KEPT = 1024
_kept: dict[tuple[Any, ...], np.ndarray[Any, Any]] = {}


def as_array(tensor: Any) -> Any:
    """Return an array over the memory of a tensor, or what was given if it is of no plain kind."""
    if type(tensor) not in _KINDS or not tensor.is_cpu or tensor.layout is not torch.strided:
        return tensor
    key = (tensor.data_ptr(), tensor.shape, tensor.dtype)
    if not tensor.is_contiguous() or tensor.is_neg():
        return tensor
    if (found := _kept.get(key)) is not None:
        return found
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None or not key[0]:
        return tensor
    if len(_kept) >= _MAX_KEPT:
        _kept.clear()
    array = _kept[key] = alias_torch(tensor, dtype, "tensor")
    return array


def all_reduce(group: ProcessGroup, tensor: Any, op: ReduceOp) -> None:
    """Make a synchronous call."""
    collectives.all_reduce(as_array(tensor), op, group)


def _broadcast(group: ProcessGroup, tensor: Any, root: int) -> None:
    collectives.broadcast(as_array(tensor), group.ranks[root], group)


def _reduce(group: ProcessGroup, tensor: Any, root: int, op: ReduceOp) -> None:
    collectives.reduce(as_array(tensor), group.ranks[root], op, group)


def _all_gather_into_tensor(group: ProcessGroup, output: Any, tensor: Any) -> None:
    collectives.all_gather_into_tensor(as_array(output), as_array(tensor), group)


def _reduce_scatter_tensor(group: ProcessGroup, output: Any, tensor: Any, op: ReduceOp) -> None:
    collectives.reduce_scatter_tensor(as_array(output), as_array(tensor), op, group)


def _all_to_all_single(group: ProcessGroup, output: Any, tensor: Any, outs: Any, ins: Any) -> None:
    arrays = as_array(output), as_array(tensor)
    collectives.all_to_all_single(*arrays, outs or None, ins or None, group)


def _barrier(group: ProcessGroup) -> None:
    collectives.barrier(group)


PLAIN: dict[str, Callable[..., None]] = {
    "broadcast": _broadcast,
    "reduce": _reduce,
    "all_gather_into_tensor": _all_gather_into_tensor,
    "reduce_scatter_tensor": _reduce_scatter_tensor,
    "all_to_all_single": _all_to_all_single,
    "barrier": _barrier,
}
"""Operation -> its plain call: the group, then the arguments of the group's method."""
