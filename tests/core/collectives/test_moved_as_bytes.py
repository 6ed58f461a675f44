"""Elements that move as bytes: records, texts, dates, long doubles."""

import numpy as np
import pytest

import unisono as dist
from tests.support.operations import Operations
from unisono.errors import CollectiveMismatchError, UnsupportedError

RECORD = np.dtype([("id", "<i4"), ("at", "<M8[s]"), ("name", "S5"), ("xy", "<f8", (2,))])
SWAPPED = np.dtype([("id", ">i4"), ("ok", "?", (3,))])
DTYPES = [
    RECORD,
    SWAPPED,
    "<U7",
    ">U3",
    "S9",
    "M8[ns]",
    ">M8[us]",
    "m8[D]",
    "g",
    "G",
    "V3",
    "V70000",
]


def _values(dtype, count, rank):
    """Return elements that differ by rank and place, from random bytes that are valid texts."""
    dtype = np.dtype(dtype)
    letters = np.random.default_rng(rank).integers(97, 122, (count, dtype.itemsize), np.uint8)
    if dtype.kind in "gGfc":
        return (np.arange(count) + 1000 * rank).astype(dtype) / 3
    if dtype.kind == "U":
        return np.array(["".join(map(chr, row[: dtype.itemsize // 4])) for row in letters], dtype)
    return letters.view(dtype).reshape(count)


def _same(got, expected):
    if got.dtype.kind in "fc":  # has bytes without meaning
        return np.array_equal(got, expected)
    return got.dtype == expected.dtype and got.tobytes() == expected.tobytes()


class Opaque(Operations):
    def value(self, rank, part=0, count=None):
        return _values(self.dtype, self.count if count is None else count, rank + 10 * part)

    # NumPy's concatenation has the machine's byte order.
    def write(self, before, after):
        return super().write(before.astype(self.dtype), after.astype(self.dtype))

    def check(self, *what):
        assert all(_same(got, after) for got, after in self.made), what


def _move(rank, size, dtype):
    calls = Opaque(rank, size, 2, dtype=np.dtype(dtype))
    for calls.root, name in enumerate(
        ("gather", "broadcast", "all_gather_into_tensor", "all_gather", "all_to_all_single")
    ):
        getattr(calls, name)()
    calls.root, calls.uneven = 2, [1, 2, 3]
    calls.scatter()
    calls.check(dtype)
    # Every second element, in reverse order.
    of = [_values(dtype, 2 * size, each) for each in range(size)]
    got = np.zeros(2 * size, dtype)
    sent = dist.isend(of[rank][::-2], (rank + 1) % size)
    dist.recv(got[::2], (rank - 1) % size)
    sent.wait()
    assert _same(got[::2].copy(), of[rank - 1][::-2].copy())


@pytest.mark.ranks(3, kind="both", engine="both")
def test_elements_move_as_bytes(rank):
    for dtype in DTYPES:
        for _ in range(2):
            _move(rank, 3, dtype)


@pytest.mark.ranks(2, kind="processes")
def test_elements_larger_than_a_slot_move(rank):
    x = _values("V600000", 3, rank)
    dist.broadcast(x, src=0)
    assert _same(x, _values("V600000", 3, 0))


@pytest.mark.ranks(2, engine="both")
def test_ranks_with_different_dtypes_get_an_error(rank):
    other = np.dtype([("id", "<i4"), ("at", "<M8[s]"), ("name", "S5"), ("zz", "<f8", (2,))])
    with pytest.raises(CollectiveMismatchError) as caught:
        dist.broadcast(np.zeros(2, other if rank else RECORD), src=0)
    assert "'xy'" in str(caught.value)
    assert "'zz'" in str(caught.value)
    with pytest.raises(CollectiveMismatchError, match="datetime64"):
        dist.all_gather_into_tensor(
            np.zeros(4, "M8[s]"), np.zeros(2, "M8[s]" if rank else "M8[D]")
        ) if rank else dist.all_gather_into_tensor(np.zeros(4, "M8[D]"), np.zeros(2, "M8[D]"))
    if rank:
        dist.send(np.zeros(2, RECORD), 0)
    else:
        with pytest.raises(CollectiveMismatchError, match="unknown dtype"):
            dist.recv(np.zeros(2, other), 1)
    dist.barrier()


REFUSED = [
    (RECORD, "SUM", "reduce the fields one by one: array['id'], array['xy']"),
    ([("a", "S3")], "MAX", "no field can be reduced"),
    ("M8[ns]", "SUM", "array.view(np.int64)"),
    ("m8[ns]", "PRODUCT", "array.view(np.int64)"),
    ("g", "AVG", "array.astype(np.float64)"),
    ("G", "MAX", "array.astype(np.complex128)"),
    ("U3", "MAX", "gather the arrays"),
]


@pytest.mark.ranks(2)
def test_reductions_and_objects_are_refused_with_a_hint(rank):
    for dtype, op, hint in REFUSED:
        x = np.zeros(2, dtype)
        with pytest.raises(UnsupportedError, match=f"reduce op {op} is not defined on") as caught:
            dist.all_reduce(x, getattr(dist.ReduceOp, op))
        assert hint in str(caught.value), str(caught.value)
    for dtype in ("O", [("a", "O")]):
        with pytest.raises(UnsupportedError, match="no plain bytes") as caught:
            dist.broadcast(np.zeros(2, dtype), src=0)
        assert "broadcast_object_list" in str(caught.value)
    with pytest.raises(UnsupportedError, match="no plain bytes"):
        dist.broadcast(np.zeros(2, "V0"), src=0)
    dist.barrier()
