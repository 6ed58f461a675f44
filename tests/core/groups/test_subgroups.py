"""new_subgroups and its kin, split_group, shrink_group, monitored_barrier."""

import os
import signal

import numpy as np
import pytest

import unisono as dist
from tests.support.calls import check_usable, fails, wait_until
from unisono.core.backends import registry
from unisono.core.groups import world
from unisono.errors import (
    ArgumentTypeError,
    ClosedError,
    CollectiveAbortedError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    InvalidArgumentError,
    PeerLostError,
)
from unisono.lowlevel import DeviceBackend
from unisono.testing import run

pytestmark = pytest.mark.sweep(1)

NOT_MINE = dist.GroupMember.NON_GROUP_MEMBER


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)


def members(group):
    """Ask the ranks themselves who is in a group."""
    out = np.zeros(dist.get_world_size(group), int)
    dist.all_gather_into_tensor(out, np.array([dist.get_rank()]), group)
    assert out.tolist() == dist.get_process_group_ranks(group)
    return out.tolist()


@pytest.mark.ranks(4)
def test_blocks_of_equal_size(rank):
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
    assert members(dist.new_group()) == [0, 1, 2, 3]  # all ranks still have the same count
    for bad in (0, 3, 5, -1):
        with pytest.raises(InvalidArgumentError, match="must be positive and divide"):
            dist.new_subgroups(bad)
    with pytest.raises(InvalidArgumentError, match="LOCAL_WORLD_SIZE"):
        dist.new_subgroups()


@pytest.mark.ranks(4, kind="both")
def test_split_by_color_and_key(rank):
    # Expected: MPI_Comm_split; equal keys keep the order of the parent.
    mine = dist.split_group(color=rank % 2, key=-rank, group_desc="parity")
    assert (mine.name, members(mine)) == ("parity", [[2, 0], [3, 1]][rank % 2])
    x = np.array([float(rank)])
    dist.broadcast(x, group=mine, group_src=0)
    assert x[0] == [2, 3][rank % 2]
    equal = dist.split_group(color=np.int64(7), key=-1 if rank == 3 else 0)
    assert members(equal) == [3, 0, 1, 2]
    again = dist.split_group(equal, color=-1 if rank == 0 else 0, key=0)
    assert again is None if rank == 0 else members(again) == [3, 1, 2]
    assert dist.split_group(color=-1) is None
    # A color that only one rank gives wrong: all raise, and the group stays usable.
    error = ArgumentTypeError if rank == 1 else CollectiveMismatchError
    with pytest.raises(error, match="color must be an integer"):
        dist.split_group(color="red" if rank == 1 else 0)
    with pytest.raises(InvalidArgumentError, match="expected one"):
        dist.split_group(split_ranks=[[0, 1, 2, 3]], color=0)
    check_usable()


