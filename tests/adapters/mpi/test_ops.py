"""Own reduce ops of the MPI engine, which need no MPI, against the reference kernels."""

import ctypes

import numpy as np
import pytest

from unisono.core.base.seam import cpp as extension
from unisono.core.base.types import RedOpType, ReduceOp, dtype_named
from unisono.core.engines.kernels import reduce_into

pytestmark = pytest.mark.native

FLOATS = ("float16", "bfloat16", "float32", "float64")
EXTREMES = (RedOpType.MIN, RedOpType.MAX)
INFINITY = {"float16": 0x7C00, "bfloat16": 0x7F80, "float32": 0x7F800000, "float64": 0x7FF << 52}
NAN = {"float16": 0x7E00, "bfloat16": 0x7FC0, "float32": 0x7FC00000, "float64": 0x7FF8 << 48}


def combine(into, lower, dtype, op):
    """Set `into = lower (op) into` by the function that MPI would call."""
    kind = ctypes.CFUNCTYPE(None, *4 * [ctypes.c_void_p])
    function = kind(extension.mpi_op(extension.dtype_codes()[dtype.name], op.value))
    function(lower.ctypes.data, into.ctypes.data, ctypes.addressof(ctypes.c_int(into.size)), None)


def awkward(name, random):
    """Every bit pattern of 16 bits is in it once; wider types have all kinds of values."""
    dtype = dtype_named(name)
    bits = np.dtype(f"u{dtype.itemsize}")
    if dtype.itemsize == 2:
        zeros, every = np.array([0, 1 << 15], bits), random.permutation(1 << 16).astype(bits)
        all_bits = np.concatenate([np.repeat(zeros, 2), every, np.tile(zeros, 2)])
        return all_bits.view(dtype.storage)
    odd = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, -np.nan, 5e-324, 1.0, -1.0], dtype.storage)
    raw = random.integers(0, 1 << 32, (5000, dtype.itemsize // 4), np.uint32)
    return np.concatenate([np.repeat(odd, 9), raw.view(dtype.storage).reshape(-1), np.tile(odd, 9)])


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("op", EXTREMES)
def test_minimum_and_maximum(name, op):
    """The kernels' values; equal bits in either order; one NaN; -0 below +0."""
    random = np.random.default_rng(1)
    dtype = dtype_named(name)
    a, b = awkward(name, random), awkward(name, random)[::-1].copy()
    bits = np.dtype(f"u{dtype.itemsize}")
    one, other, expected = a.copy(), b.copy(), a.copy()
    combine(one, b, dtype, op)
    combine(other, a, dtype, op)
    reduce_into(expected, b, dtype, ReduceOp(op))
    assert (one.view(bits) == other.view(bits)).all()
    sign = bits.type(1 << (8 * dtype.itemsize - 1))
    infinity = bits.type(INFINITY[name])
    nan = (expected.view(bits) & ~sign) > infinity
    assert (one.view(bits)[nan] == bits.type(NAN[name])).all()
    zero = (expected.view(bits) & ~sign) == 0
    rest = ~(nan | zero)
    assert (one.view(bits)[rest] == expected.view(bits)[rest]).all()
    signs = [array.view(bits)[zero] & sign for array in (a, b)]
    both = np.maximum(*signs) if op is RedOpType.MIN else np.minimum(*signs)
    negative = one.view(bits)[zero] & sign
    zeros = (a.view(bits)[zero] & ~sign == 0) & (b.view(bits)[zero] & ~sign == 0)
    assert (negative[zeros] == both[zeros]).all()
    assert all(part.any() for part in (nan, zeros, rest))


@pytest.mark.parametrize("name", ["float16", "bfloat16", "int8", "uint16", "complex64"])
@pytest.mark.parametrize("op", [RedOpType.SUM, RedOpType.PRODUCT])
def test_sums_and_products(name, op):
    random = np.random.default_rng(2)
    dtype = dtype_named(name)
    if dtype.kind == "c":
        a, b = (random.normal(size=(999, 2)).astype(np.float32).view(np.complex64) for _ in "ab")
    else:
        a, b = (random.integers(0, 256, 999 * dtype.itemsize, np.uint8) for _ in "ab")
        a, b = a.view(dtype.storage), b.view(dtype.storage)
    a, b = a.reshape(-1).copy(), b.reshape(-1).copy()
    into, expected = a.copy(), a.copy()
    combine(into, b, dtype, op)
    reduce_into(expected, b, dtype, ReduceOp(op), swapped=True)
    bits = np.dtype(f"u{min(dtype.itemsize, 4)}")
    if dtype.kind == "f":
        # The bits of a NaN may come from either operand.
        sign = bits.type(1 << 15)
        nan = (expected.view(bits) & ~sign) > INFINITY[name]
        assert ((into.view(bits)[nan] & ~sign) > INFINITY[name]).all()
        into, expected = into[~nan], expected[~nan]
    assert (into.view(bits) == expected.view(bits)).all()
