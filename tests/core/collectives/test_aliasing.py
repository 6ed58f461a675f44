"""Inputs and outputs that share memory."""

import numpy as np
import pytest

import unisono as dist
from unisono.core.schedules import available
from unisono.errors import CollectiveMismatchError, InvalidArgumentError

SIZES = pytest.mark.ranks(1, 2, 3, 4)


def parts(collective, size):
    return [None, *available(collective, size)]


@SIZES
def test_all_gather_of_a_slice_of_its_output(rank):
    p = dist.get_world_size()
    for algorithm in parts("all_gather", p):
        whole = np.full((p, 3), -1.0)
        whole[rank] = rank
        dist.all_gather_into_tensor(whole, whole[rank], algorithm=algorithm)
        assert (whole == np.arange(p)[:, None]).all(), (algorithm, whole)
        crossed = np.full(3 * p, float(rank))
        dist.all_gather_into_tensor(
            crossed, crossed[1:][:3] if p > 1 else crossed, algorithm=algorithm
        )
        assert (crossed == np.repeat(np.arange(p), 3)).all(), (algorithm, crossed)


@SIZES
def test_reduce_scatter_into_a_slice_of_its_input(rank):
    p = dist.get_world_size()
    for algorithm in parts("reduce_scatter", p):
        for op, expected in ((dist.ReduceOp.SUM, p), (dist.ReduceOp.PREMUL_SUM(0.5), p / 2)):
            for at in range(p):
                whole = np.repeat(np.arange(1.0, p + 1), 4)
                part = whole[4 * at : 4 * at + 4]
                dist.reduce_scatter_tensor(part, whole, op, algorithm=algorithm)
                assert (part == (rank + 1) * expected).all(), (algorithm, op, at, part)
                kept = [r for r in range(p) if r != at]
                assert (whole.reshape(p, 4)[kept] == np.array(kept)[:, None] + 1).all()


@SIZES
def test_all_to_all_in_place(rank):
    p = dist.get_world_size()
    for algorithm in parts("all_to_all", p):
        x = np.arange(p * 2.0) + 100 * rank
        dist.all_to_all_single(x, x, algorithm=algorithm)
        expected = [[100 * r + 2 * rank, 100 * r + 2 * rank + 1] for r in range(p)]
        assert (x.reshape(p, 2) == expected).all(), (algorithm, x)
        rows = [np.full(2, 10.0 * rank + to) for to in range(p)]
        dist.all_to_all(rows, rows, algorithm=algorithm)
        assert [row[0] for row in rows] == [10 * r + rank for r in range(p)], (algorithm, rows)


@SIZES
def test_lists_that_share_entries(rank):
    p = dist.get_world_size()
    for _ in range(3):  # the last of these calls are repeated in C++
        x = np.full(2, float(rank))
        outs = [np.zeros(2) for _ in range(p)]
        outs[0] = x  # the input is one of the outputs
        dist.all_gather(outs, x)
        assert [o[0] for o in outs] == list(range(p))
        x = np.full(2, 2.0)
        out = np.zeros(2)
        dist.reduce_scatter(out, [x] * p)  # one input many times is fine
        assert (out == 2 * p).all()
        dist.reduce_scatter(x, [x] * p)
        assert (x == 2 * p).all()
        dist.scatter(x, [x] * p if rank == 0 else None)
        assert (x == 2 * p).all()
        both = [np.full(3, 10.0 * rank + r) for r in range(p)]
        dist.all_to_all(both, both[::-1])
        assert [o[0] for o in both] == [10 * source + p - 1 - rank for source in range(p)]
    table = np.zeros((3, p))
    dist.all_gather([table[:, i] for i in range(p)], np.full(3, float(rank)))
    assert (table == np.arange(p)).all(), "interleaved columns do not overlap"
    dist.all_gather([np.zeros(0)] * p, np.zeros(0))  # nothing to overwrite


