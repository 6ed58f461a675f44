import pickle
from types import SimpleNamespace

import numpy as np
import pytest

from unisono.core.base import types
from unisono.core.base.types import (
    RedOpType,
    ReduceOp,
    all_dtypes,
    dtype_named,
    dtype_of_numpy,
    require_reducible,
)
from unisono.errors import InvalidArgumentError, UnsupportedError


def test_reduce_ops_are_numbered_as_in_torch():
    dist = pytest.importorskip("torch.distributed")
    for op in RedOpType:
        assert int(getattr(dist.ReduceOp.RedOpType, op.name)) == op


def test_reduce_op_values():
    assert ReduceOp(RedOpType.SUM) == ReduceOp.SUM
    assert ReduceOp.PREMUL_SUM(0.5) == ReduceOp(RedOpType.PREMUL_SUM, 0.5)
    assert ReduceOp.PREMUL_SUM(2).factor == 2.0
    assert repr(ReduceOp.MAX) == "ReduceOp.MAX"
    assert repr(ReduceOp.PREMUL_SUM(2)) == "ReduceOp.PREMUL_SUM(2.0)"
    assert pickle.loads(pickle.dumps(ReduceOp.PREMUL_SUM(3))) == ReduceOp.PREMUL_SUM(3)
    with pytest.raises(InvalidArgumentError) as caught:
        ReduceOp.SUM(2)
    assert caught.value.what == "ReduceOp.SUM takes no factor"


def test_dtypes_know_their_storage():
    assert len(all_dtypes()) == 19
    for dtype in all_dtypes():
        assert dtype_named(dtype.name) is dtype
        assert str(dtype) == dtype.name
        if dtype.name != "bfloat16" and dtype.kind != "x":
            assert dtype_of_numpy(np.dtype(dtype.name)) is dtype
            assert dtype.storage == np.dtype(dtype.name)
    assert dtype_named("bfloat16").itemsize == 2
    assert dtype_named("float8_e5m2").itemsize == 1
    assert dtype_of_numpy(np.dtype(">i4")).name == "int32"


def test_long_doubles_are_named_with_their_mantissa_bits(monkeypatch):
    """Ranks compare names: x86-64 has 63 bits in 16 bytes, aarch64 has 112."""
    long = ["longdouble", "clongdouble", [("a", "i4"), ("b", [("c", "longdouble", 3)])]]
    other = ["U3", "M8[s]", [("longdouble", "f4"), ("f16", "i4")]]
    for bits in (63, 112):
        monkeypatch.setattr(types, "_BY_NUMPY", {})
        monkeypatch.setattr(np, "finfo", lambda _, bits=bits: SimpleNamespace(nmant=bits))
        for dtype in map(np.dtype, long):
            assert dtype_of_numpy(dtype).name == f"{dtype} ({bits} mantissa bits)"
        for dtype in map(np.dtype, other):
            assert dtype_of_numpy(dtype).name == str(dtype)


def test_unknown_dtype():
    with pytest.raises(UnsupportedError) as caught:
        dtype_named("float128")
    assert caught.value.what.startswith("dtype 'float128' is not supported (supported: bool, int8")


ARITHMETIC, ORDER, BITS = ["SUM", "PRODUCT"], ["MIN", "MAX"], ["BAND", "BOR", "BXOR"]


@pytest.mark.parametrize(
    ("name", "defined"),
    [
        ("bool", [*ARITHMETIC, *ORDER, *BITS]),
        ("int32", [*ARITHMETIC, "AVG", *ORDER, *BITS]),
        ("uint8", [*ARITHMETIC, "AVG", *ORDER, *BITS]),
        ("float64", [*ARITHMETIC, "AVG", "PREMUL_SUM", *ORDER]),
        ("bfloat16", [*ARITHMETIC, "AVG", "PREMUL_SUM", *ORDER]),
        ("complex64", [*ARITHMETIC, "AVG", "PREMUL_SUM"]),
        ("float8_e4m3fn", []),
    ],
)
def test_which_op_has_a_meaning(name, defined):
    dtype = dtype_named(name)
    for kind in RedOpType:
        op = ReduceOp(kind, 2.0 if kind is RedOpType.PREMUL_SUM else None)
        if kind.name in defined:
            require_reducible(dtype, op)
            continue
        with pytest.raises(UnsupportedError) as caught:
            require_reducible(dtype, op)
        has = ", ".join(sorted(defined)) or "none: it only moves"
        expected = f"reduce op {kind.name} is not defined on {name} (defined: {has})"
        assert caught.value.what == expected