@pytest.fixture
def two_ranks_on_a_host(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")


@pytest.mark.ranks(4)
def test_blocks_are_those_of_a_host_by_default(rank, two_ranks_on_a_host):
    mine, _ = dist.new_subgroups()
    assert members(mine) == ([0, 1] if rank < 2 else [2, 3])


@pytest.mark.ranks(4, kind="both")
def test_subgroups_from_lists(rank):
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


@pytest.mark.ranks(4, kind="both")
def test_split_group(rank):
    parent = dist.new_group([3, 1, 0], sort_ranks=False)
    if parent == NOT_MINE:
        with pytest.raises(InvalidArgumentError, match="does not belong to the given") as caught:
            dist.split_group(parent, [[0]])
        assert caught.value.hint is not None
        assert "the call that made the group got ranks without rank 2 of 4" in caught.value.hint
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


@pytest.mark.ranks(4, kind="both")
def test_split_the_world(rank):
    child = dist.split_group(split_ranks=[[0, 1], [2, 3]])
    assert members(child) == ([0, 1] if rank < 2 else [2, 3])


@pytest.mark.ranks(4, kind="both")
def test_shrink_a_group(rank):
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
    dist.barrier(survivors)  # no rank aborts before both have begun
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


@pytest.mark.ranks(4, kind="both")
def test_shrink_the_world(rank):
    old = dist.group.WORLD
    pair = dist.new_group([2, 3])
    if rank == 1:
        return
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
    assert dist.get_rank() == (rank if rank == 0 else rank - 1)


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


@pytest.mark.parametrize("victim", [0, 2])
def test_shrink_after_a_death(victim):
    where = {"ranks": "processes", "dead": {victim}}
    results = run(shrink_after_a_death, 4, args=(victim,), **where)
    assert [r for r in results if r is not None] == [0, 1, 2]


@pytest.mark.ranks(4, kind="both")
def test_monitored_barrier_of_a_group(rank):
    for _ in range(3):
        dist.monitored_barrier()
    group = dist.new_group([1, 3], sort_ranks=True)
    if rank in (1, 3):
        dist.monitored_barrier(group, timeout=20, wait_all_ranks=True)
    else:
        with pytest.warns(UserWarning, match="running monitored_barrier on a rank"):
            assert dist.monitored_barrier(group) is None


@pytest.mark.sweep(2)
@pytest.mark.parametrize("absent", [(2,), (1, 3), (0,)])
@pytest.mark.ranks(4, kind="both")
def test_monitored_barrier_names_the_ranks_that_are_missing(rank, absent):
    """Late ranks read it, too; the group stays usable."""
    store, present = dist.group.WORLD.store, [r for r in range(4) if r not in absent]
    group = dist.new_group(present)
    if rank not in absent:
        dist.barrier(group)  # a busy machine must not make a present rank late
        start = f"timed out after 2.0 s on rank {rank}: rank"
        with fails(CollectiveTimeoutError, start, "never entered it") as caught:
            dist.monitored_barrier(timeout=2)
        # On a busy machine the verdict of rank 0 may come too late for the others.
        assert caught.value.context.peers in ([absent, (0,)] if rank else [absent])
        assert caught.value.context.usable
        store.set(f"done/{rank}", "yes")
    else:
        store.wait([f"done/{r}" for r in present], 30)
        if 0 not in absent:
            with pytest.raises(CollectiveTimeoutError) as caught:
                dist.monitored_barrier(timeout=30)
            assert caught.value.context.peers == absent
        else:
            dist.group.WORLD.counts["monitored_barrier"] += 1
    dist.monitored_barrier(timeout=30)
    check_usable()


def barrier_after_deaths(rank, victims):
    whole = dist.new_group()
    dist.barrier()
    if rank in victims:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLostError) as caught:
        dist.monitored_barrier(timeout=30, wait_all_ranks=True)
    if 0 not in victims:
        assert caught.value.context.peers == victims
        assert "lost rank" in caught.value.what
    # A rank that leaves is lost too, and not all others know the first loss yet.
    smaller = dist.shrink_group(list(victims), whole)
    dist.barrier(smaller)
    return caught.value.what


@pytest.mark.parametrize("victims", [(2,), (1, 3)])
def test_monitored_barrier_names_the_ranks_that_were_lost(victims):
    where = {"ranks": "processes", "dead": set(victims)}
    results = run(barrier_after_deaths, 4, args=(victims,), **where)
    assert len({r.partition(" on rank")[2][3:] for r in results if r is not None}) == 1


@pytest.mark.ranks(1)
def test_queries_of_backends(rank):
    assert dist.is_gloo_available()
    assert dist.is_backend_available("cpu:gloo")
    assert not dist.is_backend_available("cpu:gloo,cuda:nonesuch")
    assert not dist.is_nccl_available() or "nccl" in dist.Backend.backend_list
    assert not dist.is_ucc_available()
    assert dist.get_default_backend_for_device("cpu:0") == "unisono"
    with pytest.raises(InvalidArgumentError, match="no backend is registered for device 'tpu'"):
        dist.get_default_backend_for_device("tpu")
    ops = dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX
    assert [dist.supports_complex(op) for op in ops] == [True, True, False]
    assert dist.get_backend() == dist.Backend("UNISONO") == dist.Backend.UNISONO


