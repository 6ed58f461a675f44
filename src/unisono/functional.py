"""Collectives that return their result and leave their arguments as they are.

    y = unisono.functional.all_reduce(x)

For NumPy arrays and tensors of torch. Errors and keywords are those of the functions of the same
name in `unisono`, which write to their arguments. `unisono.nn.functional` has gradients.
"""

from __future__ import annotations

from typing import Any, Unpack

from unisono.core.base.types import Function, ReduceOp
from unisono.core.c10d import collectives
from unisono.core.groups.world import Group, require_group
from unisono.core.operations.keywords import CallKeywords
from unisono.core.operations.reductions import copied, empty

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "exscan",
    "gather",
    "reduce",
    "reduce_scatter",
    "scan",
]


def all_reduce(
    x: Any, op: ReduceOp | Function = ReduceOp.SUM, group: Group = None, **how: Unpack[CallKeywords]
) -> Any:
    """Return the reduction of the arrays [...] of all ranks."""
    collectives.all_reduce(y := copied(x), op, group, **how)
    return y


def broadcast(x: Any, src: int = 0, group: Group = None, **how: Unpack[CallKeywords]) -> Any:
    """Return the array [...] of global rank `src`; `x` has its shape and dtype on all ranks."""
    collectives.broadcast(y := copied(x), src, group, **how)
    return y


def reduce(
    x: Any,
    dst: int = 0,
    op: ReduceOp | Function = ReduceOp.SUM,
    group: Group = None,
    **how: Unpack[CallKeywords],
) -> Any:
    """Return the reduction of all arrays [...] on global rank `dst`, None elsewhere."""
    collectives.reduce(y := copied(x), dst, op, group, **how)
    return y if require_group(group).group_rank(dst) == require_group(group).rank() else None


def all_gather(x: Any, group: Group = None, **how: Unpack[CallKeywords]) -> Any:
    """Return the arrays [...] of all ranks as one array [ranks, ...]."""
    x = copied(x)
    y = empty(x, require_group(group).size(), *x.shape)
    collectives.all_gather_into_tensor(y, x, group, **how)
    return y


def gather(x: Any, dst: int = 0, group: Group = None, **how: Unpack[CallKeywords]) -> Any:
    """Return the arrays [...] of all ranks as [ranks, ...] on global rank `dst`, None elsewhere."""
    pg, x = require_group(group), copied(x)
    y = empty(x, pg.size(), *x.shape) if pg.group_rank(dst) == pg.rank() else None
    collectives.gather_into_tensor(y, x, dst, group, **how)
    return y


def reduce_scatter(
    x: Any, op: ReduceOp | Function = ReduceOp.SUM, group: Group = None, **how: Unpack[CallKeywords]
) -> Any:
    """Return this rank's part [rows, ...] of the reduction of all arrays [ranks * rows, ...]."""
    x = copied(x)
    y = empty(x, x.shape[0] // require_group(group).size(), *x.shape[1:])
    collectives.reduce_scatter_tensor(y, x, op, group, **how)
    return y


def all_to_all(x: Any, group: Group = None, **how: Unpack[CallKeywords]) -> Any:
    """Return the parts for this rank; part j of `x` [ranks * rows, ...] is for rank j."""
    x = copied(x)
    collectives.all_to_all_single(y := empty(x, *x.shape), x, group=group, **how)
    return y


def scan(
    x: Any, op: ReduceOp | Function = ReduceOp.SUM, group: Group = None, **how: Unpack[CallKeywords]
) -> Any:
    """Return the reduction of the arrays [...] of ranks 0 to this rank."""
    collectives.scan(y := copied(x), op, group, **how)
    return y


def exscan(
    x: Any, op: ReduceOp | Function = ReduceOp.SUM, group: Group = None, **how: Unpack[CallKeywords]
) -> Any:
    """Return the reduction of the ranks before this rank; on rank 0 a copy of `x`."""
    collectives.exscan(y := copied(x), op, group, **how)
    return y
