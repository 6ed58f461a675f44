"""nccl4py and cuda-core, imported on first use; numbers of NCCL's types and reduce ops."""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

from unisono.core.base.types import DType, RedOpType, ReduceOp
from unisono.errors import UnsupportedError

DTYPES = {
    **{"int8": 0, "uint8": 1, "int32": 2, "uint32": 3, "int64": 4, "uint64": 5},
    **{"float16": 6, "float32": 7, "float64": 8, "bfloat16": 9},
    **{"float8_e4m3fn": 10, "float8_e5m2": 11},
}
"""Name of a dtype -> ncclDataType_t."""

BYTES = DTYPES["uint8"]
"""The type of data that is only moved."""

SUM, PRODUCT, MAX, MIN, AVG = range(5)
"""ncclRedOp_t."""

IN_PROGRESS = 7
"""ncclInProgress."""

_OPS = {
    RedOpType.SUM: SUM,
    RedOpType.AVG: AVG,
    RedOpType.PRODUCT: PRODUCT,
    RedOpType.MIN: MIN,
    RedOpType.MAX: MAX,
    RedOpType.PREMUL_SUM: SUM,
}
# A bool is a byte with the value 0 or 1.
_OPS_OF_BOOL = {
    **{RedOpType.SUM: MAX, RedOpType.MAX: MAX, RedOpType.BOR: MAX},
    **{RedOpType.PRODUCT: MIN, RedOpType.MIN: MIN, RedOpType.BAND: MIN},
}
_PARTS = {"complex64": "float32", "complex128": "float64"}


class Libraries(NamedTuple):
    """The modules.

    Attributes:
        nccl: nccl.core, for the life of a communicator.
        calls: nccl.bindings.nccl: NCCL's functions, by addresses.
        cuda: cuda.core.
        driver: cuda.bindings.driver.
    """

    nccl: Any
    calls: Any
    cuda: Any
    driver: Any


def load() -> Libraries:
    """Import the libraries.

    Raises:
        UnsupportedError: A library is missing; has the reason.
    """
    names = ("nccl.core", "nccl.bindings.nccl", "cuda.core", "cuda.bindings.driver")
    try:
        return Libraries(*map(importlib.import_module, names))
    except (ImportError, RuntimeError) as error:
        raise UnsupportedError(
            f"backend 'nccl' needs nccl4py and the libraries of CUDA: {error}",
            hint="pip install 'nccl4py[cu13]', or [cu12] for CUDA 12",
        ) from error


class Reduction(NamedTuple):
    """A reduction as NCCL has it.

    Attributes:
        dtype: ncclDataType_t.
        op: ncclRedOp_t.
        width: Numbers of `dtype` in one element: 2 for complex numbers.
    """

    dtype: int
    op: int
    width: int = 1


def reduction_of(dtype: DType, op: ReduceOp) -> Reduction | None:
    """Return NCCL's form of a reduction; None if NCCL has none."""
    if dtype.kind == "b":
        number = _OPS_OF_BOOL.get(op.op)
        return None if number is None else Reduction(BYTES, number)
    code, number = DTYPES.get(_PARTS.get(dtype.name, dtype.name)), _OPS.get(op.op)
    if code is None or number is None:
        return None
    if dtype.kind != "c":
        return Reduction(code, number)
    # A complex sum is the sum of its parts. A complex product is not.
    return None if op.op is RedOpType.PRODUCT else Reduction(code, number, 2)
