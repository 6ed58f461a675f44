"""`unisono run --dry-run`: show the commands, CPUs and environments of a launch."""

from __future__ import annotations

import shlex
import socket
from collections.abc import Iterator

from unisono.core.base.config import environ
from unisono.core.rendezvous.agents.state import Node
from unisono.core.rendezvous.agents.worker_world import WorkerWorld
from unisono.launcher.environment import NodePlace, worker_environment
from unisono.launcher.ranges import format_ranges
from unisono.launcher.spec import LaunchSpec
from unisono.launcher.workers.cpu_binding import Binding

_DECIDED_LATER = ("RANK", "NODE_RANK", "GROUP_RANK", "ROLE_RANK")


def describe(spec: LaunchSpec) -> str:
    """Return a text about the launch without starting a process or opening a connection."""
    binding = Binding.make(spec.bind, spec.nprocs)
    return "\n".join([*_overview(spec), *_bound(binding), *_workers(spec, binding)])


def _node_rank(spec: LaunchSpec) -> int | None:
    """Return this node's rank; None if the rendezvous will decide it."""
    return 0 if spec.is_single_node else spec.meeting.node_rank


def _place(spec: LaunchSpec) -> NodePlace:
    nodes, node_rank = spec.limits.min_nodes, _node_rank(spec) or 0
    shared = ("127.0.0.1", spec.master_port) if spec.is_single_node else spec.meeting.endpoint
    host, port = shared if isinstance(shared, tuple) else ("", 0)
    each = Node(id="", host="", address="", nprocs=spec.nprocs, role=spec.role)
    return NodePlace(
        world=WorkerWorld(
            members=(each,) * nodes,
            group_rank=node_rank,
            master_addr=host,
            master_port=port,
        ),
        run_id=spec.run_id or "(random)",
        max_restarts=spec.limits.max_restarts,
        one_gpu_each=spec.one_gpu_each,
    )


def _overview(spec: LaunchSpec) -> Iterator[str]:
    low, high, host = spec.limits.min_nodes, spec.limits.max_nodes, socket.gethostname()
    yield f"host      {host}"
    if high == 1:
        yield "nodes     1 (this host)"
        yield f"store     127.0.0.1, port {spec.master_port or 'chosen by the system'}"
    else:
        endpoint = spec.meeting.endpoint
        where = endpoint if isinstance(endpoint, str) else "{}:{}".format(*endpoint)
        yield f"nodes     {low if low == high else f'{low} to {high}'}, meeting at {where}"
        yield f"          (each assumed to start {spec.nprocs} workers; shown for {low} nodes)"
    yield f"restarts  at most {spec.limits.max_restarts}"
    yield f"workers   {spec.nprocs} on this host, {_place(spec).world_size} in the world"


def _bound(binding: Binding) -> Iterator[str]:
    if binding.report:
        yield binding.report.replace(": ", "      ", 1)


def _workers(spec: LaunchSpec, binding: Binding) -> Iterator[str]:
    place = _place(spec)
    known = _node_rank(spec) is not None
    for local_rank, command in enumerate(spec.commands):
        env = worker_environment(local_rank, place, inherited=environ())
        env |= binding.environment(local_rank, environ())
        if not place.world.master_port:
            env["MASTER_PORT"] = "(chosen at the start)"
        if not known:
            env |= dict.fromkeys(_DECIDED_LATER, "(when the nodes meet)")
        cpus = binding.cpus(local_rank)
        bound = f", CPUs {format_ranges(cpus)}" if cpus else ""
        yield f"rank {env['RANK']}: local rank {local_rank} on {socket.gethostname()}{bound}"
        yield f"  command  {shlex.join(command)}"
        yield "  env      " + " ".join(f"{name}={value}" for name, value in env.items())
