"""Groups whose ranks count as several nodes of a host: by UNISONO_NODES, here on one node."""

from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

import unisono as dist
from tests.core.collectives.test_several_hosts import two_levels
from tests.support.matrix import matrix
from tests.support.operations import Operations
from unisono.core.engines import native_engine
from unisono.core.engines.native_engine import NativeEngine, _ranks_of_part
from unisono.core.schedules import available
from unisono.core.transports import native_messages
from unisono.testing import run

pytestmark = pytest.mark.native


def cpu():
    return dist.group.WORLD.backends["cpu"]


def part(rank):
    """Return the ranks per part, the map, and whether the group shares memory."""
    shape, nodes = cpu().shape, cpu().comm.transport.nodes
    return shape.local, nodes, shape.over == "shared-memory"


@pytest.mark.parametrize(
    ("size", "per_node", "local", "nodes", "kind"),
    [
        (4, "2", 2, (0, 0, 1, 1), "processes"),
        (4, "3", 4, (0, 0, 0, 1), "processes"),  # unequal nodes are no levels
        (8, "4", 4, (0, 0, 0, 0, 1, 1, 1, 1), "processes"),
        (8, "4", 4, (0, 0, 0, 0, 1, 1, 1, 1), "threads"),
        (8, "2", 2, (0, 0, 1, 1, 2, 2, 3, 3), "threads"),
        (8, "0", 8, (0,) * 8, "threads"),
        (4, "1", 4, (0, 1, 2, 3), "threads"),
    ],
)
def test_all_ranks_have_one_map(monkeypatch, kind, size, per_node, local, nodes):
    monkeypatch.setenv("UNISONO_NODES", per_node)
    assert run(part, size, ranks=kind) == [(local, nodes, True)] * size


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("size", "per_node", "per_host", "kind"),
    [
        (4, "2", "0", "processes"),
        (4, "2", "0", "threads"),
        (4, "3", "0", "threads"),
        (8, "2", "0", "threads"),
        (8, "2", "4", "threads"),
    ],
)
def test_every_operation(monkeypatch, size, per_node, per_host, kind):
    monkeypatch.setenv("UNISONO_NODES", per_node)
    monkeypatch.setenv("UNISONO_RANKS_PER_HOST", per_host)
    run(matrix, size, ranks=kind, timeout=120)


@pytest.mark.parametrize("algorithm", [None, "two_level"])
@pytest.mark.parametrize(
    ("size", "per_node", "per_host", "kind"),
    [(4, "2", "0", "processes"), (6, "3", "0", "threads"), (8, "2", "4", "threads")],
)
def test_two_levels(monkeypatch, size, per_node, per_host, kind, algorithm):
    monkeypatch.setenv("UNISONO_NODES", per_node)
    monkeypatch.setenv("UNISONO_RANKS_PER_HOST", per_host)
    run(two_levels, size, ranks=kind, args=(algorithm,))


def by_every_algorithm(rank, sizes):
    """All algorithms with levels, in pieces, in rooms of slots that turn, and with every root."""
    p = dist.get_world_size()
    for collective in ("all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter"):
        names = {*available(collective, p, local=2)} - {*available(collective, p)}
        assert names, collective
        for name in sorted(names):
            for count in sizes:
                calls = Operations(rank, p, count, dtype=np.float32, modulus=101,
                                   how={"algorithm": name})  # fmt: skip
                for calls.root in range(p) if collective in ("broadcast", "reduce") else (0,):
                    if collective in ("broadcast", "reduce", "all_reduce"):
                        getattr(calls, collective)()
                if collective == "all_gather":
                    calls.all_gather_into_tensor()
                if collective == "reduce_scatter":
                    calls.reduce_scatter_tensor()
                calls.check(collective, name, count)


