"""Reshards that send floating arrays in another dtype: bfloat16, and int8 in blocks."""

import itertools
import json

import numpy as np
import pytest

import unisono as dist
from tests.support.calls import check_usable, fails
from unisono.beyond.reshard import run as run_module
from unisono.errors import CollectiveMismatchError, InvalidArgumentError
from unisono.testing import run

ROWS, COLUMNS, CUT = 7, 300, 170
BLOCKS = [(0, 128), (128, 170), (170, 256), (256, 300)]
DTYPES = [("float32", "float32"), ("float64", "float32"), ("float16", "float64")]


def content(dtype):
    """Return values of many magnitudes; a block has no finite one, one is 0, one is tiny."""
    random = np.random.default_rng(3)
    x = random.normal(size=(ROWS, COLUMNS)) * 10.0 ** random.integers(-3, 4, (ROWS, COLUMNS))
    x[0, 128:170], x[1, :128], x[3, 256:] = np.nan, 0, x[3, 256:] * 1e-41
    x[2, [3, 129, 299]] = np.nan, np.inf, -np.inf
    return x.astype(dtype)


def by_definition(x):
    """Return what int8 in blocks makes of an array, and the bound of its error."""
    y, bound = np.empty(x.shape, np.float32), np.empty(x.shape)
    for row, (begin, end) in itertools.product(range(ROWS), BLOCKS):
        block = x[row, begin:end].astype(np.float64 if x.dtype == np.float64 else np.float32)
        finite = np.isfinite(block)
        largest = max([abs(value) for value in block[finite]], default=block.dtype.type(0))
        scale = max(np.float32(largest / 126), np.float32(2.0**-126))
        codes = np.array([round(float(v)) for v in block[finite] / scale], np.float32)
        y[row, begin:end] = block
        y[row, begin:end][finite] = codes * scale
        bound[row, begin:end] = max(largest / 252 * (1 + 1e-6), 2.0**-127)
    return y, bound


def same_values_everywhere(rank):
    run_module._LEAST_BYTES = run_module._MOST_BYTES = 1 << 10
    for given, wanted in DTYPES:
        x = content(given)
        begin, end = (0, CUT) if rank == 0 else (CUT, COLUMNS)
        own = dist.Sharded([x[:, begin:end].copy()], x.shape, starts=[(0, begin)])
        y = np.zeros(x.shape, wanted)
        part = np.zeros((5, 100), wanted)
        number = np.arange(3) if rank == 0 else None
        got = np.zeros(3, int)
        plan = dist.reshard(
            {"x": own if rank < 2 else None, "n": number, "part": own if rank < 2 else None},
            # One target cuts the blocks. Ranks 0 and 1 have a part of the source, and replicas.
            {"x": y, "n": got, "part": dist.Sharded([part], x.shape, starts=[(1, 100)])},
            dtype="int8",
        )
        plan.run()
        values, bound = by_definition(x)
        np.testing.assert_array_equal(y, values.astype(wanted))
        np.testing.assert_array_equal(part, y[1:6, 100:200])
        finite = np.isfinite(x)
        assert (abs(y[finite] - x[finite].astype(float)) <= bound[finite] * (1 + 1e-6)).all()
        np.testing.assert_array_equal(y[~finite], x[~finite])
        assert got.tolist() == [0, 1, 2]
        if "relayed" not in str(plan):
            # Replicas that get all of it: one byte for an element, and 4 for a block of a row.
            least = (x.size + 16 * ROWS) * 2
            assert least <= plan.moved_bytes <= 2.5 * least
        dist.barrier()


@pytest.mark.ranks(4, kind="both")
def test_int8_in_blocks_is_the_same_on_all_replicas(rank):
    same_values_everywhere(rank)


def test_int8_between_hosts(monkeypatch):
    monkeypatch.setenv("UNISONO_RANKS_PER_HOST", "2")
    run(same_values_everywhere, 4, ranks="processes")


