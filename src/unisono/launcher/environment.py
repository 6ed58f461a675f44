"""The environment variables that tell a worker its place in the world."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from unisono.errors import LaunchError
from unisono.rendezvous.dynamic import WorkerWorld
from unisono.rendezvous.state import Node

__all__ = [
    "ERROR_FILE_VARIABLE",
    "LOOPBACK",
    "Place",
    "new_launch_id",
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
    """Where the workers of one node stand; ranks follow the order of the nodes.

    Attributes:
        world: The nodes that run together, which of them this is, and where the workers' store is.
        run_id: Name of the job.
        max_restarts: How often it may be restarted.
        one_gpu_each: Every worker sees one GPU only and has LOCAL_RANK=0.
        token: Secret of the job, by which the workers' store knows them; empty if there is none.
    """

    world: WorkerWorld
    run_id: str
    max_restarts: int = 0
    one_gpu_each: bool = False
    token: str = ""

    @classmethod
    def alone(cls, nprocs: int, *, master_port: int, run_id: str, token: str = "") -> Place:
        """Return the place of the only node."""
        world = WorkerWorld(
            epoch=1,
            members=(Node(id="", host="", address=LOOPBACK, nprocs=nprocs),),
            group_rank=0,
            restarts=0,
            master_addr=LOOPBACK,
            master_port=master_port,
        )
        return cls(world=world, run_id=run_id, token=token)

    @property
    def node(self) -> Node:
        """This node."""
        return self.world.members[self.world.group_rank]

    @property
    def before(self) -> Sequence[Node]:
        """The nodes whose ranks are lower."""
        return self.world.members[: self.world.group_rank]

    @property
    def first_rank(self) -> int:
        """Rank of this node's first worker."""
        return _workers(self.before)

    @property
    def world_size(self) -> int:
        """Workers on all nodes."""
        return _workers(self.world.members)


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
    world, node = place.world, place.node
    role_rank = _workers([each for each in place.before if each.role == node.role]) + local_rank
    peers = [each for each in world.members if each.role == node.role]
    variables = {
        "RANK": str(place.first_rank + local_rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_WORLD_SIZE": str(node.nprocs),
        "NODE_RANK": str(world.group_rank),
        "GROUP_RANK": str(world.group_rank),
        "GROUP_WORLD_SIZE": str(len(world.members)),
        "ROLE_NAME": node.role,
        "ROLE_RANK": str(role_rank),
        "ROLE_WORLD_SIZE": str(_workers(peers)),
        "MASTER_ADDR": world.master_addr,
        "MASTER_PORT": str(world.master_port),
        "TORCHELASTIC_RUN_ID": place.run_id,
        "TORCHELASTIC_RESTART_COUNT": str(world.restarts),
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
    if node.nprocs > 1:
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
