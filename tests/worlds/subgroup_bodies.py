"""Groups made from groups, and the monitored barrier."""

import os
import signal
import time

import numpy as np
import pytest

import unisono as dist
from tests.support.lateness import Lateness
from unisono.errors import (
    ArgumentTypeError,
    ClosedError,
    CollectiveAbortedError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    InvalidArgumentError,
    PeerLostError,
)
from unisono.groups import world

NOT_MINE = dist.GroupMember.NON_GROUP_MEMBER


def members(group):
    """Ask the ranks themselves who is in a group."""
    out = np.zeros(dist.get_world_size(group), int)
    dist.all_gather_into_tensor(out, np.array([dist.get_rank()]), group)
    assert out.tolist() == dist.get_process_group_ranks(group)
    return out.tolist()


def blocks(rank):
    before = dist.get_pg_count()
    mine, groups = dist.new_subgroups(2, group_desc="pair")
    assert dist.get_pg_count() == before + 2
    assert groups == [mine, NOT_MINE] if rank < 2 else [NOT_MINE, mine]
    assert mine.name == "pair"
    assert members(mine) == ([0, 1] if rank < 2 else [2, 3])
    whole, groups = dist.new_subgroups(4)
    assert (groups, members(whole)) == ([whole], [0, 1, 2, 3])
    # Of a group: only its members call.
    odd = dist.new_group([3, 1])
    if odd != NOT_MINE:
        alone, groups = dist.new_subgroups(1, group=odd, timeout=7)
        assert groups == ([alone, NOT_MINE] if rank == 1 else [NOT_MINE, alone])
        assert members(alone) == [rank]
        assert alone.timeout_s == 7
    assert members(dist.new_group()) == [0, 1, 2, 3]  # all ranks still count alike
    for bad in (0, 3, 5, -1):
        with pytest.raises(InvalidArgumentError, match="must be positive and divide"):
            dist.new_subgroups(bad)
    with pytest.raises(InvalidArgumentError, match="LOCAL_WORLD_SIZE"):
        dist.new_subgroups()


def blocks_of_a_host(rank):
    mine, _ = dist.new_subgroups()
    assert members(mine) == ([0, 1] if rank < 2 else [2, 3])


def lists(rank):
    mine, groups = dist.new_subgroups_by_enumeration([[2, 0], [3]])
    assert [g != NOT_MINE for g in groups] == [rank in (0, 2), rank == 3]
    assert mine is {0: groups[0], 1: None, 2: groups[0], 3: groups[1]}[rank]
    if mine:
        assert members(mine) == ([3] if rank == 3 else [0, 2])
    count = dist.get_pg_count()
    for bad, text in (
        ([], "is empty"),
        (None, "must be a list of lists"),
        ([[0, 1], [1, 2]], r"rank 1 is in ranks_per_subgroup_list\[0\] and again in .*\[1\]"),
        ([[0, 4]], r"\[4\] are outside the world"),
        ([[0, 0]], "must be distinct"),
        ([[]], "at least one"),
    ):
        with pytest.raises(InvalidArgumentError, match=text):
            dist.new_subgroups_by_enumeration(bad)
    assert dist.get_pg_count() == count
    assert members(dist.new_group()) == [0, 1, 2, 3]


def split(rank):
    parent = dist.new_group([3, 1, 0], sort_ranks=False)
    if parent == NOT_MINE:
        with pytest.raises(InvalidArgumentError, match="does not belong to the given group"):
            dist.split_group(parent, [[0]])
        return
    me = dist.get_rank(parent)
    for name in ("a", None):
        child = dist.split_group(parent, [[2, 0], [1]], timeout=5, group_desc=name)
        assert members(child) == ([1] if me == 1 else [3, 0])
        assert child.timeout_s == 5
        assert child.name == (name or child.key)
    nested = dist.split_group(child, [list(range(child.size()))[::-1]], backend="cpu:unisono")
    assert members(nested) == members(child)
    some = dist.split_group(parent, [[1]])
    assert (some is None) == (me != 1)
    dist.destroy_process_group(child)
    assert members(nested) == ([1] if me == 1 else [3, 0])
    for bad, text in (
        ({}, "split_ranks must be a list of lists"),
        ({"split_ranks": []}, "is empty"),
        ({"split_ranks": [[0], [0]]}, "again in"),
        ({"split_ranks": [[3]]}, "outside group"),
        ({"split_ranks": [[0]], "backend": "gloo"}, "the parent group '.*' has 'cpu:unisono'"),
    ):
        with pytest.raises(InvalidArgumentError, match=text):
            dist.split_group(parent, **bad)


