"""The variables that the launcher sets for a worker of several nodes with different roles."""

from dataclasses import replace

from unisono.core.rendezvous.agents.state import Node
from unisono.core.rendezvous.agents.worker_world import WorkerWorld
from unisono.launcher.environment import NodePlace, worker_environment

NODES = tuple(
    Node(id=name, host=name, address=name, nprocs=nprocs, role=role)
    for name, nprocs, role in [("a", 2, "train"), ("b", 3, "store"), ("c", 4, "train")]
)


def test_ranks_of_a_worker_of_the_third_node():
    world = WorkerWorld(members=NODES, group_rank=2, master_addr="a", master_port=1, restarts=5)
    variables = worker_environment(
        1, NodePlace(world=world, run_id="job", max_restarts=7), inherited={}
    )
    expected = {
        "RANK": "6",  # 2 + 3 workers of the nodes before
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "9",
        "LOCAL_WORLD_SIZE": "4",
        "GROUP_RANK": "2",
        "GROUP_WORLD_SIZE": "3",
        "ROLE_RANK": "3",  # 2 workers of the nodes before have this role
        "ROLE_WORLD_SIZE": "6",
        "TORCHELASTIC_RESTART_COUNT": "5",
        "TORCHELASTIC_MAX_RESTARTS": "7",
    }
    assert {name: variables[name] for name in expected} == expected


def test_ways_to_join_are_this_launchers_own():
    """A launcher that a newcomer of another job starts must not make its workers wait to join."""
    world = WorkerWorld(members=NODES, group_rank=1, master_addr="a", master_port=1)
    outer = {"UNISONO_JOIN": "1", "UNISONO_STORE": "redis://outer"}
    own = worker_environment(0, NodePlace(world=world, run_id="job"), inherited=outer)
    assert {name: own[name] for name in outer} == dict.fromkeys(outer, "")
    assert (
        not outer.keys()
        & worker_environment(0, NodePlace(world=world, run_id="j"), inherited={}).keys()
    )
    founders = NodePlace(world=world, run_id="job", replaces=True)
    assert worker_environment(0, founders, inherited={})["UNISONO_JOIN"] == "0"
    joined = (*NODES[:1], replace(NODES[1], joined=True))
    world = replace(world, members=joined, store_url="redis://own")
    own = worker_environment(0, NodePlace(world=world, run_id="job"), inherited=outer)
    assert {name: own[name] for name in outer} == {
        "UNISONO_JOIN": "1",
        "UNISONO_STORE": "redis://own",
    }