@pytest.mark.ranks(2)
def test_bfloat16_on_the_way_is_the_same_on_all_replicas(rank):
    x, y = content("float32"), np.zeros((ROWS, COLUMNS), np.float32)
    plan = dist.reshard(x if rank == 0 else None, y, dtype="bfloat16")
    plan.run()
    assert plan.moved_bytes == 2 * x.size
    bits = np.where(np.isnan(x), 0, x).view(np.uint32).astype(np.uint64)
    wanted = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16).astype(np.uint32).view(np.float32)
    wanted[np.isnan(x)] = np.nan
    np.testing.assert_array_equal(y, wanted)
    # What stays in its memory keeps its values.
    dist.reshard(x if rank == 0 else None, x if rank == 0 else y, dtype="int8").run()
    np.testing.assert_array_equal(x, content("float32"))


@pytest.mark.ranks(2)
def test_int8_of_what_float32_cannot_hold(rank):
    most = float(np.finfo(np.float32).max)
    x = np.array([1e300, 1.0, -2.0, np.nextafter(most, np.inf), -np.inf, most, -most / 3])
    for dtype, lost in ((np.float64, {0, 3, 4}), (np.float32, {0, 4})):
        with np.errstate(over="ignore"):
            given = x.astype(dtype)
        y = np.zeros(x.shape)
        dist.reshard(given if rank == 0 else None, y, dtype="int8").run()
        if rank == 1:
            assert set(np.flatnonzero(np.isinf(y))) == set(np.flatnonzero(~np.isfinite(y))) == lost
            assert all(np.sign(y[at]) == np.sign(x[at]) for at in lost)
            kept = sorted({*range(len(x))} - lost)
            assert (abs(y[kept] - given[kept].astype(float)) <= most / 252 * (1 + 1e-6)).all()


@pytest.mark.ranks(2)
def test_the_bound_of_int8_holds_before_the_dtype_of_the_target(rank):
    torch = pytest.importorskip("torch")
    x = np.random.default_rng(1).normal(size=(50, 128)).astype(np.float32)
    y, z = np.zeros(x.shape, np.float32), torch.zeros(x.shape, dtype=torch.bfloat16)
    for into in (y, z):
        dist.reshard(x if rank == 0 else None, into if rank else None, dtype="int8").run()
    if rank == 1:
        assert (abs(y - x).max(1) <= abs(x).max(1) / 252 * (1 + 1e-6)).all()
        assert torch.equal(z, torch.from_numpy(y).bfloat16())


@pytest.mark.ranks(2)
def test_packets_of_int8_fill_their_slots(rank):
    x, y = np.ones((4, 1 << 18), np.float32), np.zeros((4, 1 << 18), np.float32)
    plan = dist.reshard(x if rank == 0 else None, y if rank else None, dtype="int8")
    pieces = sum(len(step.copies[0]) for step in plan._packets.steps)
    assert pieces * run_module._LEAST_BYTES < 1.5 * plan.moved_bytes
    plan.run()


@pytest.mark.ranks(2)
def test_dtypes_that_do_not_fit(rank):
    x = np.zeros(3)
    with fails(
        InvalidArgumentError if rank else CollectiveMismatchError,
        "dtype int32: expected a floating one, or int8",
    ):
        dist.reshard(x, x, dtype="int32" if rank else None)
    with fails(CollectiveMismatchError, "reshard(dtype=int8)"):
        dist.reshard(x, x, dtype="int8" if rank else "float16")
    check_usable()


def save_int8(rank, folder):
    for number, (given, _) in enumerate(DTYPES):
        x = content(given)
        begin, end = (0, CUT) if rank == 0 else (CUT, COLUMNS)
        own = dist.Sharded([x[:, begin:end].copy()], x.shape, starts=[(0, begin)])
        # Ranks 0 and 1 have parts that cut a block, rank 2 has replicas of two arrays.
        dist.save_arrays(
            {"x": own if rank < 2 else None, "n": np.arange(3), "s": np.full((), 1.5, np.float32)},
            folder / f"{number}.safetensors",
            dtype="int8",
        )
    flat = content("float32").reshape(-1)
    dist.save_arrays(
        {"flat": flat}, folder / "m.safetensors.index.json", dtype="int8", part_bytes=9
    )


