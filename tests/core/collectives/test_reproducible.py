"""Exact sums, rounded once: the bits depend on nothing but the contributions."""

import math
from fractions import Fraction

import numpy as np
import pytest

import unisono as dist
from unisono.core.engines.kernels import narrow, widen
from unisono.core.operations.sums import exact, exact_exchange
from unisono.core.operations.sums.exact import exact_sum, split_exactly
from unisono.errors import (
    ArgumentTypeError,
    CollectiveMismatchError,
    InvalidArgumentError,
    UnsupportedError,
)

# Bits of a significand, exponent of the smallest number, largest number.
FORMATS = {
    "float16": (11, -24, 65504.0),
    "bfloat16": (8, -133, (2 - 2**-7) * 2.0**127),
    "float32": (24, -149, float(np.finfo("f4").max)),
    "float64": (53, -1074, float(np.finfo("f8").max)),
}


def rounded(column, name: str) -> float:
    """Return the exact sum, rounded to nearest even: by fractions."""
    total = sum(map(Fraction, column.tolist()))
    if not total:
        return -0.0 if np.signbit(column).all() else 0.0
    bits, least, most = FORMATS[name]
    size = abs(total)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    exponent -= Fraction(2) ** exponent > size
    value = round(size / (unit := Fraction(2) ** max(exponent - bits + 1, least))) * unit
    nearest = float(value) if value <= Fraction(most) else math.inf
    return nearest if total > 0 else -nearest


def parts_of(name: str, kind: str, rng) -> np.ndarray:
    """Return [k, n] numbers of a type, as float64."""
    k, n = int(rng.integers(1, 9)), 100
    x = rng.normal(size=(k, n))
    if kind == "far apart":
        _, least, most = FORMATS[name]
        span = int(min(math.log2(most), -least) / 2)
        x *= 2.0 ** rng.integers(-span, span, size=(k, n))
    elif kind == "ties":
        x = rng.integers(-3, 4, size=(k, n)) * 2.0 ** rng.integers(-14, 13, size=(k, n))
    elif kind == "cancel":
        x *= 2.0 ** rng.integers(-10, 10, size=(k, n))
        x = np.concatenate([x, -x, rng.normal(size=(1, n)) * 2.0**-14])
    elif kind == "overflow":
        x = np.where(x > 0, 1.0, -1.0) * FORMATS[name][2] * 2.0 ** -rng.integers(0, 3, size=(k, n))
    with np.errstate(all="ignore"):
        if name == "bfloat16":
            return widen(narrow(x.astype(np.float32))).astype(np.float64)
        x = x.astype(name).astype(np.float64)
    return x[:, np.isfinite(x).all(axis=0)]


@pytest.mark.parametrize("kind", ["near", "far apart", "ties", "cancel", "overflow"])
@pytest.mark.parametrize("name", FORMATS)
def test_a_sum_is_rounded_once(name, kind, monkeypatch):
    monkeypatch.setattr(exact, "_BLOCK", 64)
    rng = np.random.default_rng(len(name + kind))
    for _ in range(8):
        parts = parts_of(name, kind, rng)
        got = exact_sum(parts, name)
        got = (widen(got) if name == "bfloat16" else got).astype(np.float64)
        expected = np.array([rounded(column, name) for column in parts.T])
        # Of zeros the sign, too.
        assert got.tobytes() == expected.tobytes()
        rows = np.array(split_exactly(parts))
        for row, column in zip(rows.T, parts.T, strict=True):
            assert sum(map(Fraction, row.tolist())) == sum(map(Fraction, column.tolist()))


def test_zeros_infinities_and_nan():
    cases = [
        ([-0.0, -0.0], -0.0),
        ([-0.0, 0.0], 0.0),
        ([1.0, -1.0], 0.0),
        ([np.inf, 1.0], np.inf),
        ([-np.inf, 1e308, 1e308], -np.inf),
        ([np.inf, -np.inf], np.nan),
        ([-np.nan, 1.0], np.nan),
        ([1e308, 1e308, -1e308, -1e308], 0.0),
        ([5e-324, 1e308, -1e308], 5e-324),
    ]
    for name in ("float64", "float32"):
        for parts, expected in cases[: 7 if name == "float32" else None]:
            got = exact_sum(np.array(parts)[:, None], name)
            assert got.tobytes() == np.array([expected], name).tobytes(), (name, parts)


