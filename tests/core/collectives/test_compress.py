"""`compress=`: equal bits on all ranks, errors within their bound, wrong calls refused."""

import threading

import numpy as np
import pytest

import unisono as dist
from tests.support.calls import check_usable, fails, finish
from unisono.core.engines.block_codes import (
    BLOCK,
    BLOCK_CODES,
    codec_in_numpy,
    coded_nbytes,
)
from unisono.core.engines.kernels import narrow, widen
from unisono.core.operations.sums import compressed
from unisono.core.schedules import build
from unisono.core.schedules.cost import cost
from unisono.errors import (
    ArgumentTypeError,
    CollectiveMismatchError,
    InvalidArgumentError,
    UnsupportedError,
)
from unisono.lowlevel import dispatcher

KINDS = ("int8", "fp8", "bf16")
EPS = {"float16": 2.0**-10, "float32": 2.0**-22, "float64": 2.0**-22}


def every(size: int, n: int, dtype: str) -> np.ndarray:
    """Return the contributions [size, n] of all ranks."""
    random = np.random.default_rng(n)
    x = random.normal(size=(size, n)) * 10.0 ** random.integers(-2, 3, (1, n))
    return x.astype(dtype)


def bound(kind: str, x: np.ndarray, starts=(0,)) -> np.ndarray:
    """Return the bound of the error of each element [..., n]; parts begin at `starts`."""
    size, found = abs(x.astype(float)), np.zeros(x.shape)
    for begin, end in zip(starts, [*starts[1:], x.shape[-1]], strict=True):
        for at in range(begin, end, BLOCK):
            part = size[..., at : min(at + BLOCK, end)]
            largest = part.max(-1, keepdims=True)
            each = {
                "int8": largest / 252 + 0 * part,
                "fp8": np.maximum(part / 16, largest / 240 * 2.0**-10),
                "bf16": part / 256,
            }
            found[..., at : min(at + BLOCK, end)] = each[kind] + 2.0**-126
    return found


def same_everywhere(x: np.ndarray) -> None:
    both = [None] * dist.get_world_size()
    dist.all_gather_object(both, x.tobytes())
    assert len(set(both)) == 1


@pytest.mark.ranks(3, kind="both")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", EPS)
def test_sums_are_within_the_bound_and_equal_on_all_ranks(rank, kind, dtype, monkeypatch):
    monkeypatch.setattr(compressed, "_PIECE", 3 * BLOCK)
    monkeypatch.setattr(compressed, "_CHUNK", BLOCK)
    for n in (0, 1, 130, 5000):
        x = every(3, n, dtype)
        exact = x.astype(float).sum(0)
        parts = bound(kind, x).sum(0)
        for op, p in ((dist.ReduceOp.SUM, 1), (dist.ReduceOp.AVG, 3)):
            y = x[rank].copy()
            dist.all_reduce(y, op, compress=kind)
            same_everywhere(y)
            slack = parts.max(initial=0) if kind == "int8" else parts
            last = bound(kind, abs(exact) + slack)
            rest = EPS[dtype] * abs(x.astype(float)).sum(0)
            assert (abs(y * float(p) - exact) <= parts + last + rest).all()
            if n == 5000:
                assert abs(y * float(p) - exact).max() > parts.max() / 50