@SIZES
def test_queued_calls_on_one_array(rank):
    """Calls that are queued on one array see what those before them have left."""
    p = dist.get_world_size()
    for n in (3, 50_000):
        for like in (np.zeros(n), np.zeros(2 * n)[::2], np.zeros((n, 2))[::-1], np.zeros(n, ">f8")):
            whole = np.tile(np.zeros(like.shape), (p, *[1] * (like.ndim - 1)))
            like[...] = rank
            works = [
                dist.all_reduce(like, async_op=True),
                dist.all_reduce(like, dist.ReduceOp.PREMUL_SUM(0.5), async_op=True),
                dist.reduce(like, 0, async_op=True),
                dist.broadcast(like, 0, async_op=True),
                dist.all_gather_into_tensor(whole[: p * len(like)], like, async_op=True),
                dist.all_to_all_single(whole, whole, async_op=True),
                dist.all_reduce_coalesced([like, whole], async_op=True),
            ]
            dist.all_reduce(like, dist.ReduceOp.MAX)
            for work in reversed(works):
                work.wait()
            expected = sum(range(p)) * p / 2 * p * p
            assert (like == expected).all(), (like.strides, like, expected)
            assert (whole == expected).all(), (like.strides, whole, expected)


@pytest.mark.ranks(3)
def test_overlapping_outputs_are_refused(rank):
    """Results that would overwrite one another are refused before anything is sent."""
    p = dist.get_world_size()
    x, long = np.ones(3), np.zeros(20)
    shifted = [long[i : i + 3] for i in range(p)]
    strided = [long[::2][:3], long[::3][:3]] + [np.zeros(3) for _ in range(p - 2)]
    backwards = [long[:3], long[2::-1]] + [np.zeros(3) for _ in range(p - 2)]
    told = []
    for outs in ([x] * p, shifted, strided, backwards):
        calls = [
            lambda outs=outs: dist.all_gather(outs, np.ones(3)),
            lambda outs=outs: dist.all_to_all(outs, [np.ones(3)] * p),
            lambda outs=outs: dist.all_gather_coalesced([[o] for o in outs], [np.ones(3)]),
        ]
        if outs[0] is not outs[1]:
            calls.append(lambda outs=outs: dist.all_reduce_coalesced(outs))
        for call in calls:
            with pytest.raises(InvalidArgumentError, match="share memory, so one result") as caught:
                call()
            told.append(caught.value.what)
    with pytest.raises((InvalidArgumentError, CollectiveMismatchError), match="gather_list"):
        dist.gather(x, [x] * p if rank == 0 else None)
    for out in (
        np.lib.stride_tricks.as_strided(long, (4, 4), (8, 8)),
        np.lib.stride_tricks.as_strided(long, (3,), (4,)),
        np.lib.stride_tricks.as_strided(long, (3,), (0,)),
    ):
        with pytest.raises(InvalidArgumentError, match="overlaps itself"):
            dist.all_reduce(out)
        dist.barrier()
    dist.all_gather([np.zeros((2, 2)).T for _ in range(p)], np.ones((2, 2)))
    assert told[0] == (
        "all_gather: tensor_list[0] and tensor_list[1] share memory, so one result would overwrite "
        "the other"
    )


@pytest.mark.ranks(2, 3, engine="both")
def test_an_array_that_is_coalesced_with_itself(rank):
    """Both places get the same sum, as in Gloo."""
    p = dist.get_world_size()
    for like in (np.zeros(5), np.zeros((3, 2))[::-1], np.zeros(8, "i4")[::2]):
        x, y = like.copy(), like
        x[...] = y[...] = rank + 1
        dist.all_reduce_coalesced([y, x, y])
        dist.all_reduce_coalesced([y, y], async_op=True).wait()
        assert (x == p * (p + 1) / 2).all()
        assert (y == p * p * (p + 1) / 2).all(), y
