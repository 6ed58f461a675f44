"""The functions of the module, against torch.distributed's signatures and rules."""

import warnings

import numpy as np
import pytest

import unisono as dist
from tests.support.operations import COLLECTIVES, Operations
from unisono.errors import InvalidArgumentError, NotInitializedError

NOT_A_MEMBER = -100


def test_before_init():
    assert dist.is_available()
    assert not dist.is_initialized()
    assert dist.group.WORLD is None
    for call in (
        dist.get_rank,
        dist.get_world_size,
        dist.barrier,
        dist.new_group,
        dist.get_backend,
    ):
        with pytest.raises(NotInitializedError):
            call()


def every_call(group, p, rank, **how):
    """Return {name: call} of every collective function on arrays that fit."""
    calls = Operations(rank, p, how={"group": group, **how})
    return {name: getattr(calls, name) for name in COLLECTIVES}


@pytest.mark.ranks(1, 3, kind="both")
def test_return_values(rank):
    p = dist.get_world_size()
    for name, call in every_call(None, p, rank).items():
        assert call() is None, name
    for name, call in every_call(None, p, rank, async_op=True).items():
        handle = call()
        kind = dist.Future if name.endswith("_coalesced") else dist.Work
        assert type(handle) is kind, name
        result = handle.wait()
        assert result is True or kind is dist.Future, name


@pytest.mark.ranks(2, kind="both")
def test_a_rank_outside_the_group(rank):
    p = dist.get_world_size()
    group = dist.new_group([0])
    if rank == 0:
        assert isinstance(group, dist.ProcessGroup)
        for name, call in every_call(group, 1, 0).items():
            assert call() is None, name
        return
    assert group == dist.GroupMember.NON_GROUP_MEMBER == NOT_A_MEMBER
    x = np.full(2, 7.0)
    refused = every_call(group, p, rank) | {
        "send": lambda: dist.send(x, 0, group), "isend": lambda: dist.isend(x, 0, group),
        "irecv": lambda: dist.irecv(x, 0, group),
    }  # fmt: skip
    for name, call in refused.items():
        with pytest.warns(UserWarning, match=f"running {name} on a rank that does not belong"):
            assert call() is None, name
    with pytest.warns(UserWarning, match="running recv on"):
        assert dist.recv(x, 0, group) == -1
    assert (dist.get_rank(group), dist.get_world_size(group)) == (-1, -1)
    dist.destroy_process_group(group)
    for call in (dist.get_backend, dist.get_backend_config, dist.get_process_group_ranks):
        with pytest.raises(InvalidArgumentError, match="does not belong to the given group"):
            call(group)


@pytest.mark.ranks(4, kind="both")
def test_roots(rank):
    """src and dst are global ranks, group_src and group_dst ranks of the group."""
    group = dist.new_group([1, 3], sort_ranks=True)
    if rank in (1, 3):
        for how, source in (({"src": 3}, 3), ({"group_src": 0}, 1), ({"group_src": 1}, 3)):
            x = np.full(2, float(rank))
            dist.broadcast(x, group=group, **how)
            assert (x == source).all(), how
        x = np.full(2, 1.0)
        dist.reduce(x, 3, group=group)
        assert (x == (2 if rank == 3 else 1)).all()
        outs = [np.zeros(1), np.zeros(1)]
        dist.gather(np.full(1, float(rank)), outs if rank == 1 else None, group_dst=0, group=group)
        if rank == 1:
            assert [o[0] for o in outs] == [1, 3]
        for bad in ({"src": 3, "group_src": 1}, {}, {"src": 2}, {"group_src": 2}, {"src": -1}):
            with pytest.raises(InvalidArgumentError):
                dist.broadcast(np.ones(1), group=group, **bad)
        with pytest.raises(InvalidArgumentError, match="global rank 0 is not in group"):
            dist.gather(np.ones(1), None, group=group)
    x = np.full(2, float(rank))
    outs = [np.zeros(2) for _ in range(4)]
    dist.gather(x, outs if rank == 0 else [])
    dist.scatter(x, outs if rank == 0 else [])
    assert (x == rank).all()
    dist.broadcast(x, np.int64(2))
    assert (x == 2).all()


@pytest.mark.ranks(3, kind="both")
def test_queries(rank):
    p = dist.get_world_size()
    assert dist.is_initialized()
    assert dist.get_rank() == rank
    assert dist.group.WORLD is dist.GroupMember.WORLD
    assert dist.get_process_group_ranks() == list(range(p))
    assert dist.get_process_group_ranks(None) == list(range(p))
    assert (dist.get_backend(), dist.get_backend_config()) == ("unisono", "cpu:unisono")
    group = dist.new_group([2, 0], sort_ranks=False)
    assert dist.get_group_rank(dist.group.WORLD, 1) == 1
    assert dist.get_global_rank(dist.group.WORLD, 1) == 1
    if rank != 1:
        assert dist.get_process_group_ranks(group) == [2, 0]
        assert dist.get_rank(group) == (1 if rank == 0 else 0)
        assert dist.get_world_size(group) == 2
        assert dist.get_group_rank(group, 0) == 1
        assert dist.get_global_rank(group, 0) == 2
        for call in (lambda: dist.get_group_rank(group, 1), lambda: dist.get_global_rank(group, 2)):
            with pytest.raises(InvalidArgumentError):
                call()


