"""Integers and seconds as arguments: of NumPy, and of every class with `__index__`.

Each function that takes one is called with each kind; an error names the function.
"""

from datetime import timedelta

import numpy as np
import pytest

import unisono as dist
from tests.support.calls import check_usable
from unisono.core.base.deadline import to_seconds
from unisono.core.platform.processes import IS_LINUX
from unisono.errors import (
    ArgumentTypeError,
    CollectiveMismatchError,
    InvalidArgumentError,
    UnsupportedError,
)
from unisono.launcher.spawn import check_start


class Index:
    """An integer that is none to arithmetic and comparisons."""

    def __init__(self, value):
        self.value = value

    def __index__(self):
        return self.value


INTEGERS = [int, np.int64, np.uint8, Index]


def row():
    return np.arange(4.0) + dist.get_rank()


def pair(rank, first, second):
    """Call the first function on rank 0, and the second on rank 1."""
    return first() if rank == 0 else second()


def only(rank, value):
    return value if rank == 0 else None


def calls_with_ranks(rank, integer):
    zero, one, peer, tag = integer(0), integer(1), integer(1 - rank), integer(3)
    lists = only(rank, [row(), row()])
    yield "broadcast", lambda: dist.broadcast(row(), zero)
    yield "broadcast in the group", lambda: dist.broadcast(row(), group_src=one)
    yield "reduce", lambda: dist.reduce(row(), one)
    yield "reduce in the group", lambda: dist.reduce(row(), group_dst=zero)
    yield "gather", lambda: dist.gather(row(), lists, dst=zero)
    yield "gather in the group", lambda: dist.gather(row(), lists, group_dst=zero)
    yield "scatter", lambda: dist.scatter(row(), lists, src=zero)
    yield "scatter in the group", lambda: dist.scatter(row(), lists, group_src=zero)
    yield (
        "messages",
        lambda: pair(
            rank,
            lambda: dist.send(row(), one, tag=tag),
            lambda: dist.recv(row(), zero, tag=tag),
        ),
    )
    yield (
        "messages in the group",
        lambda: pair(
            rank,
            lambda: dist.isend(row(), group_dst=one, tag=tag).wait(),
            lambda: dist.irecv(row(), group_src=zero, tag=tag).wait(),
        ),
    )
    yield "sendrecv", lambda: dist.sendrecv(row(), peer, row(), peer, send_tag=tag, recv_tag=tag)
    yield (
        "recv_array",
        lambda: pair(
            rank, lambda: dist.send(row(), 1, tag=3), lambda: dist.recv_array(zero, tag=tag)
        ),
    )
    yield (
        "probe",
        lambda: pair(
            rank,
            lambda: dist.send(row(), 1, tag=3),
            lambda: (dist.probe(zero, tag=tag), dist.recv(row(), 0, tag=3)),
        ),
    )
    yield (
        "batch",
        lambda: [
            work.wait()
            for work in dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, row(), peer, tag=tag),
                    dist.P2POp(dist.irecv, row(), group_peer=peer, tag=tag),
                ]
            )
        ],
    )
    yield "broadcast_object_list", lambda: dist.broadcast_object_list([1], zero)
    yield "objects in the group", lambda: dist.broadcast_object_list([1], group_src=zero)
    yield "gather_object", lambda: dist.gather_object(1, only(rank, [0, 0]), zero)
    yield "scatter_object_list", lambda: dist.scatter_object_list([0], only(rank, [1, 2]), zero)
    yield "reduce_object", lambda: dist.reduce_object(1, lambda a, b: a + b, zero)
    yield (
        "send_object_list",
        lambda: pair(
            rank,
            lambda: dist.send_object_list([1], one, tag=tag),
            lambda: dist.recv_object_list([0], zero, tag=tag),
        ),
    )
    yield "barrier", lambda: dist.barrier(device_ids=[zero])


def calls_with_groups(rank, integer):
    zero, one, two = integer(0), integer(1), integer(2)
    world = dist.group.WORLD
    options = dist.BroadcastOptions()
    options.rootRank = one
    mesh = dist.init_device_mesh("cpu", (integer(2), one), mesh_dim_names=("a", "b"))
    yield "new_group", lambda: dist.new_group([zero, one])
    yield "new_subgroups", lambda: dist.new_subgroups(two)
    yield "by enumeration", lambda: dist.new_subgroups_by_enumeration([[zero], [one]])
    yield "split_group", lambda: dist.split_group(None, [[zero, one]])
    yield "DeviceMesh", lambda: dist.DeviceMesh("cpu", [zero, one])
    yield "mesh.size", lambda: mesh.size(zero)
    yield "mesh.get_local_rank", lambda: mesh.get_local_rank(zero)
    yield "mesh.get_group", lambda: mesh.get_group(zero)
    yield "mesh.shift", lambda: mesh.shift(zero, one)
    yield (
        "backend_override",
        lambda: dist.init_device_mesh("cpu", (2,), backend_override={zero: "gloo"}),
    )
    yield "shared_array", lambda: dist.shared_array((two, integer(3)), np.float64)
    yield "shared_array of one size", lambda: dist.shared_array(integer(3), np.float64)
    yield "sync", lambda: dist.shared_array(3, np.float64).sync(src=zero)
    yield "Counter", lambda: dist.Counter(None, start=two).fetch_add(two)
    yield (
        "Neighbors",
        lambda: dist.neighbor_all_gather(
            [row()], row(), neighbors=dist.Neighbors([integer(1 - rank)], [integer(1 - rank)])
        ),
    )
    yield "get_global_rank", lambda: dist.get_global_rank(world, one)
    yield "get_group_rank", lambda: dist.get_group_rank(world, one)
    yield "ProcessGroup.broadcast", lambda: world.broadcast(row(), one)
    yield "options", lambda: world.broadcast([row()], options).wait()
    yield (
        "recv_any_source",
        lambda: pair(
            rank, lambda: world.send(row(), one, two), lambda: world.recv_any_source(row(), two)
        ),
    )
    yield "reconfigure", lambda: dist.reconfigure(min_size=two, max_size=two)


