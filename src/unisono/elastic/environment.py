"""The environment variables that tell a worker its place in the world."""

from __future__ import annotations

import os
from collections.abc import Mapping

__all__ = ["LAUNCH_VARIABLE", "LOOPBACK", "new_launch_id", "worker_environment"]

LOOPBACK = "127.0.0.1"

LAUNCH_VARIABLE = "UNISONO_LAUNCH"
"""Carries the launch's random id into every descendant; the reaper finds strays by it."""


def new_launch_id() -> str:
    """Return 128 random bits as hexadecimal text."""
    return os.urandom(16).hex()


def worker_environment(
    rank: int,
    nprocs: int,
    *,
    master_port: int,
    launch_id: str,
    inherited: Mapping[str, str],
) -> dict[str, str]:
    """Return the variables to add for one worker of a launch on one host.

    They are those of torchrun, so that a script written for it finds what it reads. The
    store is the agent's: rank 0 must connect to it rather than open one of its own, which is
    what TORCHELASTIC_USE_AGENT_STORE says.

    Source: torch 2.13, torch/distributed/elastic/agent/server/local_elastic_agent.py.
    """
    variables = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(nprocs),
        "LOCAL_WORLD_SIZE": str(nprocs),
        "NODE_RANK": "0",
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "default",
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(nprocs),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(master_port),
        "TORCHELASTIC_RUN_ID": launch_id,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    if nprocs > 1 and not inherited.get("OMP_NUM_THREADS"):
        # N workers with a thread per core each would be N times too many threads.
        variables["OMP_NUM_THREADS"] = "1"
    return variables
