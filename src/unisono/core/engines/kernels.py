"""Element-wise reductions of the reference engine, in NumPy.

bfloat16 has no NumPy arithmetic: it is widened to float32, reduced, and rounded to nearest even,
which is what hardware does. An accumulation of bfloat16 or float16 is in float32 until its end.
Overflow follows the dtype silently, as in every MPI and in torch.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from unisono.core.base.buffers import Array
from unisono.core.base.types import DType, RedOpType, ReduceOp

_UFUNCS: dict[RedOpType, np.ufunc] = {
    RedOpType.SUM: np.add,
    RedOpType.AVG: np.add,
    RedOpType.PREMUL_SUM: np.add,
    RedOpType.PRODUCT: np.multiply,
    RedOpType.MIN: np.minimum,
    RedOpType.MAX: np.maximum,
    RedOpType.BAND: np.bitwise_and,
    RedOpType.BOR: np.bitwise_or,
    RedOpType.BXOR: np.bitwise_xor,
}


def reduce_into(
    into: Array, other: Array, dtype: DType, op: ReduceOp, *, swapped: bool = False
) -> None:
    """Set `into = into (op) other`, element by element; `swapped`: `into = other (op) into`.

    AVG and PREMUL_SUM add here; their factors are applied before (`scale`) or after (`divide`).
    """
    ufunc = _UFUNCS[op.op]
    with np.errstate(all="ignore"):
        if dtype.name == "bfloat16":
            left, right = widen(into), widen(other)
            into[:] = narrow(ufunc(right, left) if swapped else ufunc(left, right))
        elif dtype.kind == "c" and op.op is RedOpType.PRODUCT:
            _multiply_complex(into, other)
        elif swapped:
            ufunc(other, into, out=into)
        else:
            ufunc(into, other, out=into)


class Accumulations:
    """The reductions of a program, of which consecutive ones into one place are an accumulation."""

    def __init__(self, dtype: DType, op: ReduceOp) -> None:
        self._dtype, self._op = dtype, op
        self._is_wide = dtype.name in ("bfloat16", "float16") and _UFUNCS[op.op] is np.add
        self._total: Any = None

    def reduce(self, into: Array, other: Array, *, swapped: bool, goes_on: bool) -> None:
        """Set `into = into (op) other`.

        Args:
            into: The left operand, and the result unless the sum goes on.
            other: The right operand.
            swapped: `into` is the right operand, if it is not the sum of earlier ones.
            goes_on: The next reduction adds to the same sum.
        """
        if not self._is_wide or (self._total is None and not goes_on):
            reduce_into(into, other, self._dtype, self._op, swapped=swapped)
            return
        with np.errstate(all="ignore"):
            wide = self._widen(other)
            if self._total is not None:
                self._total += wide
            else:
                mine = self._widen(into)
                self._total = wide + mine if swapped else mine + wide
            if not goes_on:
                into[:] = narrow(self._total) if self._dtype.name == "bfloat16" else self._total
                self._total = None

    def _widen(self, values: Array) -> Array:
        return widen(values) if self._dtype.name == "bfloat16" else values.astype(np.float32)


def scale(values: Array, dtype: DType, factor: float) -> None:
    """Multiply floating or complex values by `factor`, in place."""
    with np.errstate(all="ignore"):
        if dtype.name == "bfloat16":
            values[:] = narrow(widen(values) * np.float32(factor))
        else:
            np.multiply(values, values.dtype.type(factor), out=values)


def divide(values: Array, dtype: DType, divisor: int) -> None:
    """Divide by the number of ranks, in place; integers are rounded toward zero."""
    with np.errstate(all="ignore"):
        if dtype.name == "bfloat16":
            values[:] = narrow(widen(values) / np.float32(divisor))
        elif dtype.kind in "iu":
            # Wide enough for the divisor too: 200 ranks do not fit an int8.
            wide = values.astype(np.int64 if dtype.kind == "i" else np.uint64)
            quotient = wide // wide.dtype.type(divisor)
            # // rounds down; C, and with it NCCL's ncclAvg, rounds toward zero.
            quotient += (wide < 0) & (quotient * wide.dtype.type(divisor) != wide)
            values[:] = quotient.astype(values.dtype)
        else:
            np.divide(values, values.dtype.type(divisor), out=values)


def _multiply_complex(into: Array, other: Array) -> None:
    """Multiply with each product rounded.

    NumPy's own loop fuses a multiplication with an addition or not, depending on the processor
    and on where in the array an element stands.
    """
    real = into.real * other.real - into.imag * other.imag
    into.imag = into.real * other.imag + into.imag * other.real
    into.real = real


def widen(bits: Array) -> Array:
    """Return bfloat16, given as its bits, as float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def narrow(values: Array) -> Array:
    """Return float32 as the bits of bfloat16, rounded to nearest even."""
    bits = values.view(np.uint32)
    # Adding half of the last kept bit's weight, less one unless that bit is odd, rounds to even.
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    quiet_nan = ((bits >> 16) | 0x40).astype(np.uint16)
    return np.where(np.isnan(values), quiet_nan, rounded)
