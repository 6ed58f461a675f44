"""all_gather, gather, scatter and reduce_scatter of blocks of different size, against NumPy."""

from types import SimpleNamespace

import numpy as np
import pytest

import unisono as dist
from tests.support.calls import check_usable, fails, finish
from tests.support.operations import Operations
from unisono.core.backends.api import CallOptions
from unisono.core.backends.blocks import Blocks, Splits
from unisono.core.backends.prepared_calls import CallSpec, PreparedCalls
from unisono.core.base.deadline import Deadline
from unisono.core.base.types import dtype_named
from unisono.core.engines.api import NO_STEPS
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


def small(rank, sizes, dtype=np.float32, **how):
    """Return calls on small whole numbers, which reduce exactly."""
    return Operations(rank, len(sizes), dtype=dtype, modulus=11, uneven=sizes, how=how)


def check_moves(rank, sizes, dtype, **how):
    calls = small(rank, sizes, dtype, **how)
    finish(calls.all_gather())
    finish(calls.all_gather_into_tensor())
    for root in {0, calls.p - 1}:
        calls.root = root
        finish(calls.gather())
        finish(calls.scatter())
    calls.check(sizes, dtype, how)
    blocks = [calls.value(r, 0, n) for r, n in enumerate(sizes)]
    rows, pair = np.zeros((sum(sizes), 2), dtype), np.stack([blocks[rank]] * 2, axis=1)
    finish(dist.all_gather_into_tensor(rows, pair, output_split_sizes=sizes, **how))
    assert (rows[:, 1] == np.concatenate(blocks)).all()


def check_reductions(rank, sizes, dtype, **how):
    calls = small(rank, sizes, dtype, **how)
    for calls.op in (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT):
        calls.reduce_scatter()
        calls.reduce_scatter_tensor()
    calls.check(sizes, dtype, how)


@pytest.mark.sweep(2)
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
        calls = small(rank, shapes(p, "rising"), algorithm=algorithm)
        calls.all_gather()
        calls.check(algorithm)


def zeros(sizes, dtype):
    return [np.zeros(n, dtype) for n in sizes]


def expect(error, text, call):
    with fails(error, text):
        call()
    check_usable()


@pytest.mark.sweep(2)
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
    calls = small(rank, shapes(dist.get_world_size(), "rising"), timeout=20)
    for _ in range(3):
        calls.gather()
        calls.all_gather()
    calls.check()


@pytest.mark.parametrize(
    ("kib", "wish", "trip_us", "names"),
    [
        (100, None, 250, {"gather": "linear", "scatter": "linear", "all_to_all": "linear"}),
        # More than a switch may keep: a few blocks at once.
        (4000, None, 250, {"gather": "pairwise", "scatter": "pairwise", "all_to_all": "pairwise"}),
        (4000, "linear", 250, {"gather": "linear", "scatter": "linear", "all_to_all": "linear"}),
        # It needs equal blocks.
        (4000, "binomial", 250, {"gather": "pairwise", "scatter": "pairwise"}),
        (100, None, 0, {"gather": "linear", "scatter": "linear", "all_to_all": "pairwise"}),
    ],
)
def test_uneven_blocks_between_hosts_are_sent_as_even_ones(kib, wish, trip_us, names):
    p, sizes = 8, [kib * 128 * each // 28 for each in range(8)]
    for collective, name in names.items():
        root = -1 if collective == "all_to_all" else 0
        if root < 0:
            rows = [[*([size // p] * p), *(each // p for each in sizes)] for size in sizes]
        else:
            rows = [sizes, *(Blocks.own(sizes[r], r, p).sizes for r in range(1, p))]
        for rank in (0, 5):
            made = []

            def lower(schedule, layout, itemsize, made=made):
                made.append(schedule.algorithm)
                return NO_STEPS

            engine = SimpleNamespace(
                name="native", shares_memory=False, local=2, has_collectives=False,
                most_moved=0, lower=lower,
            )  # fmt: skip
            comm = SimpleNamespace(size=p, rank=rank, ranks=range(p), round_trip_us=trip_us)
            if root < 0:
                splits = Splits(tuple(rows[rank][:p]), tuple(rows[rank][p:]))
            else:
                splits = Blocks(tuple(rows[rank]), even=rank != root)
            calls = PreparedCalls(comm, engine)
            spec = CallSpec(collective, collective, sizes[rank], root, splits=splits)
            subject = SimpleNamespace(dtype=dtype_named("float64"), shapes=((sizes[rank],),))
            prepared = calls.get(spec, subject, CallOptions(False, Deadline(60), wish))
            prepared.exchange.program_for(np.array(rows, np.int64))
            # The static program is made first.
            assert made[-1] == name, (collective, rank)
