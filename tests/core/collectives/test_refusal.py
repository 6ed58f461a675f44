"""A wrong argument on one rank is a typed error on all, at once, and the group stays usable."""

import re

import pytest

import unisono as dist
from tests.support.calls import blocks, check_usable, f32, fails, finish, frozen, later
from unisono.errors import (
    ArgumentTypeError,
    CollectiveMismatchError,
    InvalidArgumentError,
    UnsupportedError,
)

MAX, BAND = dist.ReduceOp.MAX, dist.ReduceOp.BAND


def each(value):
    """Return a function that returns one value for each rank of the world."""
    return lambda: [value] * dist.get_world_size()


def list_if(is_root):
    return lambda: each(None)() if is_root(dist.get_rank()) else None


def object_call(name, *parts, **options):
    """Return a function that calls `dist.name`, which cannot be asynchronous."""
    call = later(name, *parts, **options)
    return lambda **_: call()


# name -> (the bad call, the good one, the error of the bad one, a part of its text)
CASES = {
    "short list": (
        later("all_gather", lambda: blocks(number=1), f32), later("all_gather", blocks, f32),
        InvalidArgumentError, "tensor_list has 1 entries"),
    "blocks of a wrong size": (
        later("reduce_scatter", f32, lambda: blocks(5)), later("reduce_scatter", f32, blocks),
        InvalidArgumentError, "has 5 elements, this rank's own array 4"),
    "no list": (later("all_to_all", f32, blocks), later("all_to_all", blocks, blocks),
        ArgumentTypeError, "output_tensor_list must be a list"),
    "root": (later("broadcast", f32, group_src=99), later("broadcast", f32, 0),
        InvalidArgumentError, "root=99 is not a rank"),
    "global rank": (later("reduce", f32, 99), later("reduce", f32, 0),
        InvalidArgumentError, "global rank 99 is not in group"),
    "two roots": (later("broadcast", f32, 0, group_src=0), later("broadcast", f32, 0),
        InvalidArgumentError, "can't specify both"),
    "dtype": (later("all_reduce", f32, BAND), later("all_reduce", f32, MAX),
        UnsupportedError, "reduce op BAND is not defined on float32"),
    "op": (later("all_reduce", f32, "sum"), later("all_reduce", f32),
        ArgumentTypeError, "op must be a ReduceOp"),
    "no array": (later("all_reduce", 5), later("all_reduce", f32),
        ArgumentTypeError, "tensor must be an array"),
    "read-only": (later("all_reduce", frozen), later("all_reduce", f32),
        InvalidArgumentError, "tensor is read-only"),
    "split sizes": (later("all_to_all_single", f32, f32, [9], [4]), later("barrier"),
        InvalidArgumentError, "input: split sizes [4]"),
    "keyword": (later("barrier", algoritm="ring"), later("barrier"),
        ArgumentTypeError, "unexpected keyword argument 'algoritm'"),
    "keyword of the method": (later("gather", f32, root=0), later("barrier"),
        ArgumentTypeError, "unexpected keyword argument 'root'"),
    "timeout": (later("barrier", timeout="soon"), later("barrier"),
        ArgumentTypeError, "timeout must be seconds"),
    "algorithm": (later("all_reduce", f32, algorithm="rign"), later("all_reduce", f32),
        InvalidArgumentError, "all_reduce has no algorithm 'rign'"),
    "list of gather_object": (object_call("gather_object", 1, list_if(lambda rank: rank != 0)),
        object_call("gather_object", 1, list_if(lambda rank: rank == 0)),
        InvalidArgumentError, "object_gather_list is "),
    "list of all_gather_object": (
        object_call("all_gather_object", [None], 1), object_call("all_gather_object", each(0), 1),
        InvalidArgumentError, "object_list has 1 entries"),
    "list of broadcast_object_list": (
        object_call("broadcast_object_list", (1,)), object_call("broadcast_object_list", [1]),
        ArgumentTypeError, "object_list must be a list, got tuple"),
    "list of scatter_object_list": (object_call("scatter_object_list", [], each(1)),
        object_call("scatter_object_list", [0], each(1)),
        InvalidArgumentError, "scatter_object_output_list must be a list of at least one"),
    "serializer": (
        object_call("reduce_object", 1, max, serializer=5), object_call("reduce_object", 1, max),
        ArgumentTypeError, "serializer must have name, dumps and loads, got 5"),
    "timeout of an object call": (object_call("all_reduce_object", 1, max, timeout="soon"),
        object_call("all_reduce_object", 1, max), ArgumentTypeError, "timeout must be seconds"),
}  # fmt: skip


def make_every_case(rank, odd, async_op):
    """Let one rank make the bad call of each case; the others read which rank refused it."""
    for bad, good, error, text in CASES.values():
        if rank == odd:
            with fails(error, text):
                finish(bad(async_op=async_op))
        else:
            with fails(
                CollectiveMismatchError, text, f"rank {odd} called", "but refused it: "
            ) as caught:
                finish(good(async_op=async_op))
            assert caught.value.context.usable is True
            assert odd in caught.value.context.peers
        check_usable()


@pytest.mark.sweep(4)
@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("is_first", [True, False], ids=["first", "last"])
@pytest.mark.ranks(2, 3, 5, engine="both")
def test_one_rank_refuses(rank, is_first, async_op):
    make_every_case(rank, 0 if is_first else dist.get_world_size() - 1, async_op)


@pytest.mark.sweep(1)
@pytest.mark.ranks(3, kind="processes", engine="both")
def test_one_process_refuses(rank):
    make_every_case(rank, 2, False)


@pytest.mark.ranks(2, 4)
def test_all_ranks_refuse(rank):
    """Each rank gets its own error, and the order of calls stays the same."""
    for bad, _, error, text in CASES.values():
        with fails(error, text):
            bad()
    check_usable()


@pytest.mark.ranks(3, kind="both")
def test_the_reason_arrives_before_the_news_of_the_end(rank):
    reason = "tensor_list has 0 entries, expected one for each of 3 ranks"
    if rank == 1:
        with fails(InvalidArgumentError) as caught:
            dist.all_gather([], f32())
        assert caught.value.what == f"all_gather: {reason}"
        dist.destroy_process_group()
    else:
        with fails(CollectiveMismatchError) as caught:
            dist.all_gather(blocks(), f32())
        start = r"rank 1 called all_gather at test_refusal\.py:\d+"
        end = f"{start}, but refused it: {re.escape(reason)}$"
        assert re.search(end, caught.value.what)


@pytest.mark.ranks(2)
def test_all_ranks_refuse_to_reduce_float8_and_move_it(rank):
    torch = pytest.importorskip("torch")
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        x = torch.full((4,), float(rank + 1)).to(dtype)
        for name, *arguments in (
            ("all_reduce", x),
            ("reduce", x, 0, dist.ReduceOp.MAX),
            ("reduce_scatter_tensor", x[:1], x[: dist.get_world_size()]),
        ):
            with pytest.raises(UnsupportedError, match=r"is not defined on float8.*it only moves"):
                getattr(dist, name)(*arguments)
        dist.broadcast(x, 1)
        assert (x.float() == 2).all()


@pytest.mark.ranks(2)
def test_a_call_in_a_stream_is_refused_when_it_begins(rank):
    with dist.stream(dist.Stream()):
        work = dist.all_reduce(f32(), BAND if rank == 1 else MAX, async_op=True)
        expected = UnsupportedError if rank == 1 else CollectiveMismatchError
        with fails(expected, "reduce op BAND is not defined on float32"):
            work.wait_on_host()
    dist.barrier()
