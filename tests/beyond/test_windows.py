"""Windows against a NumPy model: values, atomic operations, order, views, wrong calls, the end."""

from __future__ import annotations

import datetime
import gc
import os
import re
import threading
import traceback
from types import SimpleNamespace

import numpy as np
import pytest

import unisono as dist
from tests.faults.scripts import outcome, started
from tests.support import netns
from unisono.beyond.windows import memory as window_memory
from unisono.beyond.windows.access import end_of
from unisono.errors import (
    ArgumentTypeError,
    ClosedError,
    CollectiveAbortedError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    InvalidArgumentError,
    PeerLostError,
    UnisonoError,
    UnsupportedError,
    UsageError,
)
from unisono.testing import run

# Engine, and how many ranks share memory (0: all).
MEDIA = [
    pytest.param("native", 0, marks=pytest.mark.native),
    pytest.param("native", 1, marks=pytest.mark.native),
    pytest.param("native", 2, marks=pytest.mark.native),
    pytest.param("reference", 0),
]
on_each_medium = pytest.mark.parametrize(("engine", "per_host"), MEDIA)
OPS = [
    getattr(dist.ReduceOp, name) for name in ["SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"]
]
UFUNCS = {
    "SUM": np.add,
    "PRODUCT": np.multiply,
    "MIN": np.minimum,
    "MAX": np.maximum,
    "BAND": np.bitwise_and,
    "BOR": np.bitwise_or,
    "BXOR": np.bitwise_xor,
}


def on_ranks(monkeypatch, function, size, engine, per_host, kind="threads", args=()):
    monkeypatch.setenv("UNISONO_RANKS_PER_HOST", str(per_host))
    transport = "tcp" if per_host else None
    run(function, size, ranks=kind, engine=engine, transport=transport, timeout=30, args=args)


def raised(call):
    try:
        call()
    except UnisonoError as error:
        return error
    return None


# ---- values -----------------------------------------------------------------------------------


def random_calls(rank, seed):
    """Each rank changes its own stripe of every part; all ranks know what all ranks do."""
    p, width = dist.get_world_size(), 7
    rng = np.random.default_rng(seed)
    dtype = rng.choice(["i1", "i4", "i8", "f2", "f4", "f8", "c8", "c16", "?"])
    first = rng.integers(0, 2, (p, p * width)).astype(dtype)
    model = first.copy()
    window = dist.new_window(first[rank])
    assert np.array_equal(window.local, first[rank])
    window.fence()
    for _ in range(40):
        actor, target = rng.integers(0, p, 2)
        start, end = np.sort(rng.integers(0, width + 1, 2))
        values = rng.integers(0, 2, 2 * (end - start)).astype(dtype)[::2]  # strided
        kind = rng.integers(0, 3)
        at = int(actor) * width + int(start)
        stripe = model[target, at : at + len(values)]
        if kind == 0:
            stripe[:] = values
            if actor == rank:
                window.put(values, int(target), at)
        elif kind == 1:
            stripe += values
            if actor == rank:
                window.accumulate(values, target, offset=at)
        elif actor == rank:
            got = np.zeros(2 * len(values), dtype)[::2]
            window.get(got, np.int32(target), at)
            assert np.array_equal(got, stripe), (dtype, got, stripe)
    window.fence()
    assert np.array_equal(window.local, model[rank]), (dtype, window.local, model[rank])
    window.tensor_deregister()


@pytest.mark.parametrize("kind", ["threads", "processes"])
@on_each_medium
@pytest.mark.sweep(6)
def test_random_calls_leave_what_numpy_computes(monkeypatch, engine, per_host, kind):
    for seed in range(4 if kind == "threads" else 1):
        on_ranks(monkeypatch, random_calls, 3, engine, per_host, kind, (seed,))


