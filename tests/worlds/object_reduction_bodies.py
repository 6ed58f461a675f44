"""Reductions of objects by functions, against functools.reduce."""

import functools

import numpy as np
import pytest

import unisono as dist
from unisono.errors import ArgumentTypeError, CollectiveError


def joined(a, b):
    """Neither commutative nor associative."""
    return f"({a}{b})"


def merged(a, b):
    """Changes its left operand and returns it."""
    a["names"] += b["names"]
    a["sum"] = a["sum"] + b["sum"]
    return a


def record(rank):
    return {"names": [f"r{rank}"], "sum": np.full(20_000, float(rank))}


def in_rank_order(rank):
    p = dist.get_world_size()
    expected = functools.reduce(joined, map(str, range(p)))
    assert dist.all_reduce_object(str(rank), joined) == expected
    for root in {0, p - 1}:
        got = dist.reduce_object(str(rank), joined, dst=root)
        assert got == (expected if rank == root else None)
    mine = record(rank)
    got = dist.all_reduce_object(mine, merged)
    assert got["names"] == [f"r{r}" for r in range(p)]
    assert (got["sum"] == sum(range(p))).all()
    assert mine["names"] == [f"r{rank}"], "one's own object stays as it is"
    got["names"].append("x")
    assert dist.all_reduce_object(rank, max, timeout=30) == p - 1


def only_one_rank_needs_the_function(rank):
    got = dist.all_reduce_object([rank], (lambda a, b: a + b) if rank == 0 else None)
    assert got == list(range(dist.get_world_size()))


def in_a_group(rank):
    group = dist.new_group([2, 0], sort_ranks=False)
    if rank in (0, 2):
        assert dist.all_reduce_object(rank, joined, group) == "(20)"
        got = dist.reduce_object(rank, joined, group=group, group_dst=1)
        assert got == ("(20)" if rank == 0 else None)
    else:
        with pytest.warns(UserWarning, match="all_reduce_object on a rank that does not"):
            assert dist.all_reduce_object(rank, joined, group) is None


def failing(a, b):
    raise KeyError("no such thing")


def errors(rank):
    expected = KeyError if rank == 0 else CollectiveError
    with pytest.raises(expected, match="no such thing"):
        dist.all_reduce_object(rank, failing)
    obj = rank if rank != 1 else (lambda: 0)
    expected = CollectiveError if rank != 1 else Exception
    with pytest.raises(expected) as caught:
        dist.all_reduce_object(obj, joined)
    if rank != 1:
        assert "rank 1 had nothing to send" in caught.value.what
    with pytest.raises((ArgumentTypeError, CollectiveError, TypeError)):
        dist.all_reduce_object(rank, "no function")
    assert dist.all_reduce_object(rank, joined) == "((01)2)"


BODIES = [in_rank_order, only_one_rank_needs_the_function, in_a_group, errors]
