"""Reductions that no kernel has: functions, NumPy's own dtypes, float16 and bfloat16 in float32."""

import functools
from types import FunctionType

import numpy as np
import pytest

import unisono as dist
from unisono.core.operations import reductions
from unisono.core.operations.reductions import _digest_of, empty
from unisono.errors import (
    ArgumentTypeError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    InvalidArgumentError,
    UnsupportedError,
)

PAIR = np.dtype([("value", "f8"), ("index", "i8")])


def subtracted(a, b):
    """Not commutative (nor associative): shows the order."""
    return a - 2 * b


@pytest.mark.ranks(3, kind="both")
def test_functions_reduce_in_the_order_of_ranks(rank):
    all_x = [np.arange(6.0).reshape(3, 2) + 10 * r for r in range(3)]
    for function in (np.logaddexp, np.fmax, np.hypot, subtracted):
        expected = [functools.reduce(function, all_x[:n]) for n in (1, 2, 3)]
        x = all_x[rank].copy()
        dist.all_reduce(x, function)
        np.testing.assert_array_equal(x, expected[2])
        x = np.asfortranarray(all_x[rank])
        dist.reduce(x, 1, function)
        np.testing.assert_array_equal(x, expected[2] if rank == 1 else all_x[rank])
        x = all_x[rank].copy()
        dist.scan(x, function)
        np.testing.assert_array_equal(x, expected[rank])
        x = all_x[rank].copy()
        dist.exscan(x, op=function, timeout=30)
        np.testing.assert_array_equal(x, expected[rank - 1] if rank else all_x[0])
        y = np.empty((1, 2))
        dist.reduce_scatter_tensor(y, all_x[rank], function)
        np.testing.assert_array_equal(y, expected[2][rank : rank + 1])
        np.testing.assert_array_equal(
            dist.functional.all_reduce(all_x[rank], function), expected[2]
        )


@pytest.mark.ranks(1, 2, 3, 5, 8)
def test_commutative_functions_reduce_in_any_order(rank):
    p = dist.get_world_size()
    all_x = [np.arange(6).reshape(3, 2) * (r + 2) + 60 for r in range(p)]
    for function in (np.gcd, np.lcm, lambda a, b: (a + b) % 1009):
        expected = functools.reduce(function, all_x)
        x = np.asfortranarray(all_x[rank])
        dist.all_reduce(x, dist.commutative(function))
        np.testing.assert_array_equal(x, expected)
        x = all_x[rank].copy()
        dist.reduce(x, p - 1, dist.commutative(function))
        np.testing.assert_array_equal(x, expected if rank == p - 1 else all_x[rank])
        # These keep the order of ranks.
        dist.scan(x := all_x[rank].copy(), dist.commutative(function))
        np.testing.assert_array_equal(x, functools.reduce(function, all_x[: rank + 1]))
    # All ranks have the same bits, whatever the function does.
    scalar = np.array(1.0 + rank)
    dist.all_reduce(scalar, dist.commutative(subtracted))
    found = np.empty(p)
    dist.all_gather_into_tensor(found, scalar.reshape(1))
    assert len(set(found)) == 1
    assert np.signbit(found[0]) == (p > 1)
    with pytest.raises(ArgumentTypeError, match="commutative takes a function, got str"):
        dist.commutative("gcd")


@pytest.mark.ranks(5)
def test_an_error_of_a_commutative_function_is_one_on_all_ranks(rank):
    def fails_on(bad):
        def function(a, b):
            if bad in (a[0], b[0]) and (a != b).any():  # not where it is tried
                raise KeyError(bad)
            return a + b

        return dist.commutative(function)

    for bad in (3, 5):  # in the first round between ranks 2 and 3, in the last one
        with pytest.raises((KeyError, CollectiveMismatchError), match=f"{bad}"):
            dist.all_reduce(np.full(2, float(rank)) + (rank == 4) * 2, fails_on(bad))
    x = np.full(2, float(rank))
    dist.all_reduce(x, fails_on(-1))
    assert x.tolist() == [10.0, 10.0]


