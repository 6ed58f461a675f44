"""Sums of float16 and bfloat16: one rounding where a rank adds several contributions in a row."""

from hashlib import sha256

import ml_dtypes
import numpy as np
import pytest

import unisono as dist
from unisono.core.schedules import available
from unisono.testing import run

Op = dist.ReduceOp
OPS = (Op.SUM, Op.AVG, Op.PREMUL_SUM(0.5))
DTYPES = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
# About the ends of a post beside the flag, of a block of the sum, and of vectors.
SMALL = (1, 7, 47, 48, 49, 1023, 1024, 1025, 2049)


def values(rank, count, dtype):
    """Return numbers whose sums over 8 ranks are exact in float32, and not in the dtype."""
    rng = np.random.default_rng([rank, count])
    bits, spread = (11, 8) if dtype == np.float16 else (8, 12)
    mantissas = rng.integers(-(2**bits) + 1, 2**bits, count)
    x = np.ldexp(mantissas.astype(np.float64), rng.integers(-spread, 1, count))
    # Sums that leave the range of float16 in between, infinities, and their sum: NaN.
    x[::13] = (60_000.0, 60_000.0, -60_000.0, 0.0)[min(rank, 3)]
    x[5::17] = np.inf if rank == 1 else x[5::17]
    x[5::34] = -np.inf if rank == 2 else x[5::34]
    x[7::19] = np.nan if rank == 0 else x[7::19]
    return x.astype(dtype)


def expected(parts, op):
    dtype = parts[0].dtype
    with np.errstate(all="ignore"):
        if op.factor is not None:
            parts = [(part.astype(np.float32) * np.float32(op.factor)).astype(dtype)
                     for part in parts]  # fmt: skip
        total = sum(part.astype(np.float64) for part in parts).astype(np.float32).astype(dtype)
        if op is Op.AVG:
            total = (total.astype(np.float32) / np.float32(len(parts))).astype(dtype)
    return total


def same(got, want, *what):
    equal = (got == want) | (np.isnan(got) & np.isnan(want))
    at = int(np.argmin(equal)) if got.size else 0
    assert equal.all(), f"{what}: element {at} is {got[at]!r}, expected {want[at]!r}"


def sums(rank, counts, algorithms=(None, None, None)):
    """All reducing calls, each with its algorithm."""
    p = dist.get_world_size()
    for dtype in DTYPES:
        for count in counts:
            parts = [values(r, count, dtype) for r in range(p)]
            blocks = [np.concatenate([values(r + q, count, dtype) for q in range(p)])
                      for r in range(p)]  # fmt: skip
            for op in OPS:
                what, wanted = (dtype.name, count, op), expected(parts, op)
                x = parts[rank].copy()
                dist.all_reduce(x, op, algorithm=algorithms[0])
                same(x, wanted, "all_reduce", *what)
                x = parts[rank].copy()
                dist.reduce(x, p - 1, op, algorithm=algorithms[1])
                same(x, wanted if rank == p - 1 else parts[rank], "reduce", *what)
                block = np.empty(count, dtype)
                dist.reduce_scatter_tensor(block, blocks[rank], op, algorithm=algorithms[2])
                mine = [row[rank * count : (rank + 1) * count] for row in blocks]
                same(block, expected(mine, op), "reduce_scatter", *what)


@pytest.mark.native
@pytest.mark.parametrize("size", [3, 4, 5, 8])
def test_one_rounding_in_shared_memory(size):
    """As chosen: one_shot up to 128 KiB of p - 1 vectors, then two_shot, in pieces of 256 KiB."""
    most = 128 * 1024 // 2 // (size - 1)
    run(sums, size, engine="native", args=((*SMALL, most, most + 1),))
    run(sums, size, engine="native", args=((131_073, 300_001)[: 1 if size > 4 else 2],))


@pytest.mark.parametrize("size", [3, 5])
@pytest.mark.parametrize("names", [("one_shot",) * 3, ("two_shot", "two_shot", "one_shot"),
                                   ("rank_order",) * 3])  # fmt: skip
def test_one_rounding_in_the_reference_engine(size, names):
    run(sums, size, engine="reference", transport="inproc", args=((1, 49, 1025, 70_001), names))


def bits_of(rank, counts, collectives):
    """Return the bits of calls by every algorithm, of numbers whose sums depend on the order."""
    p, found = dist.get_world_size(), []
    for dtype in DTYPES:
        for count in counts:
            x = np.random.default_rng([rank, count]).normal(size=count).astype(dtype)
            for collective in collectives:
                for algorithm in available(collective, p):
                    y = x.copy()
                    root = (p - 1,) if collective == "reduce" else ()
                    getattr(dist, collective)(y, *root, algorithm=algorithm)
                    found.append((collective, algorithm, dtype.name, count, y.tobytes()))
    return found


@pytest.mark.native
@pytest.mark.parametrize("size", [3, 4])
def test_engines_have_the_same_bits_by_every_algorithm(size):
    args = ((5, 3001), ("all_reduce", "reduce", "scan"))
    mine = run(bits_of, size, engine="native", args=args)
    theirs = run(bits_of, size, engine="reference", transport="inproc", args=args)
    assert mine == theirs
    for calls in zip(*mine, strict=True):
        if calls[0][0] == "all_reduce":
            assert len(set(calls)) == 1, calls[0][:4]


def large_bits(rank):
    """Return the root's bits of vectors longer than a message's piece of 1 MiB."""
    p, found = dist.get_world_size(), []
    x = np.random.default_rng(rank).normal(size=1_300_001).astype(np.float16)
    for algorithm in ("one_shot", "two_shot", "rank_order", "linear"):
        y = x.copy()
        dist.reduce(y, p - 1, algorithm=algorithm)
        found.append(sha256(y).hexdigest() if rank == p - 1 else "")
    return found


@pytest.mark.native
def test_hosts_have_the_bits_of_one_host(monkeypatch):
    mine = run(large_bits, 4, ranks="processes")
    monkeypatch.setenv("UNISONO_RANKS_PER_HOST", "2")
    assert run(large_bits, 4, ranks="processes") == mine
