"""Reduce ops of MPI for each element type: the library's if it is right, else own ops in NumPy.

The libraries are wrong in places. MIN and MAX of floats lose NaN, and differ by rank. Open MPI adds
8-bit and 16-bit integers with saturation. No library has bfloat16, and each rounds float16 in its
own way. So these have own ops. An op of the library is tried on awkward values before its first
use; an own op replaces it if it fails.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from unisono.base.extension import extension as native
from unisono.base.log import get_logger
from unisono.base.types import DType, RedOpType, ReduceOp
from unisono.engines.kernels import reduce_into
from unisono.engines.mpi_library import library

Array = np.ndarray[Any, Any]

_log = get_logger("engines.mpi")

_SUMS = (RedOpType.SUM, RedOpType.AVG, RedOpType.PREMUL_SUM)
_EXTREMES = (RedOpType.MIN, RedOpType.MAX)
_VENDOR = {
    **dict.fromkeys(_SUMS, "SUM"),
    RedOpType.PRODUCT: "PROD",
    RedOpType.MIN: "MIN",
    RedOpType.MAX: "MAX",
    RedOpType.BAND: "BAND",
    RedOpType.BOR: "BOR",
    RedOpType.BXOR: "BXOR",
}
# On bool + is "or", * is "and"; MIN and MAX order False before True.
_VENDOR_OF_BOOL = {
    RedOpType.SUM: "BOR",
    RedOpType.PRODUCT: "BAND",
    RedOpType.MIN: "BAND",
    RedOpType.MAX: "BOR",
}
_INFINITY = {"float16": 0x7C00, "bfloat16": 0x7F80, "float32": 0x7F800000, "float64": 0x7FF << 52}
_TRIED = 300


def datatype(dtype: DType) -> Any:
    """Return MPI's type of elements that are reduced; types that NumPy stores as bits are bits."""
    MPI = library().MPI
    names = {"b": "UINT8_T", "f": "FLOAT" if dtype.itemsize == 4 else "DOUBLE"}
    bits = 8 * dtype.itemsize
    if dtype.kind == "f" and bits == 16:
        return MPI.UINT16_T
    if dtype.kind == "c":
        return MPI.C_FLOAT_COMPLEX if bits == 64 else MPI.C_DOUBLE_COMPLEX
    return getattr(MPI, names.get(dtype.kind) or f"{dtype.name.upper()}_T")


@functools.cache
def vendor_op(dtype: DType, op: RedOpType) -> Any:
    """Return the library's op, or None if it is wrong for this dtype."""
    by_hand = (
        (dtype.kind == "f" and (dtype.itemsize == 2 or op in _EXTREMES))
        or (dtype.kind == "c" and op is RedOpType.PRODUCT)
        or (dtype.kind in "iu" and dtype.itemsize < 4 and op in (*_SUMS, RedOpType.PRODUCT))
    )
    if by_hand:
        return None
    name = _VENDOR_OF_BOOL.get(op, _VENDOR[op]) if dtype.kind == "b" else _VENDOR[op]
    found = getattr(library().MPI, name)
    if _is_right(found, dtype, op):
        return found
    _log.warning(
        "%s computes %s of %s wrongly; unisono computes it, which is slower",
        library().name, name, dtype,
    )  # fmt: skip
    return None


def own_op(dtype: DType, op: RedOpType) -> Any:
    """Return an op that computes in NumPy, or with the kernels of the C++ engine."""
    # mpi4py has room for 32 ops of a process, the user's among them.
    return _made_op(dtype, RedOpType.SUM if op in _SUMS else op)


@functools.cache
def _made_op(dtype: DType, op: RedOpType) -> Any:
    combine: Callable[[Array, Array], None]
    if dtype.kind == "f" and op in _EXTREMES:
        combine = functools.partial(_take_extreme, dtype=dtype, op=op)
    else:
        combine = functools.partial(_combine, dtype=dtype, op=ReduceOp(op))

    def reduce(lower: Any, into: Any, _: Any) -> None:
        combine(np.frombuffer(into, dtype.storage), np.frombuffer(lower, dtype.storage))

    return library().MPI.Op.Create(reduce, commute=True)


def _combine(into: Array, lower: Array, dtype: DType, op: ReduceOp) -> None:
    """Set `into = lower (op) into`."""
    if native is None or (code := native.dtype_codes().get(dtype.name)) is None:
        reduce_into(into, lower, dtype, op, swapped=True)
    else:
        native.reduce(into.ctypes.data, lower.ctypes.data, into.size, code, op.op.value)


def _take_extreme(into: Array, other: Array, dtype: DType, op: RedOpType) -> None:
    """Set `into` to the lesser or greater: -0 is less than +0, and NaN wins with equal bits.

    The result does not depend on the order of the operands, which differs by rank.
    """
    bits = np.dtype(f"u{dtype.itemsize}")
    # The quiet NaN is infinity and one bit more.
    inf = _INFINITY[dtype.name]
    sign, infinity, quiet = map(bits.type, (1 << (8 * dtype.itemsize - 1), inf, (inf & -inf) >> 1))
    a, b = into.view(bits), other.view(bits)
    nan = ((a & ~sign) > infinity) | ((b & ~sign) > infinity)
    # Keys that are ordered as integers as the values are ordered as numbers.
    keys = [np.where(x & sign, ~x, x | sign) for x in (a, b)]
    key = (np.minimum if op is RedOpType.MIN else np.maximum)(*keys)
    a[:] = np.where(key & sign, key & ~sign, ~key)
    a[nan] = infinity | quiet


def _is_right(op: Any, dtype: DType, kind: RedOpType) -> bool:
    """Whether an op of the library computes awkward values as the kernels do."""
    random = np.random.default_rng(1)
    if dtype.kind in "fc":
        left, right = (random.normal(size=_TRIED).astype(dtype.storage) for _ in range(2))
        odd = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 3e38, 1e-45], dtype.storage)
        left[: odd.size], right[: odd.size] = odd, odd[::-1]
    else:
        raw = random.integers(0, 256, (2, _TRIED * dtype.itemsize), dtype=np.uint8)
        if dtype.kind == "b":
            raw &= 1
        left, right = raw.view(dtype.storage)
    expected = right.copy()
    reduce_into(expected, left, dtype, ReduceOp(kind), swapped=True)
    count_and_type = [_TRIED, datatype(dtype)]
    op.Reduce_local([left, *count_and_type], [right, *count_and_type])
    return bool(np.array_equal(right, expected, equal_nan=dtype.kind in "fc"))