def test_the_digest_of_a_function_is_that_of_what_it_does():
    def scaled(factor, *, base=0):
        return lambda a, b: a + factor * b + base

    def recursive(a, b):
        return recursive if a is None else a + b

    differ = [
        *(np.add, np.fmin, subtracted, dist.minloc, dist.commutative(np.add), scaled, recursive),
        *(scaled(1), scaled(2), scaled(1.0), scaled("1"), scaled(np.float32(1))),
        *(
            lambda a, b: a + b,
            lambda a, b: a - b,
            lambda a, b: a + 2 * b,
            lambda a, b: np.add(a, b),
        ),
        *(lambda a, b: a.max(b), lambda a, b=1: a + b, lambda a, b=2: a + b),
        *(functools.partial(subtracted, 1), functools.partial(subtracted, 2)),
        *(lambda a, b: a in {1, "x"}, lambda a, b: a in {1, "y"}, lambda a, b: [a + b for c in b]),
    ]
    assert len({_digest_of(each) for each in differ}) == len(differ)
    assert _digest_of(scaled(1)) == _digest_of(scaled(1))
    assert _digest_of(scaled(object())) == _digest_of(scaled(object()))


def test_the_digest_of_a_closure_has_no_counters_and_no_empty_cells():
    def counting(count):
        def counted(a, b):
            nonlocal count
            count += 1
            return a + b

        def later(a, b):
            return a + b if a is not None else missing

        digests = _digest_of(counted), _digest_of(later)
        missing = 1
        return *digests, _digest_of(later) != digests[1], counted, missing

    first, second = counting(0), counting(5)
    assert first[:3] == (*second[:2], True)
    first[3](1, 1)
    assert _digest_of(first[3]) == first[0]
    wide = functools.reduce(lambda f, _: lambda a, b: (f, f, f, f, f, f), range(9), np.add)
    many = [list(range(10**5)), list(range(10**5 - 1))]
    assert len({*map(_digest_of, [wide, *(functools.partial(wide, each) for each in many)])}) == 3


@pytest.mark.ranks(2)
def test_the_work_of_a_reduction_by_a_function_is_that_of_the_call(rank):
    pg, x = dist.group.WORLD, np.ones(2)
    for op in (np.maximum, dist.commutative(np.maximum), dist.ReduceOp.SUM):
        work = pg.all_reduce(x, op)
        assert work._get_op_type() == pg.all_reduce(np.ones(2))._get_op_type()
        assert work._get_duration() >= 0
    with dist.stream(dist.Stream()):
        work = dist.all_reduce(x, async_op=True)
    work.wait()
    assert work._get_duration() >= 0


@pytest.mark.ranks(2, kind="both")
def test_ranks_with_different_functions_are_told_apart(rank):
    pairs = [
        (lambda a, b: a + b, lambda a, b: a - b),
        (functools.partial(np.add, 1), functools.partial(np.add, 2)),
        (dist.commutative(np.fmin), np.fmin),
    ]
    factor = rank + 1.0
    own = lambda a, b: a + factor * b  # noqa: E731
    for functions in [*pairs, (own, own)]:
        x = np.ones(2)
        with pytest.raises(CollectiveMismatchError, match="all_reduce by "):
            dist.all_reduce(x, functions[rank])
        assert x.tolist() == [1.0, 1.0]
    for factor in (0.5, 1.0, 2.0):
        assert own(1.0, 1.0) == 1 + factor
        dist.all_reduce(x, own)
    assert x.tolist() == [1.0 * 1.5 * 2 * 3] * 2


@pytest.mark.ranks(2)
def test_functions_of_tensors(rank):
    torch = pytest.importorskip("torch")
    x = torch.tensor([1.0, 5.0 * rank])
    dist.all_reduce(x, torch.logaddexp)
    assert torch.equal(x, torch.logaddexp(torch.tensor([1.0, 0.0]), torch.tensor([1.0, 5.0])))


@pytest.mark.ranks(3)
def test_minloc_and_maxloc_are_those_of_mpi(rank):
    values = np.array([[3.0, 1.0, 2.0], [3.0, 0.0, 2.0], [1.0, 4.0, 2.0]])
    for function, wins in ((dist.minloc, np.argmin), (dist.maxloc, np.argmax)):
        x = np.empty(3, PAIR)
        x["value"], x["index"] = values[rank], 10 - rank
        dist.all_reduce(x, function)
        # MPI: of equal values the one with the smaller index, which ranks have in reverse.
        best = [2 - wins(column[::-1]) for column in values.T]
        assert x["index"].tolist() == [10 - r for r in best]
        assert x["value"].tolist() == [values[r, i] for i, r in enumerate(best)]