def split_the_world(rank):
    child = dist.split_group(split_ranks=[[0, 1], [2, 3]])
    assert members(child) == ([0, 1] if rank < 2 else [2, 3])


def shrink(rank):
    group = dist.new_group([0, 1, 3])
    survivors = dist.new_group([0, 3])
    if rank == 2:
        return
    if rank == 1:
        # A group goes on being one for a rank that was left out, until it looks.
        dist.group.WORLD.store.wait(["shrunk"], 30)
        with pytest.raises(CollectiveAbortedError):
            dist.barrier(group, timeout=5)
        return
    work = dist.all_reduce(np.ones(1), group=group, async_op=True)
    dist.barrier(survivors)  # nobody aborts before both have begun
    smaller = dist.shrink_group([1], group, dist.SHRINK_ABORT)
    dist.group.WORLD.store.set("shrunk", "yes")
    assert members(smaller) == [0, 3]
    with pytest.raises((CollectiveAbortedError, ClosedError)):
        work.wait()
    with pytest.raises(ClosedError):
        dist.barrier(group)
    for call, kind, text in (
        (lambda: dist.shrink_group([], smaller), InvalidArgumentError, "at least one"),
        (lambda: dist.shrink_group([0, 0], smaller), InvalidArgumentError, "distinct"),
        (lambda: dist.shrink_group([2], smaller), InvalidArgumentError, "outside group"),
        (lambda: dist.shrink_group([1 - smaller.rank()], smaller, 2), ValueError, "shrink_flags"),
        (lambda: dist.shrink_group([smaller.rank()], smaller), ValueError, "must not call"),
        (lambda: dist.shrink_group([0, 1], smaller), ValueError, "must not call"),
        (lambda: dist.shrink_group(1, smaller), ArgumentTypeError, "must be a list"),
        (lambda: dist.shrink_group(["1"], smaller), ArgumentTypeError, "integer"),
    ):
        with pytest.raises(kind, match=text):
            call()
    assert members(smaller) == [0, 3]


def shrink_the_world(rank):
    """The new world has links and ranks of its own; older groups are gone."""
    old = dist.group.WORLD
    pair = dist.new_group([2, 3])
    if rank == 1:
        return None
    made = dist.shrink_group([1])
    assert made is dist.group.WORLD
    assert dist.get_world_size() == 3
    assert dist.get_process_group_ranks() == [0, 1, 2]
    x = np.full(3, float(rank))
    dist.broadcast(x, 2)  # global rank 2 of now is 3 of then
    assert (x == 3).all()
    for gone in (old, pair):
        if gone != NOT_MINE:
            with pytest.raises(ClosedError):
                dist.barrier(gone)
    group = dist.new_group([0, 2])
    assert group == NOT_MINE if rank == 2 else members(group) == [0, 2]
    dist.barrier()
    return dist.get_rank()


def shrink_after_a_death(rank, victim):
    group = dist.new_group()
    x = np.ones(100_000)
    dist.all_reduce(x, group=group)
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLostError):
        dist.all_reduce(x, group=group)
    smaller = dist.shrink_group([victim], group)
    x[:] = 1
    dist.all_reduce(x, group=smaller)
    assert (x == 3).all()
    dist.shrink_group([victim])
    dist.all_reduce(x)
    assert (x == 9).all()
    assert dist.get_process_group_ranks() == [0, 1, 2]
    return dist.get_rank()


def monitored(rank):
    for _ in range(3):
        dist.monitored_barrier()
    group = dist.new_group([1, 3], sort_ranks=True)
    if rank in (1, 3):
        dist.monitored_barrier(group, timeout=20, wait_all_ranks=True)
    else:
        with pytest.warns(UserWarning, match="running monitored_barrier on a rank"):
            assert dist.monitored_barrier(group) is None


def monitored_missing(rank, absent):
    """Everybody who comes learns who did not, late ones too; the group stays usable."""
    store = dist.group.WORLD.store
    present = dist.new_group([r for r in range(dist.get_world_size()) if r not in absent])
    if rank not in absent:
        dist.barrier(present)  # a busy machine must not make one that is present late
        with pytest.raises(CollectiveTimeoutError) as caught:
            dist.monitored_barrier(timeout=2)
        # On a busy machine the verdict of rank 0 may come too late for the others.
        told = [tuple(absent), (0,)] if rank else [tuple(absent)]
        assert caught.value.context.peers in told
        assert caught.value.context.usable
        expected = f"timed out after 2.0 s on rank {rank}: rank"
        assert expected in caught.value.what
        assert "never entered it" in caught.value.what
        store.set(f"done/{rank}", "yes")
    else:
        store.wait([f"done/{r}" for r in range(dist.get_world_size()) if r not in absent], 30)
        if 0 not in absent:
            with pytest.raises(CollectiveTimeoutError) as caught:
                dist.monitored_barrier(timeout=30)
            assert caught.value.context.peers == tuple(absent)
        else:
            dist.group.WORLD.counts["monitored_barrier"] += 1
    dist.monitored_barrier(timeout=30)
    x = np.ones(2)
    dist.all_reduce(x)
    assert (x == dist.get_world_size()).all()