def each(calls):
    """Make all calls; return the errors by name."""
    wrong = {}
    for name, call in calls:
        try:
            call()
        except Exception as error:
            if IS_LINUX or not isinstance(error, UnsupportedError):  # a shared array
                wrong[name] = error
    return wrong


@pytest.mark.ranks(2)
@pytest.mark.parametrize("integer", INTEGERS)
def test_integers_of_every_class(rank, integer):
    assert each(calls_with_ranks(rank, integer)) == {}
    assert each(calls_with_groups(rank, integer)) == {}
    # The ranks may pass integers of different classes.
    assert each(calls_with_ranks(rank, integer if rank else int)) == {}
    assert each(calls_with_groups(rank, integer if rank else int)) == {}


SECONDS = {
    "int": 20,
    "numpy int": np.int64(20),
    "numpy float": np.float32(20),
    "array": np.array(20.0)[()],
    "timedelta": timedelta(seconds=20),
    "timedelta64": np.timedelta64(20, "s"),
    "nanoseconds": np.timedelta64(20_000_000_000, "ns"),
    "index": Index(20),
}


def calls_with_seconds(rank, seconds):
    world = dist.group.WORLD
    options = dist.AllreduceOptions()
    options.timeout = seconds
    peer = 1 - rank

    def running():
        return dist.all_reduce(row(), async_op=True)

    yield "all_reduce", lambda: dist.all_reduce(row(), timeout=seconds)
    yield "wait", lambda: dist.all_reduce(row(), timeout=seconds, async_op=True).wait(seconds)
    yield "future", lambda: running().get_future().wait(seconds)
    yield "wait_all", lambda: dist.wait_all([running()], timeout=seconds)
    yield "wait_any", lambda: dist.wait_any([running()], timeout=seconds)
    yield (
        "messages",
        lambda: pair(
            rank,
            lambda: dist.send(row(), 1, timeout=seconds),
            lambda: dist.recv(row(), 0, timeout=seconds),
        ),
    )
    yield "sendrecv", lambda: dist.sendrecv(row(), peer, row(), peer, timeout=seconds)
    yield "barrier", lambda: dist.barrier(timeout=seconds)
    yield "monitored_barrier", lambda: dist.monitored_barrier(timeout=seconds)
    yield "objects", lambda: dist.all_gather_object([0, 0], 1, timeout=seconds)
    yield "new_group", lambda: dist.new_group(timeout=seconds)
    yield "local", lambda: dist.new_group([0, 1], timeout=seconds, use_local_synchronization=True)
    yield "new_subgroups", lambda: dist.new_subgroups(1, timeout=seconds)
    yield "by enumeration", lambda: dist.new_subgroups_by_enumeration([[0], [1]], timeout=seconds)
    yield "split_group", lambda: dist.split_group(None, [[0, 1]], timeout=seconds)
    yield "should_stop", lambda: dist.should_stop(timeout=seconds)
    yield "set_timeout", lambda: world.set_timeout(seconds)
    yield "shared_array", lambda: dist.shared_array(3, timeout=seconds).sync(0, timeout=seconds)
    yield "store", lambda: dist.HashStore().set_timeout(seconds)
    yield "check", lambda: dist.HashStore().check(["a"], seconds)
    yield "stream", lambda: dist.Stream().synchronize(seconds)
    yield "options", lambda: world.allreduce([row()], options).wait()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", SECONDS)
def test_seconds_of_every_class(rank, kind):
    assert each(calls_with_seconds(rank, SECONDS[kind])) == {}
    assert dist.group.WORLD.timeout_s == 20


@pytest.mark.parametrize("kind", SECONDS)
def test_seconds_are_not_counted_in_another_unit(kind):
    assert to_seconds(SECONDS[kind]) == 20