@pytest.mark.ranks(3)
def test_long_doubles_and_dates_are_reduced_by_numpy(rank):
    op, tiny = dist.ReduceOp, np.finfo(np.longdouble).eps
    cases = [
        ("g", [1 + tiny, 1, 1 - tiny], op.SUM, np.add),
        ("g", [1 + tiny, 2, 1], op.PRODUCT, np.multiply),
        ("g", [1 + tiny, np.nan, 1], op.MAX, np.maximum),
        ("G", [1j + tiny, 2, 1], op.SUM, np.add),
        ("M8[s]", [5, 7, 2], op.MIN, np.minimum),
        ("M8[s]", [5, "NaT", 2], op.MAX, np.maximum),
        ("m8[ms]", [5, 7, 2], op.SUM, np.add),
    ]
    for dtype, values, kind, ufunc in cases:
        every = np.array(values, dtype)
        x = every[rank : rank + 1].copy()
        dist.all_reduce(x, kind)
        np.testing.assert_array_equal(x, ufunc.reduce(every, keepdims=True), err_msg=dtype)


@pytest.mark.ranks(3, kind="both")
def test_float16_is_summed_in_float32_and_rounded_once(rank):
    generator = np.random.default_rng(5)
    every = generator.normal(size=(3, 1000)).astype(np.float16) * np.float16(30)
    exact = every.astype(np.float32).sum(axis=0)
    x = every[rank].copy()
    dist.all_reduce(x, accumulate="float32")
    np.testing.assert_array_equal(x, exact.astype(np.float16))
    x = every[rank].copy()
    dist.reduce(x, 2, op=dist.ReduceOp.AVG, accumulate="float32")
    expected = (exact / np.float32(3)).astype(np.float16) if rank == 2 else every[rank]
    np.testing.assert_array_equal(x, expected)
    text = "accumulate='float64' on float16: only 'float32' on float16 and bfloat16"
    with pytest.raises(InvalidArgumentError, match=text):
        dist.all_reduce(x, accumulate="float64")
    with pytest.raises(UnsupportedError, match="all_reduce with accumulate takes no async_op"):
        dist.all_reduce(x, accumulate="float32", async_op=True)
    kinds = InvalidArgumentError, CollectiveMismatchError
    with pytest.raises(kinds[rank != 1], match="accumulate='float32' on int64"):
        dist.all_reduce(np.ones(2, int), **({"accumulate": "float32"} if rank == 1 else {}))
    dist.barrier()


@pytest.mark.ranks(2)
def test_bfloat16_is_rounded_once(rank):
    torch = pytest.importorskip("torch")
    every = torch.randn(2, 500, generator=torch.Generator().manual_seed(3)).bfloat16()
    x = every[rank].clone()
    dist.all_reduce(x, accumulate="float32")
    assert torch.equal(x, every.float().sum(0).bfloat16())


@pytest.mark.ranks(2, kind="both")
def test_wrong_calls_by_a_function_are_errors_on_all_ranks(rank):
    x = np.ones(3)
    with pytest.raises(CollectiveMismatchError, match="all_reduce by minimum"):
        dist.all_reduce(x, np.maximum if rank else np.minimum)
    with pytest.raises(CollectiveMismatchError, match="all_reduce by fmin"):
        dist.all_reduce(x, np.fmin if rank else dist.ReduceOp.MIN)
    with pytest.raises(
        UnsupportedError, match="by a function takes neither async_op nor algorithm"
    ):
        dist.all_reduce(x, np.fmin, async_op=True)
    kinds = ArgumentTypeError, CollectiveMismatchError
    with pytest.raises(kinds[rank], match="all_reduce by a function takes arrays, got bytearray"):
        dist.all_reduce(x if rank else bytearray(24), np.fmin)
    with pytest.raises(InvalidArgumentError, match=r"by dot returned the shape \[\] for \[3\]"):
        dist.all_reduce(x, np.dot)
    with pytest.raises(ZeroDivisionError):
        dist.all_reduce(x, lambda a, b: 1 / 0)
    dist.all_reduce(x)
    assert x.tolist() == [2.0] * 3


