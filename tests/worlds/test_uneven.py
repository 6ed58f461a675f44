"""all_gather, gather, scatter and reduce_scatter of blocks of different size, against NumPy."""

import numpy as np
import pytest

import unisono as dist
from tests.support.calls import check_usable, fails, finish
from unisono.errors import CollectiveMismatchError, InvalidArgumentError


def shapes(p, kind):
    """Return the elements of every rank's block."""
    return {
        "rising": [r + 1 for r in range(p)],
        "with nothing": [0 if r % 2 else 5 for r in range(p)],
        "one has all": [p * 3 if r == p - 1 else 0 for r in range(p)],
        "large": [1000 + 37_000 * (r % 3) for r in range(p)],
        "equal": [4] * p,
    }[kind]


KINDS = ("rising", "with nothing", "one has all", "large", "equal")
DTYPES = (np.float32, np.int8, np.complex128, np.bool_)


def block(rank, to, count, dtype):
    """What `rank` has for `to`; small whole numbers, which reduce exactly."""
    return ((np.arange(count) * 3 + 5 * rank + 7 * to) % 11).astype(dtype)


def zeros(sizes, dtype):
    return [np.zeros(n, dtype) for n in sizes]


def check_equal(got, expected, what):
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == b.dtype
        assert (a == b).all(), what


def check_moves(rank, sizes, dtype, **how):
    p, n = len(sizes), sizes[rank]
    blocks = [block(r, 0, sizes[r], dtype) for r in range(p)]
    mine, outs = blocks[rank].copy(), zeros(sizes, dtype)
    what = (sizes, dtype, how)

    finish(dist.all_gather(outs, mine, **how))
    check_equal(outs, blocks, what)
    whole = np.zeros(sum(sizes), dtype)
    finish(dist.all_gather_into_tensor(whole, mine, output_split_sizes=sizes, **how))
    check_equal([whole], [np.concatenate(blocks)], what)
    rows = np.zeros((sum(sizes), 2), dtype)
    pair = np.stack([mine, mine], axis=1)
    finish(dist.all_gather_into_tensor(rows, pair, output_split_sizes=sizes, **how))
    check_equal([rows[:, 1]], [np.concatenate(blocks)], what)
    for root in {0, p - 1}:
        outs = zeros(sizes, dtype) if rank == root else None
        finish(dist.gather(mine, outs, root, **how))
        check_equal(outs or [], blocks if outs else [], what)
        out = np.zeros(n, dtype)
        finish(dist.scatter(out, blocks if rank == root else None, root, **how))
        check_equal([out, mine], [blocks[rank]] * 2, what)


def check_reductions(rank, sizes, dtype, **how):
    p = len(sizes)
    what = (sizes, dtype, how)
    lists = [[block(r, to, sizes[to], dtype) for to in range(p)] for r in range(p)]
    for op, ufunc in ((dist.ReduceOp.SUM, np.add), (dist.ReduceOp.PRODUCT, np.multiply)):
        expected = ufunc.reduce([blocks[rank] for blocks in lists], axis=0, dtype=dtype)
        out = np.zeros(sizes[rank], dtype)
        dist.reduce_scatter(out, [b.copy() for b in lists[rank]], op, **how)
        check_equal([out], [expected], what)
        out = np.zeros(sizes[rank], dtype)
        whole = np.concatenate(lists[rank])
        dist.reduce_scatter_tensor(out, whole, op, input_split_sizes=sizes, **how)
        check_equal([out, whole], [expected, np.concatenate(lists[rank])], what)


