"""What to launch, and how a launch ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from unisono.launcher.output.files import LogOptions
from unisono.launcher.report import Failure, exception_line, signal_name
from unisono.launcher.signals import ENDING
from unisono.rendezvous.member import Timing
from unisono.rendezvous.state import Limits

__all__ = ["GRACE_S", "LaunchResult", "LaunchSpec", "Meeting", "as_document"]

GRACE_S = 5.0
"""Default time between SIGTERM and SIGKILL. A script that writes a checkpoint on SIGTERM
needs more; a rank that hangs in a collective would only waste a longer one."""


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """How the agents of several nodes find each other; unused with one node.

    Attributes:
        endpoint: Host and port of the store, the path of a file that all nodes share, or the URL of
            a service (etcd:// or redis://).
        hosting: Whether the store must be served here; None: the first agent on that host.
        node_rank: Group rank that this node must get, or None.
        share_port: The workers' store is the rendezvous store (`--master-port`).
        address: Where other nodes reach this one; None: found out.
        timing: Time-outs and pauses.
    """

    endpoint: tuple[str, int] | str = ("127.0.0.1", 0)
    hosting: bool | None = None
    node_rank: int | None = None
    share_port: bool = False
    address: str | None = None
    timing: Timing = field(default_factory=Timing)


@dataclass(frozen=True, kw_only=True)
class LaunchSpec:
    """What to launch.

    Attributes:
        commands: Program and arguments of each worker of this host, by local rank.
        grace_s: Seconds between the request to end and SIGKILL.
        logs: Where the workers' output goes.
        bind: What each worker is bound to: "none", "core", "numa" or "auto".
        limits: Number of nodes and of restarts.
        meeting: How the nodes find each other.
        run_id: Name of the job; None: random.
        role: Name of the workers' role.
        monitor_interval_s: Pause between looks at the other nodes while workers run.
        master_port: Port of the workers' store with one node; 0 for any.
        signals: Names of the signals that end the launch.
        one_gpu_each: Every worker sees one GPU only and has LOCAL_RANK=0
            (`--virtual-local-rank`).
        warm: How many workers of this host have a half-started one ready for a restart.
    """

    commands: Sequence[Sequence[str]]
    grace_s: float = GRACE_S
    logs: LogOptions = field(default_factory=LogOptions)
    bind: str = "none"
    limits: Limits = field(default_factory=lambda: Limits(min_nodes=1, max_nodes=1, max_restarts=0))
    meeting: Meeting = field(default_factory=Meeting)
    run_id: str | None = None
    role: str = "default"
    monitor_interval_s: float = 0.1
    master_port: int = 0
    signals: Sequence[str] = ENDING
    one_gpu_each: bool = False
    warm: int = 0

    @property
    def nprocs(self) -> int:
        """Number of workers on this host."""
        return len(self.commands)


@dataclass(frozen=True, kw_only=True)
class LaunchResult:
    """How a launch ended.

    Attributes:
        failures: Workers that failed by themselves in the last attempt, on any node; the root
            cause first.
        stopped: Ranks of this node that the agent ended.
        left_s: By rank of this node that ended with exit code 0, when; if it may have to do with
            the root cause.
        signum: The signal that ended the launch, or None.
        restarts: How often the job was restarted.
        reason: Why the nodes could not go on together, or "".
    """

    failures: tuple[Failure, ...]
    stopped: tuple[int, ...]
    left_s: dict[int, float]
    signum: int | None
    restarts: int = 0
    reason: str = ""

    @property
    def exit_code(self) -> int:
        """0, the root cause's exit code, or 128 + signal as in a shell."""
        if self.signum is not None:
            return 128 + self.signum
        if not self.failures:
            return 1 if self.reason else 0
        code = self.failures[0].exit_code
        return code if code > 0 else 128 - code


def as_document(result: LaunchResult) -> dict[str, Any]:
    """Return what `--error-json` writes: the report for programs; `failures` as in the text."""
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