@pytest.mark.ranks(2, kind="both")
def test_a_result_that_cannot_be_written_is_an_error_before_any_array_is_changed(rank):
    def mean(a, b):
        return (a + b) / 2

    def read_only(x):
        x.setflags(write=rank == 1)
        return x

    refused = (InvalidArgumentError, CollectiveMismatchError)[rank]
    whole, half = np.arange(3) + rank, {"accumulate": "float32"}
    cases = [
        (read_only(np.ones(3)), np.fmin, {}, refused, "tensor is read-only"),
        (read_only(np.ones(3, np.float16)), dist.ReduceOp.SUM, half, refused, "is read-only"),
        (whole, mean, {}, InvalidArgumentError, "float64 for int64, which is of another kind"),
        (np.ones(3), lambda a, b: a * 1j + b, {}, InvalidArgumentError, "returned complex128 for"),
        (np.ones(3), np.fmin if rank else lambda a, b: 1 / 0, {}, Exception, "ZeroDivisionError"),
    ]
    for x, function, how, error, text in cases:
        before = x.copy()
        for call in (dist.all_reduce, dist.scan) if not how else (dist.all_reduce,):
            with pytest.raises(error) as caught:
                call(x, op=function, **how)
            assert text in f"{caught.type.__name__}: {caught.value}"
            np.testing.assert_array_equal(x, before)
    y, halves = np.zeros(2), [1, 3]
    with pytest.raises(UnsupportedError, match="by a function takes no input_split_sizes"):
        dist.reduce_scatter_tensor(y, np.arange(4.0), np.fmin, input_split_sizes=halves)
    with pytest.raises(InvalidArgumentError, match="returned float64 for int64"):
        dist.reduce_scatter_tensor(np.zeros(2, int), np.arange(4.0), np.fmin)
    with pytest.raises((ArgumentTypeError, CollectiveMismatchError)[rank]):
        dist.reduce_scatter_tensor(y if rank else bytearray(16), np.arange(4.0), np.fmin)
    dist.barrier()


@pytest.mark.ranks(2)
def test_leaves_that_require_gradients_are_written_as_by_a_kernel(rank):
    torch = pytest.importorskip("torch")
    x = torch.ones(3, requires_grad=True)
    dist.all_reduce(x, torch.add)
    assert x.tolist() == [2.0] * 3
    assert x.is_leaf
    x = torch.ones(3, dtype=torch.float16, requires_grad=True)
    dist.all_reduce(x, accumulate="float32")
    assert x.tolist() == [2.0] * 3
    with pytest.raises(InvalidArgumentError, match=r"returned torch\.float32 for torch\.int64"):
        dist.all_reduce(torch.ones(3, dtype=torch.int64), lambda a, b: (a + b) / 2)


@pytest.mark.ranks(4, kind="both")
@pytest.mark.parametrize("fails_at", [1, 2])
def test_an_error_between_two_rounds_ends_the_call_on_all_ranks(rank, fails_at):
    made: list = []

    def without_memory(like, *shape):
        made.append(shape)
        if rank == 1 and len(made) == fails_at:
            raise MemoryError("no room")
        return empty(like, *shape)

    names = {**vars(reductions), "empty": without_memory}
    own, x = FunctionType(reductions._in_pairs.__code__, names, "_in_pairs"), np.ones(2)
    with pytest.raises(MemoryError if rank == 1 else CollectiveMismatchError, match="no room"):
        own(dist.group.WORLD, dist.commutative(np.add), np.ones(2), "sum", "sum", None)
    dist.all_reduce(x)
    assert x.tolist() == [4.0, 4.0]


@pytest.mark.ranks(2)
def test_a_commutative_reduction_has_no_time_with_timeout_0(rank):
    group = dist.new_group([0, 1])
    if rank == 0:
        with pytest.raises(CollectiveTimeoutError):
            dist.all_reduce(np.ones(2), dist.commutative(np.add), group, timeout=0)
    dist.barrier()
