"""A call that C++ runs without Python code does what Python would do."""

import inspect
import pickle
import pydoc
import re
import signal
import sys
import threading

import numpy as np
import pytest

import unisono as dist
from tests.support.calls import fails, operations_of
from tests.support.operations import COLLECTIVES, Operations
from unisono.errors import (
    ArgumentTypeError,
    CollectiveAbortedError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    InvalidArgumentError,
    UsageError,
)

pytestmark = [pytest.mark.sweep(1), pytest.mark.native]


def repeats():
    """Return how many calls of the default group C++ has run so far, at least."""
    calls = dist.group.WORLD.calls
    last = None if calls is None else calls.last()
    return 0 if last is None else last[0]


def test_a_function_in_cpp_still_looks_like_one():
    assert type(dist.all_reduce).__name__ == "Function"
    assert list(inspect.signature(dist.all_reduce).parameters)[:4] == [
        "tensor", "op", "group", "async_op",
    ]  # fmt: skip
    assert dist.all_reduce.__name__ == "all_reduce"
    assert inspect.getdoc(dist.all_reduce).startswith("Replace every rank's tensor")
    assert pickle.loads(pickle.dumps(dist.all_reduce)) is dist.all_reduce
    shown = pydoc.render_doc(dist.all_reduce, renderer=pydoc.plaintext)
    assert "tensor: 'Array'," in shown
    assert "op: 'ReduceOp | Function' = ReduceOp.SUM," in shown
    assert type("Holder", (), {"call": dist.barrier})().call.__func__ is dist.barrier


def test_argument_errors_are_those_of_python():
    with pytest.raises(TypeError, match="positional argument"):
        dist.all_reduce()
    with pytest.raises(TypeError, match="multiple values"):
        dist.all_reduce(np.ones(1), tensor=np.ones(1))
    with pytest.raises(dist.errors.NotInitializedError):
        dist.all_reduce(np.ones(1))


@pytest.mark.sweep(3)
@pytest.mark.ranks(1, 2, 3, 4, kind="both")
def test_every_function_repeats_with_other_contents(rank):
    p, seen = dist.get_world_size(), []
    names = [name for name in COLLECTIVES if not name.endswith("_coalesced")]
    for n in (0, 1, 40_000):
        for dtype in (np.float32, np.int64):
            for k in range(3):
                before = repeats()
                calls = Operations(rank, p, n, p - 1, dtype=dtype, shift=k, modulus=1001)
                for name in names:
                    getattr(calls, name)()
                calls.op = dist.ReduceOp.MAX
                calls.all_reduce()
                calls.check(n, k)
                if k > 0:
                    seen.append(repeats() > before)
    assert seen == [p > 1] * 12


@pytest.mark.ranks(3, kind="both")
def test_a_call_that_differs_in_one_thing_from_a_repeated_call(rank):
    def check_both(x, total, **how):
        for _ in range(2):
            mine = x.copy()
            dist.all_reduce(mine, **how)
            assert (mine == total).all(), how

    check_both(np.full(4, rank + 1.0), 6)
    check_both(np.full((2, 2), rank + 1.0), 6)
    check_both(np.full(4, rank + 1), 6)
    check_both(np.full(4, rank + 1.0), 3, op=dist.ReduceOp.MAX)
    check_both(np.full(4, rank + 1.0), 2, op=dist.ReduceOp.AVG)
    check_both(np.full(4, rank + 1.0), 12, op=dist.ReduceOp.PREMUL_SUM(2.0))
    check_both(np.full(4, rank + 1.0), 6, algorithm="ring")
    check_both(np.full(4, rank + 1.0).astype(">f8"), 6)
    strided = np.full(8, rank + 1.0)
    for _ in range(2):
        dist.all_reduce(strided[::2])
    assert strided.tolist() == [18.0, rank + 1.0] * 4
    overlapping = np.zeros(6)
    mine = overlapping[2 * rank : 2 * rank + 2]
    mine[:] = rank
    for _ in range(2):
        dist.all_gather_into_tensor(overlapping, mine)
    assert overlapping.tolist() == [0, 0, 1, 1, 2, 2]


@pytest.mark.ranks(3, kind="both")
def test_a_mismatch_names_both_calls(rank):
    x = np.ones(3, np.float32)
    for _ in range(4):
        x[:] = 1
        dist.all_reduce(x)
        both = "all_reduce(float32[3], SUM)", "broadcast(float32[3], src=0)"
        with fails(CollectiveMismatchError, *both):
            dist.broadcast(x, 0) if rank == 1 else dist.all_reduce(x)
    dist.all_reduce(x)
    # The last good call added the ones of the last round.
    assert x.tolist() == [9.0] * 3


