"""What the public calls must give, in NumPy, and arrays of every dtype and layout."""

from functools import cache

import ml_dtypes
import numpy as np

import unisono as dist

INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
FLOATS = ["float16", "float32", "float64", "bfloat16"]
COMPLEX = ["complex64", "complex128"]
FLOAT8 = ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"]
DTYPES = ["bool", *INTEGERS, *FLOATS, *COMPLEX, *FLOAT8]

FACTOR = 0.75
BITWISE = ["BAND", "BOR", "BXOR"]
REDUCE_OPS = {
    "bool": ("SUM", "PRODUCT", "MIN", "MAX", *BITWISE),
    **dict.fromkeys(INTEGERS, ("SUM", "AVG", "PRODUCT", "MIN", "MAX", *BITWISE)),
    **dict.fromkeys(FLOATS, ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "PREMUL_SUM")),
    **dict.fromkeys(COMPLEX, ("SUM", "AVG", "PRODUCT", "PREMUL_SUM")),
    **dict.fromkeys(FLOAT8, ()),
}
ALL_OPS = ["SUM", "AVG", "PRODUCT", "MIN", "MAX", *BITWISE, "PREMUL_SUM"]
UFUNCS = {
    "SUM": np.add, "PRODUCT": np.multiply, "MIN": np.minimum, "MAX": np.maximum,
    "BAND": np.bitwise_and, "BOR": np.bitwise_or, "BXOR": np.bitwise_xor,
}  # fmt: skip


def reduce_op(name):
    return (
        dist.ReduceOp.PREMUL_SUM(FACTOR) if name == "PREMUL_SUM" else getattr(dist.ReduceOp, name)
    )


def np_dtype(name):
    return (
        np.dtype(getattr(ml_dtypes, name))
        if "bfloat" in name or "float8" in name
        else np.dtype(name)
    )


def bits(array):
    """Return the bytes of the elements in C order."""
    return np.ascontiguousarray(array).tobytes()


def frozen(array):
    array.flags.writeable = False
    return array


# Ranks that are threads share the cache: without it the oracle takes most of the time.
@cache
def values(dtype, rank, count, salt=0):
    """Return [count] values that every rank can compute for every other; read-only."""
    return frozen(_values(dtype, rank, count, salt))


def _values(dtype, rank, count, salt):
    rng = np.random.default_rng([rank, count, salt])
    kind = np_dtype(dtype)
    if dtype == "bool":
        return rng.integers(0, 2, count).astype(bool)
    if dtype in INTEGERS:
        info = np.iinfo(kind)
        return rng.integers(info.min, info.max, count, kind, endpoint=True)
    real = rng.uniform(0.5, 1.5, count) * rng.choice([-1, 1], count)
    if dtype in COMPLEX:
        return (real + 1j * rng.uniform(-1, 1, count)).astype(kind)
    return real.astype(kind)


@cache
def reduction(dtype, op, p, count, salt=0):
    """Return `reduced` of the `values` of p ranks."""
    exact, slack = reduced(dtype, op, [values(dtype, r, count, salt) for r in range(p)])
    return frozen(exact), slack


def reduced(dtype, op, arrays):
    """Return the reduction of all ranks' arrays, and how far from it a result may be.

    Integers, bool, MIN and MAX must be exact. Each of the p-1 operations on floats rounds by at
    most half a unit in the last place of a partial result, and no partial result is larger than
    the reduction of the absolute values; AVG and PREMUL_SUM round once more per value. A complex
    product is made of four products and two sums, hence the factor.
    """
    p = len(arrays)
    if dtype in FLOATS + COMPLEX and op not in ("MIN", "MAX"):
        wide = np.clongdouble if dtype in COMPLEX else np.longdouble
        stack = np.stack([a.astype(wide) for a in arrays])
        sizes = abs(stack)
        if op == "PRODUCT":
            exact, size = stack.prod(0), sizes.prod(0)
        else:
            exact, size = stack.sum(0), sizes.sum(0)
            scale = {"AVG": 1 / wide(p), "PREMUL_SUM": wide(FACTOR)}.get(op, 1)
            exact, size = exact * scale, size * abs(scale)
        eps = float(ml_dtypes.finfo(np_dtype(dtype)).eps)
        return exact, (p + 1) * eps * (4 if dtype in COMPLEX else 1) * size
    ufunc = UFUNCS["SUM" if op == "AVG" else op]
    result = arrays[0].copy()
    for other in arrays[1:]:
        result = ufunc(result, other, dtype=result.dtype)
    if op == "AVG":
        exact = [trunc_div(int(x), p) for x in result]
        result = np.array(exact, result.dtype)
    return result, None