def accumulates(rank):
    p = dist.get_world_size()
    values = (np.arange(1, 9) * np.arange(1, p + 1)[:, None]) % 3 + 1
    names = "int8 uint16 int32 uint64 float16 float32 float64 complex64 complex128 bool"
    for name in names.split():
        window = dist.new_window(np.ones(8, name))
        for op in OPS:
            is_bitwise, kind = op.name.startswith("B"), np.dtype(name).kind
            is_order = op.name in ("MIN", "MAX")
            if (is_bitwise and kind in "fc") or (is_order and kind == "c"):
                error = raised(lambda window=window, op=op: window.accumulate(window.local, 0, op))
                assert "is not defined on" in str(error)
                continue
            if name == "complex128" and op.name != "SUM":
                continue
            mine = values.astype(name)
            window.local[:] = 1
            window.fence()
            window.accumulate(mine[rank], 0, op)
            window.fence()
            expected = np.ones(8, name)
            for row in mine:
                expected = UFUNCS[op.name](expected, row)
            if rank == 0:
                assert np.array_equal(window.local, expected), (name, op)
            window.fence()


@on_each_medium
@pytest.mark.sweep(2)
def test_accumulate_of_each_op_and_dtype(monkeypatch, engine, per_host):
    on_ranks(monkeypatch, accumulates, 3, engine, per_host)


