"""A call that C++ repeats does what it did the first time, or what Python would do."""

import inspect
import pickle
import pydoc

import numpy as np
import pytest

import unisono as dist
from tests.worlds import quick_bodies as bodies
from unisono.base import config
from unisono.engines import is_native_built
from unisono.testing import run

pytestmark = [
    pytest.mark.skipif(not is_native_built(), reason="the C++ engine is not built"),
    pytest.mark.skipif(
        config.get("UNISONO_ENGINE") == "reference", reason="UNISONO_ENGINE forbids it"
    ),
]


def test_a_quick_function_still_looks_like_one():
    assert type(dist.all_reduce).__name__ == "Function"
    assert list(inspect.signature(dist.all_reduce).parameters)[:4] == [
        "tensor", "op", "group", "async_op",
    ]  # fmt: skip
    assert dist.all_reduce.__name__ == "all_reduce"
    assert inspect.getdoc(dist.all_reduce).startswith("Replace every rank's tensor")
    assert pickle.loads(pickle.dumps(dist.all_reduce)) is dist.all_reduce
    shown = pydoc.render_doc(dist.all_reduce, renderer=pydoc.plaintext)
    assert "tensor: 'Any'," in shown
    assert "op: 'ReduceOp' = ReduceOp.SUM," in shown
    assert type("Holder", (), {"call": dist.barrier})().call.__func__ is dist.barrier


def test_argument_errors_are_those_of_python():
    with pytest.raises(TypeError, match="positional argument"):
        dist.all_reduce()
    with pytest.raises(TypeError, match="multiple values"):
        dist.all_reduce(np.ones(1), tensor=np.ones(1))
    with pytest.raises(dist.errors.NotInitializedError):
        dist.all_reduce(np.ones(1))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_function(world, size):
    for wrong, seen in world(bodies.every_function, size):
        assert wrong == 0
        # Of three rounds with the same arguments the second and the third are repeated.
        assert [seen[i] for i in range(len(seen)) if i % 3] == [size > 1] * 8


def test_other_arguments(world):
    for results in world(bodies.other_arguments, 3):
        assert results[:4] == [[6.0] * 4, [[6.0] * 2] * 2, [6] * 4, [3.0] * 4]
        assert results[4:8] == [[2.0] * 4, [12.0] * 4, [6.0] * 4, [6.0] * 4]
        assert results[9] == [0, 0, 1, 1, 2, 2]
    for rank, results in enumerate(world(bodies.other_arguments, 3)):
        assert results[8] == [18.0, rank + 1.0] * 4


def test_other_groups(world):
    pairs = [(0 + 1 + 2 + 3 * k) for k in range(3)]
    for rank, sums in enumerate(world(bodies.other_groups, 3)):
        assert sums == ([2.0 * s for s in pairs] if rank < 2 else [float(s) for s in pairs])


def test_a_mismatch_names_both_calls(world):
    for texts, x in world(bodies.odd_one, 3):
        assert [k for k, _ in texts] == [0, 1, 2, 3]
        for _, text in texts:
            assert "all_reduce(float32[3], SUM)" in text
            assert "broadcast(float32[3], src=0)" in text
        # The last good call added the ones of the last round.
        assert x == [9.0] * 3


def test_an_even_exchange_among_uneven_ones(world):
    bodies.check_one_uneven(world(bodies.one_uneven, 3))


def test_a_missing_rank_is_named(world):
    bodies.check_missing(world(bodies.missing, 3, args=(1.0,)), 1.0)


def test_abort_ends_a_repeated_call(world):
    bodies.check_aborted(world(bodies.aborted, 3))


def test_order_with_asynchronous_calls(world):
    assert world(bodies.between_async, 2) == [(1.0, 1.0)] * 2


def test_a_wrapper_is_never_passed_by(world):
    assert world(bodies.wrapped, 2) == [["all_reduce", "barrier"]] * 2


def test_two_threads_with_a_group_each(world):
    each = sum(range(200)) * 2.0
    assert world(bodies.own_group_per_thread, 2) == [[each, 2 * each]] * 2


def test_a_destroyed_group(world):
    for text in world(bodies.destroyed, 2):
        assert "was destroyed" in text


def test_an_overlapping_call_names_both_places(world):
    (told, x), (_, y) = world(bodies.overlapping, 2)
    assert x == y == [8.0] * 3
    # The first thread runs no code of ours, so its call site is where it called C++.
    assert told.startswith("all_reduce on group 'default' at ")
    assert "overlaps all_reduce at " in told
    assert "quick_bodies.py" in told


def test_a_stream_keeps_its_order(world):
    for seen in world(bodies.in_stream, 2):
        assert seen[1:] == [[12.0] * 2, [24.0] * 2]
    for rank, seen in enumerate(world(bodies.in_stream, 2)):
        assert seen[0] == [6.0] * 2
        assert rank in (0, 1)


def test_calls_of_a_signal_handler_do_not_take_the_place_of_the_one_that_runs():
    for right, told in run(bodies.interrupted_by_others, 2, ranks="processes"):
        assert right
        assert "rank 0 called all_reduce(float64[1000]" in told
        assert "rank 1 called all_reduce(int64[1000]" in told


def test_plain_messages_run_no_python(world):
    assert world(bodies.messages_in_cpp, 3) == [[True] * 6] * 3


def test_calls_with_an_algorithm_are_repeated(world):
    for results, repeated, texts in world(bodies.with_algorithms, 3):
        assert results == [[6.0] * 9] * 9
        assert repeated == [False] * 3 + [True] * 6
        assert texts == [True] * 3
