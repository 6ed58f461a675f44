"""Codes of one byte for floating numbers in blocks, each with a float32 scale; no I/O.

A block is up to 128 neighbouring elements. In float32, or in float64 as far as the scale:

    scale = max(largest finite magnitude / M, 2^-126)     no larger than lets M scales be finite
    code  = the code nearest to element / scale, ties to even
    value = code * scale

    int8   -126..126, M = 126; 127 and -127 are the infinities, -128 is NaN
    fp8    float8_e4m3: 4 bits of exponent, 3 of fraction, M = 240; infinities and NaN as IEEE 754

C++ has the same loops (native/kernels/codes_isa.cpp), with the same bits.

So an error of int8 is at most 1/252 of the block's largest magnitude, or 2^-127. That of fp8 is at
most 1/16 of the element, or 2^-10 / 240 of the largest or 2^-136 if that is more. NaN and
infinities are kept.

Source: block scales as in "OCP Microscaling Formats (MX) Specification" (2023); the format of
float8_e4m3 as in ml_dtypes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from unisono.core.base.buffers import Array
from unisono.core.base.seam import cpp, is_wanted
from unisono.core.engines.kernels import narrow, widen

BLOCK = 128
# The smallest normal number: below it a scale is rounded too much.
_LEAST_SCALE = np.float32(2.0**-126)
_MOST = np.finfo(np.float32).max


@dataclass(frozen=True)
class BlockCode:
    """A kind of codes.

    Attributes:
        storage: Type of a code in memory.
        most: M, the largest finite code's value.
        encode: Called as encode(quotients, codes, are_finite); may change the quotients.
        decode: Called as decode(codes, values): sets float32 values, of which the scale is 1.
    """

    storage: Any
    most: int
    encode: Callable[[Array, Array, bool], None]
    decode: Callable[[Array, Array], None]

    def scales(self, largest: Array) -> Array:
        """Return the scales of blocks by their largest finite magnitudes."""
        # Rounded down: to nearest, M scales would be infinite.
        most = np.nextafter(_MOST / np.float32(self.most), np.float32(0))
        return np.clip(largest / self.most, _LEAST_SCALE, most).astype(np.float32)

    def encode_blocks(self, values: Array, scales: Array, codes: Array) -> None:
        """Set the scales and codes [n] of float32 values [n]; the last block may be shorter."""
        for rows, its_scales, its_codes in _rows(values, scales, codes):
            made = np.abs(rows)
            largest = made.max(axis=1)
            if not (are_finite := bool(np.isfinite(largest).all())):
                made[~np.isfinite(made)] = 0
                largest = made.max(axis=1)
            its_scales[...] = self.scales(largest)
            np.divide(rows, its_scales[:, None], out=made)
            self.encode(made, its_codes, are_finite)

    def decode_blocks(self, scales: Array, codes: Array, values: Array) -> None:
        """Set float32 values [n] from what `encode_blocks` made."""
        for rows, its_scales, its_codes in _rows(values, scales, codes):
            self.decode(its_codes, rows)
            rows *= its_scales[:, None]


def _rows(values: Array, scales: Array, codes: Array) -> Iterator[tuple[Array, Array, Array]]:
    """Yield values, scales and codes of whole blocks, [k, 128], and of the last one, [1, m]."""
    count = len(values) // BLOCK
    if whole := count * BLOCK:
        yield values[:whole].reshape(-1, BLOCK), scales[:count], codes[:whole].reshape(-1, BLOCK)
    if whole < len(values):
        yield values[None, whole:], scales[count:], codes[None, whole:]


def _encode_int8(quotients: Array, codes: Array, are_finite: bool) -> None:
    np.rint(quotients, out=quotients)
    if not are_finite:
        np.clip(quotients, -127, 127, out=quotients)
        np.copyto(quotients, -128, where=np.isnan(quotients))
    np.copyto(codes, quotients, casting="unsafe")


def _decode_int8(codes: Array, values: Array) -> None:
    np.copyto(values, codes)
    if codes.size and (codes.min() < -126 or codes.max() > 126):
        values[codes == -128] = np.nan
        values[abs(values) == 127] *= np.float32(np.inf)


def _encode_fp8(quotients: Array, codes: Array, are_finite: bool) -> None:
    bits = quotients.astype(np.float32, copy=False).view(np.uint32)
    # bfloat16 rounded to odd: a second rounding then gives no other result.
    high = (bits >> 16).astype(np.uint16)
    high |= (bits & 0xFFFF) != 0
    np.take(_fp8_codes(), high, out=codes, mode="clip")


def _decode_fp8(codes: Array, values: Array) -> None:
    np.take(_fp8_values(), codes, out=values, mode="clip")


@cache
def _fp8_values() -> Array:
    """Return the numbers [256] of all codes: sign, 4 bits of exponent (bias 7), 3 of fraction."""
    code = np.arange(128)
    exponent, fraction = code >> 3, code & 7
    normal = (8 + fraction) * 2.0 ** (exponent - 10.0)
    values = np.where(exponent == 0, fraction * 2.0**-9, normal)
    values[120], values[121:] = np.inf, np.nan
    return np.concatenate([values, -values]).astype(np.float32)


@cache
def _fp8_codes() -> Array:
    """Return the codes [65536] of all bits of bfloat16; beyond the largest is the largest."""
    size = np.abs(widen(np.arange(1 << 16, dtype=np.uint16)))
    grid = _fp8_values()[:120]
    between = (grid[1:] + grid[:-1]) / 2
    code = np.searchsorted(between, size)
    at = np.minimum(code, 118)
    code += (code < 119) & (size == between[at]) & (code & 1 == 1)
    code[np.isinf(size)], code[np.isnan(size)] = 120, 124
    code[1 << 15 :] += 128
    return code.astype(np.uint8)


BLOCK_CODES = {
    "int8": BlockCode(np.int8, 126, _encode_int8, _decode_int8),
    "fp8": BlockCode(np.uint8, 240, _encode_fp8, _decode_fp8),
}
"""The kinds by their names."""

COMPRESSIONS = (*BLOCK_CODES, "bf16")
"""The values of `compress` in calls."""


class Codec(NamedTuple):
    """The loops of one value of `compress`, over contiguous arrays.

    Attributes:
        storage: Type of a code in memory.
        encode: Called as encode(values, scales, codes): codes float32 values [n].
        decode: Called as decode(scales, codes, values): sets float32 values [n].
        add: Called likewise: adds to them.
    """

    storage: Any
    encode: Callable[[Array, Array, Array], None]
    decode: Callable[[Array, Array, Array], None]
    add: Callable[[Array, Array, Array], None]


def codec_of(compress: str) -> Codec:
    """Return the loops in C++, or in NumPy where the C++ engine is not wanted."""
    return (_codec_in_cpp if is_wanted() else codec_in_numpy)(compress)


@cache
def codec_in_numpy(compress: str) -> Codec:
    """Return the loops in NumPy, which define those in C++."""
    if code := BLOCK_CODES.get(compress):
        storage, encode, decode = code.storage, code.encode_blocks, code.decode_blocks
    else:
        storage, encode, decode = np.uint16, _encode_bf16, _decode_bf16

    def add(scales: Array, codes: Array, values: Array) -> None:
        more = np.empty_like(values)
        decode(scales, codes, more)
        values += more

    return Codec(storage, encode, decode, add)


def _encode_bf16(values: Array, scales: Array, codes: Array) -> None:
    codes[...] = narrow(values)


def _decode_bf16(scales: Array, codes: Array, values: Array) -> None:
    values[...] = widen(codes)


@cache
def _codec_in_cpp(compress: str) -> Codec:
    number = COMPRESSIONS.index(compress)

    def encode(values: Array, scales: Array, codes: Array) -> None:
        cpp.encode(number, _at(values), _at(scales), _at(codes), values.size)

    def decode(scales: Array, codes: Array, values: Array) -> None:
        cpp.decode(number, _at(scales), _at(codes), _at(values), values.size, False)

    def add(scales: Array, codes: Array, values: Array) -> None:
        cpp.decode(number, _at(scales), _at(codes), _at(values), values.size, True)

    return Codec(codec_in_numpy(compress).storage, encode, decode, add)


def _at(array: Array) -> int:
    return int(array.__array_interface__["data"][0])


def coded_nbytes(compress: str, n: int) -> int:
    """Return the size of n elements as scales and codes, or as bfloat16; a multiple of 8."""
    used = 4 * -(-n // BLOCK) + n if compress in BLOCK_CODES else 2 * n
    return -(-used // 8) * 8
