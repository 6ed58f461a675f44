"""Exact sums of floats: the sum of any number of contributions, rounded once.

A sum is kept as two floats, whose rounding errors are caught (two-sum). Where two floats cannot
hold it, Python's integers add the contributions as multiples of the smallest float.

Source: T. J. Dekker, "A floating-point technique for extending the available precision" (1971);
S. Boldo, G. Melquiond, "Emulation of FMA and correctly rounded sums: proved algorithms using
rounding to odd" (2008).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from unisono.core.base.buffers import Array
from unisono.core.engines.kernels import narrow, widen

# Elements that are added at once, so that all sums in between stay in the cache.
_BLOCK = 1 << 13
# Every float64 is a multiple of 1 / _UNIT.
_UNIT = 1 << 1074
_KINDS = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")


def sums_exactly(dtype_name: str) -> bool:
    """Return whether `exact_sum` adds this type."""
    return dtype_name in _KINDS


def real_of(dtype_name: str) -> str:
    """Return the name of the type of a complex number's parts; of another type its own."""
    return {"complex64": "float32", "complex128": "float64"}.get(dtype_name, dtype_name)


def widened(flat: Array, dtype_name: str) -> Array:
    """Return numbers [n], of bfloat16 their bits, as float64 [n], or [2n] of complex numbers."""
    values = widen(flat) if dtype_name == "bfloat16" else flat
    return values.view(values.real.dtype).astype(np.float64)


def exact_sum(parts: Array, dtype_name: str, divisor: int = 1) -> Array:
    """Return the sum [n] of float64 parts [k, n], rounded once to a type; bfloat16 as its bits.

    The rounding is to nearest, ties to even. A sum of -0 alone is -0. A NaN, or infinities of both
    signs, give NaN. A sum beyond the type's range gives infinity. With a divisor, a narrow type's
    quotient is rounded in float64 first, and a float64 sum is divided after its rounding.

    Cost: some 20 operations on an element. If two floats cannot hold its sum, 1 to 2 us per part.
    """
    name = real_of(dtype_name)
    result = np.empty(parts.shape[1])
    with np.errstate(all="ignore"):
        for at in range(0, len(result), _BLOCK):
            result[at : at + _BLOCK] = _sum_block(parts[:, at : at + _BLOCK], name != "float64")
        if divisor != 1:
            result /= divisor
        if name == "float64":
            return result
        if name == "float32":
            return result.astype(np.float32)
        # Once more to odd: the type's bits, and two more, decide the rounding.
        single = result.astype(np.float32)
        single = _to_odd(single, result - single.astype(np.float64), np.int32)
        return narrow(single) if name == "bfloat16" else single.astype(np.float16)


def split_exactly(parts: Array) -> list[Array]:
    """Return as few float64 arrays [n] as have the exact sum of the parts [k, n].

    An element that is infinite or NaN is in the first one. Sums near the largest float64 take a row
    for each multiple of it. The sum of no parts is 0.
    """
    most, rows = np.finfo(np.float64).max, list[Array]()
    with np.errstate(all="ignore"):
        while True:
            row = exact_sum(parts, "float64")
            if rows:
                row = np.where(np.isfinite(rows[0]), row, 0.0)
                if not row.any():
                    return rows
                # The first one alone has the sign of a zero.
                row = np.where(row == 0, -0.0, row)
            # The sum of finite parts may be beyond the range: then its other half follows.
            is_beyond = np.isinf(row) & np.isfinite(parts).all(axis=0)
            row = np.where(is_beyond, np.copysign(most, row), row)
            rows.append(row)
            parts = np.concatenate([parts, -row[None]])


def _sum_block(parts: Array, to_odd: bool) -> Array:
    """Return the sum of float64 parts [k, n], to nearest or to odd."""
    high, low = parts[0].copy(), np.zeros(parts.shape[1])
    is_lost = np.zeros(parts.shape[1], bool)
    for part in parts[1:]:
        high, error = _two_sum(high, part)
        low, error = _two_sum(low, error)
        is_lost |= error != 0
    high, low = _two_sum(high, low)
    is_lost |= ~np.isfinite(high)
    if is_lost.any():
        special = np.where(np.isfinite(parts), 0.0, parts).sum(axis=0)
        # One NaN of many.
        high = np.where(np.isnan(special), np.nan, np.where(special != 0, special, high))
        low[special != 0] = 0.0
        for at in np.flatnonzero(is_lost & (special == 0)):
            high[at], low[at] = _sum_of_integers(parts[:, at])
    is_zero = high == 0
    high[is_zero] = np.where(np.signbit(parts[:, is_zero]).all(axis=0), -0.0, 0.0)
    return _to_odd(high, low, np.int64) if to_odd else high


def _two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    """Return the rounded sum and its error; the error is exact if the sum is finite."""
    total = a + b
    rest = total - a
    return total, (a - (total - rest)) + (b - rest)


def _sum_of_integers(column: Array) -> tuple[float, float]:
    """Return the sum of finite floats, rounded to nearest, and a number with its error's sign."""
    total = 0
    for value in column.tolist():
        numerator, denominator = value.as_integer_ratio()
        total += numerator * (_UNIT // denominator)
    try:
        nearest = total / _UNIT
    except OverflowError:
        return (np.inf if total > 0 else -np.inf), 0.0
    numerator, denominator = nearest.as_integer_ratio()
    error = total - numerator * (_UNIT // denominator)
    return nearest, float((error > 0) - (error < 0))


def _to_odd(nearest: Array, error: Array, bits: Any) -> Array:
    """Return a rounding to nearest as one to odd, so that a second rounding gives no other result.

    Of the two floats around an inexact sum it is that with an odd last bit.
    """
    whole = nearest.view(bits)
    change = np.where((error > 0) == (nearest > 0), 1, -1)
    is_even = (error != 0) & (whole & 1 == 0) & ~np.isnan(nearest)
    odd: Array = np.where(is_even, whole + change, whole).astype(bits)
    return odd.view(nearest.dtype)