def counts(rank, rounds):
    """All ranks add at once; nothing is lost, and each value is handed out once."""
    p = dist.get_world_size()
    window = dist.new_window(np.zeros(3, np.int64))
    mine = [window.fetch_add(1, 0) for _ in range(rounds)]
    assert mine == sorted(mine)
    # A counter behind a lock made of compare_and_swap, and one that is added to.
    for _ in range(rounds // 10):
        while window.compare_and_swap(0, rank + 1, p - 1, 1) != 0:
            pass
        seen = np.zeros(1, np.int64)
        window.get(seen, p - 1, 2)
        window.put(seen + 1, p - 1, 2)
        window.flush(p - 1)
        assert window.compare_and_swap(rank + 1, 0, p - 1, 1) == rank + 1
    every = [None] * p
    dist.all_gather_object(every, mine)
    assert sorted(value for each in every for value in each) == list(range(p * rounds))
    window.fence()
    if rank == p - 1:
        assert window.local[2] == p * (rounds // 10)
    small = dist.new_window(np.array([120], np.int8))
    window.fence()
    if rank == 0:
        assert small.fetch_add(10, p - 1) == 120
        assert small.fetch_add(0, p - 1) == -126  # wraps around
    window.fence()


@pytest.mark.parametrize("kind", ["threads", "processes"])
@on_each_medium
@pytest.mark.sweep(4)
def test_atomic_operations_lose_nothing(monkeypatch, engine, per_host, kind):
    on_ranks(monkeypatch, counts, 3, engine, per_host, kind, (200 if per_host == 0 else 50,))


def large_arrays(rank):
    """More than one message holds, and more than a target may have to handle."""
    count = 6_000_000
    window = dist.new_window(np.zeros(count + 1, np.int64))
    window.fence()
    given, got = np.arange(count), np.zeros(count, np.int64)
    if rank == 0:
        window.put(given, 1, 1)
        window.accumulate(given, 1, offset=1)
        window.get(got, 1, 1)
        assert np.array_equal(got, 2 * given)
        window.signal(1)
    else:
        window.wait_signal(0)
        assert np.array_equal(window.local[1:], 2 * given)
        assert window.local[0] == 0
    window.fence()


@on_each_medium
@pytest.mark.sweep(2)
def test_large_arrays(monkeypatch, engine, per_host):
    on_ranks(monkeypatch, large_arrays, 2, engine, per_host)


# ---- order ------------------------------------------------------------------------------------


def relay(rank, rounds):
    """Behind a signal come the elements that were put before it, and no earlier ones."""
    p = dist.get_world_size()
    window = dist.new_window(np.zeros((p, 1000), np.int64))
    after, before = (rank + 1) % p, (rank - 1) % p
    for number in range(1, rounds + 1):
        window.put(np.full(1000, number), after, 1000 * rank)
        window.signal(after)
        window.wait_signal(before, timeout=20)
        assert (window.local[before] == number).all(), (number, window.local[before])
        window.signal(before)  # the elements are read
        window.wait_signal(after, timeout=20)


@pytest.mark.parametrize("kind", ["threads", "processes"])
@on_each_medium
@pytest.mark.sweep(4)
def test_a_signal_comes_after_what_was_put(monkeypatch, engine, per_host, kind):
    on_ranks(monkeypatch, relay, 3, engine, per_host, kind, (300 if per_host == 0 else 60,))


def signals(rank):
    """Signals are counted for each rank, and a wait takes one."""
    p = dist.get_world_size()
    window = dist.new_window(np.zeros(1))
    for other in range(p):
        for _ in range(rank + 1):
            window.signal(other)
    window.fence()
    for other in range(p):
        for _ in range(other + 1):
            window.wait_signal(other, timeout=20)
        error = raised(lambda other=other: window.wait_signal(other, timeout=0.01))
        assert isinstance(error, CollectiveTimeoutError), other
        text = f"timed out after 10 ms on rank {rank} of {p}: rank {other} did not signal"
        assert str(error).startswith(f"wait_signal(src={other}) in group 'default' {text}")
        assert error.context.peers == (other,)
    window.fence()
    # A work is done when the signal has come.
    work = window.wait_signal((rank - 1) % p, True)
    ended = threading.Event()
    work.get_future().then(lambda _: ended.set())
    assert not work.is_completed()
    dist.barrier()
    window.signal((rank + 1) % p, True).wait()
    assert ended.wait(20)
    assert work.is_completed()
    assert work.wait()


@on_each_medium
@pytest.mark.sweep(3)
def test_signals_are_counted(monkeypatch, engine, per_host):
    on_ranks(monkeypatch, signals, 3, engine, per_host)


# ---- arrays of each kind ----------------------------------------------------------------------


def waits_by_two_threads(rank):
    """A work that a future and a thread wait for takes one signal, or has one error."""
    window = dist.new_window(np.zeros(1))
    for _ in range(20):
        dist.barrier()
        if rank == 0:
            window.signal(1)
            window.signal(1)
            continue
        work = window.wait_signal(0, True)
        work.get_future()  # starts a thread
        assert work.wait()
        window.wait_signal(0, timeout=20)
    if rank == 1:
        work = window.wait_signal(0, True, timeout=0.05)
        work.get_future()
        with pytest.raises(CollectiveTimeoutError):
            work.wait()
    dist.barrier()


@on_each_medium
@pytest.mark.sweep(2)
def test_a_work_takes_one_signal(monkeypatch, engine, per_host):
    on_ranks(monkeypatch, waits_by_two_threads, 2, engine, per_host)


def tensors(rank, share_memory):
    torch = pytest.importorskip("torch")
    own = torch.full((2, 3), float(rank), dtype=torch.bfloat16)
    window = dist.get_default_group().new_window(own)
    assert window.local is not own
    assert torch.equal(window.local, own)
    other = 1 - rank
    window.put(torch.ones(2, dtype=torch.bfloat16), other, 1)
    window.accumulate(torch.ones(2, dtype=torch.bfloat16), other, offset=4)
    window.fence()
    # The tensor itself is in the window.
    assert own.flatten().tolist() == [rank, 1.0, 1.0, rank, rank + 1.0, rank + 1.0]
    got = torch.zeros(2, 2, dtype=torch.bfloat16).t()
    window.get(got, other, 2)
    assert got.tolist() == [[1.0, other], [other + 1.0, other + 1.0]]
    window.fence()
    if share_memory:
        theirs = window.map_remote_tensor(other)
        assert theirs.shape == (2, 3)
        assert theirs.dtype == torch.bfloat16
        theirs[1, 2] = 9
        window.fence()
        assert own[1, 2] == 9
    window.tensor_deregister()


@pytest.mark.parametrize(("engine", "per_host"), [MEDIA[0], MEDIA[1], MEDIA[3]])
def test_tensors_of_torch(monkeypatch, engine, per_host):
    monkeypatch.setattr(dist, "get_default_group", lambda: dist.group.WORLD, raising=False)
    on_ranks(monkeypatch, tensors, 2, engine, per_host, args=(engine == "native" and not per_host,))


@pytest.mark.ranks(3, kind="both")
def test_parts_of_other_shapes_and_other_elements(rank):
    dtype = [("id", "<i4"), ("name", "U3")]
    mine = np.zeros((rank, 2), dtype)
    window = dist.new_window(mine)
    assert window.local.shape == (rank, 2)
    assert window.local.dtype == dtype
    window.fence()
    if rank == 0:
        window.put(np.array([(7, "abc")], dtype), 2, 3)
        error = raised(lambda: window.put(mine, 1, 3))
        assert str(error).startswith("put of 0 elements at offset 3: the window of rank 1 has 2 el")
        with pytest.raises(UnsupportedError, match="reduce op SUM is not defined on"):
            window.accumulate(mine, 0)
    window.fence()
    if rank == 2:
        assert window.local[1, 1].item() == (7, "abc")
    buffer = bytearray(b"abc")
    bytewise = dist.new_window(buffer)
    if rank == 0:
        bytewise.put(b"xyz", 1)
    bytewise.fence()
    assert bytes(bytewise.local) == (b"xyz" if rank == 1 else b"abc")
    whole = dist.new_window(np.array(5.0))
    whole.fence()
    assert whole.local.shape == ()
    assert whole.local == 5


@pytest.mark.ranks(2)
def test_names_of_c10d(rank):
    window = dist.group.WORLD.new_window()
    assert dist.group.WORLD.supports_window
    with pytest.raises(UsageError, match=r"put of .*, which has no array"):
        window.put(np.zeros(1), 0)
    dist.barrier()
    window.tensor_register(np.zeros(4, np.float32), owning=False)
    options = dist.PutOptions(timeout=datetime.timedelta(seconds=20))
    given = np.ones(1, np.float32)
    work = window.put(given, dst_rank=1 - rank, target_offset_nelems=2, async_op=True, opts=options)
    assert work.wait()
    assert work.is_success()
    window.signal(1 - rank, False, dist.SignalOptions()).wait()
    window.wait_signal(1 - rank, False, dist.WaitSignalOptions()).wait()
    assert window.local.tolist() == [0, 0, 1, 0]
    assert window.get_attr(1 - rank).access_type is dist.WindowAccessType.UNIFIED
    error = raised(lambda: window.tensor_register(given)) if rank else raised(dist.barrier)
    assert isinstance(error, UsageError if rank else CollectiveMismatchError)
    assert (
        "tensor_register: <Window of float32 in group 'default'> has had an array already"
        in str(error)
    )
    window.tensor_deregister()
    assert window.local.tolist() == [0, 0, 1, 0]


# ---- wrong calls ------------------------------------------------------------------------------

WRONG = [
    ("put(np.zeros(2), 1, 3)", InvalidArgumentError,
     "put of 2 elements at offset 3: the window of rank 1 has 4 elements"),
    ("put(np.zeros(2), 1, -1)", InvalidArgumentError,
     "put of 2 elements at offset -1: the window of rank 1 has 4 elements"),
    ("get(np.zeros(5), 0)", InvalidArgumentError,
     "get of 5 elements at offset 0: the window of rank 0 has 4 elements"),
    ("put(np.zeros(2, 'f4'), 1)", InvalidArgumentError,
     "put: the array has dtype float32, but the window of rank 1 has float64"),
    ("put(np.zeros(2), 2)", InvalidArgumentError,
     "put: rank 2 is not in group 'default' of 2 ranks"),
    ("put(np.zeros(2), -1)", InvalidArgumentError,
     "put: rank -1 is not in group 'default' of 2 ranks"),
    ("signal(True)", ArgumentTypeError, "signal: rank must be an integer, got True"),
    ("put([1.0], 0)", ArgumentTypeError, "tensor must be an array (NumPy, torch, DLPack, buffer)"),
    ("put(np.zeros(1), 0, 1.5)", ArgumentTypeError, "put: offset must be an integer, got 1.5"),
    ("get(np.zeros(1).view(R), 0)", InvalidArgumentError,
     "tensor is read-only but the operation writes into it"),
    ("fetch_add(1, 0)", ArgumentTypeError, "fetch_add needs a window of integers, got float64"),
    ("accumulate(np.zeros(1), 0, 'SUM')", ArgumentTypeError, "op must be a ReduceOp such as"),
    ("accumulate(np.zeros(1), 0, dist.ReduceOp.AVG)", UnsupportedError,
     "accumulate: AVG of float64 is not atomic"),
    ("wait_signal(0, 5.0)", ArgumentTypeError, "wait_signal: async_op must be a bool, got 5.0"),
    ("put(np.zeros(1), 1, timeout=-1)", InvalidArgumentError,
     "timeout must not be negative, got -1"),
    ("get(np.ones(1), 1, timeout=-1)", InvalidArgumentError,
     "timeout must not be negative, got -1"),
    ("signal(1, timeout=-1)", InvalidArgumentError, "timeout must not be negative, got -1"),
]  # fmt: skip


@on_each_medium
@pytest.mark.sweep(2)
def test_wrong_calls_change_nothing(monkeypatch, engine, per_host):
    on_ranks(monkeypatch, wrong_calls, 2, engine, per_host)


def wrong_calls(rank):
    window = dist.new_window(np.arange(4.0))
    frozen = np.zeros(1)
    frozen.flags.writeable = False
    for text, kind, words in WRONG:
        code = f"window.{text.replace('np.zeros(1).view(R)', 'frozen')}"
        names = {"window": window, "frozen": frozen, "np": np, "dist": dist}
        error = raised(lambda code=code, names=names: eval(code, names))
        assert type(error) is kind, (text, error)
        assert str(error).startswith(words), (text, error)
    integers = dist.new_window(np.zeros(1, np.uint8))
    with pytest.raises(InvalidArgumentError, match="fetch_add: 256 is no uint8"):
        integers.fetch_add(256, 0)
    window.fence()
    assert window.local.tolist() == [0, 1, 2, 3]


@pytest.mark.ranks(2)
def test_ranks_that_disagree(rank):
    for mine, text in (
        (np.zeros(2, np.float32 if rank else np.float64), "new_window(float64)"),
        ([1] if rank else np.zeros(2), "tensor must be an array"),
    ):
        error = raised(lambda mine=mine: dist.new_window(mine))
        assert isinstance(error, (CollectiveMismatchError, ArgumentTypeError)), error
        assert text in str(error)
    dist.barrier()


def flushes_what_is_late(rank, is_held, is_checked):
    """Rank 1 handles nothing for a while. A question that it does not answer is no flush."""
    window = dist.new_window(np.zeros(4))
    window.fence()
    if rank == 1:
        with window.memory.parts[1]._changed:
            is_held.set()
            assert is_checked.wait(20)
    else:
        assert is_held.wait(20)
        window.put(np.ones(4), 1)
        for call in (
            lambda: window.get(np.zeros(4), 1, timeout=0.05),
            lambda: window.flush(1, timeout=0.05),
            lambda: window.flush(timeout=0.05),
            lambda: window.fence(timeout=0.05),
        ):
            assert isinstance(raised(call), CollectiveTimeoutError)
        is_checked.set()
        window.flush()
        assert window.requests.late() == set()
    window.fence()
    assert window.local.tolist() == [rank] * 4


def test_a_flush_waits_after_a_question_without_an_answer(monkeypatch):
    args = (threading.Event(), threading.Event())
    on_ranks(monkeypatch, flushes_what_is_late, 2, "reference", 1, args=args)


# ---- the end ----------------------------------------------------------------------------------


def closes(rank):
    window = dist.new_window(np.zeros(2))
    other = 1 - rank
    window.fence()
    window.signal(other)
    dist.barrier()
    window.wait_signal(other)
    if rank == 1:
        window.put(np.ones(1), 0)
        window.signal(0)
        window.flush()
        window.close()
        window.close()
        with pytest.raises(ClosedError, match=re.escape("which is closed")):
            window.put(np.ones(1), 0)
        dist.barrier()
        return
    dist.barrier()
    window.wait_signal(1)  # it signalled before it closed the window
    assert window.local[0] == 1
    for call in (
        lambda: window.wait_signal(1),
        lambda: (window.put(np.ones(1), 1), window.flush(1)),
        lambda: window.get(np.ones(1), 1),
    ):
        error = raised(call)
        assert isinstance(error, PeerLostError), error
        assert "rank 1 was lost: it closed the window" in str(error)
        assert error.context.peers == (1,)
    window.put(np.ones(2), 0)  # its own part works


@on_each_medium
@pytest.mark.sweep(2)
def test_a_rank_that_closes_its_window(monkeypatch, engine, per_host):
    on_ranks(monkeypatch, closes, 2, engine, per_host)


def forks(rank):
    window = dist.new_window(np.zeros(2, np.int64))
    other, one = 1 - rank, np.ones(1, np.int64)
    window.fence()
    if (pid := os.fork()) == 0:
        try:
            for call in (
                lambda: window.put(one, other),
                lambda: window.get(one, other),
                lambda: window.fetch_add(1, other),
                lambda: window.signal(other),
                lambda: window.wait_signal(other, timeout=0.05),
                lambda: window.fence(timeout=1),
            ):
                error = raised(call)
                assert type(error) is ClosedError, error
                assert "which belongs to the parent of this fork" in str(error)
            window.close()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    window.fence()
    assert window.local.tolist() == [0, 0]
    assert isinstance(
        raised(lambda: window.wait_signal(other, timeout=0.05)), CollectiveTimeoutError
    )
    window.fence()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@on_each_medium
@pytest.mark.sweep(2)
def test_the_child_of_a_fork_does_not_act_as_its_parent(monkeypatch, engine, per_host):
    on_ranks(monkeypatch, forks, 2, engine, per_host, "processes")


def maps_one_way(rank):
    """Rank 1 cannot open the part of rank 0. Its last signal comes before its end."""

    def refused(made, stack):
        raise PermissionError(13, "Permission denied")

    if rank == 1:
        window_memory.opened_memory = refused
    for _ in range(10):
        window = dist.new_window(np.zeros(100_000))
        if rank == 1:
            for _ in range(10):
                window.put(np.ones(100_000), 0)
            window.signal(0)
            window.close()
        else:
            error = raised(lambda window=window: window.map_remote_tensor(1))
            assert "rank 1: that rank cannot open the window of this rank" in str(error)
            window.wait_signal(1, timeout=20)
            assert window.local.all()
        dist.barrier()


@pytest.mark.native
def test_ranks_share_memory_in_both_directions_or_in_none(monkeypatch):
    on_ranks(monkeypatch, maps_one_way, 2, "native", 0, "processes")


@pytest.mark.ranks(2, kind="both")
def test_a_window_ends_with_its_group(rank):
    group = dist.new_group([0, 1])
    window = dist.new_window(np.zeros(1), group)
    dist.barrier(group)
    if rank == 0:
        dist.destroy_process_group(group)
        with pytest.raises(
            ClosedError, match=r"signal of <Window of float64 in group .*, which is"
        ):
            window.signal(1)
        with pytest.raises(ClosedError, match=r"new_window in group .*, which was destroyed"):
            dist.Window(group)
    else:
        error = raised(lambda: window.wait_signal(0, timeout=20))
        assert isinstance(error, PeerLostError), error
        assert error.context.peers == (0,)
        dist.destroy_process_group(group)


@pytest.mark.ranks(2)
def test_an_aborted_group(rank):
    group = dist.new_group([0, 1])
    window = dist.new_window(np.zeros(1), group)
    if rank == 0:
        group.abort("for a test")
    error = raised(lambda: window.wait_signal(1 - rank, timeout=20))
    assert isinstance(error, CollectiveAbortedError), error
    error = raised(lambda: window.put(np.zeros(1), 1 - rank))
    assert isinstance(error, CollectiveAbortedError), error
    dist.destroy_process_group(group)


@pytest.mark.ranks(2)
def test_a_window_that_was_closed_after_an_error_is_not_the_cause(rank):
    group = dist.new_group([0, 1])
    window = dist.new_window(np.zeros(1), group)
    transport = window.comm.transport
    if rank == 0:
        real, asked = transport.failure, []

        def late(context):
            # The message with the cause comes after the flag in shared memory.
            asked.append(context)
            return real(context) if len(asked) > 5 else None

        transport.failure = late
        dist.barrier()
        error = raised(lambda: window.wait_signal(1, timeout=20))
        assert isinstance(error, CollectiveTimeoutError), error
        assert "rank 0 did nothing" in str(error)
        del transport.failure
        dist.barrier()
    else:
        dist.barrier()
        window.close()
        group.backends["cpu"].fail("timeout", "timed out after 1 s: rank 0 did nothing", (0,))
        dist.barrier()
    dist.destroy_process_group(group)


@pytest.mark.ranks(2)
def test_a_dropped_window_is_closed(rank):
    window = dist.new_window(np.zeros(1))
    window.fence()
    if rank == 1:
        del window
        gc.collect()
        dist.barrier()
    else:
        dist.barrier()
        assert isinstance(raised(lambda: window.wait_signal(1, timeout=20)), PeerLostError)


@pytest.mark.ranks(2)
def test_calls_are_recorded(rank):
    window = dist.new_window(np.zeros(4))
    window.put(np.ones(2), 1 - rank)
    window.signal(1 - rank)
    window.wait_signal(1 - rank)
    window.fence()
    found = [each for each in dist.trace_records() if each.op in ("put", "signal", "wait_signal")]
    assert [(each.op, each.peer, each.outcome) for each in found[-3:]] == [
        ("put", 1 - rank, "completed"),
        ("signal", 1 - rank, "completed"),
        ("wait_signal", 1 - rank, "completed"),
    ]
    assert found[-3].count == 2


# ---- hosts ------------------------------------------------------------------------------------

HOSTS = """
def body():
    dist.init_process_group(timeout=60)
    p = dist.get_world_size()
    window = dist.new_window(np.zeros((p, 50_000)))
    near = [r for r in range(p) if r % 2 == rank % 2]
    for other in range(p):
        window.put(np.full(50_000, rank + 1.0), other, 50_000 * rank)
        window.signal(other)
    for other in range(p):
        window.wait_signal(other)
        assert (window.local[other] == other + 1).all(), other
        try:
            window.map_remote_tensor(other)
            assert other in near or os.environ["UNISONO_ENGINE"] == "native"
        except dist.errors.UnsupportedError:
            pass
    counter = dist.new_window(np.zeros(1, np.int64))
    mine = [counter.fetch_add(1, 0) for _ in range(50)]
    every = [None] * p
    dist.all_gather_object(every, mine)
    assert sorted(sum(every, [])) == list(range(50 * p))
    dist.destroy_process_group()
import unisono.errors
tell(attempt(body))
"""


@pytest.mark.skipif(netns.why_not() is not None, reason=str(netns.why_not()))
@pytest.mark.sweep(1)
@pytest.mark.parametrize("engine", [pytest.param("native", marks=pytest.mark.native), "reference"])
def test_two_hosts(engine):
    with netns.Network(2) as network:
        first, second = network.hosts
        variables = {"MASTER_ADDR": first.v4, "MASTER_PORT": "29500", "UNISONO_ENGINE": engine}
        variables["TORCHELASTIC_USE_AGENT_STORE"] = ""
        prefixes = [host.inside() for host in (first, second, first, second)]
        with started(prefixes, HOSTS, variables) as processes:
            ends = [outcome(process) for process in processes]
    for told, returncode, err in ends:
        assert returncode == 0, err
        assert told["kind"] == "", told


def waits_in_a_callback(rank):
    window = dist.new_window(np.zeros(1))
    window.fence()
    error = raised(lambda: window.map_remote_tensor(1 - rank))
    text = "map_remote_tensor: this rank shares no memory with rank"
    assert str(error).startswith(f"{text} {1 - rank}: ranks without the C++ engine share none")
    dist.barrier()
    may_wait, window.comm.transport.may_wait = window.comm.transport.may_wait, lambda: False
    error = raised(lambda: window.get(np.zeros(1), 1 - rank))
    window.comm.transport.may_wait = may_wait
    assert str(error).startswith("get of a window waits for the thread it runs on")
    assert isinstance(error, UsageError)
    window.fence()
    window.close()
    assert str(end_of(window, rank)) == "the window was closed"


def test_calls_that_cannot_be_made():
    run(waits_in_a_callback, 2, engine="reference")
    group = SimpleNamespace(backends={"cuda": None}, name="gpus")
    error = raised(lambda: dist.Window(group))
    assert str(error).startswith("new_window: group 'gpus' has no backend for CPU memory")