def gather_ranks(group):
    out = np.zeros(dist.get_world_size(group), int)
    dist.all_gather_into_tensor(out, np.array([dist.get_rank()]), group)
    return out.tolist()


@pytest.mark.ranks(4, kind="both")
def test_groups(rank):
    """Sorted, unsorted, overlapping, nested use, many, with their own order of calls."""
    warnings.simplefilter("error")
    specs = [[0, 1, 2, 3], [3, 1], [0, 2], [2, 1, 0], [0, 1, 2, 3]]
    made = [dist.new_group(ranks) for ranks in specs]
    made += [dist.new_group(ranks, sort_ranks=False) for ranks in specs]
    for group, ranks in zip(made, [sorted(ranks) for ranks in specs] + specs, strict=True):
        assert (group != NOT_A_MEMBER) == (rank in ranks)
        if group != NOT_A_MEMBER:
            assert gather_ranks(group) == ranks
    # Calls on two groups in another order: groups are independent.
    whole = dist.new_group()
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = halves[rank // 2]
    x, y = np.ones(2), np.ones(2)
    works = [
        dist.all_reduce(x, group=whole, async_op=True),
        dist.all_reduce(y, group=mine, async_op=True),
    ]
    for work in works if rank % 2 else works[::-1]:
        work.wait()
    assert (x == 4).all()
    assert (y == 2).all()
    dist.destroy_process_group(mine)
    dist.barrier()


@pytest.mark.ranks(4, kind="both")
def test_groups_of_members_only(rank):
    """Only the members call, in an order of their own; a key is never used twice."""
    if rank == 3:
        dist.barrier()
        return
    pair = [0, 1] if rank < 2 else [2]
    for _ in range(20):
        group = dist.new_group(pair, use_local_synchronization=True)
        x = np.full(1, rank + 1.0)
        dist.all_reduce(x, group=group)
        assert x[0] == 3
        dist.destroy_process_group(group)
    assert dist.new_group([3], use_local_synchronization=True) is None
    three = dist.new_group([2, 0, 1], use_local_synchronization=True)
    assert gather_ranks(three) == [0, 1, 2]
    dist.barrier()


@pytest.mark.ranks(2, kind="both")
def test_a_group_made_again_while_the_old_one_is_used(rank):
    """Rank 0 destroys and makes a group again while rank 1 still uses the old one."""
    old = dist.new_group([0, 1], use_local_synchronization=True)
    x = np.ones(1)
    dist.all_reduce(x, group=old)
    if rank == 0:
        dist.destroy_process_group(old)
        new = dist.new_group([0, 1], use_local_synchronization=True)
        work = dist.all_reduce(x, group=new, async_op=True)
        dist.send(np.zeros(1), 1)
        work.wait()
    else:
        # The message of the new group is here before the old one is destroyed.
        dist.recv(np.zeros(1), 0)
        dist.destroy_process_group(old)
        new = dist.new_group([0, 1], use_local_synchronization=True)
        dist.all_reduce(x, group=new)
    assert x[0] == 4


@pytest.mark.ranks(2, kind="both")
def test_time_outs(rank):
    """A group's own time-out, and a call's."""
    groups = [dist.new_group(timeout=0.2), dist.new_group(), dist.new_group()]
    groups[2].set_timeout(0.2)
    if rank == 0:
        late = "timed out after 0.2 s on rank 0 of 2: rank 1 (never|had not|did not)"
        with pytest.raises(TimeoutError, match=late):
            groups[0].barrier()
        with pytest.raises(TimeoutError, match=late):
            dist.all_reduce(np.ones(1), group=groups[1], timeout=0.2)
        with pytest.raises(TimeoutError, match=late):
            groups[2].barrier(async_op=True).wait()
    dist.barrier()
    for group in groups:
        # Rank 1 may come into this call before it hears that the group is broken.
        with pytest.raises(TimeoutError, match=r"timed out after 0\.2 s"):
            dist.barrier(group)
    shown = repr(groups[0])
    assert shown.startswith(f"<ProcessGroup '1' rank={rank} size=2 cpu=unisono engine=")
    assert " broken: timed out after 0.2 s: rank 1 " in shown


@pytest.mark.ranks(2, engine="both")
def test_calls_are_counted(rank):
    """As Gloo: 0 before the first collective call, one more after each; messages do not count."""
    group, x = dist.new_group(range(dist.get_world_size())), np.ones(1000)
    seen = [group._get_sequence_number_for_group()]
    for _ in range(10):  # the last of these are repeated in C++
        group.all_reduce(x)
    seen.append(group._get_sequence_number_for_group())
    group.all_reduce(x, async_op=True).wait()
    group.barrier()
    seen.append(group._get_sequence_number_for_group())
    group.send(x, rank, async_op=True)
    group.recv(x, rank)
    group._set_sequence_number_for_group()
    seen.append(group._get_sequence_number_for_group())
    assert seen == [0, 10, 12, 12], seen