@pytest.mark.ranks(3, kind="both")
@pytest.mark.parametrize("name", ["float16", "float32", "float64", "complex64", "complex128"])
def test_all_kinds_of_calls_and_sizes(rank, name, monkeypatch):
    monkeypatch.setattr(exact_exchange, "_GATHERED_BYTES", 200)
    rng, real = np.random.default_rng(3), np.dtype(name).type(0).real.dtype.name
    for n in (0, 1, 7, 100):
        both = rng.normal(size=(2, 3, 3 * n)) * rng.choice([1e-3, 1, 300], size=3 * n)
        every = (both[0] + 1j * both[1] if name[0] == "c" else both[0]).astype(name)
        flat = every.view(real).astype(np.float64)
        expected = np.array([rounded(column, real) for column in flat.T], real).view(name)
        x = every[rank].copy()
        dist.all_reduce(x, reproducible=True)
        assert x.tobytes() == expected.tobytes()
        x = np.array(every[rank].reshape(n, 3), order="F")
        dist.all_reduce(x, dist.ReduceOp.AVG, reproducible=True)
        # A float64 sum is rounded before it is divided.
        means = [float(sum(map(Fraction, column.tolist())) / 3) for column in flat.T]
        whole = expected.view(real) / 3 if real == "float64" else np.array(means, real)
        assert x.tobytes() == whole.view(name).tobytes()
        x = every[rank].copy()
        dist.reduce(x, 1, reproducible=True)
        assert x.tobytes() == (expected if rank == 1 else every[rank]).tobytes()
        part = np.zeros(n, name)
        dist.reduce_scatter_tensor(part, every[rank], reproducible=True)
        assert part.tobytes() == expected[n * rank : n * (rank + 1)].tobytes()


@pytest.mark.ranks(4, kind="both")
def test_the_bits_do_not_depend_on_ranks_or_order(rank):
    rng = np.random.default_rng(7)
    parts = (rng.normal(size=(12, 200)) * 10.0 ** rng.integers(-9, 9, (12, 200))).astype("f4")
    parts = np.concatenate([parts, -parts[::2]])
    expected = np.array([rounded(column, "float32") for column in parts.astype("f8").T], "f4")
    assert (parts.sum(axis=0) != expected).any()
    for size in (1, 2, 3, 4):
        group = dist.new_group(range(size))
        for _ in range(2):
            parts = rng.permutation(parts)
            cuts = np.sort(rng.integers(0, len(parts) + 1, size - 1))
            if rank < size:
                mine = np.split(parts, cuts)[rank]
                got = dist.functional.reproducible_sum(mine.reshape(-1, 20, 10), group)
                assert got.shape == (20, 10)
                assert got.tobytes() == expected.tobytes()


@pytest.mark.ranks(2)
def test_tensors(rank, monkeypatch):
    monkeypatch.setattr(exact_exchange, "_GATHERED_BYTES", 200)
    torch = pytest.importorskip("torch")
    every = torch.randn(2, 900, generator=torch.Generator().manual_seed(4)).bfloat16()
    exactly = every.double().sum(0)  # 16 bits leave room for the sum of two
    x = every[rank].clone().requires_grad_()
    dist.all_reduce(x, reproducible=True)
    # torch rounds float64 to bfloat16 in two steps.
    expected = [rounded(column, "bfloat16") for column in every.double().numpy().T]
    assert x.tolist() == expected
    assert (x.double() - exactly).abs().max() <= exactly.abs().max() * 2**-8
    got = dist.functional.reproducible_sum(every[rank:].clone())
    expected = [rounded(c, "bfloat16") for c in every[[0, 1, 1]].double().numpy().T]
    assert got.dtype == torch.bfloat16
    assert got.tolist() == expected


