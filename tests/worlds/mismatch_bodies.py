"""Calls that do not fit together; every rank must hear of both sides."""

import time
import warnings

import numpy as np

import unisono as dist
from tests.support.lateness import Lateness
from unisono.errors import CollectiveMismatchError


def f32(n=4):
    return np.full(n, 1.5, np.float32)


def blocks(n=4):
    return [f32(n) for _ in range(dist.get_world_size())]


def premul(factor):
    return dist.ReduceOp.PREMUL_SUM(factor)


def gathered(n):
    return lambda **h: dist.all_gather(blocks(n), f32(n), **h)


def exchanged(extra, odd):
    """all_to_all_single of one row each; the odd rank wants `extra` rows more from rank 0."""
    p = dist.get_world_size()
    outs = [1] * p
    if odd:
        outs[0] += extra
    return lambda **h: dist.all_to_all_single(f32(sum(outs)), f32(p), outs, [1] * p, **h)


# name -> (what the odd rank does, what the others do, both texts)
CASES = {
    "op": (
        lambda **h: dist.all_reduce(f32(), **h),
        lambda **h: dist.broadcast(f32(), 0, **h),
        "all_reduce(float32[4], SUM)", "broadcast(float32[4], src=0)",
    ),
    "barrier": (
        lambda **h: dist.barrier(**h),
        lambda **h: dist.all_reduce(f32(), **h),
        "barrier()", "all_reduce(float32[4], SUM)",
    ),
    "dtype": (
        lambda **h: dist.all_reduce(np.ones(4, np.int32), **h),
        lambda **h: dist.all_reduce(f32(), **h),
        "all_reduce(int32[4], SUM)", "all_reduce(float32[4], SUM)",
    ),
    "count": (
        lambda **h: dist.all_reduce(f32(5), **h),
        lambda **h: dist.all_reduce(f32(), **h),
        "all_reduce(float32[5], SUM)", "all_reduce(float32[4], SUM)",
    ),
    "shape": (
        lambda **h: dist.all_reduce(f32(6).reshape(2, 3), **h),
        lambda **h: dist.all_reduce(f32(6).reshape(3, 2), **h),
        "all_reduce(float32[2, 3], SUM)", "all_reduce(float32[3, 2], SUM)",
    ),
    "shape of reduce": (
        lambda **h: dist.reduce(f32(1).reshape(()), 0, **h),
        lambda **h: dist.reduce(f32(1), 0, **h),
        "reduce(float32[], SUM, dst=0)", "reduce(float32[1], SUM, dst=0)",
    ),
    "count of blocks": (
        lambda **h: gathered(5)(**h), lambda **h: gathered(4)(**h),
        "all_gather(float32[5])", "all_gather(float32[4])",
    ),
    "root": (
        lambda **h: dist.broadcast(f32(), 1, **h),
        lambda **h: dist.broadcast(f32(), 0, **h),
        "broadcast(float32[4], src=1)", "broadcast(float32[4], src=0)",
    ),
    "reduce op": (
        lambda **h: dist.all_reduce(f32(), dist.ReduceOp.MAX, **h),
        lambda **h: dist.all_reduce(f32(), **h),
        "all_reduce(float32[4], MAX)", "all_reduce(float32[4], SUM)",
    ),
    "factor": (
        lambda **h: dist.all_reduce(f32(), premul(2), **h),
        lambda **h: dist.all_reduce(f32(), premul(3), **h),
        "all_reduce(float32[4], PREMUL_SUM(2.0))", "all_reduce(float32[4], PREMUL_SUM(3.0))",
    ),
    "algorithm": (
        lambda **h: dist.all_reduce(f32(), algorithm="ring", **h),
        lambda **h: dist.all_reduce(f32(), **h),
        "all_reduce(float32[4], SUM, algorithm=ring)", "all_reduce(float32[4], SUM)",
    ),
    "algorithm of a barrier": (
        lambda **h: dist.barrier(algorithm="linear", **h),
        lambda **h: dist.barrier(**h),
        "barrier(algorithm=linear)", "barrier()",
    ),
    "coalesced sizes": (
        lambda **h: dist.all_reduce_coalesced([f32(2), f32(4)], **h),
        lambda **h: dist.all_reduce_coalesced([f32(3), f32(3)], **h),
        "all_reduce_coalesced(float32[2 + 4], SUM)", "all_reduce_coalesced(2 x float32[3], SUM)",
    ),
    "coalesced or not": (
        lambda **h: dist.all_reduce_coalesced([f32(2), f32(2)], **h),
        lambda **h: dist.all_reduce(f32(4), **h),
        "all_reduce_coalesced(2 x float32[2], SUM)", "all_reduce(float32[4], SUM)",
    ),
    "split sizes": (
        lambda **h: exchanged(2, True)(**h),
        lambda **h: exchanged(2, False)(**h),
        "rank 0 sends 1 elements to rank 1, which expects 3", "all_to_all_single",
    ),
    "all_to_all or gather": (
        lambda **h: exchanged(0, False)(**h),
        lambda **h: gathered(1)(**h),
        "all_to_all_single(float32[", "all_gather(float32[1])",
    ),
}  # fmt: skip


