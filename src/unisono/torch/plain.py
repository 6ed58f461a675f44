"""Plain synchronous calls: unisono's public functions on arrays, which C++ repeats.

`engines/quick.py` remembers calls of those functions on NumPy arrays. A torch tensor of a plain
kind is such an array at the same address; a description of the memory at an address stays true
whoever owns it, so descriptions are kept and making them costs nothing the next time. They own
nothing: only for calls that end before they return.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch._C._distributed_c10d as c10d

from unisono.base.buffers import alias_torch
from unisono.base.types import dtype_named
from unisono.groups import collectives
from unisono.groups.process_group import ProcessGroup
from unisono.groups.work import Work
from unisono.torch.arguments import UNSET, reduce_op
from unisono.torch.sparse import all_reduce_sparse

__all__ = ["PLAIN", "as_array", "is_plain", "recv", "send"]

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
    array = _kept[key] = alias_torch(tensor, dtype, "tensor", keep=False)
    return array


def is_plain(options: Any) -> bool:
    """Whether an option struct of torch asks for a synchronous call with the group's time-out."""
    return not options.asyncOp and options.timeout == UNSET


def _all_reduce(group: ProcessGroup, tensors: Any, options: Any) -> None:
    tensor, op = tensors[0], reduce_op(options.reduceOp)
    if tensor.is_sparse:
        all_reduce_sparse(group, tensor, op)
    else:
        collectives.all_reduce(as_array(tensor), op, group)


def _broadcast(group: ProcessGroup, tensors: Any, options: Any) -> None:
    collectives.broadcast(as_array(tensors[0]), group.ranks[options.rootRank], group)


def _reduce(group: ProcessGroup, tensors: Any, options: Any) -> None:
    root, op = group.ranks[options.rootRank], reduce_op(options.reduceOp)
    collectives.reduce(as_array(tensors[0]), root, op, group)


def _all_gather_single(group: ProcessGroup, output: Any, tensor: Any, options: Any) -> None:
    collectives.all_gather_into_tensor(as_array(output), as_array(tensor), group)


def _all_gather(group: ProcessGroup, outputs: Any, tensors: Any, options: Any) -> None:
    collectives.all_gather(list(map(as_array, outputs[0])), as_array(tensors[0]), group)


def _gather(group: ProcessGroup, outputs: Any, tensors: Any, options: Any) -> None:
    lists = list(map(as_array, outputs[0])) if outputs else None
    collectives.gather(as_array(tensors[0]), lists, group.ranks[options.rootRank], group)


def _scatter(group: ProcessGroup, outputs: Any, inputs: Any, options: Any) -> None:
    lists = list(map(as_array, inputs[0])) if inputs else None
    collectives.scatter(as_array(outputs[0]), lists, group.ranks[options.rootRank], group)


def _reduce_scatter_single(group: ProcessGroup, output: Any, tensor: Any, options: Any) -> None:
    arrays = as_array(output), as_array(tensor)
    collectives.reduce_scatter_tensor(*arrays, reduce_op(options.reduceOp), group)


def _reduce_scatter(group: ProcessGroup, outputs: Any, inputs: Any, options: Any) -> None:
    lists = list(map(as_array, inputs[0]))
    collectives.reduce_scatter(as_array(outputs[0]), lists, reduce_op(options.reduceOp), group)


def _all_to_all(group: ProcessGroup, outputs: Any, inputs: Any, options: Any) -> None:
    collectives.all_to_all(list(map(as_array, outputs)), list(map(as_array, inputs)), group)


def _all_to_all_single(
    group: ProcessGroup, output: Any, tensor: Any, outs: Any, ins: Any, options: Any
) -> None:
    arrays = as_array(output), as_array(tensor)
    collectives.all_to_all_single(*arrays, outs or None, ins or None, group)


def _barrier(group: ProcessGroup, options: Any) -> None:
    collectives.barrier(group)


PLAIN: dict[str, tuple[int, type[Any], Callable[..., None]]] = {
    "allreduce": (1, c10d.AllreduceOptions, _all_reduce),
    "broadcast": (1, c10d.BroadcastOptions, _broadcast),
    "reduce": (1, c10d.ReduceOptions, _reduce),
    "allgather": (2, c10d.AllgatherOptions, _all_gather),
    "gather": (2, c10d.GatherOptions, _gather),
    "scatter": (2, c10d.ScatterOptions, _scatter),
    "all_gather_single": (2, c10d.AllgatherOptions, _all_gather_single),
    "_allgather_base": (2, c10d.AllgatherOptions, _all_gather_single),
    "reduce_scatter_single": (2, c10d.ReduceScatterOptions, _reduce_scatter_single),
    "_reduce_scatter_base": (2, c10d.ReduceScatterOptions, _reduce_scatter_single),
    "reduce_scatter": (2, c10d.ReduceScatterOptions, _reduce_scatter),
    "alltoall": (2, c10d.AllToAllOptions, _all_to_all),
    "all_to_all_single": (4, c10d.AllToAllOptions, _all_to_all_single),
    "alltoall_base": (4, c10d.AllToAllOptions, _all_to_all_single),
    "barrier": (0, c10d.BarrierOptions, _barrier),
}
"""Method of torch's process group -> position and type of its option struct, and its plain call."""


def send(group: ProcessGroup, tensor: Any, peer: int, tag: int) -> Work | None:
    """Send if nothing has to be waited for; None: nothing was sent."""
    port = group.plain_port
    if port is None or not 0 <= peer < len(group.ranks):
        return None
    sent = port.isend(as_array(tensor), group.ranks[peer], tag, tensor)
    return None if sent is None else Work(sent, "send")


def recv(group: ProcessGroup, tensor: Any, peer: int | None, tag: int) -> Work | None:
    """Start receiving, from any rank if `peer` is None; None: not a plain call."""
    port = group.plain_port
    if port is None or not (peer is None or 0 <= peer < len(group.ranks)):
        return None
    source = None if peer is None else group.ranks[peer]
    started = port.irecv(as_array(tensor), source, tag, tensor, group.timeout_s)
    return None if started is None else Work(started, "recv")
