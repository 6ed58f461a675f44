"""The expected results of collectives on every rank, computed with NumPy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from unisono.core.base.buffers import Array
from unisono.core.base.types import DType, ReduceOp

__all__ = ["UFUNCS", "case", "reduced", "values"]

UFUNCS: dict[ReduceOp, np.ufunc] = {
    ReduceOp.SUM: np.add,
    ReduceOp.PRODUCT: np.multiply,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.BAND: np.bitwise_and,
    ReduceOp.BOR: np.bitwise_or,
    ReduceOp.BXOR: np.bitwise_xor,
}


def values(dtype: DType, count: int, rank: int, op: ReduceOp) -> Array:
    """Return small whole numbers, so that every order of a reduction gives the same result."""
    small = op is ReduceOp.PRODUCT or dtype.kind == "b"
    numbers = (np.arange(count) * 3 + rank * 5) % (2 if dtype.kind == "b" else 11)
    if small and dtype.kind != "b":
        numbers = 1 + numbers % 2
    if dtype.name == "bfloat16":
        return (numbers.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return numbers.astype(dtype.storage)


def reduced(parts: Sequence[Array], dtype: DType, op: ReduceOp) -> Array:
    """Return the reduction of all ranks' parts."""
    ufunc = UFUNCS[op]
    if dtype.name == "bfloat16":
        wide = [(part.astype(np.uint32) << 16).view(np.float32) for part in parts]
        total = np.asarray(ufunc.reduce(wide))
        return (total.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return np.asarray(ufunc.reduce(parts, dtype=dtype.storage))


def case(
    collective: str, size: int, count: int, root: int, dtype: DType, op: ReduceOp
) -> tuple[list[Array | None], list[Array | None], list[Array | None]]:
    """Return the inputs, the outputs before the call, and the expected outputs of all ranks."""
    many = collective in ("reduce_scatter", "all_to_all", "scatter")
    width = count * (size if many else 1)
    data = [values(dtype, width, rank, op) for rank in range(size)]
    ranks = range(size)
    none: list[Array | None] = [None] * size

    def at_root(values: Array) -> list[Array | None]:
        return [values if rank == root else None for rank in ranks]

    def room(elements: int) -> list[Array | None]:
        return [np.zeros(elements, dtype.storage) for _ in ranks]

    inputs: list[Array | None] = list(data)
    if collective == "all_reduce":
        return none, inputs, [reduced(data, dtype, op)] * size
    if collective in ("scan", "exscan"):
        counts = [r + 1 if collective == "scan" else max(r, 1) for r in ranks]
        return none, inputs, [reduced(data[:n], dtype, op) for n in counts]
    if collective == "broadcast":
        return none, inputs, [data[root]] * size
    if collective == "reduce":
        return none, inputs, at_root(reduced(data, dtype, op))
    if collective == "all_gather":
        return inputs, room(count * size), [np.concatenate(data)] * size
    if collective == "gather":
        after = at_root(np.concatenate(data))
        return inputs, [None if a is None else np.zeros_like(a) for a in after], after
    blocks = [values.reshape(size, count) for values in data]
    if collective == "reduce_scatter":
        return inputs, room(count), list(reduced(blocks, dtype, op))
    if collective == "scatter":
        return at_root(data[root]), room(count), list(blocks[root])
    if collective == "all_to_all":
        after = [np.concatenate([blocks[source][rank] for source in ranks]) for rank in ranks]
        return inputs, room(width), after
    return none, room(0), none