@pytest.mark.ranks(2, kind="both")
def test_integers_need_nothing_and_wrong_calls_are_errors_on_all_ranks(rank):
    x = np.array([2**62, 5], np.int64)
    dist.all_reduce(x, dist.ReduceOp.MAX, reproducible=True)
    assert x.tolist() == [2**62, 5]
    x = np.full(2, 5, ">i4")
    dist.all_reduce(x, reproducible=True)
    assert x.tolist() == [10, 10]
    x = np.array([4e4, 4e4], np.float16)
    work = dist.group.WORLD.all_reduce(x, dist.ReduceOp.AVG, reproducible=True)
    assert work.result()[0] is x
    assert x.tolist() == [4e4, 4e4]
    x, either = np.full(3, 0.5), (UnsupportedError, CollectiveMismatchError)
    for kind in (dist.ReduceOp.MAX, np.fmin, dist.ReduceOp.PREMUL_SUM(2.0)):
        with pytest.raises(UnsupportedError, match="only SUM and AVG of float16"):
            dist.all_reduce(x, kind, reproducible=True)
    for how in ({"async_op": True}, {"algorithm": "ring"}):
        with pytest.raises(UnsupportedError, match="all_reduce with reproducible takes no"):
            dist.all_reduce(x, reproducible=True, **how)
    with pytest.raises(CollectiveMismatchError, match="all_reduce, reproducible SUM"):
        dist.all_reduce(x, reproducible=rank == 0)
    with pytest.raises(CollectiveMismatchError, match="reproducible AVG"):
        dist.all_reduce(x, [dist.ReduceOp.SUM, dist.ReduceOp.AVG][rank], reproducible=True)
    with pytest.raises(ArgumentTypeError if rank == 0 else CollectiveMismatchError):
        dist.all_reduce(x, reproducible=True if rank else x)
    for part, whole in (
        (x, np.ones(5)),
        (x.astype("f4"), np.ones(6)),
        (np.ones(3, int), np.ones(6)),
    ):
        with pytest.raises(InvalidArgumentError, match="expected float64 of 1/2 of the input's"):
            dist.reduce_scatter_tensor(part, whole, reproducible=True)
    with pytest.raises(UnsupportedError, match="mask"):
        dist.reduce_scatter_tensor(x, np.ma.masked_less(np.ones(6), 2), reproducible=True)
    with pytest.raises(CollectiveMismatchError, match="to rank"):
        dist.reduce(x, rank, reproducible=True)
    with pytest.raises(CollectiveMismatchError, match="to rank"):
        dist.reduce(x, rank, np.fmin)
    with pytest.raises(CollectiveMismatchError, match=r"float64\[2, 3\]"):
        dist.all_reduce(np.ones((2, 3) if rank else (3, 2)), reproducible=True)
    with pytest.raises(ArgumentTypeError, match="reproducible_sum: tensor must be an array"):
        dist.functional.reproducible_sum([])
    with pytest.raises(UnsupportedError, match="reproducible_sum takes no algorithm"):
        dist.functional.reproducible_sum(np.ones((1, 2)), algorithm="ring")
    with pytest.raises(UnsupportedError, match=r"reproducible_sum of float64\[\]"):
        dist.functional.reproducible_sum(np.array(1.0))
    with pytest.raises(either[rank], match="reproducible_sum of int64"):
        dist.functional.reproducible_sum(np.ones((2, 3), float if rank else int))
    with pytest.raises(CollectiveMismatchError):
        dist.all_reduce(np.ones(9000 + rank), reproducible=True)
    assert x.tolist() == [0.5] * 3
    dist.barrier()


@pytest.mark.ranks(2)
def test_a_sum_of_zeros_has_one_sign_however_the_parts_are_placed(rank):
    parts = np.array([[-0.0, 1.0], [-0.0, 2.0**-60], [-0.0, 2.0**-120]])
    for cut in range(4):
        got = dist.functional.reproducible_sum(np.split(parts, [cut])[rank])
        assert got.tobytes() == np.array([-0.0, 1.0]).tobytes()
    assert dist.functional.reproducible_sum(parts[:0]).tobytes() == np.zeros(2).tobytes()


@pytest.mark.ranks(2, kind="both")
def test_blocks_and_streams(rank):
    x, y = np.full(2, 1.0 + rank), np.full(2, 2.0)
    with dist._coalescing_manager():
        dist.all_reduce(x)
        dist.all_reduce(y)
    assert (x.tolist(), y.tolist()) == ([3, 3], [4, 4])
    with pytest.raises(ArgumentTypeError, match="reproducible"), dist._coalescing_manager():
        dist.all_reduce(x, reproducible=True)
    refused = pytest.raises(InvalidArgumentError, match="reproducible_sum in a coalescing block")
    with refused, dist._coalescing_manager():
        dist.functional.reproducible_sum(np.ones((1, 2)))
    for how in ({"reproducible": True}, {"op": np.fmin}):
        refused = pytest.raises(UnsupportedError, match="all_reduce of this kind takes no stream")
        with dist.stream(dist.Stream()), refused:
            dist.all_reduce(x, **how)
    with dist.stream(dist.Stream()), pytest.raises(UnsupportedError, match="not in a stream"):
        dist.functional.reproducible_sum(np.ones((1, 2)))
    dist.barrier()
    assert x.tolist() == [3, 3]


@pytest.mark.ranks(2)
def test_hooks_see_one_call(rank):
    seen: list[str] = []
    pg = dist.new_group()
    pg.register_pre_hook(1, lambda call: seen.append(call.name.name))
    dist.all_reduce(np.ones(9000), group=pg, reproducible=True)
    dist.functional.reproducible_sum(np.ones((3, 2)), pg)
    assert len(seen) == 2
    assert seen[0] == "ALLREDUCE"


@pytest.mark.ranks(3, kind="processes")
def test_an_error_between_the_exchanges_is_one_on_all_ranks(rank, monkeypatch):
    def without_memory(*arguments):
        raise MemoryError("no room")

    x = np.ones(20_000)
    if rank == 1:
        monkeypatch.setattr(exact_exchange, "exact_sum", without_memory)
    with pytest.raises(MemoryError if rank == 1 else CollectiveMismatchError, match="no room"):
        dist.all_reduce(x, reproducible=True)
    monkeypatch.undo()
    dist.all_reduce(x, reproducible=True)
    assert (x == 3).all()
