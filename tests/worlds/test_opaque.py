"""Elements that move as bytes: records, texts, dates, long doubles."""

from __future__ import annotations

import numpy as np
import pytest

import unisono as dist
from unisono.errors import CollectiveMismatchError, UnsupportedError
from unisono.testing import run

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


def _move(rank, size, dtype):
    of = [_values(dtype, 2 * size, each) for each in range(size)]
    mine = of[rank].copy()
    dist.broadcast(mine, src=1)
    assert _same(mine, of[1])
    every = np.empty(2 * size * size, dtype)
    dist.all_gather_into_tensor(every, of[rank])
    assert _same(every, np.concatenate(of).astype(dtype))
    listed = [np.empty(2 * size, dtype) for _ in range(size)]
    dist.all_gather(listed, of[rank])
    assert all(map(_same, listed, of))
    mine = np.empty(2 * size, dtype)
    dist.all_to_all_single(mine, of[rank])
    assert _same(mine, np.concatenate([each[2 * rank : 2 * rank + 2] for each in of]).astype(dtype))
    mine = np.empty(rank + 1, dtype)
    dist.scatter(mine, [of[2][: each + 1] for each in range(size)] if rank == 2 else None, src=2)
    assert _same(mine, of[2][: rank + 1])
    dist.gather(of[rank], listed if rank == 0 else None, dst=0)
    assert rank or all(map(_same, listed, of))
    # Every second element, in reverse order.
    got = np.zeros(2 * size, dtype)
    sent = dist.isend(of[rank][::-2], (rank + 1) % size)
    dist.recv(got[::2], (rank - 1) % size)
    sent.wait()
    assert _same(got[::2].copy(), of[rank - 1][::-2].copy())


def _moves(rank, size):
    for dtype in DTYPES:
        for _ in range(2):
            _move(rank, size, dtype)


@pytest.mark.parametrize(
    ("ranks", "engine"),
    [("threads", "native"), ("processes", "native"), ("threads", "reference")],
)
def test_elements_move_as_bytes(ranks, engine):
    run(_moves, 3, args=(3,), ranks=ranks, engine=engine)


def _large(rank):
    x = _values("V600000", 3, rank)
    dist.broadcast(x, src=0)
    assert _same(x, _values("V600000", 3, 0))


def test_elements_larger_than_a_slot_move():
    run(_large, 2, ranks="processes")


def _differ(rank):
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


@pytest.mark.parametrize("engine", ["native", "reference"])
def test_ranks_with_different_dtypes_get_an_error(engine):
    run(_differ, 2, engine=engine)


REFUSED = [
    (RECORD, "SUM", "reduce the fields one by one: array['id'], array['xy']"),
    ([("a", "S3")], "MAX", "no field can be reduced"),
    ("M8[ns]", "MAX", "array.view(np.int64)"),
    ("m8[ns]", "SUM", "array.view(np.int64)"),
    ("g", "SUM", "array.astype(np.float64)"),
    ("G", "SUM", "array.astype(np.complex128)"),
    ("U3", "MAX", "gather the arrays"),
]


def _refusals(rank):
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


def test_reductions_and_objects_are_refused_with_a_hint():
    run(_refusals, 2)
