"""The first line of every error of groups/ and backends/, word for word."""

import numpy as np
import pytest

import unisono as dist
from unisono.backends import CPUOptions, registry
from unisono.errors import (
    AlreadyInitializedError,
    ArgumentTypeError,
    ClosedError,
    CollectiveAbortedError,
    CollectiveMismatchError,
    InvalidArgumentError,
    NotInitializedError,
    PeerLostError,
    RendezvousError,
    UnsupportedError,
)
from unisono.testing import run

WORLD_OF_ONE = {
    "twice": (
        lambda: dist.init_process_group(), AlreadyInitializedError,
        "trying to initialize the default process group twice",
    ),
    "both ranks": (
        lambda: dist.broadcast(x(), 0, group_src=0), InvalidArgumentError,
        "broadcast: can't specify both a group rank and a global rank",
    ),
    "no rank": (
        lambda: dist.broadcast(x()), InvalidArgumentError,
        "broadcast: must specify a global rank or a group rank",
    ),
    "global rank": (
        lambda: dist.broadcast(x(), 3), InvalidArgumentError,
        "broadcast: global rank 3 is not in group 'default' (ranks [0])",
    ),
    "text as rank": (
        lambda: dist.broadcast(x(), "0"), ArgumentTypeError,
        "broadcast: a global rank must be an integer, got '0'",
    ),
    "group rank": (
        lambda: dist.reduce(x(), group_dst=1), InvalidArgumentError,
        "reduce: root=1 is not a rank of group 'default' (0..0)",
    ),
    "float rank": (
        lambda: dist.broadcast(x(), group_src=0.0), ArgumentTypeError,
        "broadcast: root must be an integer, got 0.0",
    ),
    "peer": (
        lambda: dist.isend(x(), group_dst=-1), InvalidArgumentError,
        "isend: dst=-1 is not a rank of group 'default' (0..0)",
    ),
    "tag": (
        lambda: dist.isend(x(), 0, tag=-1), InvalidArgumentError,
        "isend: tag=-1 is outside 0..2**63-1",
    ),
    "tag type": (
        lambda: dist.irecv(x(), 0, tag="a"), ArgumentTypeError,
        "irecv: tag must be an integer, got 'a'",
    ),
    "self": (
        lambda: dist.send(x(), 0), InvalidArgumentError,
        "send to this rank itself (0) would wait for its own receive",
    ),
    "array": (
        lambda: dist.all_reduce([1, 2]), ArgumentTypeError,
        "all_reduce: tensor must be an array (NumPy, torch, DLPack, buffer), got list",
    ),
    "op": (
        lambda: dist.all_reduce(x(), "sum"), ArgumentTypeError,
        "all_reduce: op must be a ReduceOp such as ReduceOp.SUM, got 'sum'",
    ),
    "op and dtype": (
        lambda: dist.all_reduce(x(), dist.ReduceOp.BAND), UnsupportedError,
        "all_reduce: reduce op BAND is not defined on float64 "
        "(defined: AVG, MAX, MIN, PREMUL_SUM, PRODUCT, SUM)",
    ),
    "factor": (
        lambda: dist.all_reduce(x(), dist.ReduceOp.PREMUL_SUM), InvalidArgumentError,
        "all_reduce: PREMUL_SUM needs its factor",
    ),
    "read-only": (
        lambda: dist.all_reduce(frozen()), InvalidArgumentError,
        "all_reduce: tensor is read-only but the operation writes into it",
    ),
    "read-only output": (
        lambda: dist.all_gather([frozen()], x()), InvalidArgumentError,
        "all_gather: tensor_list[0] is read-only but the operation writes into it",
    ),
    "dtype": (
        lambda: dist.all_reduce(np.array(["a"])), UnsupportedError,
        "all_reduce: reduce op SUM is not defined on <U1 (defined: none: it only moves)",
    ),
    "keyword": (
        lambda: dist.all_reduce(x(), tiemout=3), ArgumentTypeError,
        "all_reduce() got an unexpected keyword argument 'tiemout' "
        "(known besides its own: async_op, timeout, algorithm, deterministic)",
    ),
    "keyword that a function of ours has": (
        lambda: dist.all_reduce(x(), name="a"), ArgumentTypeError,
        "all_reduce() got an unexpected keyword argument 'name' "
        "(known besides its own: async_op, timeout, algorithm, deterministic)",
    ),
    "keyword that the recorder has": (
        lambda: coalesced(kind="a"), ArgumentTypeError,
        "all_reduce_coalesced() got an unexpected keyword argument 'kind' "
        "(known besides its own: async_op, timeout, algorithm, deterministic)",
    ),
    "timeout": (
        lambda: dist.barrier(timeout="3"), ArgumentTypeError,
        "barrier: timeout must be seconds (float) or datetime.timedelta, got str",
    ),
    "timeout value": (
        lambda: dist.all_reduce(x(), timeout=-1), InvalidArgumentError,
        "all_reduce: timeout must not be negative, got -1",
    ),
    "list": (
        lambda: dist.all_gather(x(), x()), ArgumentTypeError,
        "all_gather: tensor_list must be a list, got ndarray",
    ),
    "list length": (
        lambda: dist.all_gather([x(), x()], x()), InvalidArgumentError,
        "all_gather: tensor_list has 2 entries, expected one for each of 1 ranks",
    ),
    "empty list": (
        lambda: dist.all_reduce_coalesced([]), InvalidArgumentError,
        "all_reduce_coalesced: tensors is empty; expected at least one array",
    ),
    "no list": (
        lambda: dist.all_reduce_coalesced(x()), ArgumentTypeError,
        "all_reduce_coalesced: tensors must be a list, got ndarray",
    ),
    "no rows": (
        lambda: dist.all_gather_coalesced([[]], [x()]), InvalidArgumentError,
        "all_gather_coalesced: output_tensor_lists is empty; expected at least one array",
    ),
    "gather_list": (
        lambda: dist.gather(x()), InvalidArgumentError,
        "gather: gather_list is required on the root, which is this rank",
    ),
    "block size": (
        lambda: dist.reduce_scatter(x(), [x(3)]), InvalidArgumentError,
        "reduce_scatter: input_list[0] has 3 elements, this rank's own array 2",
    ),
    "total size": (
        lambda: dist.all_gather_into_tensor(x(3), x()), InvalidArgumentError,
        "all_gather_into_tensor: output_tensor has 3 elements, expected 2: 1 ranks x 2 of "
        "input_tensor",
    ),
    "total size of the input": (
        lambda: dist.reduce_scatter_tensor(x(3), x()), InvalidArgumentError,
        "reduce_scatter_tensor: input has 2 elements, expected 3: 1 ranks x 3 of output",
    ),
    "coalesced size": (
        lambda: dist.all_gather_coalesced([[x(), x()]], [x(), x(3)]), InvalidArgumentError,
        "all_gather_coalesced: output_tensor_lists hold (2, 2) elements, expected (2, 3) for each "
        "of 1 ranks",
    ),
    "two dtypes": (
        lambda: dist.all_gather_into_tensor(np.zeros(2, "f4"), x()), InvalidArgumentError,
        "all_gather_into_tensor: output_tensor has dtype float32, the input has float64",
    ),
    "dtypes in a list": (
        lambda: dist.all_reduce_coalesced([x(), np.zeros(2, "i4")]), InvalidArgumentError,
        "all_reduce_coalesced: tensors[1] has dtype int32, expected float64",
    ),
    "splits": (
        lambda: dist.all_to_all_single(x(4), x(4), [4], [3]), InvalidArgumentError,
        "all_to_all_single: input: split sizes [3] add up to 3, but dimension 0 has 4 rows",
    ),
    "number of splits": (
        lambda: dist.all_to_all_single(x(4), x(4), [1, 3]), InvalidArgumentError,
        "all_to_all_single: output: split sizes [1, 3]; expected 1 numbers, none negative",
    ),
    "negative split": (
        lambda: dist.all_to_all_single(x(4), x(4), [-4]), InvalidArgumentError,
        "all_to_all_single: output: split sizes [-4]; expected 1 numbers, none negative",
    ),
    "to oneself": (
        lambda: dist.all_to_all_single(x(4), x(3)), InvalidArgumentError,
        "all_to_all_single: this rank sends 3 elements to itself, which expects 4",
    ),
    "algorithm": (
        lambda: dist.barrier(algorithm="ring"), InvalidArgumentError,
        "barrier has no algorithm 'ring' (it has: linear, dissemination, one_shot)",
    ),
    "group": (
        lambda: dist.all_reduce(x(), group=x()), ArgumentTypeError,
        "group must be a ProcessGroup, got ndarray",
    ),
    "group number": (
        lambda: dist.get_rank(7), ArgumentTypeError, "group must be a ProcessGroup, got int",
    ),
    "outside": (
        lambda: dist.new_group([0, 5, -2]), InvalidArgumentError,
        "new_group: ranks [-2, 5] are outside the world (0..0)",
    ),
    "duplicates": (
        lambda: dist.new_group([0, 0]), InvalidArgumentError,
        "new_group: ranks [0, 0] must be distinct, and at least one",
    ),
    "no ranks": (
        lambda: dist.new_group([]), InvalidArgumentError,
        "new_group: ranks [] must be distinct, and at least one",
    ),
    "rank types": (
        lambda: dist.new_group(["0", 1]), ArgumentTypeError,
        "new_group: each of ranks must be an integer, got '0'",
    ),
    "one rank": (
        lambda: dist.new_group(0), ArgumentTypeError,
        "new_group: ranks must be a list of integers, got 0",
    ),
    "not a member": (
        lambda: dist.get_backend(dist.GroupMember.NON_GROUP_MEMBER), InvalidArgumentError,
        "this rank does not belong to the given group",
    ),
    "get_global_rank": (
        lambda: dist.get_global_rank(dist.group.WORLD, 1), InvalidArgumentError,
        "group rank 1 is not in group 'default' (0..0)",
    ),
    "P2POp": (
        lambda: dist.P2POp(len, x(), 0), InvalidArgumentError,
        "op must be unisono.isend or unisono.irecv, got <built-in function len>",
    ),
    "P2POp elsewhere": (
        lambda: dist.P2POp(dist.isend, x(), 0, dist.GroupMember.NON_GROUP_MEMBER),
        InvalidArgumentError, "P2POp on a rank that does not belong to the given group",
    ),
    "batch": (
        lambda: dist.batch_isend_irecv(5), InvalidArgumentError,
        "p2p_op_list must be a list of P2POp, got 5",
    ),
    "backend of a group": (
        lambda: dist.new_group(backend="gluon"), InvalidArgumentError,
        "new_group: unknown backend 'gluon' (known: gloo, unisono)",
    ),
    "options": (
        lambda: dist.new_group(pg_options={}), ArgumentTypeError,
        "pg_options must be unisono.lowlevel.CPUOptions, got {}",
    ),
    "options of another backend": (
        lambda: dist.new_group(backend="gloo", pg_options=0), ArgumentTypeError,
        "pg_options must be unisono.lowlevel.CPUOptions, got 0",
    ),
}  # fmt: skip