@pytest.mark.sweep(3)
@pytest.mark.ranks(1, 2, 3, 5, kind="both", engine="both")
def test_blocks_of_every_size_arrive(rank):
    p = dist.get_world_size()
    for kind in KINDS:
        sizes = shapes(p, kind)
        for dtype in DTYPES:
            check_moves(rank, sizes, dtype)
            check_reductions(rank, sizes, dtype)
        check_moves(rank, sizes, np.float32, async_op=True)
        check_reductions(rank, sizes, np.float64, deterministic=True)
    for algorithm in ("linear", "ring", "one_shot"):
        outs = zeros(shapes(p, "rising"), np.float32)
        mine = block(rank, 0, rank + 1, np.float32)
        dist.all_gather(outs, mine, algorithm=algorithm)
        check_equal(outs, [block(r, 0, r + 1, np.float32) for r in range(p)], algorithm)


def expect(error, text, call):
    with fails(error, text):
        call()
    check_usable()


@pytest.mark.sweep(3)
@pytest.mark.ranks(2, 3, kind="both", engine="both")
def test_blocks_that_do_not_fit_are_an_error_on_every_rank(rank):
    """The error names the pair of ranks; nothing is written."""
    p = dist.get_world_size()
    sizes = shapes(p, "rising")
    outs, mine = zeros(sizes, np.float32), np.ones(sizes[rank], np.float32)
    wrong = np.ones(sizes[rank] + 2, np.float32) if rank == 1 else mine
    mismatch = CollectiveMismatchError
    lists = outs if rank == 0 else None
    text = "rank 1 sends 4 elements to rank 0, which expects 2"
    expect(mismatch, text, lambda: dist.gather(wrong, lists, 0))
    text = "rank 0 sends 2 elements to rank 1, which expects 4"
    expect(mismatch, text, lambda: dist.scatter(wrong.copy(), lists, 0))
    own = InvalidArgumentError if rank == 1 else mismatch
    text = "tensor_list[1] has 2 elements, this rank's own array 4"
    expect(own, text, lambda: dist.all_gather(outs, wrong))
    text = "input_list[1] has 2 elements, this rank's own array 4"
    expect(own, text, lambda: dist.reduce_scatter(wrong.copy(), outs))
    other = list(reversed(sizes)) if rank == 0 else sizes
    fitting = np.ones(other[rank], np.float32)
    text = f"blocks of {sizes}"
    expect(mismatch, text, lambda: dist.all_gather(zeros(other, np.float32), fitting))
    whole = np.zeros(sum(sizes), np.float32)

    def single(rows):
        return lambda: dist.all_gather_into_tensor(whole, mine, output_split_sizes=rows)

    expect(InvalidArgumentError, "add up to", single([n + 1 for n in sizes]))
    expect(InvalidArgumentError, "numbers, none negative", single([*sizes, 0]))
    assert all((o == 0).all() for o in outs)
    assert (whole == 0).all()
    text = "does not serve all_gather with blocks of different size"
    expect(InvalidArgumentError, text, lambda: dist.all_gather(outs, mine, algorithm="bruck"))


@pytest.mark.ranks(1)
def test_blocks_that_do_not_fit_in_a_world_of_one(rank):
    x, blocks = np.ones(3), [np.zeros(2)]
    with fails(InvalidArgumentError, "gather_list[0] has 2 elements"):
        dist.gather(x, blocks)
    with fails(InvalidArgumentError, "scatter_list[0] has 2 elements"):
        dist.scatter(x, blocks)


@pytest.mark.ranks(2, 3)
def test_sizes_that_one_rank_knows_then_sizes_that_all_know(rank):
    """The two kinds get their programs in two ways."""
    for _ in range(3):
        sizes = [rank + 1 for rank in range(dist.get_world_size())]
        into = zeros(sizes, np.int64) if rank == 0 else None
        dist.gather(np.full(sizes[rank], rank), into, dst=0, timeout=20)
        everything = zeros(sizes, np.int64)
        dist.all_gather(everything, np.full(sizes[rank], rank), timeout=20)
        check_equal(everything, [np.full(n, r) for r, n in enumerate(sizes)], "all_gather")
        if into is not None:
            check_equal(into, everything, "gather")
