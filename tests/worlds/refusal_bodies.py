"""One rank's arguments make no call: the others, who are in one, hear of it at once."""

import time

import numpy as np
import pytest

import unisono as dist
from tests.support.lateness import Lateness
from unisono.errors import (
    ArgumentTypeError,
    CollectiveMismatchError,
    InvalidArgumentError,
    UnsupportedError,
)


def f32(n=4):
    return np.full(n, 1.5, np.float32)


def blocks(n=4, count=None):
    return [f32(n) for _ in range(dist.get_world_size() if count is None else count)]


def rank():
    return dist.get_rank()


def frozen():
    x = f32()
    x.flags.writeable = False
    return x


MAX, BAND = dist.ReduceOp.MAX, dist.ReduceOp.BAND

# name -> (the bad call, the good one, the error of the bad one, a part of its text)
CASES = {
    "short list": (
        lambda **h: dist.all_gather(blocks(count=1), f32(), **h),
        lambda **h: dist.all_gather(blocks(), f32(), **h),
        InvalidArgumentError, "tensor_list has 1 entries",
    ),
    "blocks of a wrong size": (
        lambda **h: dist.reduce_scatter(f32(), blocks(5), **h),
        lambda **h: dist.reduce_scatter(f32(), blocks(), **h),
        InvalidArgumentError, "has 5 elements, this rank's own array 4",
    ),
    "no list": (
        lambda **h: dist.all_to_all(f32(), blocks(), **h),
        lambda **h: dist.all_to_all(blocks(), blocks(), **h),
        ArgumentTypeError, "output_tensor_list must be a list",
    ),
    "root": (
        lambda **h: dist.broadcast(f32(), group_src=99, **h),
        lambda **h: dist.broadcast(f32(), 0, **h),
        InvalidArgumentError, "root=99 is not a rank",
    ),
    "global rank": (
        lambda **h: dist.reduce(f32(), 99, **h),
        lambda **h: dist.reduce(f32(), 0, **h),
        InvalidArgumentError, "global rank 99 is not in group",
    ),
    "two roots": (
        lambda **h: dist.broadcast(f32(), 0, group_src=0, **h),
        lambda **h: dist.broadcast(f32(), 0, **h),
        InvalidArgumentError, "can't specify both",
    ),
    "dtype": (
        lambda **h: dist.all_reduce(f32(), BAND, **h),
        lambda **h: dist.all_reduce(f32(), MAX, **h),
        UnsupportedError, "reduce op BAND is not defined on float32",
    ),
    "op": (
        lambda **h: dist.all_reduce(f32(), "sum", **h),
        lambda **h: dist.all_reduce(f32(), **h),
        ArgumentTypeError, "op must be a ReduceOp",
    ),
    "no array": (
        lambda **h: dist.all_reduce(5, **h),
        lambda **h: dist.all_reduce(f32(), **h),
        ArgumentTypeError, "tensor must be an array",
    ),
    "read-only": (
        lambda **h: dist.all_reduce(frozen(), **h),
        lambda **h: dist.all_reduce(f32(), **h),
        InvalidArgumentError, "tensor is read-only",
    ),
    "split sizes": (
        lambda **h: dist.all_to_all_single(f32(), f32(), [9], [4], **h),
        lambda **h: dist.barrier(**h),
        InvalidArgumentError, "input: split sizes [4]",
    ),
    "keyword": (
        lambda **h: dist.barrier(algoritm="ring", **h),
        lambda **h: dist.barrier(**h),
        ArgumentTypeError, "unexpected keyword argument 'algoritm'",
    ),
    "keyword of the method": (
        lambda **h: dist.gather(f32(), root=0, **h),
        lambda **h: dist.barrier(**h),
        ArgumentTypeError, "unexpected keyword argument 'root'",
    ),
    "timeout": (
        lambda **h: dist.barrier(timeout="soon", **h),
        lambda **h: dist.barrier(**h),
        ArgumentTypeError, "timeout must be seconds",
    ),
    "algorithm": (
        lambda **h: dist.all_reduce(f32(), algorithm="rign", **h),
        lambda **h: dist.all_reduce(f32(), **h),
        InvalidArgumentError, "all_reduce has no algorithm 'rign'",
    ),
    "list of gather_object": (
        lambda **_: dist.gather_object(1, [None] * dist.get_world_size() if rank() else None),
        lambda **_: dist.gather_object(1, None if rank() else [None] * dist.get_world_size()),
        InvalidArgumentError, "object_gather_list is ",
    ),
    "list of all_gather_object": (
        lambda **_: dist.all_gather_object([None], 1),
        lambda **_: dist.all_gather_object([None] * dist.get_world_size(), 1),
        InvalidArgumentError, "object_list has 1 entries",
    ),
    "list of broadcast_object_list": (
        lambda **_: dist.broadcast_object_list((1,)),
        lambda **_: dist.broadcast_object_list([1]),
        ArgumentTypeError, "object_list must be a list, got tuple",
    ),
    "list of scatter_object_list": (
        lambda **_: dist.scatter_object_list([], [1] * dist.get_world_size()),
        lambda **_: dist.scatter_object_list([0], [1] * dist.get_world_size()),
        InvalidArgumentError, "scatter_object_output_list must be a list of at least one",
    ),
    "serializer": (
        lambda **_: dist.reduce_object(1, max, serializer=5),
        lambda **_: dist.reduce_object(1, max),
        ArgumentTypeError, "serializer must have name, dumps and loads, got 5",
    ),
    "timeout of an object call": (
        lambda **_: dist.all_reduce_object(1, max, timeout="soon"),
        lambda **_: dist.all_reduce_object(1, max),
        ArgumentTypeError, "timeout must be seconds",
    ),
}  # fmt: skip