NO_WORLD = {
    "call": (
        lambda: dist.all_reduce(x()), NotInitializedError,
        "the default process group has not been initialized",
    ),
    "destroy": (
        lambda: dist.destroy_process_group(), NotInitializedError,
        "the default process group has not been initialized",
    ),
    "store and URL": (
        lambda: dist.init_process_group(store=dist.HashStore(), init_method="env://"),
        InvalidArgumentError, "cannot specify both init_method and store",
    ),
    "store only": (
        lambda: dist.init_process_group(store=dist.HashStore(), rank=0), InvalidArgumentError,
        "with store=, rank and world_size are required, got rank=0 and world_size=-1",
    ),
    "rank": (
        lambda: dist.init_process_group(store=dist.HashStore(), rank=2, world_size=2),
        InvalidArgumentError, "rank 2 of 2: expected 0 <= rank < size",
    ),
    "nobody came": (
        lambda: dist.init_process_group(
            store=dist.HashStore(), rank=1, world_size=3, timeout=0.05
        ), RendezvousError, "rank 1 of 3 waited 0.05 s for ranks that never came: 0, 2",
    ),
    "transport": (
        lambda: dist.init_process_group(pg_options=CPUOptions(transport="pigeon")),
        InvalidArgumentError, "unknown transport 'pigeon' (known: auto, inproc, tcp)",
    ),
    "backend": (
        lambda: dist.init_process_group("gluon"), InvalidArgumentError,
        "unknown backend 'gluon' (known: gloo, unisono)",
    ),
    "backend type": (
        lambda: dist.init_process_group(5), ArgumentTypeError, "backend must be a string, got 5",
    ),
    "device twice": (
        lambda: dist.init_process_group("unisono,cpu:gloo"), InvalidArgumentError,
        "backend 'unisono,cpu:gloo' names device 'cpu' twice",
    ),
    "no device": (
        lambda: dist.init_process_group(":gloo"), InvalidArgumentError,
        "backend ':gloo': expected device:backend, got ':gloo'",
    ),
    "two colons": (
        lambda: dist.init_process_group("cpu:0:gloo"), InvalidArgumentError,
        "backend 'cpu:0:gloo': expected device:backend, got 'cpu:0:gloo'",
    ),
    "devices": (
        lambda: dist.register_backend("mine", print, devices="cpu"), InvalidArgumentError,
        "devices must be a list of names, got the string 'cpu'",
    ),
    "backend name": (
        lambda: dist.register_backend("My-own", print), InvalidArgumentError,
        "backend name 'My-own' must be a lower-case identifier",
    ),
    "known backend": (
        lambda: dist.register_backend("gloo", print), InvalidArgumentError,
        "backend 'gloo' is registered already",
    ),
}  # fmt: skip