def through(kind: str, x: np.ndarray) -> np.ndarray:
    """Return what arrives of float32 numbers."""
    codec, y = codec_in_numpy(kind), np.empty_like(x)
    scales = np.empty(-(-len(x) // BLOCK) * (kind in BLOCK_CODES), "f4")
    codes = np.empty(len(x), codec.storage)
    codec.encode(x, scales, codes)
    codec.decode(scales, codes, y)
    return y


def summed(kind: str, x: np.ndarray) -> np.ndarray:
    """Return the sum of the contributions [p, n] in NumPy: parts have whole blocks."""
    (p, n), y = x.shape, np.empty_like(x[0])
    starts = [min(n, -(-n // BLOCK) * r // p * BLOCK) for r in range(p + 1)]
    for owner in range(p):
        part = slice(starts[owner], starts[owner + 1])
        total = np.zeros_like(y[part])
        for r in range(p):
            total = total + (x[r, part] if r == owner else through(kind, x[r, part]))
        y[part] = through(kind, total)
    return y


@pytest.mark.ranks(3, kind="both")
@pytest.mark.parametrize("kind", KINDS)
def test_any_bits_give_what_numpy_gives(rank, kind, monkeypatch):
    monkeypatch.setattr(compressed, "_PIECE", 6 * BLOCK)
    monkeypatch.setattr(compressed, "_CHUNK", BLOCK)
    random = np.random.default_rng(3)
    for n in (1, 129, 3001):
        bits = random.integers(0, 1 << 32, (3, n), np.uint64).astype(np.uint32)
        small = random.integers(0, 1 << 23, (3, n)).astype(np.uint32)
        # Some blocks are denormal or 0, and some without NaN.
        bits[:, 5 * BLOCK : 7 * BLOCK] = small[:, 5 * BLOCK : 7 * BLOCK]
        bits[:, 7 * BLOCK : 9 * BLOCK] = 0
        bits[:, 9 * BLOCK :] &= 0xBFFFFFFF
        x = bits.view("f4")
        y, whole = x[rank].copy(), np.zeros((3, n), "f4")
        dist.all_reduce(y, compress=kind)
        same_everywhere(y)
        dist.all_gather_into_tensor(whole, x[rank], compress=kind)
        with np.errstate(all="ignore"):
            np.testing.assert_array_equal(y, summed(kind, x))
            np.testing.assert_array_equal(whole, [through(kind, each) for each in x])


@pytest.mark.ranks(3, kind="both")
@pytest.mark.parametrize("kind", KINDS)
def test_scatters_and_gathers(rank, kind, monkeypatch):
    monkeypatch.setattr(compressed, "_PIECE", 6 * BLOCK)
    n = 700
    x = every(3, 3 * n, "float32")
    exact, error = x.astype(float).sum(0), bound(kind, x, (0, n, 2 * n)).sum(0)
    mine = slice(n * rank, n * (rank + 1))
    y, z = np.zeros(n, "f4"), np.zeros(n, "f4")
    dist.reduce_scatter_tensor(y, x[rank], compress=kind)
    assert (abs(y - exact[mine]) <= error[mine] * (1 + 1e-5) + 1e-4).all()
    assert abs(y - exact[mine]).max() > 0
    dist.reduce_scatter(z, [*x[rank].reshape(3, n)], compress=kind)
    assert z.tobytes() == y.tobytes()
    dist.reduce_scatter_tensor(z, x[rank], dist.ReduceOp.AVG, compress=kind)
    assert z.tobytes() == (y / np.float32(3)).tobytes()
    whole, parts = np.zeros((3, n), "f4"), [np.zeros((n, 1), "f4") for _ in range(3)]
    dist.all_gather_into_tensor(whole, x[rank, :n], compress=kind)
    same_everywhere(whole)
    assert (abs(whole - x[:, :n]) <= bound(kind, x[:, :n]) * (1 + 1e-6)).all()
    dist.all_gather(parts, x[rank, :n].copy(), compress=kind)
    assert np.concatenate(parts).tobytes() == whole.tobytes()
    # Input and output may share memory.
    given = x[rank].copy()
    dist.reduce_scatter_tensor(given[n : 2 * n], given, compress=kind)
    assert given[n : 2 * n].tobytes() == y.tobytes()
    again = np.zeros((3, n), "f4")
    again[rank] = x[rank, :n]
    dist.all_gather_into_tensor(again, again[rank], compress=kind)
    assert again.tobytes() == whole.tobytes()


@pytest.mark.ranks(2)
def test_bf16_is_rounded_to_nearest_even(rank):
    x = every(2, 1000, "float32")
    y = x[rank].copy()
    dist.all_reduce(y, compress="bf16")
    # The owner adds its own part as it is. The parts have whole blocks.
    sent, owner = widen(narrow(x)), np.arange(1000) // BLOCK >= 4
    first = np.where(owner, sent[0], x[0]) + np.where(owner, x[1], sent[1])
    assert y.tobytes() == widen(narrow(first)).tobytes()


@pytest.mark.ranks(2, kind="both")
@pytest.mark.parametrize("kind", KINDS)
def test_nan_and_infinities_are_kept(rank, kind):
    x = every(2, 600, "float32")
    x[0, [1, 300, 599]] = np.nan, np.inf, -np.inf
    x[1, [2, 300, 598]] = -np.inf, -np.inf, np.nan
    with np.errstate(invalid="ignore"):
        exact = x.sum(0)
    y = x[rank].copy()
    dist.all_reduce(y, compress=kind)
    same_everywhere(y)
    odd = ~np.isfinite(exact)
    assert np.flatnonzero(odd).tolist() == [1, 2, 300, 598, 599]
    np.testing.assert_array_equal(y[odd], exact[odd])
    assert np.isfinite(y[~odd]).all()
    wide = np.array([1e300, -1e300, 1, 2])
    whole = np.zeros((2, 4))
    dist.all_gather_into_tensor(whole, wide, compress=kind)
    assert whole[0, :2].tolist() == [np.inf, -np.inf]


@pytest.mark.ranks(3, kind="both")
def test_what_is_lost_and_what_arrives_are_all_there_is(rank, monkeypatch):
    monkeypatch.setattr(compressed, "_PIECE", 3 * BLOCK)
    pg, n = dist.group.WORLD, 3000
    x = every(3, n, "float32")
    for kind in KINDS:
        for op, p in ((dist.ReduceOp.SUM, 1), (dist.ReduceOp.AVG, 3)):
            y, lost = x[rank].copy(), np.full(n, np.nan, "f4")
            pg.all_reduce(y, op, compress=kind, _lost=lost)
            dist.all_reduce(lost)
            gap = abs(y.astype(float) * p + lost - x.astype(float).sum(0))
            assert gap.max() <= 1e-5 * abs(x).max()
            assert abs(lost).max() > 1e-3 * abs(x).max()
    y = np.full(n, np.inf, "f4")
    pg.all_reduce(y, compress="int8", _lost=lost)
    assert (y == np.inf).all()
    assert not lost.any()


@pytest.mark.ranks(2, kind="both")
def test_calls_that_do_not_wait_keep_their_order(rank):
    x, y = every(2, 40_000, "float32"), np.full(3, 1.0 + rank)
    expected = x[rank].copy()
    dist.all_reduce(expected, compress="int8")
    z, threads = x[rank].copy(), threading.active_count()
    works = [
        dist.all_reduce(z, compress="int8", async_op=True),
        dist.all_reduce(y, async_op=True),
    ]
    dist.all_reduce(y)
    assert y.tolist() == [6, 6, 6]
    assert all(work.wait() for work in works)
    assert works[0].result()[0] is z
    assert z.tobytes() == expected.tobytes()
    # In a stream the array is read when its earlier work is done.
    stream, w = dist.Stream(), np.zeros(40_000, "f4")
    with dist.stream(stream):
        stream.submit(np.copyto, w, x[rank])
        dist.all_reduce(w, compress="int8", timeout=30)
    stream.synchronize()
    assert w.tobytes() == expected.tobytes()
    assert threading.active_count() <= threads + 4
    check_usable()


@pytest.mark.ranks(2)
def test_layouts_tensors_and_groups_of_one(rank):
    x = every(2, 6000, "float32")
    expected = x[rank].copy()
    dist.all_reduce(expected, compress="fp8")
    wide = np.zeros((60, 200), "f4")
    wide[::-1, ::2] = x[rank].reshape(60, 100)
    dist.all_reduce(wide[::-1, ::2], compress="fp8")
    assert wide[::-1, ::2].tobytes() == expected.tobytes()
    assert not wide[:, 1::2].any()
    turned = np.array(x[rank].reshape(60, 100), order="F")
    dist.all_reduce(turned, compress="fp8")
    assert np.array(turned, order="C").tobytes() == expected.tobytes()
    odd = np.zeros(4 * 6000 + 1, np.uint8)[1:].view("f4")
    swapped = x[rank].astype(">f4")
    odd[:] = x[rank]
    for given in (odd, swapped):
        dist.all_reduce(given, compress="fp8")
        assert given.astype("f4").tobytes() == expected.tobytes()
    alone = dist.new_group([rank], use_local_synchronization=True)
    for kind in KINDS:
        y, z = x[rank].copy(), np.zeros(6000, "f4")
        dist.all_reduce(y, dist.ReduceOp.AVG, group=alone, compress=kind)
        dist.reduce_scatter_tensor(z, x[rank], group=alone, compress=kind)
        assert y.tobytes() == z.tobytes() == x[rank].tobytes()
    torch = pytest.importorskip("torch")
    given = torch.from_numpy(x[rank].copy()).bfloat16()
    both = torch.from_numpy(x).bfloat16().double()
    dist.all_reduce(given, compress="int8")
    error = (given.double() - both.sum(0)).abs()
    assert (error <= 3 * both.abs().max() / 252 + both.sum(0).abs() / 256).all()
    leaf = torch.ones(200, requires_grad=True)
    dist.all_reduce(leaf, compress="bf16")
    assert leaf.tolist() == [2.0] * 200


@pytest.mark.ranks(2, kind="both")
def test_wrong_calls_are_errors_on_all_ranks(rank):
    x = np.full(300, 0.5)
    with fails(InvalidArgumentError, "compress='int4', expected one of int8, fp8, bf16"):
        dist.all_reduce(x, compress="int4")
    for op in (dist.ReduceOp.MAX, dist.ReduceOp.PREMUL_SUM(2.0)):
        with fails(UnsupportedError, f"all_reduce with compress of {op.name}: only SUM and AVG"):
            dist.all_reduce(x, op, compress="int8")
    with fails(ArgumentTypeError, "op must be"):
        dist.all_reduce(x, np.fmin, compress="int8")
    for how in ({"algorithm": "ring"}, {"reproducible": True}, {"accumulate": "float32"}):
        with fails(UnsupportedError, f"with compress takes no {next(iter(how))}"):
            dist.all_reduce(x, compress="int8", **how)
    with fails(UnsupportedError, "compress of int64: only one of float16"):
        dist.all_reduce(np.ones(3, int), compress="int8")
    with fails(UnsupportedError, "takes no output_split_sizes"):
        pg, whole = dist.group.WORLD, np.zeros(600)
        pg.all_gather_into_tensor(whole, x, output_split_sizes=[300, 300], compress="int8")
    with fails(InvalidArgumentError, "expected 1/2 of the input's 300"):
        dist.reduce_scatter_tensor(np.ones(100), x, compress="int8")
    with fails(InvalidArgumentError, "an output has 100 elements, expected 600"):
        dist.all_gather_into_tensor(np.ones(100), x, compress="int8")
    with fails(UnsupportedError, "compress of float64, float32"):
        dist.all_gather_into_tensor(np.ones(600, "f4"), x, compress="int8")
    with fails(ArgumentTypeError, "must be an array"):
        dist.all_reduce([1.0], compress="int8")
    with fails(CollectiveMismatchError, "all_reduce, compress int8 SUM of float64[300]"):
        dist.all_reduce(x, compress="int8" if rank else "fp8")
    with fails(CollectiveMismatchError, "compress int8"):
        dist.all_reduce(x, compress="int8" if rank else None)
    with fails(CollectiveMismatchError, "AVG of float64"):
        dist.all_reduce(x, [dist.ReduceOp.SUM, dist.ReduceOp.AVG][rank], compress="int8")
    with fails(CollectiveMismatchError, "float64[301]"):
        dist.all_reduce(x if rank else np.ones(301), compress="int8")
    with pytest.raises(InvalidArgumentError if rank else CollectiveMismatchError):
        dist.all_reduce(x, compress="none" if rank else "int8")
    assert (x == 0.5).all()
    check_usable()


@pytest.mark.ranks(3, kind="processes")
@pytest.mark.parametrize("waits", [True, False])
def test_an_error_between_the_exchanges_is_one_on_all_ranks(rank, waits, monkeypatch):
    monkeypatch.setattr(compressed, "_PIECE", 3 * BLOCK)
    calls = []

    def without_memory(self, *arguments):
        calls.append(arguments)
        if len(calls) == 7:
            raise MemoryError("no room")
        return codes_of(self, *arguments)

    codes_of = compressed._CodedExchanges._codes_of
    x = np.ones(20 * BLOCK)
    if rank == 1:
        monkeypatch.setattr(compressed._CodedExchanges, "_codes_of", without_memory)
    with pytest.raises(MemoryError if rank == 1 else CollectiveMismatchError, match="no room"):
        finish(dist.all_reduce(x, compress="int8", async_op=not waits))
    monkeypatch.undo()
    check_usable()
    x[:] = 1
    dist.all_reduce(x, compress="int8")
    assert (x == 3).all()


@pytest.mark.ranks(2)
def test_blocks_refuse_it_and_hooks_see_one_call(rank):
    x, seen = np.ones(900, "f4"), []
    with pytest.raises(ArgumentTypeError, match="compress"), dist._coalescing_manager():
        dist.all_reduce(x, compress="int8")
    parts = [np.zeros(4), np.zeros(4)]
    with dist._coalescing_manager():
        dist.all_gather_into_tensor(parts[0], np.ones(2))
        dist.all_gather_into_tensor(parts[1], np.ones(2))
    assert parts[0].tolist() == parts[1].tolist() == [1, 1, 1, 1]
    pg = dist.new_group()
    pg.register_pre_hook(1, lambda call: seen.append(call.name.name))
    dist.all_reduce(x, group=pg, compress="int8")
    assert seen == ["ALLREDUCE"]


@pytest.mark.ranks(4)
def test_the_bytes_are_those_of_the_exchanges_that_explain_shows(rank):
    """Each rank sends (p-1)/p of the codes twice, as the schedules of the two exchanges do."""
    sent, n, mine = [], 4 * 10 * BLOCK, dist.group.WORLD
    exchanges = {"all_to_all_single": "all_to_all", "all_gather_into_tensor": "all_gather"}

    def seen(schema, device, kernel):
        def run(group, device, *arguments):
            if group is mine and schema.name in exchanges:
                copies = 3 if schema.name == "all_gather_into_tensor" else 1
                sent.append((schema.name, copies * arguments[1].nbytes))
            return kernel(group, device, *arguments)

        return run

    dist.barrier()
    remove = dispatcher.register_wrapper(seen) if rank == 0 else None
    dist.barrier()
    dist.all_reduce(np.ones(n, "f4"), compress="int8")
    dist.barrier()
    if remove is None:
        return
    remove()
    coded = coded_nbytes("int8", n)
    assert coded == n + n // 32
    for op, collective in exchanges.items():
        expected = cost(build(collective, "linear", 4), coded).bytes_sent
        assert [part for name, part in sent if name == op] == [expected]