@pytest.mark.ranks(3, kind="both")
def test_an_even_exchange_among_uneven_ones(rank):
    """Rank 0 repeats an even exchange, which is a part of an uneven exchange of the others."""
    out, x = np.full(3, -1), np.arange(3) + 10 * rank
    even = [rank, 10 + rank, 20 + rank]
    # Ranks 1 and 2 swap two rows, and keep none.
    splits = [1, 0, 2] if rank == 1 else [1, 2, 0]
    for k in range(4):
        if k % 2 == 0 or rank == 0:
            dist.all_to_all_single(out, x)
        else:
            dist.all_to_all_single(out, x, splits, splits)
        uneven = [[0, 10, 20], [1, 21, 22], [2, 11, 12]][rank]
        assert out.tolist() == (uneven if k % 2 else even)


# A rank that is busy with something else may be late to answer that it never entered the call.
NO_RANK_1 = r"ranks? [\d, and]*\b1\b[\d, and]* (never entered it|.*did not answer)"


@pytest.mark.sweep(2)
@pytest.mark.ranks(3, kind="both")
def test_a_missing_rank_is_named(rank):
    pg, x = dist.group.WORLD, np.ones(2)
    for _ in range(3):
        dist.all_reduce(x)
    pg.set_timeout(0.5)
    if rank != 1:
        with pytest.raises(CollectiveTimeoutError) as caught:
            dist.all_reduce(x)
        assert "timed out after 0.5 s" in str(caught.value)
        assert re.search(NO_RANK_1, str(caught.value))
        with pytest.raises(CollectiveTimeoutError):
            dist.all_reduce(x)
        assert "broken" in repr(pg)
    pg.store.barrier("end", 3, 60.0)


@pytest.mark.sweep(2)
@pytest.mark.ranks(3, kind="both")
def test_a_repeated_call_has_the_time_out_of_its_own(rank):
    pg, x = dist.group.WORLD, np.ones(2)
    for how in ({"timeout": 40}, {"timeout": 50.0}, {"deterministic": True, "timeout": 60}):
        dist.all_reduce(x, **how)
        before = repeats()
        dist.all_reduce(x, **how)
        assert repeats() > before, how
    assert x.tolist() == [3.0**6] * 2
    with pytest.raises(InvalidArgumentError, match="must not be negative"):
        dist.all_reduce(x, timeout=-1.0)
    with fails(ArgumentTypeError, "timeout must be seconds"):
        dist.all_reduce(x, timeout="1")
    work = dist.all_reduce(x, timeout=40, async_op=True)
    work.wait()
    with fails(CollectiveTimeoutError, "0.2 s" if rank else "0.3 s"):
        dist.recv(x, (rank + 1) % 3, timeout=0.2 if rank else 0.3)
    pg.store.barrier("received", 3, 60.0)
    if rank != 1:
        with pytest.raises(CollectiveTimeoutError) as caught:
            dist.all_reduce(x, timeout=0.5)
        assert "timed out after 0.5 s" in str(caught.value)
        assert re.search(NO_RANK_1, str(caught.value))
    pg.store.barrier("end", 3, 60.0)


@pytest.mark.ranks(3, kind="both")
def test_abort_ends_a_repeated_call(rank):
    pg, x = dist.group.WORLD, np.ones(2)
    for _ in range(3):
        dist.all_reduce(x)
    if rank == 0:
        # Sooner, and the others might still be in the calls before.
        pg.store.wait(["1", "2"], 30.0)
        pg.abort("enough")
    else:
        pg.store.set(str(rank), b"")
        with pytest.raises(CollectiveAbortedError, match="enough"):
            dist.all_reduce(x)


@pytest.mark.ranks(2, kind="both")
def test_a_wrapper_is_never_passed_by(rank):
    x = np.zeros(2)
    for _ in range(2):
        dist.all_reduce(x)
    with operations_of(dist.group.WORLD) as seen:
        dist.all_reduce(x)
        dist.barrier()
        dist.group.WORLD.store.barrier("wrapped", dist.get_world_size(), 30.0)
    dist.all_reduce(x)
    assert seen == ["all_reduce", "barrier"]


@pytest.mark.ranks(2, kind="processes")
def test_an_asynchronous_call_and_its_wait_run_hardly_any_python(rank):
    x, calls = np.full(4, rank + 1.0), []

    def count(frame, event, argument):
        if event == "call":
            calls.append(frame.f_code.co_qualname)

    for _ in range(2):
        dist.all_reduce(x, async_op=True).wait()
    sys.setprofile(count)
    try:
        work = dist.all_reduce(x, async_op=True)
        work.wait()
    finally:
        sys.setprofile(None)
    assert len(calls) <= 6, calls
    assert work.is_success()
    assert work.result()[0] is x
    assert x.tolist() == [12.0] * 4


@pytest.mark.ranks(2, kind="both")
def test_an_overlapping_call_names_both_places(rank):
    group, x = dist.group.WORLD, np.ones(3)
    for _ in range(2):
        dist.all_reduce(x)
    if rank == 0:
        first = threading.Thread(target=dist.all_reduce, args=(x,), kwargs={"group": group})
        first.start()
        while group.calls.caller == 0 and first.is_alive():
            first.join(0.001)
        with pytest.raises(UsageError) as caught:
            dist.all_reduce(np.ones(2))
        # The first thread runs no code of ours, so its call site is where it called C++.
        assert caught.value.what.startswith("all_reduce on group 'default' at ")
        assert "overlaps all_reduce at " in caught.value.what
        assert "test_prepared.py" in caught.value.what
        group.send(np.zeros(1), 1)
        first.join()
    else:
        group.recv(np.zeros(1), 0)
        dist.all_reduce(x)
    dist.barrier()
    assert x.tolist() == [8.0] * 3