def outcome(collective, given, root, reduced, blocks):
    """Return what each rank must have after a collective, None where that is undefined.

    Args:
        given: What each rank has.
        reduced: Function of a list of arrays.
        blocks: Function of a rank: what it has for each rank.
    """
    ranks = range(len(given))

    def at_root(value):
        return [value if rank == root else None for rank in ranks]

    match collective:
        case "all_reduce":
            return [reduced(given) for _ in ranks]
        case "reduce":
            return at_root(reduced(given))
        case "scan":
            return [reduced(given[: rank + 1]) for rank in ranks]
        case "exscan":
            return [reduced(given[: max(rank, 1)]) for rank in ranks]
        case "broadcast":
            return [given[root] for _ in ranks]
        case "all_gather":
            return [np.concatenate(given) for _ in ranks]
        case "gather":
            return at_root(np.concatenate(given))
        case "scatter":
            return list(blocks(root))
        case "reduce_scatter":
            return [reduced([blocks(source)[rank] for source in ranks]) for rank in ranks]
        case "all_to_all":
            return [np.concatenate([blocks(source)[rank] for source in ranks]) for rank in ranks]


def trunc_div(value, divisor):
    return value // divisor if value >= 0 else -(-value // divisor)


def check(case, got, expected, slack=None):
    """Compare C-order elements; the case is named on failure."""
    got = np.asarray(got).reshape(-1)
    if slack is None:
        assert got.dtype == expected.dtype, (case, got.dtype, expected.dtype)
        assert bits(got) == bits(expected), f"{case}: got {got}, expected {expected}"
    else:
        error = abs(got.astype(expected.dtype) - expected)
        assert (error <= slack).all(), f"{case}: got {got}, expected {expected}, error {error}"


class Placed:
    """An array of a given layout, and what lies between its elements."""

    def __init__(self, data, layout, library="numpy"):
        self.library, self.dtype = library, data.dtype
        base = data.reshape(-1)
        if layout == "strided":
            base = np.repeat(base, 2)
            base.view(np.uint8).reshape(-1)[:] = 0x55
            base[::2] = data
        elif layout == "negative":
            base = base[::-1]
        elif layout == "fortran":
            columns = next(n for n in (3, 2, 1) if data.size % n == 0)
            base = data.reshape(-1, columns).T
        self.layout = layout
        self._base = np.ascontiguousarray(base).copy()
        if library == "numpy":
            self.array = self._look(self._base)
        else:
            import torch

            bits_only = self._base.view(f"i{self._base.itemsize}") if self._opaque() else self._base
            tensor = torch.from_numpy(bits_only)
            self._tensor = (
                tensor.view(getattr(torch, data.dtype.name)) if self._opaque() else tensor
            )
            self.array = self._look(self._tensor)

    def _opaque(self):
        return self.dtype.name in [*FLOAT8, "bfloat16"]

    def _look(self, base):
        match self.layout:
            case "strided":
                return base[::2]
            case "negative":
                return base[::-1]
            case "fortran":
                return base.T
            case "scalar" if base.shape == (1,):
                return base.reshape(())
        return base

    def elements(self):
        """Return the values in C order, as NumPy sees them; fail if a gap was written."""
        if self.layout == "strided":
            assert set(self._base[1::2].tobytes()) <= {0x55}, "the gaps were written"
        return np.ascontiguousarray(self._look(self._base)).reshape(-1)


def layouts(library):
    return ["contiguous", "strided", "fortran"] + (["negative"] if library == "numpy" else [])
