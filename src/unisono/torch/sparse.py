"""all_reduce of sparse COO tensors by gathers of their parts, as in Gloo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from unisono.base.types import RedOpType, ReduceOp
from unisono.c10d.arguments import reporting_bad_arguments
from unisono.errors import CollectiveMismatchError, UnsupportedError
from unisono.groups.process_group import ProcessGroup
from unisono.groups.work import Work

__all__ = ["all_reduce_sparse"]


def all_reduce_sparse(
    group: ProcessGroup, tensor: torch.Tensor, op: ReduceOp, *, async_op: bool = False, **how: Any
) -> Work:
    """Replace the sparse tensor of every rank by the sum over all ranks, coalesced.

    The call makes three gathers. The first gives the sizes of the others. The call is done when it
    returns, also with `async_op`. Otherwise another call between the gathers could have a different
    place in the order of calls on different ranks.

    Args:
        group: The unisono process group.
        tensor: Sparse COO tensor on the CPU; same shape on all ranks, any number of entries.
        op: SUM.
        async_op: Accepted, without effect.
        **how: timeout.

    Raises:
        UnsupportedError: Another reduce op.
        CollectiveMismatchError: Shapes differ. All ranks raise it, and no tensor is changed.
    """
    parts: list[torch.Tensor] = []

    def described() -> torch.Tensor:
        if op.op is not RedOpType.SUM:
            raise UnsupportedError(f"all_reduce of sparse tensors has SUM only, not {op.name}")
        mine = tensor.coalesce()
        parts.extend((mine.indices(), mine.values()))
        return torch.tensor([mine.sparse_dim(), *mine.shape, parts[1].shape[0]])

    table, _ = _gathered(group, described, how)
    indices, values = parts
    shapes = [row[:-1].tolist() for row in table]
    if any(shape != shapes[0] for shape in shapes):
        found = ", ".join(
            f"{shape[1:]} on rank {r}" for r, shape in zip(group.ranks, shapes, strict=True)
        )
        raise CollectiveMismatchError(
            f"all_reduce of sparse tensors in group '{group.name}': shapes differ: {found}"
        )
    counts = [int(row[-1]) for row in table]
    most = max(counts)
    all_indices, _ = _gathered(group, lambda: _padded(indices.t(), most), how)
    all_values, done = _gathered(group, lambda: _padded(values, most), how)
    total = torch.sparse_coo_tensor(
        torch.cat([all_indices[r, :n] for r, n in enumerate(counts)]).t(),
        torch.cat([all_values[r, :n] for r, n in enumerate(counts)]),
        tensor.shape,
    ).coalesce()
    with torch.no_grad():
        tensor.copy_(total)
    return done


def _gathered(
    group: ProcessGroup, make: Callable[[], torch.Tensor], how: dict[str, Any]
) -> tuple[torch.Tensor, Work]:
    with reporting_bad_arguments(group, "all_reduce"):
        part = make().contiguous()
        whole = part.new_empty((group.size(), *part.shape))
    return whole, group.all_gather_into_tensor(whole, part, **how)


def _padded(rows: torch.Tensor, count: int) -> torch.Tensor:
    out = rows.new_zeros((count, *rows.shape[1:]))
    out[: rows.shape[0]] = rows
    return out