def usable(p):
    x = np.ones(3)
    dist.all_reduce(x)
    assert (x == p).all()


def error_of(call):
    """Return the mismatch that a call, and the wait for it, ends with; None if it succeeds."""
    try:
        work = call()
        if work is not None:
            work.wait()
    except CollectiveMismatchError as error:
        return error
    return None


def slowest_case(rank, odd):
    """Return the longest time that a mismatching call took, less what the machine was late."""
    slowest_s = 0.0
    for different, usual, *_ in CASES.values():
        call = different if rank == odd else usual
        dist.barrier()
        with Lateness() as lateness:
            began_s = time.monotonic()
            assert error_of(lambda call=call: call(async_op=False)) is not None
            took_s = time.monotonic() - began_s
        slowest_s = max(slowest_s, took_s - lateness.slack_s)
    return slowest_s


def every_case(rank, odd, async_op):
    """Make every mismatching call; return {case: first line}."""
    warnings.simplefilter("error")
    told, p = {}, dist.get_world_size()
    for name, (different, usual, *_) in CASES.items():
        call = different if rank == odd else usual
        error = error_of(lambda call=call: call(async_op=async_op))
        assert error is not None, f"{name}: no error on rank {rank}"
        told[name] = error.what
        assert error.context.usable is True, name
        assert error.context.peers, (name, error.context)
        assert set(error.context.peers) <= set(range(p)), (name, error.context)
        usable(p)
    return told


def layouts_meet(rank):
    """Elements are matched by index: layouts may differ from rank to rank."""
    p, values = dist.get_world_size(), np.arange(6.0).reshape(2, 3)
    base = np.zeros((4, 6))
    layouts = [np.zeros((2, 3)), np.zeros((2, 3), order="F"), base[::2, ::2], base[1::-1, 2::-1]]
    for turn in range(4):
        mine = layouts[(rank + turn) % 4]
        mine[:] = values * (rank + 1)
        dist.all_reduce(mine)
        assert (mine == values * p * (p + 1) / 2).all()
        mine[:] = values * (rank == turn)
        dist.broadcast(mine, turn)
        assert (mine == values).all()


def keeps_buffers(rank):
    """No array is written by a call that does not fit."""
    x = np.full(3 + (rank == 1), float(rank))
    outs = [np.full(x.size, 9.0) for _ in range(dist.get_world_size())]
    calls = [
        lambda: dist.all_reduce(x),
        lambda: dist.all_reduce(x, premul(2)),
        lambda: dist.broadcast(x, 0),
        lambda: dist.all_gather(outs, x),
        lambda: dist.all_reduce_coalesced([x, x * 2]),
        lambda: dist.gather(x, outs if rank == 0 else None, 0),
    ]
    for number, call in enumerate(calls):
        assert error_of(call) is not None, f"call {number} was accepted"
        assert (x == rank).all(), f"call {number} changed an array"
        assert all((out == 9).all() for out in outs), f"call {number} changed an output"
    usable(dist.get_world_size())


def swapped_order(rank, async_op):
    a, b = np.ones(3), np.ones(3, np.int16)
    first, second = (a, b) if rank == 0 else (b, a)
    calls = [lambda x=x: dist.all_reduce(x, async_op=async_op) for x in (first, second)]
    if async_op:
        works = [call() for call in calls]  # both are queued before the first one is waited for
        calls = [lambda work=work: work for work in works]
    errors = [error_of(call).what for call in calls]
    assert (a == 1).all()
    assert (b == 1).all()
    usable(dist.get_world_size())
    return errors


def last_call(rank):
    """Leave right after the error, as a script does that does not catch it."""
    return error_of(lambda: dist.all_reduce(f32(4 + rank))).what


def in_sub_group(rank):
    """Ranks are told by their numbers in the world."""
    group = dist.new_group([2, 3])
    if rank < 2:
        return None
    error = error_of(lambda: dist.all_reduce(f32(4 + rank), group=group))
    return error.what, error.context.rank, error.context.world_size, error.context.peers