@pytest.mark.ranks(2, kind="both")
def test_a_stream_keeps_its_order(rank):
    x = np.full(2, rank + 1.0)
    for _ in range(2):
        dist.all_reduce(x)
    gate = threading.Event()
    with dist.stream(dist.Stream()):
        dist.current_stream().submit(gate.wait)
        dist.all_reduce(x)
        assert x.tolist() == [3.0 * 2] * 2
        gate.set()
        dist.current_stream().synchronize()
    assert x.tolist() == [12.0] * 2
    dist.all_reduce(x)
    assert x.tolist() == [24.0] * 2


@pytest.mark.ranks(2, kind="processes")
def test_calls_of_a_signal_handler_do_not_take_the_place_of_the_call_that_runs(rank):
    """A signal handler makes many calls in the middle of one that C++ runs, which then fails."""
    store, x = dist.group.WORLD.store, np.ones(1000)
    for _ in range(3):
        dist.all_reduce(x)
    works, sums = [], [np.full(n, rank + 1.0) for n in range(1, 500)]

    def call_others(*_):
        if rank == 0 and dist.group.WORLD.calls.caller == 0:
            signal.setitimer(signal.ITIMER_REAL, 0.01)  # too early
            return
        works.extend(dist.all_reduce(each, async_op=True) for each in sums)
        store.set("others", "called")

    if rank == 0:
        signal.signal(signal.SIGALRM, call_others)
        signal.setitimer(signal.ITIMER_REAL, 0.01)
    else:
        store.wait(["others"])
    with fails(
        CollectiveMismatchError,
        "rank 0 called all_reduce(float64[1000]",
        "rank 1 called all_reduce(int64[1000]",
    ):
        dist.all_reduce(x if rank == 0 else x.astype(int))
    if rank != 0:
        call_others()
    assert all(work.wait() for work in works)
    assert all((each == 3).all() for each in sums)


@pytest.mark.ranks(3, kind="both")
def test_plain_messages_run_no_python(rank):
    p, group = dist.get_world_size(), dist.group.WORLD
    to, source = (rank + 1) % p, (rank - 1) % p
    # Once in Python's way: what C++ needs to know is there then.
    dist.barrier()

    def refuse(*args, **how):
        raise RuntimeError("came to Python")

    group.send = group.recv = refuse
    try:
        for k, how in enumerate([{}, {"tag": 3}, {"group": group, "tag": 4}, {"group": group}]):
            mine, got = np.full(5, 10 * rank + k), np.zeros(5, int)
            dist.send(mine, to, **how)
            assert dist.recv(got, source if k % 2 else None, **how) == source
            assert got.tolist() == [10 * source + k] * 5
        dist.send(np.arange(10.0)[::2], to)
        assert dist.recv(table := np.zeros((6, 2))[:, 1], source, partial=True) == 5
        assert table.tolist() == [0, 2, 4, 6, 8, 0]
        for call in (dist.send, dist.recv):
            with pytest.raises(RuntimeError, match="came to Python"):
                call(np.ones(4, ">f8"), to)
    finally:
        del group.send, group.recv
    dist.barrier()


@pytest.mark.ranks(2, kind="both")
def test_an_attribute_that_hides_a_method_is_called(rank):
    group, seen = dist.group.WORLD, []
    dist.barrier()

    def all_reduce(tensor, *args, **how):
        seen.append(tensor.size)
        return type(group).all_reduce(group, tensor, *args, **how)

    group.all_reduce = all_reduce
    try:
        for _ in range(2):
            x = np.full(7, rank + 1.0)
            dist.all_reduce(x)
            assert (x == 3).all()
    finally:
        del group.all_reduce
    assert seen == [7, 7]


@pytest.mark.sweep(2)
@pytest.mark.ranks(3, kind="both")
def test_calls_with_an_algorithm_are_repeated(rank):
    """Two algorithms and none in turn, with a wrong name each time."""
    repeated = []
    for count in (9, 10, 11):
        found = []
        for _ in range(3):
            for how in ({"algorithm": "ring"}, {"algorithm": "recursive_doubling"}, {}):
                before, x = repeats(), np.full(count, rank + 1.0)
                dist.all_reduce(x, **how)
                assert (x == 6).all()
                found.append(repeats() > before)
            with pytest.raises(InvalidArgumentError, match="no such"):
                dist.all_reduce(x, algorithm="no such")
            # A rank waits at most 1 s until all have refused. A later rank would keep the progress
            # thread busy, and the next call would be queued behind the refusal.
            dist.barrier()
        repeated.append(found)
    # Two of the calls can have the same slot in the table: in 1 of 100 tables.
    assert [False] * 3 + [True] * 6 in repeated