# What differs -> (what rank 1 calls, what the others call, a part of the error's first line)
DIFFERENT = {
    "members": (
        lambda: dist.new_group([0, 1]), lambda: dist.new_group([0, 2]), "called new_group([0, 2])"),
    "order": (lambda: dist.new_group([0, 1]), lambda: dist.new_group([1, 0], sort_ranks=False),
        "called new_group([1, 0])"),
    "backend": (lambda: dist.new_group([0, 1]), lambda: dist.new_group([0, 1], backend="gloo"),
        "called new_group([0, 1], backend='cpu:"),
    "group or call": (dist.barrier, dist.new_group, "called barrier()"),
    "enumeration": (lambda: dist.new_subgroups_by_enumeration([[0], [1, 2]]),
        lambda: dist.new_subgroups_by_enumeration([[0, 1], [2]]),
        "called new_subgroups_by_enumeration([[0, 1], [2]])"),
    "size": (lambda: dist.new_subgroups(1), lambda: dist.new_subgroups(3),
        "called new_subgroups_by_enumeration([[0, 1, 2]])"),
    "split": (lambda: dist.split_group(split_ranks=[[0], [1, 2]]),
        lambda: dist.split_group(split_ranks=[[0, 1, 2]]), "called split_group([[0, 1, 2]])"),
}  # fmt: skip


@pytest.mark.sweep(2)
@pytest.mark.ranks(3, kind="both", engine="both")
def test_ranks_that_make_different_groups_all_fail(rank):
    for one, other, text in DIFFERENT.values():
        with fails(CollectiveMismatchError, text, "rank 1 called") as caught:
            (one if rank == 1 else other)()
        assert caught.value.context.usable
    own_error = InvalidArgumentError if rank == 1 else CollectiveMismatchError
    with fails(own_error, "ranks [99] are outside the world"):
        dist.new_group([0, 99] if rank == 1 else [0, 1])
    with fails(own_error, "group_size=2 must be positive and divide"):
        dist.new_subgroups(2 if rank == 1 else 3)
    assert len(world.current().groups) == 1
    check_usable(dist.new_group())


def test_names_of_backends(monkeypatch):
    monkeypatch.setattr(registry._backends, "_values", dict(registry._backends._values))
    assert dist.Backend("GLOO") == dist.Backend.GLOO == "gloo"
    assert dist.Backend("Other") == "other"
    with pytest.raises(AttributeError, match="no backend is named 'drums'"):
        dist.Backend.DRUMS  # noqa: B018  the access is the test
    dist.Backend.register_backend("Drums", lambda *a: None, devices=["drum", "cpu"])
    assert dist.Backend.DRUMS == "drums"
    assert dist.Backend.backend_capability["drums"] == ["drum", "cpu"]
    assert dist.Backend.default_device_backend_map == {
        "cpu": "unisono", "cuda": "nccl", "drum": "drums",
    }  # fmt: skip
    assert dist.get_default_backend_for_device("drum:1") == "drums"
    assert str(dist.BackendConfig("cpu:gloo,drum:drums")) == "cpu:gloo,drum:drums"
    with pytest.raises(InvalidArgumentError, match="registered already"):
        dist.Backend.register_backend("drums", lambda *a: None)
    with pytest.raises(ArgumentTypeError, match="expected a unisono"):
        dist.init_process_group("drum:drums", rank=0, world_size=1)
    assert not dist.is_initialized()


@pytest.mark.sweep(2)
@pytest.mark.parametrize("extended", [False, True])
def test_backends_made_in_torchs_way(monkeypatch, extended):
    monkeypatch.setattr(registry._backends, "_values", dict(registry._backends._values))
    seen = []

    class Silent(DeviceBackend):
        name, device = "silent", "cpu"

        def split(self, spec):
            raise NotImplementedError

        def abort(self, reason, failed=False):
            pass

        def close(self):
            pass

    def make(*arguments):
        seen.extend(arguments)
        return Silent(arguments[0].spec if extended else None)

    dist.Backend.register_backend("silent", make, extended_api=extended, devices="cpu")
    dist.init_process_group("silent", rank=0, world_size=1, timeout=9, pg_options="mine")
    try:
        if extended:
            options, given = seen
            assert (options.group_rank, options.group_size, given) == (0, 1, "mine")
            assert (options.timeout.total_seconds(), options.global_ranks_in_group) == (9, [0])
        else:
            assert (seen[1:3], seen[3].total_seconds()) == ([0, 1], 9)
        assert dist.get_backend() == "silent"
    finally:
        dist.destroy_process_group()


