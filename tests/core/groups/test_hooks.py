"""Hooks of a group, checks of data by them, and arrays that must be equal."""

import sys

import numpy as np
import pytest

import unisono as dist
from unisono.beyond.checks import _first_nan
from unisono.core.base.buffers import view
from unisono.core.operations.hooks import Hooks
from unisono.errors import (
    ArgumentTypeError,
    CollectiveAbortedError,
    CollectiveError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    InvalidArgumentError,
)

NAN = float("nan")


@pytest.mark.ranks(2, kind="both")
def test_hooks_see_each_call_of_their_group(rank):
    pg, other, seen = dist.new_group([0, 1]), dist.new_group([0, 1]), []
    x, y, parts = np.ones(3), np.zeros(6), [np.zeros(3), np.zeros(3)]
    for group in (pg, other):  # C++ knows the calls then
        dist.all_reduce(x, group=group)
    in_cpp = pg.calls
    pg.register_pre_hook(7, lambda call: seen.append(call))
    pg.register_post_hook(7, lambda call: seen.append(call))
    assert pg.calls is None
    assert (other.calls is None) == (in_cpp is None)
    dist.all_reduce(x, group=pg)
    dist.all_reduce(x, group=other)
    dist.broadcast(x, 1, group=pg)
    dist.all_gather_into_tensor(y, x, group=pg)
    dist.gather(x, parts if rank == 0 else None, 0, group=pg)
    dist.scatter(x, parts if rank == 0 else None, 0, group=pg)
    work = dist.reduce_scatter_tensor(x, y, group=pg, async_op=True)
    work.wait()
    dist.send(x, 1, group=pg) if rank == 0 else dist.recv(x, 0, group=pg)
    dist.barrier(group=pg)
    with dist._coalescing_manager(pg):
        dist.all_reduce(x, group=pg)
        dist.all_reduce(y, group=pg)
    assert pg.calls is None
    befores, afters = seen[::2], seen[1::2]
    names = [
        *("ALLREDUCE", "BROADCAST", "ALLGATHER_BASE", "GATHER", "SCATTER", "REDUCE_SCATTER_BASE"),
        *(("SEND", "RECV")[rank], "BARRIER", "ALLREDUCE_COALESCED"),
    ]
    assert [call.name for call in befores] == [dist.HookOpName[name] for name in names]
    pairs = [*zip(befores, afters, strict=True)]
    assert all((a.op_id, a.op, a.number) == (b.op_id, b.op, b.number) for a, b in pairs)
    assert len({call.op_id for call in befores}) == len(befores)
    assert [call.number for call in befores] == [2, 3, 4, 5, 6, 7, 0, 8, 9]
    assert [call.root for call in befores] == [-1, 1, -1, 0, 0, -1, 1 - rank, -1, -1]
    assert afters[5].work.wait()
    assert [call.async_op for call in befores] == [False] * 5 + [True] + [False] * 3
    assert afters[0].work.is_success()

    def of(arrays):
        known = {id(x): "x", id(y): "y", id(parts[0]): "p", id(parts[1]): "q"}
        return "".join(known[id(each)] for each in arrays)

    inputs = ["x", "x" * rank, "x", "x", "pq" * (not rank), "y", "x" * (not rank), "", "xy"]
    outputs = ["x", "x", "y", "pq" * (not rank), "x", "x", "x" * rank, "", "xy"]
    assert [of(call.input_tensors) for call in befores] == inputs
    assert [of(call.output_tensors) for call in befores] == outputs
    with pytest.raises(InvalidArgumentError, match="the group has a hook with id 7 already"):
        pg.register_pre_hook(7, print)
    pg.unregister_pre_hook(7)
    pg.unregister_post_hook(7)
    pg.unregister_post_hook(8)
    assert pg.calls is in_cpp
    count = len(seen)
    dist.all_reduce(x, group=pg)
    assert len(seen) == count


