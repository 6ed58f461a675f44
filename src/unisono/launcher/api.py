"""torch.distributed.launcher.api's path: `elastic_launch` for functions on this host."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from unisono.errors import UnsupportedError, WorkerFailedError
from unisono.launcher.environment import one_gpu
from unisono.launcher.launch import launched

__all__ = ["LaunchConfig", "elastic_launch", "launch_agent"]

_WITHOUT_EFFECT = (
    "event_log_handler",
    "numa_options",
    "signals_to_handle",
    "duplicate_stdout_filters",
    "duplicate_stderr_filters",
)


@dataclass
class LaunchConfig:
    """How to start processes; see torch for the fields.

    Raises:
        UnsupportedError: More than one node, for which there is `unisono run`.

    `virtual_local_rank` lets each process see one GPU. `shutdown_timeout` are the seconds between
    SIGTERM and SIGKILL, 5 if None. The fields in `_WITHOUT_EFFECT` warn; others of torch's agent
    have no effect.

    Source: torch.distributed.launcher.api (2.13).
    """

    min_nodes: int
    max_nodes: int
    nproc_per_node: int
    logs_specs: Any = None
    run_id: str = ""
    role: str = "default_role"
    rdzv_endpoint: str = ""
    rdzv_backend: str = "etcd"
    rdzv_configs: dict[str, Any] = field(default_factory=dict)
    rdzv_timeout: int = -1
    max_restarts: int = 3
    monitor_interval: float = 0.1
    start_method: str = "spawn"
    log_line_prefix_template: str | None = None
    metrics_cfg: dict[str, str] = field(default_factory=dict)
    local_addr: str | None = None
    event_log_handler: str = "null"
    numa_options: Any = None
    signals_to_handle: str = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
    duplicate_stdout_filters: list[str] | None = None
    duplicate_stderr_filters: list[str] | None = None
    virtual_local_rank: bool = False
    shutdown_timeout: int | None = None

    def __post_init__(self) -> None:
        if self.max_nodes != 1:
            raise UnsupportedError(
                f"elastic_launch starts processes on one host only, got max_nodes={self.max_nodes}",
                hint="unisono run --nnodes",
            )
        for name in _WITHOUT_EFFECT:
            if getattr(self, name) != getattr(type(self), name):
                warnings.warn(f"LaunchConfig: {name} has no effect", stacklevel=3)


class elastic_launch:
    """Calls a function in new processes: `elastic_launch(config, fn)(*args)`.

    Returns the results by rank. After a failure all ranks start again, up to `max_restarts` times.

    Raises:
        WorkerFailedError: A rank failed; torch's ChildFailedError.
    """

    def __init__(self, config: LaunchConfig, entrypoint: Callable[..., Any] | str | None) -> None:
        self._config, self._entrypoint = config, entrypoint

    def __call__(self, *args: Any) -> dict[int, Any]:
        return launch_agent(self._config, self._entrypoint, list(args))


def launch_agent(
    config: LaunchConfig, entrypoint: Callable[..., Any] | str | None, args: list[Any]
) -> dict[int, Any]:
    """Call `entrypoint(*args)` as `elastic_launch` does; return the results by rank.

    Raises:
        UnsupportedError: A command instead of a function, for which there is `unisono run`.
        WorkerFailedError: A rank failed.
    """
    if not callable(entrypoint):
        raise UnsupportedError(
            f"elastic_launch calls functions, got {entrypoint!r}", hint="unisono run SCRIPT"
        )
    left = config.max_restarts
    while True:
        try:
            call = (config.virtual_local_rank, entrypoint, *args)
            how = config.start_method, config.shutdown_timeout
            results = launched(_without_rank, config.nproc_per_node, call, *how)
            return dict(enumerate(results))
        except Exception as error:
            failure = error if isinstance(error, WorkerFailedError) else error.__cause__
            if not isinstance(failure, WorkerFailedError):
                raise
            if left <= 0:
                raise failure from error if failure is not error else None
            left -= 1


def _without_rank(rank: int, one_gpu_each: bool, fn: Callable[..., Any], *args: Any) -> Any:
    if one_gpu_each:
        os.environ.update(one_gpu(rank, os.environ))
    return fn(*args)