@pytest.mark.parametrize("size", [4, 8])
def test_by_every_algorithm_with_levels(monkeypatch, size):
    monkeypatch.setenv("UNISONO_NODES", "2")
    run(by_every_algorithm, size, args=((0, 1, 5, 1000, 70_001, 300_001 // size),))


def taken(rank, nbytes, dtype):
    """Return the algorithm of an all_reduce as the group prepared it."""
    dist.all_reduce(np.zeros(nbytes // dtype.itemsize, dtype))
    (call,) = cpu()._prepared_calls._prepared.values()
    return call.algorithm


@pytest.mark.parametrize(
    ("per_node", "nbytes", "dtype", "expected"),
    [
        ("4", 1 << 20, np.float32, "two_level"),
        ("4", 1 << 10, np.float32, "one_shot"),
        ("0", 1 << 20, np.float32, "two_shot"),
        ("3", 1 << 20, np.float32, "two_shot"),  # nodes of 3, 3 and 2 ranks
        ("numa", 1 << 20, np.float32, "two_shot"),  # the ranks are threads of one process
        # A sum of halves on few ranks is rounded once.
        ("4", 1 << 20, np.float16, "two_shot"),
        ("4", 1 << 20, ml_dtypes.bfloat16, "two_shot"),
    ],
)
def test_what_a_call_takes(monkeypatch, per_node, nbytes, dtype, expected):
    monkeypatch.setenv("UNISONO_NODES", per_node)
    assert run(taken, 8, args=(nbytes, np.dtype(dtype))) == [expected] * 8


def sub_groups(rank):
    """Return the parts of groups of some ranks."""
    found = []
    for ranks in ([0, 1, 4, 5], [0, 1, 2, 3], [0, 4, 1, 5], [3, 4]):
        group = dist.new_group(ranks)
        if rank in ranks:
            found.append((ranks, group.backends["cpu"].shape.local))
            x = np.full(50_000, float(rank))
            dist.all_reduce(x, group=group)
            assert (x == sum(ranks)).all()
    return found


def test_sub_groups_have_their_own_parts(monkeypatch):
    monkeypatch.setenv("UNISONO_NODES", "4")
    found = run(sub_groups, 8)
    # [0, 4, 1, 5] is numbered 0, 1, 4, 5; all ranks of [0, 1, 2, 3] are on one node.
    assert found[0] == [([0, 1, 4, 5], 2), ([0, 1, 2, 3], 4), ([0, 4, 1, 5], found[0][2][1])]
    assert found[4][-1] == ([3, 4], 2)


@pytest.mark.parametrize(
    ("hosts", "nodes", "expected"),
    [
        ("aaaa", (0, 0, 1, 1), 2),
        ("aaaa", (0, 0, 0, 1), 4),
        ("aaaa", (0, 1, 0, 1), 4),  # not numbered node by node
        ("aaaa", (5, 5, 2, 2), 2),
        ("aaaa", (0, 1, 2, 3), 4),
        ("aaaa", (0, 0, 0, 0), 4),
        ("aabb", (0, 1, 0, 1), 2),  # hosts come first
        ("aaaabbbb", (0, 0, 1, 1, 0, 0, 1, 1), 4),
        ("aaab", (0, 0, 1, 0), 1),
        ("a", (0,), 1),
    ],
)
def test_the_ranks_of_a_part(hosts, nodes, expected):
    assert _ranks_of_part([*hosts], nodes) == expected


def wrong_name(rank):
    dist.all_reduce(np.zeros(4), algorithm="two_level")


def test_levels_without_nodes(monkeypatch):
    monkeypatch.setenv("UNISONO_NODES", "3")
    line = (
        "algorithm 'two_level' does not serve all_reduce on 4 ranks: it needs several hosts with "
        "equally many ranks, two at least, numbered host by host, or such nodes of one host"
    )
    with pytest.raises(dist.errors.InvalidArgumentError, match=line):
        run(wrong_name, 4)


def test_a_bad_value_is_told_to_all_ranks(monkeypatch):
    monkeypatch.setenv("UNISONO_NODES", "all")
    with pytest.raises(dist.errors.InvalidArgumentError, match="UNISONO_NODES='all' is neither"):
        run(part, 2, ranks="processes")


# ---- where pages lie --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nodes", "rank", "own", "wish", "expected"),
    [
        ((0, 1), 0, 0, "numa", 1),  # of two ranks the other one reads
        ((0, 1), 1, 1, "numa", 0),
        ((4, 2, 2, 2), 0, 4, "numa", 2),
        ((0, 0, 0, 1), 1, 0, "numa", -1),  # readers on two nodes
        ((0, 0, 1, 1), 0, 0, "numa", -1),
        ((0, 0), 0, 0, "numa", -1),
        ((0, 1), 0, -1, "numa", -1),  # one node, or not bound
        ((0, 1), 0, 0, "1", -1),  # virtual nodes have no memory
    ],
)
def test_the_node_of_slots(monkeypatch, nodes, rank, own, wish, expected):
    monkeypatch.setenv("UNISONO_NODES", wish)
    monkeypatch.setattr(native_engine, "memory_node", lambda: own)
    engine = SimpleNamespace(_nodes=nodes, comm=SimpleNamespace(size=len(nodes), rank=rank))
    assert NativeEngine._slot_node(engine) == expected


def maps():
    """Return address, policy and file of each map of memory that ranks share."""
    lines = Path("/proc/self/numa_maps").read_text(encoding="utf-8").splitlines()
    return {tuple(line.split()[:3]) for line in lines if "/memfd:unisono" in line}


def policies(rank, known=frozenset()):
    """Return what the kernel says about this world's rings and slots, after a few calls."""
    x = np.ones(100_000)
    dist.all_reduce(x)
    if rank == 0:
        dist.send(x, 1)
    else:
        dist.recv(x, 0)
    rows = maps() - known
    return {("inbox" if "inbox" in file else "slots", policy) for _, policy, file in rows}


@pytest.mark.skipif(not Path("/proc/self/numa_maps").exists(), reason="a kernel without NUMA")
def test_rings_and_slots_ask_for_their_readers_node(monkeypatch):
    """This machine may have one node only: so the node is given, and the policy is what counts."""
    assert run(policies, 2, ranks="processes") == [{("inbox", "default"), ("slots", "default")}] * 2
    monkeypatch.setattr(native_messages, "memory_node", lambda: 0)
    monkeypatch.setattr(NativeEngine, "_slot_node", lambda engine: 0 if engine.comm.rank else -1)
    # Only the slots of rank 1; the words of both ranks and the slots of rank 0 stay.
    placed = {("inbox", "prefer:0"), ("slots", "prefer:0"), ("slots", "default")}
    # Of worlds that earlier tests have left behind in this process.
    assert run(policies, 2, args=(frozenset(maps()),)) == [placed] * 2