@pytest.mark.ranks(2, kind="both")
def test_hooks_see_a_call_of_several_parts_once(rank):
    pg, seen, objects = dist.new_group([0, 1]), [], [None, None]
    pg.register_pre_hook(1, seen.append)
    pg.register_post_hook(1, seen.append)
    dist.all_gather_object(objects, "x" * 100_000 * (rank + 1), group=pg)
    assert [len(each) for each in objects] == [100_000, 200_000]
    part = dist.split_group(pg, [[0], [1]])
    window = dist.new_window(np.zeros(2), pg)
    half = dist.split_group(pg, color=rank)
    dist.all_reduce(np.ones(1), group=pg)
    expected = [
        *(("all_gather_object", "UNKNOWN"), ("split_group", "SPLIT"), ("new_window", "NEW_WINDOW")),
        *(("split_group", "SPLIT"), ("all_reduce", "ALLREDUCE")),
    ]
    befores, afters = seen[::2], seen[1::2]
    assert [(call.op, call.name.name) for call in befores] == expected
    assert [call.op_id for call in befores] == [call.op_id for call in afters]
    assert [call.work is None for call in afters] == [True, False, True, True, False]
    numbers = [call.number for call in befores]
    assert numbers == sorted({*numbers})
    window.close()
    dist.destroy_process_group(part)
    dist.destroy_process_group(half)


@pytest.mark.ranks(2, kind="both")
def test_an_error_in_a_hook_around_a_call_of_objects_leaves_the_group_usable(rank):
    pg, objects, x = dist.new_group([0, 1]), [None, None], np.ones(1)

    def refuse(call):
        raise ValueError("not now")

    def made():
        dist.all_gather_object(objects, "x" * 100_000, group=pg)

    if rank == 1:
        pg.register_pre_hook(1, refuse)
    with pytest.raises(ValueError if rank == 1 else CollectiveMismatchError, match="not now"):
        made()
    pg.unregister_pre_hook(1)
    if rank == 1:
        pg.register_post_hook(1, refuse)
        with pytest.raises(ValueError, match="not now"):
            made()
        pg.unregister_post_hook(1)
    else:
        made()
    made()
    dist.all_reduce(x, group=pg)
    assert x.tolist() == [2.0]
    assert objects == ["x" * 100_000] * 2


@pytest.mark.ranks(3, kind="both")
def test_hooks_see_messages_of_objects_and_reductions_in_pairs_once(rank):
    pg, seen, objects = dist.new_group([0, 1, 2]), [], [None]
    half = np.ones(2, np.float16)
    pg.register_pre_hook(1, seen.append)
    pg.register_post_hook(1, seen.append)
    if rank == 0:
        dist.send_object_list(["x" * 300_000], 1, pg)
    elif rank == 1:
        dist.recv_object_list(objects, 0, pg)
        assert len(objects[0]) == 300_000
    dist.monitored_barrier(pg)
    dist.all_reduce(np.ones(2), dist.commutative(np.maximum), pg)
    dist.all_reduce(np.ones(2), np.maximum, pg)
    dist.all_reduce(half, group=pg, accumulate="float32")
    assert half.tolist() == [3.0, 3.0]
    messages = [[("send_object_list", "SEND", 1, 0)], [("recv_object_list", "RECV", 0, 0)], []]
    befores, afters = seen[::2], seen[1::2]
    assert [(call.op, call.name.name, call.root) for call in befores] == [
        *(each[:3] for each in messages[rank]),
        ("monitored_barrier", "UNKNOWN", -1),
        *[("all_reduce", "ALLREDUCE", -1)] * 3,
    ]
    assert [call.op_id for call in befores] == [call.op_id for call in afters]


@pytest.mark.ranks(2, kind="both")
def test_a_hook_that_raises_around_a_call_of_messages_breaks_no_later_call(rank):
    pg, objects = dist.new_group([0, 1]), [None]

    def refuse(call):
        raise ValueError("not now")

    def refused(call, kind):
        if rank == 0:
            with pytest.raises(kind, match="not now"):
                call()
        else:
            call()

    def send(text):
        dist.send_object_list([text], 1, pg) if rank == 0 else dist.recv_object_list(objects, 0, pg)

    if rank == 0:
        pg.register_post_hook(1, refuse)
    refused(lambda: send("x" * 300_000), ValueError)
    refused(lambda: dist.monitored_barrier(pg), ValueError)
    pg.unregister_post_hook(1)
    if rank == 0:
        pg.register_pre_hook(1, refuse)
    with pytest.raises(ValueError if rank == 0 else CollectiveMismatchError):
        dist.monitored_barrier(pg)
    pg.unregister_pre_hook(1)
    send("last")
    dist.monitored_barrier(pg)
    assert objects == ([None] if rank == 0 else ["last"])


