"""NUMA nodes and shared caches, from trees like those of the kernel."""

import pytest

from unisono.core.platform import nodes
from unisono.core.platform.machine import allowed_cpus
from unisono.core.platform.nodes import memory_node, numa_node, numa_nodes, shared_cache


def tree(path, of_nodes, caches):
    """Write cpulists by node, and L3 groups as (text, their CPUs)."""
    files = {f"node/node{node}/cpulist": text for node, text in of_nodes.items()}
    # What else is in the folder.
    files |= {"node/possible": "0-7", "node/has_cpu": "0", "node/power/control": "auto"}
    for text, cpus in caches:
        files |= {f"cpu/cpu{cpu}/cache/index3/shared_cpu_list": text for cpu in cpus}
    for name, text in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(f"{text}\n")
    return str(path)


ONE = ({0: "0-7"}, [("0-7", range(8))])
# Hyper-threads have high numbers.
TWO_SOCKETS = (
    {0: "0-3,8-11", 1: "4-7,12-15"},
    [("0-3,8-11", [0, 1, 2, 3, 8, 9, 10, 11]), ("4-7,12-15", [4, 5, 6, 7, 12, 13, 14, 15])],
)
# AMD with 4 nodes per socket: 4 nodes of 2 L3 each, of 2 cores.
FOUR_NODES = (
    {node: f"{4 * node}-{4 * node + 3}" for node in range(4)},
    [(f"{at}-{at + 1}", [at, at + 1]) for at in range(0, 16, 2)],
)
# CPUs 2, 3 and 6 are offline: they are in no list. Node 2 is memory only; nodes 1 and 3 are absent.
OFFLINE = ({0: "0-1", 2: "", 10: "4-5,7"}, [("0-1", [0, 1]), ("4-5,7", [4, 5, 7])])


@pytest.mark.parametrize(
    ("shape", "cpus", "node", "cache"),
    [
        (ONE, range(8), 0, 0),
        (ONE, [5], 0, 0),
        (TWO_SOCKETS, [0, 8], 0, 0),
        (TWO_SOCKETS, [5, 12, 13], 1, 4),
        (TWO_SOCKETS, range(16), None, None),  # not bound
        (TWO_SOCKETS, [3, 4], None, None),
        (FOUR_NODES, [9], 2, 8),
        (FOUR_NODES, [10, 11], 2, 10),
        (FOUR_NODES, [8, 9, 10, 11], 2, None),  # one node, two caches
        (FOUR_NODES, [11, 12], None, None),
        (OFFLINE, [0, 1], 0, 0),
        (OFFLINE, [7, 4], 10, 4),
        (OFFLINE, [2], None, None),
        (({}, []), [0], None, None),
        ((ONE[0], []), [0], 0, None),  # nodes without caches
        (({}, ONE[1]), [0], None, 0),  # a kernel without NUMA
        (ONE, [], 0, None),
    ],
)
def test_of_the_cpus_of_a_process(tmp_path, shape, cpus, node, cache):
    system = tree(tmp_path, *shape)
    assert numa_node(cpus, system) == node
    assert shared_cache(cpus, system) == cache


def test_nodes_with_cpus(tmp_path):
    assert numa_nodes(tree(tmp_path, *OFFLINE)) == {0: [0, 1], 10: [4, 5, 7]}


def test_a_container_without_sys(tmp_path):
    system = str(tmp_path / "absent")
    assert numa_nodes(system) == {}
    assert (numa_node([0], system), shared_cache([0], system)) == (None, None)


def test_the_node_of_memory_matters_if_there_are_several(tmp_path, monkeypatch):
    cpus = sorted(allowed_cpus())
    own = ",".join(map(str, cpus))
    several = {0: "100000", 1: own}
    shapes = [(several, 1), ({0: own}, -1), ({}, -1), ({0: "100000", 1: "100001"}, -1)]
    for at, (shape, expected) in enumerate(shapes):
        system = tree(tmp_path / str(at), shape, [])
        monkeypatch.setattr(nodes, "numa_nodes", lambda system=system: numa_nodes(system))
        assert memory_node() == expected


def test_this_machine():
    """Each CPU that a process may use has a node, where the kernel tells of nodes."""
    found = numa_nodes()
    for cpu in allowed_cpus() if found else ():
        assert cpu in found[numa_node([cpu])]
