"""reduce_object and all_reduce_object, against functools.reduce."""

import functools

import numpy as np
import pytest

import unisono as dist
from tests.support.calls import fails
from unisono.errors import ArgumentTypeError, CollectiveError


def joined(a, b):
    """Neither commutative nor associative."""
    return f"({a}{b})"


def merged(a, b):
    """Change the left operand and return it."""
    a["names"] += b["names"]
    a["sum"] = a["sum"] + b["sum"]
    return a


@pytest.mark.sweep(6)
@pytest.mark.ranks(1, 2, 3, 5, kind="both", engine="both")
def test_objects_are_reduced_in_the_order_of_ranks(rank):
    p = dist.get_world_size()
    expected = functools.reduce(joined, map(str, range(p)))
    assert dist.all_reduce_object(str(rank), joined) == expected
    for root in {0, p - 1}:
        got = dist.reduce_object(str(rank), joined, dst=root)
        assert got == (expected if rank == root else None)
    mine = {"names": [f"r{rank}"], "sum": np.full(20_000, float(rank))}
    got = dist.all_reduce_object(mine, merged)
    assert got["names"] == [f"r{r}" for r in range(p)]
    assert (got["sum"] == sum(range(p))).all()
    assert mine["names"] == [f"r{rank}"], "one's own object stays as it is"
    assert dist.all_reduce_object(rank, max, timeout=30) == p - 1
    # Only one rank needs the function, which so need not be picklable.
    got = dist.all_reduce_object([rank], (lambda a, b: a + b) if rank == 0 else None)
    assert got == list(range(p))


@pytest.mark.sweep(2)
@pytest.mark.ranks(3, kind="both", engine="both")
def test_a_group_reduces_in_its_own_order(rank):
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


@pytest.mark.sweep(2)
@pytest.mark.ranks(3, kind="both", engine="both")
def test_an_error_of_one_rank_reaches_all(rank):
    with pytest.raises(KeyError if rank == 0 else CollectiveError, match="no such thing"):
        dist.all_reduce_object(rank, failing)
    if rank == 1:
        with pytest.raises(Exception, match=r"(?i)pickle"):
            dist.all_reduce_object(lambda: 0, joined)
    else:
        with fails(CollectiveError, "rank 1 had nothing to send"):
            dist.all_reduce_object(rank, joined)
    with pytest.raises((ArgumentTypeError, CollectiveError, TypeError)):
        dist.all_reduce_object(rank, "no function")
    assert dist.all_reduce_object(rank, joined) == "((01)2)"