@pytest.mark.ranks(2)
def test_an_error_in_a_hook_before_a_call_is_an_error_on_all_ranks(rank):
    pg, x = dist.new_group([0, 1]), np.ones(2)

    def refuse(call):
        raise ValueError("not now")

    if rank == 1:
        pg.register_pre_hook(1, refuse)
    with pytest.raises(ValueError if rank == 1 else CollectiveMismatchError, match="not now"):
        dist.all_reduce(x, group=pg)
    pg.unregister_pre_hook(1)
    dist.all_reduce(x, group=pg)
    assert x.tolist() == [2.0, 2.0]


@pytest.mark.ranks(2, kind="both")
def test_hooks_at_the_abort_run_once_and_leave_calls_to_cpp(rank):
    pg, seen, x = dist.new_group([0, 1]), [], np.ones(2)
    calls = pg.calls
    pg.register_abort_hook(1, lambda: seen.append(len(dist.trace_records(pg))))
    pg.register_abort_hook(3, lambda: seen.append("removed"))
    pg.unregister_abort_hook(3)
    assert pg.calls is calls
    for _ in range(3):
        dist.all_reduce(x, group=pg)
    assert not seen
    if rank == 0:
        pg.abort()
    else:
        with pytest.raises(CollectiveAbortedError):
            dist.all_reduce(x, group=pg)
    assert seen[0] >= 3
    pg.abort()
    assert len(seen) == 1


def test_a_hook_that_raises_at_the_abort_is_logged_and_stops_no_other(caplog):
    hooks, seen = Hooks(), []
    hooks.at_abort = {1: lambda: 1 / 0, 2: lambda: seen.append(1)}
    hooks.abort()
    assert seen == [1]
    assert "a hook at the abort raised" in caplog.text


@pytest.mark.ranks(2)
def test_hook_at_a_time_out(rank):
    pg, seen = dist.new_group([0, 1]), []
    pg.register_abort_hook(1, lambda: seen.append(1))
    if rank == 0:
        with pytest.raises(CollectiveTimeoutError):
            dist.all_reduce(np.ones(2), group=pg, timeout=0.2)
        assert seen == [1]
    dist.barrier()


# ---- NaN -----------------------------------------------------------------------------------


@pytest.mark.ranks(3, kind="both")
def test_nan_is_found_before_it_spreads(rank):
    pg = dist.new_group([0, 2, 1], sort_ranks=False)
    x, y = np.ones((70_000, 2), np.float32), np.zeros(6)
    for _ in range(2):  # C++ knows the call then
        dist.all_reduce(np.ones_like(x), group=pg)
    hook = dist.NanCheckHook.attach(pg)
    if rank == 2:
        x[40_000, 1] = NAN
    text = "rank 2 gives NaN to all_reduce: array 0 .float32.70000, 2.. has the first one at index"
    kind = InvalidArgumentError if rank == 2 else CollectiveMismatchError
    with pytest.raises(kind, match=text + r" \[40000, 1\]"):
        dist.all_reduce(x, group=pg)
    assert np.isnan(x).sum() == (rank == 2)
    # Buffers that only receive, and integers.
    y[:] = NAN
    dist.all_gather_into_tensor(y, np.full(2, 1.0), group=pg)
    dist.all_reduce(np.ones(2, int), group=pg)
    z = np.full(2, NAN if rank else 3.0)
    dist.broadcast(z, 0, group=pg)
    assert z.tolist() == [3.0, 3.0]
    if rank < 2:
        dist.send(z, 1, group=pg) if rank == 0 else dist.recv(z[:], 0, group=pg)
    c = np.array([1, 1j * NAN if rank == 1 else 2])
    kind = InvalidArgumentError if rank == 1 else CollectiveMismatchError
    with pytest.raises(kind, match="rank 1 gives NaN to all_reduce"):
        dist.all_reduce(c, group=pg)
    hook.remove()
    dist.all_reduce(x, group=pg)
    assert np.isnan(x).sum() == 1


@pytest.mark.ranks(2)
def test_nan_in_bfloat16(rank):
    torch = pytest.importorskip("torch")
    pg = dist.new_group([0, 1])
    hook = dist.NanCheckHook.attach(pg)
    x = torch.ones(2, 3, dtype=torch.bfloat16)
    x[1] = torch.tensor([float("inf"), -float("inf"), -NAN if rank else 1])
    kind = InvalidArgumentError if rank else CollectiveMismatchError
    with pytest.raises(kind, match=r"bfloat16.2, 3.. has the first one at index .1, 2."):
        dist.all_reduce(x, group=pg)
    hook.remove()


