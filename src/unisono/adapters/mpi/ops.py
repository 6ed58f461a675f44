"""Reduce ops of MPI for each element type: the library's if it is right, else own ops in C++.

The libraries are wrong in places. MIN and MAX of floats lose NaN, and differ by rank. Open MPI adds
8-bit and 16-bit integers with saturation. No library has bfloat16, and each rounds float16 in its
own way. So these have own ops. An op of the library is tried on awkward values before its first
use; an own op replaces it if it fails.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np

from unisono.adapters.mpi.calls import address
from unisono.adapters.mpi.library import library
from unisono.core.base.log import get_logger
from unisono.core.base.seam import cpp as _engine
from unisono.core.base.types import DType, RedOpType, ReduceOp
from unisono.core.engines.kernels import reduce_into

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
_TRIED = 300


def datatype(dtype: DType) -> Any:
    """Return MPI's type of elements; BYTE for elements that are never reduced."""
    MPI = library().MPI
    if dtype.kind == "x":
        return MPI.BYTE
    bits = 8 * dtype.itemsize
    if dtype.kind == "f" and bits > 16:
        return MPI.FLOAT if bits == 32 else MPI.DOUBLE
    if dtype.kind == "c":
        return MPI.C_FLOAT_COMPLEX if bits == 64 else MPI.C_DOUBLE_COMPLEX
    return getattr(MPI, f"INT{bits}_T" if dtype.kind == "i" else f"UINT{bits}_T")


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
        "%s computes %s of %s wrongly; unisono computes it",
        library().name, name, dtype,
    )  # fmt: skip
    return None


@functools.cache
def own_op(dtype: DType, op: RedOpType) -> int:
    """Return the handle of an op that computes with the kernels of the C++ engine."""
    function = ctypes.c_void_p(_engine.mpi_op(_engine.dtype_codes()[dtype.name], op.value))
    # A handle is an int, or a pointer.
    made = ctypes.c_int64() if library().is_openmpi else ctypes.c_int32()
    create = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
    if error := create(address("MPI_Op_create"))(function, 1, ctypes.addressof(made)):
        raise RuntimeError(str(library().MPI.Exception(error)))
    return made.value


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
