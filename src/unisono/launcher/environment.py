"""The environment variables that give a worker its place in the world."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from unisono.core.rendezvous.agents.state import Node
from unisono.core.rendezvous.agents.worker_world import WorkerWorld
from unisono.errors import LaunchError

LOOPBACK = "127.0.0.1"

ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"
"""Path of the file in which torch's `record` decorator, or a worker, describes an exception."""


def new_launch_id() -> str:
    """Return 128 random bits as hexadecimal text."""
    return os.urandom(16).hex()


@dataclass(frozen=True, kw_only=True)
class NodePlace:
    """The place of one node's workers in the world; ranks follow the order of the nodes.

    Attributes:
        world: The nodes that run together, this node's group rank, and the workers' store.
        run_id: Name of the job.
        max_restarts: Number of restarts that the job may have.
        one_gpu_each: Whether every worker sees one GPU only and has LOCAL_RANK=0.
        token: Secret by which the workers' store recognises clients of the job, or "".
        replaces: Whether newcomers can join the workers (`--restart worker`).
    """

    world: WorkerWorld
    run_id: str
    max_restarts: int = 0
    one_gpu_each: bool = False
    token: str = ""
    replaces: bool = False

    @classmethod
    def alone(cls, nprocs: int, *, master_port: int, run_id: str, token: str = "") -> NodePlace:
        """Return the place of the only node."""
        world = WorkerWorld(
            members=(Node(id="", host="", address=LOOPBACK, nprocs=nprocs),),
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
    local_rank: int, place: NodePlace, *, inherited: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables to add for one worker.

    The variables are those of torchrun, so that scripts written for torchrun work. The agent
    serves the store. TORCHELASTIC_USE_AGENT_STORE makes rank 0 connect to that store instead of
    opening its own.

    Raises:
        LaunchError: `one_gpu_each` is set, and there are fewer GPUs than workers.

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
    # This launcher may itself be started by a newcomer of another job.
    for name, text in (
        ("UNISONO_JOIN", "1" if node.joined else "0" * place.replaces),
        ("UNISONO_STORE", world.store_url),
    ):
        if text or inherited.get(name):
            variables[name] = text
    defaults = {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        # Makes a worker print its Python stack before SIGSEGV ends it.
        "PYTHONFAULTHANDLER": "1",
    }
    if node.nprocs > 1:
        # With a thread per core in each of N workers there would be N threads per core.
        defaults["OMP_NUM_THREADS"] = "1"
    if place.one_gpu_each:
        variables |= one_gpu(local_rank, inherited)
    return variables | {k: v for k, v in defaults.items() if not inherited.get(k)}


def one_gpu(local_rank: int, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the variables by which a worker sees one GPU only.

    Raises:
        LaunchError: There are fewer GPUs than workers.
    """
    visible = inherited.get("CUDA_VISIBLE_DEVICES")
    names = [str(n) for n in range(local_rank + 1)] if visible is None else visible.split(",")
    if local_rank >= len(names):
        raise LaunchError(
            f"local rank {local_rank} needs a GPU of its own (--virtual-local-rank), but "
            f"CUDA_VISIBLE_DEVICES={visible} names {len(names)}"
        )
    return {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": names[local_rank].strip()}