@pytest.mark.parametrize(
    "value", ["5", True, np.True_, 1j, None, [5], np.ones(2), np.timedelta64("NaT")]
)
def test_what_is_no_duration(value):
    with pytest.raises(ArgumentTypeError, match="must be seconds"):
        to_seconds(value)


def test_durations_that_no_float_holds():
    assert to_seconds(10**400) == float("inf")
    for value in (-(10**400), np.int8(-1), np.timedelta64(-1, "s"), np.float16("nan")):
        with pytest.raises(InvalidArgumentError, match="must not be negative"):
            to_seconds(value)


def start(integer, tmp_path):
    """Yield what starts a world, or a store."""
    seconds = integer(20)
    yield (
        "store",
        lambda: dist.init_process_group(
            store=dist.HashStore(), rank=integer(0), world_size=integer(1), timeout=seconds
        ),
    )
    url = f"file://{tmp_path}/world_{integer.__name__}"
    yield (
        "URL",
        lambda: dist.init_process_group(init_method=url, rank=integer(0), world_size=integer(1)),
    )


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        (2, "mesh_shape must be a list of integers, got 2"),
        ((0,), r"mesh_shape \(0,\) must have sizes of at least 1"),
        ((-1, -2), r"mesh_shape \(-1, -2\) must have sizes of at least 1"),
        ((1.0,), "each of mesh_shape must be an integer, got 1.0"),
    ],
)
def test_what_is_no_shape_of_a_mesh(shape, words):
    with pytest.raises((ArgumentTypeError, InvalidArgumentError), match=words):
        dist.init_device_mesh("cpu", shape)


@pytest.mark.parametrize("integer", INTEGERS)
def test_start_of_a_world(integer, tmp_path):
    for name, begin in start(integer, tmp_path):
        begin()
        assert dist.get_world_size() == 1, name
        dist.destroy_process_group()
    for kind in (dist.ProcessGroup, dist.ProcessGroupGloo):
        kind(dist.HashStore(), integer(0), integer(1), timeout=integer(20)).close()


@pytest.mark.parametrize("integer", INTEGERS)
def test_stores(integer, tmp_path):
    with dist.TCPStore(
        "127.0.0.1", integer(0), integer(1), is_master=True, timeout=integer(20)
    ) as store:
        assert store.add("n", integer(3)) == 3
        store.barrier("b", integer(1))
    file = dist.FileStore(str(tmp_path / "store"), integer(1), timeout=integer(20))
    assert file.add("n", integer(3)) == 3
    file.close()
    dist.HashStore().barrier("b", integer(1))


@pytest.mark.parametrize("integer", INTEGERS)
def test_processes(integer):
    number = check_start("launch", abs, (), integer(2), "spawn")
    assert type(number) is int
    assert number == 2


@pytest.mark.parametrize("value", ["0", 0.0, True, None])
def test_what_is_no_rank(value):
    with pytest.raises(ArgumentTypeError, match="rank must be an integer, got"):
        dist.init_process_group(store=dist.HashStore(), rank=value, world_size=1)
    with pytest.raises(ArgumentTypeError, match="nprocs must be an integer, got"):
        dist.launch(abs, value)


BAD = {
    "should_stop": lambda: dist.should_stop(timeout="x"),
    "new_group": lambda: dist.new_group(timeout="x"),
    "new_subgroups": lambda: dist.new_subgroups(1, timeout=-1),
    "new_subgroups_by_enumeration": lambda: dist.new_subgroups_by_enumeration([[0]], timeout="x"),
    "split_group": lambda: dist.split_group(None, [[0]], timeout="x"),
    "group of should_stop": lambda: dist.should_stop("x"),
    "group of all_reduce": lambda: dist.all_reduce(row(), group="x"),
    "group of an object": lambda: dist.all_gather_object([0, 0], 1, group=3.5),
    "breakpoint": lambda: dist.breakpoint(skip="x"),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", BAD)
def test_refusal_on_one_rank_is_an_error_on_all(rank, name):
    call = name.removeprefix("group of ")
    if rank == 0:
        with pytest.raises((ArgumentTypeError, InvalidArgumentError), match="must"):
            BAD[name]()
    else:
        with pytest.raises(CollectiveMismatchError, match=r"rank 0 called \w+ at .*, but refused"):
            dist.barrier(timeout=20)
    check_usable()
    assert call


@pytest.mark.ranks(2)
def test_elements_that_move_as_bytes_are_recorded(rank):
    """Statistics need the size of an element, which its name does not tell."""
    record = np.dtype([("a", np.float32), ("b", np.int8)])
    for dtype in ("M8[s]", "U7", record):
        dist.broadcast(np.zeros(3, dtype), 0)
        pair(
            rank,
            lambda dtype=dtype: dist.send(np.zeros(3, dtype), 1),
            lambda dtype=dtype: dist.recv(np.zeros(3, dtype), 0),
        )
    found = [each.nbytes for each in dist.trace_records()]
    assert found == [24, 24, 84, 84, 15, 15]
    assert dist.stats().operations["broadcast"].nbytes == 123