def _call_a_group_that_rank_0_has_closed(rank, calls):
    """Rank 1 must learn at once that rank 0 has closed the group; rank 2 goes on in it."""
    group = dist.new_group([0, 1], timeout=20)
    if rank < 2:
        for _ in range(calls):
            dist.barrier(group)
    if rank == 0:
        dist.destroy_process_group(group)
    dist.barrier()
    if rank == 1:
        with pytest.raises(PeerLostError, match=r"rank 0 was lost: it left: "):
            dist.all_reduce(np.ones(3), group=group)
        with pytest.raises(PeerLostError):
            dist.barrier(group)
    check_usable()


@pytest.mark.parametrize("calls", [0, 2])
@pytest.mark.ranks(3, engine="both", kind="both")
def test_a_call_of_a_group_that_another_rank_has_closed_ends_at_once(rank, calls):
    _call_a_group_that_rank_0_has_closed(rank, calls)


@pytest.mark.native
@pytest.mark.parametrize("calls", [0, 2])
def test_a_call_between_hosts_of_a_group_that_another_rank_has_closed_ends(calls, monkeypatch):
    monkeypatch.setenv("UNISONO_RANKS_PER_HOST", "1")
    run(_call_a_group_that_rank_0_has_closed, 3, args=(calls,))


def _receive_from_a_rank_that_closed_the_group(rank):
    """The messages of rank 0 come first, then the end; rank 2 sends when rank 1 has seen that."""
    group, x = dist.new_group(timeout=60), np.zeros(3)
    if rank == 0:
        for tag in (1, 2):
            dist.send(np.full(100_000, float(tag)), 1, group=group, tag=tag)
        dist.destroy_process_group(group)
    elif rank == 1:
        early, late = dist.irecv(x, 0, group, tag=3), np.zeros(100_000)
        for receive in (
            lambda: dist.recv(np.zeros(1), 0, group, tag=4),
            early.wait,
            lambda: dist.recv(np.zeros(1), 0, group, tag=5),
        ):
            with pytest.raises(PeerLostError, match=r"rank 0 was lost: it left: the group was cl"):
                receive()
        for tag in (2, 1):
            dist.recv(late, 0, group, tag=tag)
            assert (late == tag).all()
        assert (x == 0).all()
        dist.send(x, 2, group=group)
        dist.recv(x, None, group)
        assert (x == 7).all()
    else:
        dist.recv(x, 1, group)
        dist.send(np.full(3, 7.0), 1, group=group)
        dist.destroy_process_group(group)
    dist.barrier()
    if rank == 1:
        for receive in (lambda: dist.recv(x, None, group), lambda: dist.probe(2, group)):
            with pytest.raises(PeerLostError, match=r"rank [02] was lost: it left: the group was"):
                receive()
    check_usable()


@pytest.mark.ranks(3, engine="both", kind="both")
def test_a_receive_from_a_rank_that_closed_the_group_ends_at_once(rank):
    _receive_from_a_rank_that_closed_the_group(rank)


@pytest.mark.native
def test_a_receive_between_hosts_from_a_rank_that_closed_the_group_ends(monkeypatch):
    monkeypatch.setenv("UNISONO_RANKS_PER_HOST", "1")
    run(_receive_from_a_rank_that_closed_the_group, 3)


@pytest.mark.ranks(2, engine="both", kind="both")
def test_a_receive_without_a_waiting_thread_learns_that_its_sender_closed_the_group(rank):
    group = dist.new_group(timeout=60)
    if rank == 0:
        dist.destroy_process_group(group)
    else:
        work = dist.irecv(np.zeros(3), 0, group)
        assert wait_until(work.is_completed, 30)
        with pytest.raises(PeerLostError, match=r"rank 0 was lost: it left: the group was closed"):
            work.wait()
    dist.barrier()


@pytest.mark.ranks(3, engine="both")
def test_messages_go_on_in_a_group_that_another_rank_has_closed(rank):
    group, x = dist.new_group(), np.full(3, float(rank))
    dist.barrier(group)
    if rank == 2:
        dist.send(x, 0, group=group)
        dist.destroy_process_group(group)
    dist.barrier()
    if rank == 0:
        dist.recv(x, 2, group=group)
        assert (x == 2).all()
        dist.send(x, 1, group=group)
    elif rank == 1:
        dist.recv(x, 0, group=group)
        assert (x == 2).all()
    check_usable()