def monitored_killed(rank, victims):
    whole = dist.new_group()
    dist.barrier()
    if rank in victims:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLostError) as caught:
        dist.monitored_barrier(timeout=30, wait_all_ranks=True)
    if 0 not in victims:
        assert caught.value.context.peers == victims
        assert "lost rank" in caught.value.what
    # A rank that leaves is lost too; the others have not all been told yet.
    smaller = dist.shrink_group(list(victims), whole)
    dist.barrier(smaller)
    return caught.value.what


def names(rank):
    assert dist.is_gloo_available()
    assert dist.is_backend_available("cpu:gloo")
    assert not dist.is_backend_available("cpu:gloo,cuda:nonesuch")
    assert not dist.is_nccl_available() or "nccl" in dist.Backend.backend_list
    assert not dist.is_ucc_available()
    assert dist.get_default_backend_for_device("cpu:0") == "unisono"
    with pytest.raises(InvalidArgumentError, match="no backend is registered for device 'tpu'"):
        dist.get_default_backend_for_device("tpu")
    assert [dist.supports_complex(getattr(dist.ReduceOp, op)) for op in ("SUM", "AVG", "MAX")] == [
        True,
        True,
        False,
    ]
    assert dist.get_backend() == dist.Backend("UNISONO") == dist.Backend.UNISONO


def told_differently(rank):
    """Ranks that make different groups hear so at once, on all ranks, and no group is made."""
    p, slowest_s = dist.get_world_size(), 0.0
    for name, (one, other, text) in DIFFERENT.items():
        with Lateness() as lateness:
            began = time.monotonic()
            with pytest.raises(CollectiveMismatchError) as caught:
                (one if rank == 1 else other)()
            took_s = time.monotonic() - began
        slowest_s = max(slowest_s, took_s - lateness.slack_s)
        assert text in caught.value.what, (name, caught.value.what)
        assert "rank 1 called" in caught.value.what
        assert caught.value.context.usable
    with pytest.raises(InvalidArgumentError if rank == 1 else CollectiveMismatchError) as caught:
        dist.new_group([0, 99] if rank == 1 else [0, 1])
    assert "ranks [99] are outside the world" in caught.value.what
    with pytest.raises(InvalidArgumentError if rank == 1 else CollectiveMismatchError) as caught:
        dist.new_subgroups(2 if rank == 1 else 3)
    assert "group_size=2 must be positive and divide" in caught.value.what
    assert len(world.current().groups) == 1
    x = np.ones(2)
    dist.all_reduce(x, group=dist.new_group())
    assert (x == p).all()
    return slowest_s


# What differs -> (what rank 1 calls, what the others call, a part of the error's first line)
DIFFERENT = {
    "members": (
        lambda: dist.new_group([0, 1]), lambda: dist.new_group([0, 2]), "called new_group([0, 2])",
    ),
    "order": (
        lambda: dist.new_group([0, 1]), lambda: dist.new_group([1, 0], sort_ranks=False),
        "called new_group([1, 0])",
    ),
    "backend": (
        lambda: dist.new_group([0, 1]), lambda: dist.new_group([0, 1], backend="gloo"),
        "called new_group([0, 1], backend='cpu:",
    ),
    "group or call": (dist.barrier, dist.new_group, "called barrier()"),
    "enumeration": (
        lambda: dist.new_subgroups_by_enumeration([[0], [1, 2]]),
        lambda: dist.new_subgroups_by_enumeration([[0, 1], [2]]),
        "called new_subgroups_by_enumeration([[0, 1], [2]])",
    ),
    "size": (
        lambda: dist.new_subgroups(1), lambda: dist.new_subgroups(3),
        "called new_subgroups_by_enumeration([[0, 1, 2]])",
    ),
    "split": (
        lambda: dist.split_group(split_ranks=[[0], [1, 2]]),
        lambda: dist.split_group(split_ranks=[[0, 1, 2]]),
        "called split_group([[0, 1, 2]])",
    ),
}  # fmt: skip
