"""Prefix reductions: what MPI has and torch.distributed lacks, in the form of its functions."""

from __future__ import annotations

from typing import Any

from unisono.base.types import ReduceOp
from unisono.groups.work import Work
from unisono.groups.world import member_group

__all__ = ["exscan", "scan"]


def scan(
    tensor: Any, op: ReduceOp = ReduceOp.SUM, group: Any = None, async_op: bool = False, **how: Any
) -> Work | None:
    """Replace rank r's tensor by the reduction over ranks 0..r.

    For every rank r:  tensor_r = tensor_0 (op) tensor_1 (op) ... (op) tensor_r

    Args:
        tensor: [...] same number of elements and dtype on all ranks; any layout.
        op: As for all_reduce; AVG divides by r + 1.
        group: The default group if None.
        async_op: Return a `Work` at once; the tensor must stay untouched until it is done.
        **how: timeout (seconds or timedelta), algorithm, deterministic.

    Raises:
        UnsupportedError, CollectiveMismatchError, CollectiveTimeoutError, PeerLostError: As
            `all_reduce` does.

    Cost: small: ceil(log2 p) rounds; large: a chain, in which every rank sends its tensor once.
    Source: MPI_Scan.
    """
    if (pg := member_group(group, "scan")) is None:
        return None
    work = pg.scan(tensor, op, async_op=async_op, **how)
    return work if async_op else None


def exscan(
    tensor: Any, op: ReduceOp = ReduceOp.SUM, group: Any = None, async_op: bool = False, **how: Any
) -> Work | None:
    """Replace rank r's tensor by the reduction over ranks 0..r-1; rank 0 keeps its own.

    For every rank r > 0:  tensor_r = tensor_0 (op) tensor_1 (op) ... (op) tensor_{r-1}

    Arguments and errors are those of `scan`; AVG divides by r.

    Cost: one round more than scan where that is small, the same where it is large.
    Source: MPI_Exscan, which leaves rank 0's result undefined.
    """
    if (pg := member_group(group, "exscan")) is None:
        return None
    work = pg.exscan(tensor, op, async_op=async_op, **how)
    return work if async_op else None