def x(count=2):
    return np.ones(count)


def coalesced(**how):
    with dist._coalescing_manager():
        dist.all_reduce(x(), **how)


def frozen():
    array = x()
    array.flags.writeable = False
    return array


@pytest.fixture
def alone():
    dist.init_process_group()
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("name", WORLD_OF_ONE)
def test_in_a_world_of_one(alone, name):
    call, error, text = WORLD_OF_ONE[name]
    with pytest.raises(error) as caught:
        call()
    assert type(caught.value) is error
    assert caught.value.what == text
    assert "\n" not in text
    dist.all_reduce(x())  # the group is as good as before


@pytest.mark.parametrize("name", NO_WORLD)
def test_without_a_world(monkeypatch, name):
    monkeypatch.setattr(registry, "_backends", dict(registry._backends))
    call, error, text = NO_WORLD[name]
    with pytest.raises(error) as caught:
        call()
    assert type(caught.value) is error
    assert caught.value.what == text
    assert not dist.is_initialized()


def test_a_destroyed_group(alone):
    group = dist.new_group(group_desc="mine")
    assert group.name == "mine"
    dist.destroy_process_group(group)
    with pytest.raises(ClosedError) as caught:
        dist.all_reduce(x(), group=group)
    assert caught.value.what == "all_reduce on group 'mine', which was destroyed"
    with pytest.raises(InvalidArgumentError) as caught:
        dist.destroy_process_group(group)
    assert caught.value.what == ("group <ProcessGroup 'mine' closed> is not a group of this world")


