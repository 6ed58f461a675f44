"""Convert the arguments that torch passes to a process group to unisono's arguments."""

from __future__ import annotations

from typing import Any

import torch._C._distributed_c10d as c10d

from unisono.core.base.types import ReduceOp, as_reduce_op
from unisono.core.groups.process_group import ProcessGroup
from unisono.core.operations.c10d_methods import C10dCall, read_c10d_form
from unisono.core.operations.methods import OpSchema

__all__ = ["read_call", "reduce_op"]

_SUM: Any = c10d.ReduceOp.SUM
_REDUCE_OPS = (c10d.ReduceOp, c10d.ReduceOp.RedOpType)


def reduce_op(op: Any) -> ReduceOp:
    """Return unisono's reduce op for a ReduceOp of torch."""
    return ReduceOp.SUM if op == _SUM else as_reduce_op(op)


def read_call(schema: OpSchema, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> C10dCall:
    """Return the call that torch's arguments mean, with unisono's reduce op.

    Args:
        schema: The operation.
        arguments: The data, then an option struct, or settings and a time-out as single arguments.
        keywords: The same by torch's names.
    """
    call = read_c10d_form(schema, arguments, keywords)
    if isinstance(op := call.given.get("op"), _REDUCE_OPS):
        call.given["op"] = reduce_op(op)
    return call


# ---- the short way ----------------------------------------------------------------------------
# Each function returns the arguments of unisono's function, and is written for speed: a call by its
# name takes as long as a tenth of a small all_reduce in C++.


def broadcast(group: ProcessGroup, tensors: Any, opts: Any) -> Any:
    [tensor] = tensors
    return tensor, _root(group, opts), group, opts.asyncOp


def all_reduce(group: ProcessGroup, tensors: Any, opts: Any) -> Any:
    [tensor] = tensors
    op = opts.reduceOp
    return tensor, ReduceOp.SUM if op == _SUM else reduce_op(op), group, opts.asyncOp


def reduce(group: ProcessGroup, tensors: Any, opts: Any) -> Any:
    [tensor] = tensors
    return tensor, _root(group, opts), reduce_op(opts.reduceOp), group, opts.asyncOp


def all_gather(group: ProcessGroup, outputs: Any, tensors: Any, opts: Any) -> Any:
    [listed], [tensor] = outputs, tensors
    return listed, tensor, group, opts.asyncOp


def gather(group: ProcessGroup, outputs: Any, tensors: Any, opts: Any) -> Any:
    [listed], [tensor] = outputs or [None], tensors
    return tensor, listed, _root(group, opts), group, opts.asyncOp


def scatter(group: ProcessGroup, outputs: Any, inputs: Any, opts: Any) -> Any:
    [tensor], [listed] = outputs, inputs or [None]
    return tensor, listed, _root(group, opts), group, opts.asyncOp


def reduce_scatter(group: ProcessGroup, outputs: Any, inputs: Any, opts: Any) -> Any:
    [tensor], [listed] = outputs, inputs
    return tensor, listed, reduce_op(opts.reduceOp), group, opts.asyncOp


def arrays(group: ProcessGroup, output: Any, tensor: Any, opts: Any) -> Any:
    return output, tensor, group, opts.asyncOp


def reduced_arrays(group: ProcessGroup, output: Any, tensor: Any, opts: Any) -> Any:
    return output, tensor, reduce_op(opts.reduceOp), group, opts.asyncOp


def split_arrays(group: ProcessGroup, output: Any, tensor: Any, to: Any, of: Any, opts: Any) -> Any:
    return output, tensor, _sizes(to), _sizes(of), group, opts.asyncOp


def no_arrays(group: ProcessGroup, opts: Any) -> Any:
    return group, opts.asyncOp


def message(group: ProcessGroup, tensors: Any, rank: int, tag: int) -> Any:
    [tensor] = tensors
    return tensor, _rank(group, rank), group, tag


def from_any(group: ProcessGroup, tensors: Any, tag: int) -> Any:
    [tensor] = tensors
    return tensor, None, group, tag


def _sizes(sizes: Any) -> Any:
    # In c10d an empty list means equal parts; the check of the operation knows it, too.
    return None if type(sizes) is list and not sizes else sizes


def _root(group: ProcessGroup, opts: Any) -> int:
    if getattr(opts, "rootTensor", 0):
        raise ValueError
    return _rank(group, opts.rootRank)


def _rank(group: ProcessGroup, rank: int) -> int:
    """Return the global rank of a rank in the group."""
    if rank < 0:
        raise ValueError
    return group.ranks[rank]
