"""Convert the arguments that torch passes to a process group to unisono's arguments."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch._C._distributed_c10d as c10d

from unisono.base.types import ReduceOp, as_reduce_op
from unisono.groups.operations import OpSchema

__all__ = ["UNSET", "call_options", "call_settings", "reduce_op"]

UNSET = timedelta(milliseconds=-1)
"""The time-out in an option struct that stands for the group's time-out."""
_SUM: Any = c10d.ReduceOp.SUM
_REDUCE_OPS = (c10d.ReduceOp, c10d.ReduceOp.RedOpType)


def reduce_op(op: Any) -> ReduceOp:
    """Return unisono's reduce op for a ReduceOp of torch."""
    return ReduceOp.SUM if op == _SUM else as_reduce_op(op)


def call_options(options: Any) -> dict[str, Any]:
    """Return unisono's keywords for the fields that every option struct of torch has."""
    given: dict[str, Any] = {"async_op": options.asyncOp}
    if options.timeout != UNSET:
        given["timeout"] = options.timeout
    return given


def call_settings(
    schema: OpSchema, arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of a call of torch, with torch's types replaced by unisono's.

    Args:
        schema: The operation.
        arguments: The data, then an option struct, or settings and a time-out as single arguments.
        keywords: `opts`, or settings by name.
    """
    data = len(schema.data.split())
    given, rest = list(arguments[:data]), arguments[data:]
    options: Any = keywords.pop("opts", None) or (rest[0] if rest else None)
    if hasattr(options, "asyncOp"):
        rest = tuple(
            options.rootRank if name == "root" else options.reduceOp
            for name in schema.settings.split()
        )
        keywords = call_options(options)
    given += [value for value in rest if value is not None]
    keywords = {"async_op": True} | keywords
    return [_plain(value) for value in given], {k: _plain(v) for k, v in keywords.items()}


def _plain(value: Any) -> Any:
    return reduce_op(value) if isinstance(value, _REDUCE_OPS) else value
