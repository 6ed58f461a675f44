"""Collectives that return their result and leave their arguments as they are.

    y = unisono.functional.all_reduce(x)

For NumPy arrays and tensors of torch. Errors and keywords are those of the functions of the same
name in `unisono`, which write to their arguments. But there is no `async_op`, and a rank that is
no member gets an error. `unisono.nn.functional` has gradients.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, Unpack

import numpy as np

from unisono.core.base.buffers import view
from unisono.core.base.threads.streams import explicit_stream
from unisono.core.base.types import Function, ReduceOp
from unisono.core.c10d import collectives
from unisono.core.c10d.arguments import reporting_bad_arguments
from unisono.core.c10d.objects.call import ObjectCall
from unisono.core.groups.process_group import ProcessGroup
from unisono.core.groups.world import Group, member_group, require_group
from unisono.core.operations.keywords import CallKeywords
from unisono.core.operations.reductions import copied, empty
from unisono.core.operations.sums.exact import real_of, split_exactly, sums_exactly, widened
from unisono.core.operations.sums.exact_exchange import exact_over_ranks
from unisono.core.operations.table import OPS
from unisono.errors import InvalidArgumentError, UnsupportedError

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "exscan",
    "gather",
    "reduce",
    "reduce_scatter",
    "reproducible_sum",
    "scan",
]


@contextlib.contextmanager
def _preparing(
    call: str, group: Group, how: Mapping[str, Any], name: str = ""
) -> Iterator[ProcessGroup]:
    """Yield the group; the other ranks get an error of the block, which makes the arrays."""
    pg = member_group(group, name or call, stacklevel=5) or require_group(group)
    with reporting_bad_arguments(pg, name or call):
        name = name or call.removesuffix("_tensor").removesuffix("_into").removesuffix("_single")
        if how.get("async_op"):
            raise UnsupportedError(
                f"functional.{name} returns its result, so it takes no async_op",
                hint=f"unisono.{call} returns a work, and writes to its arguments",
            )
        block = pg._block_here()
        if block is not None and not block.takes_all and OPS[call].coalesced:
            raise InvalidArgumentError(
                f"functional.{name} in a coalescing block, which makes its calls at its end",
                hint=f"unisono.{call} writes to its arguments, and may be called there",
            )
        yield pg


def all_reduce(
    x: Any, op: ReduceOp | Function = ReduceOp.SUM, group: Group = None, **how: Unpack[CallKeywords]
) -> Any:
    """Return the reduction of the arrays [...] of all ranks."""
    with _preparing("all_reduce", group, how):
        y = copied(x)
    collectives.all_reduce(y, op, group, **how)
    return y


def reproducible_sum(parts: Any, group: Group = None, **how: Unpack[CallKeywords]) -> Any:
    """Return the exact sum [...] of the parts [k, ...] of all ranks, rounded once.

    Its bits depend only on the parts of all ranks together: not on the number of ranks, on which
    rank has which part, nor on their order. So k may differ between ranks, and be 0.

    Args:
        parts: Floats or complex numbers, an array or tensor; equal dtype and [...] on all ranks.
        group: The default group if None.
        **how: timeout (seconds or timedelta), of the whole call.

    Raises:
        UnsupportedError: The dtype is not float16, bfloat16, float32, float64 or complex; or the
            call is in a stream, or has another keyword.

    Cost: a number of rows c, mostly 1 to 3, has the exact sum of a rank's parts. The ranks agree on
        the largest c, then exchange c float64 arrays, and the result.
    """
    name, shape = "reproducible_sum", tuple(getattr(parts, "shape", (0,)))
    with _preparing("all_reduce", group, how, name) as pg:
        if others := sorted(how.keys() - {"async_op", "timeout"}):
            raise UnsupportedError(f"reproducible_sum takes no {others[0]}")
        dtype = view(parts, write=False, pack=False).dtype.name
        if not (shape and sums_exactly(dtype)) or explicit_stream() is not None:
            raise UnsupportedError(
                f"reproducible_sum of {dtype}{list(shape)}: only parts [k, ...] of float16, "
                "bfloat16, float32, float64 and complex numbers, and not in a stream"
            )
        y = empty(parts, *shape[1:])
        result, label = view(y, write=True), f"{name} of {dtype}{list(shape[1:])}"
        n = result.count * (2 if dtype.startswith("complex") else 1)
        flat = widened(view(parts, write=False).array, dtype)
        rows = split_exactly(flat.reshape(shape[0], n)) if shape[0] else []
        count = np.array([len(rows)])
        call = ObjectCall(pg, name, how.get("timeout"), None)
    with call:
        pg.all_reduce(count, ReduceOp.MAX, timeout=call.remaining_s, _label=label)
        with reporting_bad_arguments(pg, name):
            # -0 changes no sum; the sum of no parts is 0.
            planes = np.full((max(1, count[0]), n), -0.0 if count[0] else 0.0)
            for plane, row in zip(planes, rows, strict=False):
                plane[:] = row
        summed = exact_over_ranks(
            pg, planes, ("float64", real_of(dtype)), label, timeout=call.remaining_s
        )
    if summed is not None:  # on all ranks, because there is no root
        result.array[:] = summed.view(result.array.dtype)
    return y


def broadcast(x: Any, src: int = 0, group: Group = None, **how: Unpack[CallKeywords]) -> Any:
    """Return the array [...] of global rank `src`; `x` has its shape and dtype on all ranks."""
    with _preparing("broadcast", group, how):
        y = copied(x)
    collectives.broadcast(y, src, group, **how)
    return y


def reduce(
    x: Any,
    dst: int = 0,
    op: ReduceOp | Function = ReduceOp.SUM,
    group: Group = None,
    **how: Unpack[CallKeywords],
) -> Any:
    """Return the reduction of all arrays [...] on global rank `dst`, None elsewhere."""
    with _preparing("reduce", group, how) as pg:
        y, is_root = copied(x), pg.group_rank(dst) == pg.rank()
    collectives.reduce(y, dst, op, group, **how)
    return y if is_root else None


def all_gather(x: Any, group: Group = None, **how: Unpack[CallKeywords]) -> Any:
    """Return the arrays [...] of all ranks as one array [ranks, ...]."""
    with _preparing("all_gather_into_tensor", group, how) as pg:
        x = copied(x)
        y = empty(x, pg.size(), *x.shape)
    collectives.all_gather_into_tensor(y, x, group, **how)
    return y


def gather(x: Any, dst: int = 0, group: Group = None, **how: Unpack[CallKeywords]) -> Any:
    """Return the arrays [...] of all ranks as [ranks, ...] on global rank `dst`, None elsewhere."""
    with _preparing("gather_into_tensor", group, how) as pg:
        x = copied(x)
        y = empty(x, pg.size(), *x.shape) if pg.group_rank(dst) == pg.rank() else None
    collectives.gather_into_tensor(y, x, dst, group, **how)
    return y


def reduce_scatter(
    x: Any, op: ReduceOp | Function = ReduceOp.SUM, group: Group = None, **how: Unpack[CallKeywords]
) -> Any:
    """Return this rank's part [rows, ...] of the reduction of all arrays [ranks * rows, ...]."""
    with _preparing("reduce_scatter_tensor", group, how) as pg:
        x = copied(x)
        if not x.shape:
            raise InvalidArgumentError("functional.reduce_scatter takes an array with rows")
        y = empty(x, x.shape[0] // pg.size(), *x.shape[1:])
    collectives.reduce_scatter_tensor(y, x, op, group, **how)
    return y


def all_to_all(x: Any, group: Group = None, **how: Unpack[CallKeywords]) -> Any:
    """Return the parts for this rank; part j of `x` [ranks * rows, ...] is for rank j."""
    with _preparing("all_to_all_single", group, how):
        x = copied(x)
        y = empty(x, *x.shape)
    collectives.all_to_all_single(y, x, group=group, **how)
    return y


def scan(
    x: Any, op: ReduceOp | Function = ReduceOp.SUM, group: Group = None, **how: Unpack[CallKeywords]
) -> Any:
    """Return the reduction of the arrays [...] of ranks 0 to this rank."""
    with _preparing("scan", group, how):
        y = copied(x)
    collectives.scan(y, op, group, **how)
    return y


def exscan(
    x: Any, op: ReduceOp | Function = ReduceOp.SUM, group: Group = None, **how: Unpack[CallKeywords]
) -> Any:
    """Return the reduction of the ranks before this rank; on rank 0 a copy of `x`."""
    with _preparing("exscan", group, how):
        y = copied(x)
    collectives.exscan(y, op, group, **how)
    return y
