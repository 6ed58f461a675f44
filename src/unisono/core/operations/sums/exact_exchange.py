"""The exchanges of an exact sum, and errors between the exchanges of one call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np

from unisono.core.base.buffers import Array
from unisono.core.base.deadline import Deadline
from unisono.core.operations.sums.exact import exact_sum, widened

# Up to so many bytes of all ranks together, one exchange is faster than two of the parts.
_GATHERED_BYTES = 1 << 15


@contextmanager
def announcing(group: Any, label: str, *, is_last: bool) -> Iterator[None]:
    """Report an error of the block to the other ranks, which wait in its exchange or the next."""
    since = group.place()
    try:
        yield
    except BaseException as error:
        has_ended = is_last and group.place() > since
        if not has_ended and not group.is_known_to_all(error, since):
            group.refuse(label, error)
        raise


def exact_over_ranks(
    group: Any,
    rows: Array,
    dtypes: tuple[str, str],
    label: str,
    *,
    timeout: Any,
    root: int = -1,
    scatters: bool = False,
    divisor: int = 1,
) -> Array | None:
    """Return the exact sum [n] over all ranks and rows, rounded once, of bfloat16 its bits.

    Args:
        group: The group.
        rows: [k, n] numbers, of bfloat16 their bits; equal k and n on all ranks.
        dtypes: Names of their type, and of the result's.
        label: Name of the call in errors; equal on all ranks.
        timeout: Seconds for all exchanges; None for the group's.
        root: Rank that gets the result; -1 for all. Other ranks get None.
        scatters: Whether each rank gets its part of the result instead.
        divisor: Divides the sum.

    Cost: up to 32 KiB of all ranks, each sends its rows to all others. Beyond it, an all_to_all of
        the parts and an all_gather of the sums: (p-1)/p of the rows, and of the result.
    """
    rank, size, (dtype, to) = group.rank(), group.size(), dtypes
    due, (count, n) = Deadline(group.timeout_s if timeout is None else timeout), rows.shape

    def summed(parts: Array) -> Array:
        wide = widened(parts.reshape(-1), dtype).reshape(size * count, -1)
        made = exact_sum(wide, to, divisor)
        return made.view(to) if to.startswith("complex") else made

    def exchange(output: Array, array: Array, outs: list[int], ins: list[int]) -> None:
        how = {"output_split_sizes": outs, "input_split_sizes": ins, "_label": label}
        group.all_to_all_single(output, array, timeout=due.remaining(), **how)

    if not scatters and size * rows.nbytes <= _GATHERED_BYTES:
        with announcing(group, label, is_last=True):
            parts = np.empty((size * count, n), rows.dtype)
            how = {"timeout": due.remaining(), "_label": label}
            group.all_gather_into_tensor(parts, rows, **how)
            return summed(parts) if root in (-1, rank) else None
    starts = [n * r // size for r in range(size + 1)]
    own = [end - begin for begin, end in pairwise(starts)]
    with announcing(group, label, is_last=scatters):
        if count > 1:
            rows = np.concatenate([each.reshape(-1) for each in np.split(rows, starts[1:-1], 1)])
        mine, given = count * own[rank], [count * each for each in own]
        parts = np.empty(size * mine, rows.dtype)
        exchange(parts, rows.reshape(-1), [mine] * size, given)
        part = summed(parts)
    if scatters:
        return part
    with announcing(group, label, is_last=True):
        result = np.empty(n if root in (-1, rank) else 0, part.dtype)
        if root < 0:
            how = {"timeout": due.remaining(), "_label": label, "output_split_sizes": own}
            group.all_gather_into_tensor(result, part, **how)
        else:
            ins = [own[rank] if r == root else 0 for r in range(size)]
            exchange(result, part, own if rank == root else [0] * size, ins)
    return result if root in (-1, rank) else None