def finish(work):
    if work is not None:
        work.wait()


def every_case(rank, odd, async_op):
    """The odd rank gets its own error, the others one that quotes it; then all go on.

    Returns the longest time that took, less what the machine was late, in seconds.
    """
    p, slowest_s = dist.get_world_size(), 0.0
    for name, (bad, good, error, text) in CASES.items():
        if name == "split sizes" and p == 1:
            continue
        expected = error if rank == odd else CollectiveMismatchError
        call = bad if rank == odd else good
        with Lateness() as lateness:
            began = time.monotonic()
            with pytest.raises(expected) as caught:
                finish(call(async_op=async_op))
            took_s = time.monotonic() - began
        slowest_s = max(slowest_s, took_s - lateness.slack_s)
        assert text in caught.value.what, (name, caught.value.what)
        if rank != odd:
            assert f"rank {odd} called" in caught.value.what
            assert "but refused it: " in caught.value.what
            assert caught.value.context.usable is True
            assert odd in caught.value.context.peers
        x = np.ones(3)
        dist.all_reduce(x)
        assert (x == p).all(), name
    return slowest_s


def all_refuse(rank):
    """If every rank makes the mistake, each gets its own error and the order stays the same."""
    for bad, _, error, text in CASES.values():
        with pytest.raises(error) as caught:
            bad()
        assert text in caught.value.what
    x = np.ones(3)
    dist.all_reduce(x)
    return x.tolist()


def then_gone(rank):
    """A rank that leaves after its own error has told the others why."""
    if rank == 1:
        with pytest.raises(InvalidArgumentError) as caught:
            dist.all_gather([], f32())
        dist.destroy_process_group()
    else:
        with pytest.raises(CollectiveMismatchError) as caught:
            dist.all_gather(blocks(), f32())
    return caught.value.what


def fp8(rank):
    """float8 moves, and does not reduce: an error on every rank."""
    import torch

    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        x = torch.full((4,), float(rank + 1)).to(dtype)
        for call in (
            lambda x=x: dist.all_reduce(x),
            lambda x=x: dist.reduce(x, 0, dist.ReduceOp.MAX),
            lambda x=x: dist.reduce_scatter_tensor(x[:1], x[: dist.get_world_size()]),
        ):
            with pytest.raises(UnsupportedError, match=r"is not defined on float8.*it only moves"):
                call()
        dist.broadcast(x, 1)
        assert (x.float() == 2).all()
    return True


def in_a_stream(rank):
    """A call that begins later, and turns out to be none then."""
    with dist.stream(dist.Stream()):
        expected = UnsupportedError if rank == 1 else CollectiveMismatchError
        work = dist.all_reduce(f32(), BAND if rank == 1 else MAX, async_op=True)
        with pytest.raises(expected, match="reduce op BAND is not defined on float32"):
            work.wait_on_host()
    dist.barrier()
    return True
