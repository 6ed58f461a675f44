"""Convert the arguments that torch passes to a process group to unisono's arguments."""

from __future__ import annotations

from typing import Any

import torch._C._distributed_c10d as c10d

from unisono.core.base.types import ReduceOp, as_reduce_op
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