def load_int8(rank, folder):
    for number, (given, wanted) in enumerate(DTYPES):
        values, _ = by_definition(content(given))
        part, codes = np.zeros((5, 100), wanted), np.zeros((ROWS, COLUMNS), np.int8)
        scales, n, one = np.zeros((ROWS, 4), np.float32), np.zeros(3, int), np.zeros((), np.float32)
        dist.load_arrays(
            {"x": dist.Sharded([part], (ROWS, COLUMNS), starts=[(1, 100)]), "n": n, "s": one},
            folder / f"{number}.safetensors",
        )
        np.testing.assert_array_equal(part, values.astype(wanted)[1:6, 100:200])
        assert (n.tolist(), float(one)) == ([0, 1, 2], 1.5)
        dist.load_arrays({"x": codes, "x.scales": scales}, folder / f"{number}.safetensors")
        decoded = codes * np.repeat(scales, [128, 42, 86, 44], axis=1)
        finite = np.isfinite(content(given))
        np.testing.assert_array_equal(decoded[finite], values[finite])
    flat = np.zeros(ROWS * COLUMNS, np.float32)
    dist.load_arrays({"flat": flat}, folder / "m.safetensors.index.json")
    x = content("float32").reshape(-1)
    finite = np.isfinite(x)
    largest = np.maximum.reduceat(np.where(finite, abs(x), 0), np.arange(0, len(x), 128))
    bound = np.repeat(largest, 128)[: len(x)] / 252 + 2.0**-127
    assert (abs(flat[finite] - x[finite]) <= bound[finite] * (1 + 1e-6)).all()


def test_files_in_blocks_of_int8(tmp_path):
    run(save_int8, 3, args=(tmp_path,), ranks="processes")
    run(load_int8, 2, args=(tmp_path,), ranks="processes")
    load = pytest.importorskip("safetensors.numpy").load_file
    found = load(tmp_path / "0.safetensors")
    assert (found["x"].dtype, found["x.scales"].shape) == (np.int8, (ROWS, 4))


@pytest.mark.ranks(2)
def test_versions_in_blocks_of_int8(rank, tmp_path):
    publisher = dist.Publisher(tmp_path / "w", dtype="int8")
    x = content("float32")
    publisher.publish({"x": x})
    y = np.zeros(x.shape, np.float32)
    assert dist.Subscriber(tmp_path / "w").take({"x": y}) == 1
    # Both ranks have all of the array, so the blocks begin at multiples of 128 alone.
    starts = np.arange(0, COLUMNS, 128)
    sizes = np.where(np.isfinite(x), abs(x), 0)
    bound = np.repeat(np.maximum.reduceat(sizes, starts, axis=1), 128, axis=1)[:, :COLUMNS]
    finite = np.isfinite(x)
    assert (abs(y[finite] - x[finite]) <= (bound / 252 * (1 + 1e-6) + 2.0**-127)[finite]).all()
    with fails(
        InvalidArgumentError, "'x.scales' is the name of an array, and of the scales of 'x'"
    ):
        publisher.publish({"x": x, "x.scales": x})
    check_usable()


@pytest.mark.parametrize(
    "sides", ['{"x": [0]}', '{"x": [300]}', '{"x": [5, "a"]}', '{"y": []}', '{"x": [7]}', "3", "{"]
)
def test_broken_blocks_of_a_file(tmp_path, sides):
    entries = {
        "x": {"dtype": "I8", "shape": [3], "data_offsets": [4, 7]},
        "x.scales": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
        "__metadata__": {"unisono.blocks": sides},
    }
    text = json.dumps(entries).encode()
    path = tmp_path / "0000000001.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(7))
    x = np.full(3, 7, np.float32)
    with pytest.raises(InvalidArgumentError) as caught:
        dist.Subscriber(tmp_path).take({"x": x})
    assert f"{path} is no whole file of safetensors' format: " in caught.value.what
    assert x.tolist() == [7, 7, 7]
