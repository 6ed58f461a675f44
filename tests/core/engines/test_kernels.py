import numpy as np
import pytest

from unisono.core.base.types import ReduceOp, dtype_named
from unisono.core.engines.kernels import divide, reduce_into, scale

BF16 = dtype_named("bfloat16")
OPS = [ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX]


def bf16_bits():
    """Return pairs of bit patterns: many random ones, and all corners with each other."""
    corners = np.array(
        [0x0000, 0x8000, 0x0001, 0x8001, 0x007F, 0x0080, 0x3F80, 0xBF80, 0x3F81, 0x7F7F, 0xFF7F,
         0x7F80, 0xFF80, 0x7FC0, 0xFFC1, 0x7F81], np.uint16
    )  # fmt: skip
    left, right = map(np.ravel, np.meshgrid(corners, corners))
    more = np.random.default_rng(1).integers(0, 1 << 16, (2, 20_000)).astype(np.uint16)
    return np.concatenate([left, more[0]]), np.concatenate([right, more[1]])


def same_bf16(got, want):
    """Compare bit for bit; any NaN equals any NaN."""
    is_nan = (want & 0x7FFF) > 0x7F80
    np.testing.assert_array_equal((got & 0x7FFF) > 0x7F80, is_nan)
    np.testing.assert_array_equal(got[~is_nan], want[~is_nan])


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_bfloat16_as_in_torch(op):
    torch = pytest.importorskip("torch")
    left, right = bf16_bits()
    a, b = (torch.from_numpy(x.view(np.int16).copy()).view(torch.bfloat16) for x in (left, right))
    function = {"SUM": torch.add, "PRODUCT": torch.mul, "MIN": torch.minimum, "MAX": torch.maximum}
    want = function[op.name](a, b).view(torch.int16).numpy().view(np.uint16)
    if op.name in ("MIN", "MAX"):
        # Which zero is the smaller one is nobody's promise.
        want = np.where((want & 0x7FFF) == 0, 0, want)
    got = left.copy()
    reduce_into(got, right, BF16, op)
    if op.name in ("MIN", "MAX"):
        got = np.where((got & 0x7FFF) == 0, 0, got)
    same_bf16(got, want)


def test_bfloat16_divide_and_scale_round_once():
    torch = pytest.importorskip("torch")
    bits = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
    values = torch.from_numpy(bits.view(np.int16).copy()).view(torch.bfloat16).float()
    for function, want in ((lambda x: divide(x, BF16, 3), values / 3),
                           (lambda x: scale(x, BF16, 0.1), values * 0.1)):  # fmt: skip
        got = bits.copy()
        function(got)
        same_bf16(got, want.bfloat16().view(torch.int16).numpy().view(np.uint16))


@pytest.mark.parametrize("name", ["int8", "int64", "uint8", "uint64"])
@pytest.mark.parametrize("divisor", [1, 2, 3, 7])
def test_integers_divide_toward_zero(name, divisor):
    dtype = dtype_named(name)
    info = np.iinfo(dtype.storage)
    whole = [info.min, info.min + 1, info.max, info.max - 1, 0, 1, 2, 5, 100]
    if info.min < 0:
        whole += [-1, -2, -5, -100]
    values = np.array(whole, dtype.storage)
    divide(values, dtype, divisor)
    assert values.tolist() == [abs(v) // divisor * (1 if v >= 0 else -1) for v in whole]


@pytest.mark.parametrize("name", ["float16", "float32", "float64", "complex64"])
def test_floats_divide_and_scale_in_their_own_precision(name):
    dtype = dtype_named(name)
    values = np.random.default_rng(0).normal(size=50).astype(dtype.storage)
    got = values.copy()
    divide(got, dtype, 3)
    np.testing.assert_array_equal(got, values / dtype.storage.type(3))
    got = values.copy()
    scale(got, dtype, 0.25)
    np.testing.assert_array_equal(got, values * dtype.storage.type(0.25))
    assert got.dtype == dtype.storage


@pytest.mark.parametrize("op", [ReduceOp.MIN, ReduceOp.MAX], ids=lambda op: op.name)
def test_nan_wins(op):
    for left, right in ((np.nan, 1.0), (1.0, np.nan), (np.nan, np.nan)):
        into = np.array([left], np.float32)
        reduce_into(into, np.array([right], np.float32), dtype_named("float32"), op)
        assert np.isnan(into).all()


def test_overflow_is_silent():
    for name, big in (("int8", 127), ("float16", 65504.0)):
        dtype = dtype_named(name)
        into = np.array([big], dtype.storage)
        reduce_into(into, into.copy(), dtype, ReduceOp.SUM)
        assert into[0] == (-2 if name == "int8" else np.inf)


def test_swapped_operands():
    into, other = np.array([np.nan, 1.0]), np.array([1.0, np.nan])
    reduce_into(into, other, dtype_named("float64"), ReduceOp.SUM, swapped=True)
    assert np.isnan(into).all()
    bits, more = np.array([0x3F80], np.uint16), np.array([0x4000], np.uint16)
    reduce_into(bits, more, BF16, ReduceOp.SUM, swapped=True)
    assert bits.tolist() == [0x4040]
