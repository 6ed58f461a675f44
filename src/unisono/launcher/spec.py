"""The settings of a launch, and its result."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from unisono.core.rendezvous.agents.member import Timing
from unisono.core.rendezvous.agents.state import JobLimits
from unisono.launcher.output.files import LogOptions
from unisono.launcher.report import WorkerFailure, signal_name
from unisono.launcher.signals import ENDING
from unisono.launcher.traceback_text import exception_line

GRACE_S = 5.0
"""Default time between SIGTERM and SIGKILL.

A script that writes a checkpoint on SIGTERM needs more. With more, a rank that hangs in a
collective delays the end of the launch.
"""


@dataclass(frozen=True, kw_only=True)
class NodeMeeting:
    """How the agents of several nodes find each other; unused with one node.

    Attributes:
        endpoint: Host and port of the store, the path of a file that all nodes share, or the URL of
            a service (etcd:// or redis://).
        hosting: Whether this agent must serve the store. None: the first agent on the host of the
            endpoint does.
        node_rank: Group rank that this node must get, or None.
        share_port: Whether the workers' store is the rendezvous store (`--master-port`).
        address: Address under which other nodes reach this node. None: the address of the
            interface that leads to the endpoint.
        timing: Time-outs and pauses.
    """

    endpoint: tuple[str, int] | str = ("127.0.0.1", 0)
    hosting: bool | None = None
    node_rank: int | None = None
    share_port: bool = False
    address: str | None = None
    timing: Timing = field(default_factory=Timing)

    @property
    def service(self) -> str:
        """The URL of the service in which the agents meet, or ""."""
        is_url = isinstance(self.endpoint, str) and "://" in self.endpoint
        return str(self.endpoint) if is_url else ""


@dataclass(frozen=True, kw_only=True)
class LaunchSpec:
    """The settings of a launch.

    Attributes:
        commands: Program and arguments of each worker of this host, by local rank.
        grace_s: Seconds between the signal to stop and SIGKILL.
        logs: Files and console for the workers' output.
        bind: Mode of the CPU binding: "none", "core", "numa" or "auto".
        limits: Number of nodes and of restarts.
        meeting: How the nodes find each other.
        run_id: Name of the job; None: random.
        role: Name of the workers' role.
        master_port: Port of the workers' store with one node; 0 for any.
        signals: Names of the signals that end the launch.
        one_gpu_each: Whether every worker sees one GPU only and has LOCAL_RANK=0
            (`--virtual-local-rank`).
        warm: Number of workers of this host for which a half-started worker waits for a restart.
    """

    commands: Sequence[Sequence[str]]
    grace_s: float = GRACE_S
    logs: LogOptions = field(default_factory=LogOptions)
    bind: str = "none"
    limits: JobLimits = field(
        default_factory=lambda: JobLimits(min_nodes=1, max_nodes=1, max_restarts=0)
    )
    meeting: NodeMeeting = field(default_factory=NodeMeeting)
    run_id: str | None = None
    role: str = "default"
    master_port: int = 0
    signals: Sequence[str] = ENDING
    one_gpu_each: bool = False
    warm: int = 0

    @property
    def nprocs(self) -> int:
        """Number of workers on this host."""
        return len(self.commands)

    @property
    def is_single_node(self) -> bool:
        """Whether the launch has one node only."""
        return self.limits.max_nodes == 1


@dataclass(frozen=True, kw_only=True)
class LaunchResult:
    """How a launch ended.

    Attributes:
        failures: Workers that failed by themselves in the last attempt, on any node; the root
            cause first.
        stopped: Ranks of this node that the agent stopped.
        left_s: Time of the end, in seconds since the epoch, by rank of this node with exit code
            0. Empty if the root cause is on another node, whose clock may differ.
        places: Where stopped ranks of this node were, as far as they answered.
        signum: The signal that ended the launch, or None.
        ended_well: Whether each worker of this node ended with exit code 0. A worker without
            which the others go on does not count.
        restarts: Number of restarts of the job.
        reason: Why the nodes could not continue together, or "".
        idle: Whether no worker of this node was ever taken in by the ranks that it was to join.
        is_shown: Whether the root cause's text is the last that a worker put on the console.
    """

    failures: tuple[WorkerFailure, ...]
    stopped: tuple[int, ...]
    left_s: dict[int, float]
    places: dict[int, str]
    signum: int | None
    ended_well: bool = False
    restarts: int = 0
    reason: str = ""
    idle: bool = False
    is_shown: bool = False

    @property
    def exit_code(self) -> int:
        """0, the root cause's exit code, or 128 + signal as in a shell.

        Workers that save their state at SIGTERM and end with 0 (`should_stop`) have done their
        work. With another exit code Slurm would mark the job as failed.
        """
        if self.signum == signal.SIGTERM and self.ended_well:
            return 0
        if self.signum is not None:
            return 128 + self.signum
        if not self.failures:
            return 1 if self.reason else 0
        code = self.failures[0].exit_code
        return code if code > 0 else 128 - code


def as_document(result: LaunchResult) -> dict[str, Any]:
    """Return the content of `--json`; `failures` are in the order of the text report."""
    return {
        "exit_code": result.exit_code,
        "signal": signal_name(result.signum) if result.signum is not None else None,
        "reason": result.reason or None,
        "restarts": result.restarts,
        "stopped_ranks": list(result.stopped),
        "failures": [
            {
                "rank": failure.rank,
                "host": failure.host,
                "pid": failure.pid,
                "exit_code": failure.exit_code if failure.exit_code >= 0 else None,
                "signal": signal_name(-failure.exit_code) if failure.exit_code < 0 else None,
                "time": failure.time_s,
                "hint": failure.hint or None,
                "exception": exception_line(failure.text) or None,
                "traceback": failure.text or None,
            }
            for failure in result.failures
        ],
    }
