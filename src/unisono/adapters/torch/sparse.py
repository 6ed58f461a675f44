"""all_reduce of sparse COO tensors by gathers of their parts, as in Gloo."""

from __future__ import annotations

import torch

from unisono.adapters.torch.values import dense
from unisono.core.base.deadline import Timeout
from unisono.core.base.types import RedOpType, ReduceOp
from unisono.core.groups.process_group import ProcessGroup
from unisono.core.operations.keywords import How
from unisono.errors import UnsupportedError

__all__ = ["all_reduce_sparse"]


def all_reduce_sparse(
    group: ProcessGroup, tensor: torch.Tensor, op: ReduceOp, timeout: Timeout | None = None
) -> None:
    """Replace the sparse tensor of every rank by the sum over all ranks, coalesced.

    The ranks agree on shape and dtype, then make three gathers. The first gives the sizes of the
    others. The call is done when it returns. Otherwise another call between the gathers could have
    a different place in the order of calls on different ranks.

    Args:
        group: The unisono process group.
        tensor: Sparse COO tensor on the CPU; same shape on all ranks, any number of entries.
        op: SUM.
        timeout: Of each of the calls.

    Raises:
        UnsupportedError: Another reduce op.
        CollectiveMismatchError: Shapes or dtypes differ, or a rank has a dense tensor. All ranks
            raise it, and no tensor is changed.
    """
    if op.op is not RedOpType.SUM:
        raise UnsupportedError(f"all_reduce of sparse tensors has SUM only, not {op.name}")
    mine = tensor.coalesce()
    indices, values = mine.indices(), mine.values()
    how: How = {"timeout": timeout, "_label": "all_reduce of a sparse tensor"}
    kind = str(tensor.dtype).removeprefix("torch.")
    dimensions = f"{mine.sparse_dim()} sparse of {mine.dim()} dimensions"
    group.agree(f"all_reduce(sparse {kind}{list(mine.shape)}, {dimensions}, SUM)", timeout=timeout)
    counts = _gathered(group, torch.tensor([values.shape[0]]), how).flatten().tolist()
    most = max(counts)
    all_indices = _gathered(group, _padded(indices.t(), most), how)
    all_values = _gathered(group, _padded(values, most), how)
    total = torch.sparse_coo_tensor(
        torch.cat([all_indices[r, :n] for r, n in enumerate(counts)]).t(),
        torch.cat([all_values[r, :n] for r, n in enumerate(counts)]),
        tensor.shape,
    ).coalesce()
    with torch.no_grad():
        tensor.copy_(total)


def _gathered(group: ProcessGroup, part: torch.Tensor, how: How) -> torch.Tensor:
    whole = part.new_empty((group.size(), *part.shape))
    group.all_gather_into_tensor(dense(whole), dense(part.contiguous()), **how)
    return whole


def _padded(rows: torch.Tensor, count: int) -> torch.Tensor:
    out = rows.new_zeros((count, *rows.shape[1:]))
    out[: rows.shape[0]] = rows
    return out
