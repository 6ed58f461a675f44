"""The compiled reduction loops against the reference engine's, bit for bit."""

import numpy as np
import pytest

from unisono.core.base.types import (
    RedOpType,
    ReduceOp,
    all_dtypes,
    dtype_named,
    require_reducible,
)
from unisono.core.engines.kernels import reduce_into
from unisono.errors import UnsupportedError

_engine = pytest.importorskip("unisono._engine", reason="the C++ engine is not built")

pytestmark = pytest.mark.usefixtures("isa")

# A prime beyond several vectors of every width, so that every loop also has a tail.
COUNT = 4099
NATIVE_DTYPES = [dtype for dtype in all_dtypes() if dtype.kind != "x"]
# What decides a float's fate: signed zeros, denormals, 1, overflow's edge, infinities, NaNs.
EDGES = {
    "float16": "0000 8000 0001 83FF 0400 3C00 7BFF FBFF 7C00 FC00 7E00 FE00 7C01",
    "bfloat16": "0000 8000 0001 807F 0080 3F80 7F7F FF7F 7F80 FF80 7FC0 FFC0 7F81",
}


def is_defined(dtype, op):
    try:
        require_reducible(dtype, ReduceOp(op, 2.0))
    except UnsupportedError:
        return False
    return True


DEFINED = [(d, op) for d in NATIVE_DTYPES for op in RedOpType if is_defined(d, op)]
UNDEFINED = [(d, op) for d in NATIVE_DTYPES for op in RedOpType if not is_defined(d, op)]


def edges(dtype):
    """Return the values at which a type's arithmetic changes, in its storage."""
    if dtype.name in EDGES:
        bits = [int(word, 16) for word in EDGES[dtype.name].split()]
        return np.array(bits, np.uint16).view(dtype.storage)
    if dtype.kind in "iu":
        limits = np.iinfo(dtype.storage)
        return np.array([limits.min, limits.max, 0, 1, limits.max // 2 + 1], dtype.storage)
    if dtype.kind == "b":
        return np.array([False, True])
    real = np.empty(0, dtype.storage).real.dtype
    limits = np.finfo(real)
    values = [0.0, limits.smallest_subnormal, limits.smallest_normal, 1.0, limits.max, np.inf]
    values = np.array([*values, np.nan], real)
    values = np.concatenate([values, -values])
    if dtype.kind == "f":
        return values
    # Side by side, not a + 1j * b: that would multiply infinities by zero.
    pairs = np.stack(np.meshgrid(values, values), axis=-1)
    return np.ascontiguousarray(pairs).view(dtype.storage).ravel()


def operands(dtype, seed):
    """Return two arrays: every pair of edge values, then random bits."""
    random = np.random.default_rng(seed)
    special = edges(dtype)
    # Every pair of scalars; of complex numbers, which have 196 edges, a sample.
    first, second = (grid.ravel() for grid in np.meshgrid(special, special))
    chosen = random.permutation(first.size)[:COUNT]
    both = []
    for pairs in (first[chosen], second[chosen]):
        if dtype.kind == "b":
            noise = random.integers(0, 2, COUNT).astype(bool)
        else:
            noise = np.frombuffer(random.bytes(COUNT * dtype.itemsize), dtype.storage)
        both.append(np.concatenate([pairs, noise]))
    return both


def native(into, other, dtype, op):
    result = into.copy()
    code = _engine.dtype_codes()[dtype.name]
    _engine.reduce(result.ctypes.data, other.ctypes.data, result.size, code, int(op))
    return result


def comparable(values, dtype):
    """Return the values' bits, with one pattern for all NaNs; complex numbers part by part."""
    if dtype.kind == "c":
        values = values.view(values.real.dtype)
    bits = values.view(f"u{values.itemsize}").copy()
    if dtype.name == "bfloat16":
        bits[(bits & 0x7FFF) > 0x7F80] = 0x7FC0
    elif dtype.kind in "fc":
        bits[np.isnan(values)] = np.array(np.nan, values.dtype).view(bits.dtype)
    return bits


def expected(into, other, dtype, op):
    """Return the reference engine's result.

    NumPy multiplies complex numbers with a fused multiply-add on some processors and some
    positions; unisono never does, as hosts would then disagree. So that one is spelled out.
    """
    result = into.copy()
    if dtype.kind == "c" and op is RedOpType.PRODUCT:
        with np.errstate(all="ignore"):
            result.real = into.real * other.real - into.imag * other.imag
            result.imag = into.real * other.imag + into.imag * other.real
    else:
        reduce_into(result, other, dtype, ReduceOp(op))
    return result


@pytest.mark.parametrize(("dtype", "op"), DEFINED, ids=lambda value: getattr(value, "name", value))
def test_same_bits_as_the_reference_engine(dtype, op):
    into, other = operands(dtype, seed=int(op))
    got = comparable(native(into, other, dtype, op), dtype)
    want = comparable(expected(into, other, dtype, op), dtype)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    ("dtype", "op"), UNDEFINED, ids=lambda value: getattr(value, "name", value)
)
def test_pair_without_meaning_is_refused(dtype, op):
    values = np.zeros(1, dtype.storage)
    with pytest.raises(ValueError, match="is not defined"):
        native(values, values, dtype, op)


def test_every_pair_of_float16_values_near_the_rounding_edges():
    """Sums that fall between two halves, at each exponent."""
    dtype = dtype_named("float16")
    every = np.arange(65536, dtype=np.uint16).view(np.float16)
    for bits in (0x0001, 0x0200, 0x03FF, 0x0401, 0x3C01, 0x5801, 0x7BFF, 0x9001):
        other = np.full(every.size, bits, np.uint16).view(np.float16)
        for op in (RedOpType.SUM, RedOpType.PRODUCT):
            got = comparable(native(every, other, dtype, op), dtype)
            want = comparable(expected(every, other, dtype, op), dtype)
            np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("offset", [1, 3])
def test_operands_at_odd_addresses(offset):
    dtype = dtype_named("float64")
    numbers = np.arange(100, dtype=np.float64)
    raw = np.zeros(numbers.nbytes + 8, np.uint8)
    raw[offset : offset + numbers.nbytes] = numbers.view(np.uint8)
    other = np.ones(100)
    code = _engine.dtype_codes()[dtype.name]
    _engine.reduce(raw.ctypes.data + offset, other.ctypes.data, 100, code, int(RedOpType.SUM))
    got = raw[offset : offset + numbers.nbytes].copy().view(np.float64)
    np.testing.assert_array_equal(got, numbers + 1)
    assert not raw[:offset].any()
    assert not raw[offset + numbers.nbytes :].any()


def test_unknown_instruction_set_is_refused_and_changes_nothing(isa):
    with pytest.raises(ValueError, match="pdp11"):
        _engine.set_isa("pdp11")
    assert _engine.isa() == isa