def two_ranks(rank):
    told = {}

    def note(name, error, call):
        with pytest.raises(error) as caught:
            call()
        told[name] = caught.value.what

    mine = InvalidArgumentError if rank == 1 else CollectiveMismatchError
    note("list elsewhere", mine, lambda: dist.gather(x(), [x(), x()], 0))
    dist.barrier()
    note("rows", InvalidArgumentError, lambda: dist.all_to_all_single(x(3), x(3)))
    rows = [[1, 2], [2, 1]] if rank == 0 else [[1, 2], [1, 2]]
    note("splits", CollectiveMismatchError, lambda: dist.all_to_all_single(x(3), x(3), *rows))
    group = dist.new_group()
    if rank == 0:
        work = dist.irecv(x(), 1, group)
        group.abort("enough")
        note("receive", CollectiveAbortedError, work.wait)
        note("after abort", CollectiveAbortedError, lambda: dist.barrier(group))
    else:
        note("aborted", CollectiveAbortedError, lambda: dist.all_reduce(x(), group=group))
    dist.barrier()
    return told


def test_on_two_ranks():
    first, second = run(two_ranks, 2)
    assert second["list elsewhere"] == "gather: gather_list is for the root only, which is rank 0"
    assert first["list elsewhere"] == (
        "gather #1 in group 'default' does not match on rank 0 of 2: rank 0 called "
        "gather(float64[2], dst=0); rank 1 called gather, but refused it: gather_list is for the "
        "root only, which is rank 0"
    )
    text = "all_to_all_single: input: dimension 0 has 3 rows, which 2 ranks cannot share equally"
    assert first["rows"] == second["rows"] == text
    for rank, told in enumerate((first, second)):
        assert told["splits"] == (
            f"all_to_all_single #4 in group 'default' does not match on rank {rank} of 2: rank 0 "
            "sends 2 elements to rank 0, which expects 1; rank 1 sends 1 elements to rank 0, which "
            "expects 2"
        )
    assert first["receive"] == ("recv in group '1' was aborted on rank 0 of 2: enough on rank 0")
    assert first["after abort"] == (
        "barrier in group '1' cannot run on rank 0 of 2: the group is broken: enough on rank 0"
    )
    assert "enough on rank 0" in second["aborted"]
    assert "all_reduce" in second["aborted"]
    assert "in group '1'" in second["aborted"]


def left_alone(rank):
    if rank == 1:
        dist.send(x(), 0, tag=1)
        return None
    # Rank 1 goes away after its message; what comes then names it.
    dist.recv(x(), 1, tag=1)
    told = []
    with pytest.raises(PeerLostError) as caught:
        dist.recv(x(), 1)
    told.append(caught.value.what)
    with pytest.raises(PeerLostError) as caught:
        dist.send(x(), 1)
    told.append(caught.value.what)
    with pytest.raises(PeerLostError) as caught:
        dist.all_reduce(x())
    told.append(caught.value.what)
    return told


@pytest.mark.parametrize("transport", ["inproc", "tcp"])
def test_a_rank_that_left(transport):
    told = run(left_alone, 2, transport=transport)[0]
    lost = (
        "in group 'default' failed on rank 0 of 2: rank 1 was lost: it left: its transport was "
        "closed"
    )
    assert told == [
        f"recv(float64[2], src=1, tag=0) {lost}",
        f"send(float64[2], dst=1, tag=0) {lost}",
        f"all_reduce #1 {lost}",
    ]