@pytest.mark.parametrize("bits", ["4m3fn", "5m2", "4m3fnuz", "5m2fnuz"])
def test_nan_of_each_float8_is_the_one_of_torch(bits):
    torch = pytest.importorskip("torch")
    every = torch.arange(256).to(torch.uint8).view(getattr(torch, f"float8_e{bits}"))
    found = [_first_nan(view(one, write=False)) == 0 for one in every.split(1)]
    assert found == every.float().isnan().tolist()
    assert any(found)


@pytest.mark.parametrize("dtype", ["g", "G", ">f8", "e"])
def test_nan_in_other_dtypes(dtype):
    assert _first_nan(view(np.array([1, np.inf, NAN, 1], dtype), write=False)) == 2
    assert _first_nan(view(np.array([1, np.inf, -np.inf], dtype), write=False)) == -1


@pytest.mark.ranks(2)
def test_an_array_that_only_receives_may_have_nan(rank):
    pg = dist.new_group([0, 1])
    hook, x = dist.NanCheckHook.attach(pg), np.full(2, NAN if rank else 3.0)
    for source in (0, None):
        dist.send(x, 1, group=pg) if rank == 0 else dist.recv(x, source, group=pg)
        assert x.tolist() == [3.0] * 2
        x[:] = NAN if rank else 3.0
    # A hook that raises keeps the message; nothing reaches the other rank.
    if rank == 0:
        with pytest.raises(InvalidArgumentError, match="rank 0 gives NaN to send"):
            dist.send(x * NAN, 1, group=pg)
    dist.barrier()
    dist.send(x, 1, group=pg) if rank == 0 else dist.recv(x, 0, group=pg)
    assert x.tolist() == [3.0] * 2
    hook.remove()


@pytest.mark.ranks(2, kind="both")
def test_recorder_hook_gives_the_calls_since_it_was_attached(rank):
    pg = dist.new_group([0, 1])
    dist.all_reduce(np.ones(2), group=pg)
    calls, hook = pg.calls, dist.FlightRecorderHook.attach(pg)
    assert hook.records() == []
    for count in (2, 2, 5):
        dist.all_reduce(np.ones(count), group=pg)
    assert [(each.op, each.count) for each in hook.records()] == [
        *(("all_reduce", 2), ("all_reduce", 2), ("all_reduce", 5))
    ]
    assert pg.calls is calls
    hook.remove()


# ---- equal arrays --------------------------------------------------------------------------


@pytest.mark.ranks(3, kind="both")
def test_arrays_that_differ_are_named_with_their_ranks(rank):
    same, zero = np.array([1.0, NAN]), np.array([0.0])
    dist.assert_equal(same)
    dist.assert_equal([same, bytearray(b"abc"), np.asfortranarray(np.ones((2, 3)))])
    dist.assert_equal([])
    cases = [
        ({"w": same, "b": zero * (-1 if rank == 1 else 1)}, r"b \(float64\[1\] on rank \d\)", 1),
        ([same, zero + (rank == 2)], r"array 1 \(float64\[1\] on rank \d\)", 2),
        (np.ones((2, 1) if rank == 0 else (1, 2)), r"the array \(float64\[[12], [12]\]", 0),
    ]
    for arrays, text, culprit in cases:
        text = rf"assert_equal: {text}.* differs on ranks \[{culprit}\] from the other 2"
        with pytest.raises(CollectiveError, match=text) as caught:
            dist.assert_equal(arrays)
        assert caught.value.context.peers == (culprit,)
    with pytest.raises(CollectiveMismatchError, match="assert_equal"):
        dist.assert_equal([same] * (1 + (rank == 1)))
    with pytest.raises(ArgumentTypeError if rank == 1 else CollectiveMismatchError):
        dist.assert_equal([same if rank != 1 else object()])
    dist.barrier()


@pytest.mark.ranks(2)
def test_a_group_with_hooks_can_be_dropped(rank):
    pg = dist.new_group([0, 1])
    pg.register_pre_hook(1, len)
    pg.register_abort_hook(1, int)
    references = sys.getrefcount(pg)
    assert not any(value is pg for value in vars(pg._hooks).values())
    assert sys.getrefcount(pg) == references
    dist.destroy_process_group(pg)
