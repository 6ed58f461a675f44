"""The environment variables that tell a worker its place in the world."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from unisono.errors import LaunchError
from unisono.rendezvous.dynamic import World
from unisono.rendezvous.state import Node

__all__ = [
    "ERROR_FILE_VARIABLE",
    "LOOPBACK",
    "Place",
    "new_launch_id",
    "place_in",
    "worker_environment",
]

LOOPBACK = "127.0.0.1"

ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"
"""Where torch's `record` decorator, or a worker itself, describes an exception as JSON."""


def new_launch_id() -> str:
    """Return 128 random bits as hexadecimal text."""
    return os.urandom(16).hex()


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where the workers of one node stand in the world.

    Attributes:
        nprocs: Workers on this node; their ranks follow each other.
        first_rank: Rank of the first of them.
        world_size: Workers on all nodes.
        group_rank: Rank of this node among the nodes.
        group_world_size: Number of nodes.
        role: Name of the workers' role.
        role_first_rank: Rank of the first of them among the workers of that role.
        role_world_size: Workers of that role on all nodes.
        master_addr: Where the workers' store listens.
        master_port: Likewise.
        run_id: Name of the job.
        restarts: How often the job was restarted so far.
        max_restarts: How often it may be.
        one_gpu_each: Every worker sees one GPU only and has LOCAL_RANK=0.
        token: Secret of the job, by which the workers' store knows them; empty if there is none.
    """

    nprocs: int
    first_rank: int = 0
    world_size: int
    group_rank: int = 0
    group_world_size: int = 1
    role: str = "default"
    role_first_rank: int = 0
    role_world_size: int
    master_addr: str = LOOPBACK
    master_port: int
    run_id: str
    restarts: int = 0
    max_restarts: int = 0
    one_gpu_each: bool = False
    token: str = ""

    @classmethod
    def alone(cls, nprocs: int, *, master_port: int, run_id: str, token: str = "") -> Place:
        """Return the place of the only node."""
        return cls(
            nprocs=nprocs,
            world_size=nprocs,
            role_world_size=nprocs,
            master_port=master_port,
            run_id=run_id,
            token=token,
        )


def place_in(
    world: World,
    *,
    run_id: str,
    max_restarts: int,
    one_gpu_each: bool = False,
    token: str = "",
) -> Place:
    """Return the place of this node in a world; ranks follow the order of its nodes."""
    mine = world.members[world.group_rank]
    before = world.members[: world.group_rank]
    peers = [node for node in world.members if node.role == mine.role]
    return Place(
        nprocs=mine.nprocs,
        first_rank=_workers(before),
        world_size=_workers(world.members),
        group_rank=world.group_rank,
        group_world_size=len(world.members),
        role=mine.role,
        role_first_rank=_workers([node for node in before if node.role == mine.role]),
        role_world_size=_workers(peers),
        master_addr=world.master_addr,
        master_port=world.master_port,
        run_id=run_id,
        restarts=world.restarts,
        max_restarts=max_restarts,
        one_gpu_each=one_gpu_each,
        token=token,
    )


def _workers(nodes: Sequence[Node]) -> int:
    return sum(node.nprocs for node in nodes)


def worker_environment(
    local_rank: int, place: Place, *, inherited: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables to add for one worker.

    They are those of torchrun, so that a script written for it finds what it reads. The
    store is the agent's: rank 0 must connect to it rather than open one of its own, which is
    what TORCHELASTIC_USE_AGENT_STORE says.

    Raises:
        LaunchError: There are fewer GPUs than workers, and each was to have its own.

    Source: torch 2.13, torch/distributed/elastic/agent/server/local_elastic_agent.py.
    """
    variables = {
        "RANK": str(place.first_rank + local_rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_WORLD_SIZE": str(place.nprocs),
        "NODE_RANK": str(place.group_rank),
        "GROUP_RANK": str(place.group_rank),
        "GROUP_WORLD_SIZE": str(place.group_world_size),
        "ROLE_NAME": place.role,
        "ROLE_RANK": str(place.role_first_rank + local_rank),
        "ROLE_WORLD_SIZE": str(place.role_world_size),
        "MASTER_ADDR": place.master_addr,
        "MASTER_PORT": str(place.master_port),
        "TORCHELASTIC_RUN_ID": place.run_id,
        "TORCHELASTIC_RESTART_COUNT": str(place.restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(place.max_restarts),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    if place.token:
        variables["UNISONO_TOKEN"] = place.token
    defaults = {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        # A worker that the kernel kills for a bad memory access prints its Python stack first.
        "PYTHONFAULTHANDLER": "1",
    }
    if place.nprocs > 1:
        # N workers with a thread per core each would be N times too many threads.
        defaults["OMP_NUM_THREADS"] = "1"
    if place.one_gpu_each:
        variables["LOCAL_RANK"] = "0"
        variables["CUDA_VISIBLE_DEVICES"] = _gpu(local_rank, inherited)
    return variables | {k: v for k, v in defaults.items() if not inherited.get(k)}


def _gpu(local_rank: int, inherited: Mapping[str, str]) -> str:
    visible = inherited.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return str(local_rank)
    names = visible.split(",")
    if local_rank >= len(names):
        raise LaunchError(
            f"local rank {local_rank} needs a GPU of its own (--virtual-local-rank), but "
            f"CUDA_VISIBLE_DEVICES={visible} names {len(names)}"
        )
    return names[local_rank].strip()
