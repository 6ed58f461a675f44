"""Collectives of torch tensors with gradients, without torch.distributed.

Each is a linear map of the tensors of all ranks. Its gradient is the transposed map, which is a
collective as well, so all ranks must call `backward`. `group` is the default group if None.

Source: torch.distributed.nn.functional (2.13).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from unisono import functional
from unisono.core.base.types import ReduceOp, as_reduce_op
from unisono.core.c10d import collectives
from unisono.core.groups.process_group import ProcessGroup
from unisono.core.groups.world import Group, require_group
from unisono.errors import UnsupportedError

Map = Callable[..., Any]


class _LinearMap(torch.autograd.Function):  # type: ignore[misc]
    """A map of tensors, given with its transpose."""

    @staticmethod
    def forward(ctx: Any, there: Map, back: Map, *tensors: Tensor) -> Any:
        ctx.there, ctx.back = there, back
        return there(*(tensor.detach().contiguous() for tensor in tensors))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        found = _apply(ctx.back, ctx.there, *gradients)
        return None, None, *(found if isinstance(found, tuple) else (found,))


def _apply(there: Map, back: Map, *tensors: Tensor) -> Any:
    return _LinearMap.apply(there, back, *tensors)


def broadcast(tensor: Tensor, src: int, group: Group = None) -> Tensor:
    """Return the tensor of global rank `src`; its gradient is the sum of all ranks' gradients."""
    back = partial(_sum, src, ReduceOp.SUM, group)
    return _apply(partial(_spread, 1.0, src, group), back, tensor)


def reduce(tensor: Tensor, dst: int, op: ReduceOp = ReduceOp.SUM, group: Group = None) -> Tensor:
    """Return the reduction on global rank `dst`, zeros elsewhere."""
    back = partial(_transposed(op, group, _spread), dst, group)
    return _apply(partial(_sum, dst, op, group), back, tensor)


def all_reduce(tensor: Tensor, op: ReduceOp = ReduceOp.SUM, group: Group = None) -> Tensor:
    """Return the reduction over all ranks; only sums and averages have a gradient."""
    back = partial(_transposed(op, group, _sum_everywhere), group)
    return _apply(partial(functional.all_reduce, op=op, group=group), back, tensor)


def gather(tensor: Tensor, dst: int = 0, group: Group = None) -> Any:
    """Return the tensors of all ranks on global rank `dst`, zeros elsewhere."""
    return _apply(partial(_collect, dst, group), partial(_deal, dst, group), tensor)


def scatter(tensors: Sequence[Tensor], src: int = 0, group: Group = None) -> Tensor:
    """Return this rank's tensor of those of global rank `src`; all ranks give such tensors."""
    return _apply(partial(_deal, src, group), partial(_collect, src, group), *tensors)


def all_gather(tensor: Tensor, group: Group = None) -> Any:
    """Return the tensors of all ranks."""
    back = partial(_reduce_parts, ReduceOp.SUM, group)
    return _apply(partial(_all_parts, 1.0, group), back, tensor)


def _all_gather_base(output_tensor: Tensor, input_tensor: Tensor, group: Group = None) -> Tensor:
    """Return the tensors of all ranks as one tensor of the shape of `output_tensor`."""
    return torch.cat([part.flatten() for part in all_gather(input_tensor, group)]).view(
        output_tensor.shape
    )


def reduce_scatter(
    output: Tensor,
    input_list: Sequence[Tensor],
    op: ReduceOp = ReduceOp.SUM,
    group: Group = None,
) -> Tensor:
    """Return the reduction of entry i of all ranks' lists on rank i, in the shape of `output`."""
    back = partial(_transposed(op, group, _all_parts), group)
    return _apply(partial(_reduce_parts, op, group), back, *input_list).view(output.shape)


def all_to_all(
    output_tensor_list: Sequence[Tensor], input_tensor_list: Sequence[Tensor], group: Group = None
) -> Any:
    """Return entry r of each rank's list on rank r, in the shapes of `output_tensor_list`."""
    outputs, inputs = ([t.shape for t in ts] for ts in (output_tensor_list, input_tensor_list))
    return _apply(
        partial(_exchange, outputs, group), partial(_exchange, inputs, group), *input_tensor_list
    )


def all_to_all_single(
    output: Tensor,
    input: Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Group = None,
) -> Tensor:
    """Return the rows for this rank as `unisono.all_to_all_single`, in the shape of `output`."""
    there = partial(_exchange_rows, output.shape, output_split_sizes, input_split_sizes, group)
    back = partial(_exchange_rows, input.shape, input_split_sizes, output_split_sizes, group)
    return _apply(there, back, input)


# ---- the maps, without gradients ------------------------------------------------------------


def _is_root(root: int, pg: ProcessGroup) -> bool:
    return pg.group_rank(root) == pg.rank()


def _transposed(op: ReduceOp, group: Group, back: Map) -> Map:
    """Return `back` with the factor with which a reduction has each rank's tensor."""
    op = as_reduce_op(op)
    factors = {"SUM": 1.0, "AVG": 1 / require_group(group).size(), "PREMUL_SUM": op.factor}
    return partial(back, factors[op.name]) if op.name in factors else partial(_no_gradient, op)


def _no_gradient(op: ReduceOp, *arguments: object) -> None:
    raise UnsupportedError(f"a reduction by {op.name} has no gradient")


def _sum_everywhere(scale: float, group: Group, tensor: Tensor) -> Tensor:
    y: Tensor = functional.all_reduce(tensor, group=group)
    return y if scale == 1 else y * scale


def _spread(scale: float, src: int, group: Group, tensor: Tensor) -> Tensor:
    y: Tensor = functional.broadcast(tensor, src, group)
    return y if scale == 1 else y * scale


def _sum(dst: int, op: ReduceOp, group: Group, tensor: Tensor) -> Tensor:
    y = functional.reduce(tensor, dst, op, group)
    return torch.zeros_like(tensor) if y is None else y


def _collect(dst: int, group: Group, tensor: Tensor) -> tuple[Tensor, ...]:
    pg = require_group(group)
    parts = [torch.zeros_like(tensor) for _ in range(pg.size())]
    collectives.gather(tensor, parts if _is_root(dst, pg) else None, dst, group)
    return tuple(parts)


def _deal(src: int, group: Group, *tensors: Tensor) -> Tensor:
    y = torch.empty_like(tensors[0])
    is_root = _is_root(src, require_group(group))
    collectives.scatter(y, list(tensors) if is_root else None, src, group)
    return y


def _all_parts(scale: float, group: Group, tensor: Tensor) -> tuple[Tensor, ...]:
    parts = functional.all_gather(tensor, group)
    return tuple((parts if scale == 1 else parts * scale).unbind())


def _reduce_parts(op: ReduceOp, group: Group, *tensors: Tensor) -> Tensor:
    y = torch.empty_like(tensors[0])
    collectives.reduce_scatter(y, list(tensors), op, group)
    return y


def _exchange(shapes: Sequence[torch.Size], group: Group, *tensors: Tensor) -> tuple[Tensor, ...]:
    received = [tensors[0].new_empty(shape) for shape in shapes]
    collectives.all_to_all(received, list(tensors), group)
    return tuple(received)


def _exchange_rows(
    shape: torch.Size,
    output_split_sizes: Sequence[int] | None,
    input_split_sizes: Sequence[int] | None,
    group: Group,
    tensor: Tensor,
) -> Tensor:
    y = tensor.new_empty(shape)
    collectives.all_to_all_single(y, tensor, output_split_sizes, input_split_sizes, group)
    return y
