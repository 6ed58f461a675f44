"""torch.distributed.launcher.api's path: `elastic_launch` for functions on this host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from unisono.errors import UnsupportedError, WorkerFailedError
from unisono.launcher.launch import launch

__all__ = ["LaunchConfig", "elastic_launch", "launch_agent"]


@dataclass
class LaunchConfig:
    """How to start processes; see torch for the fields.

    Raises:
        UnsupportedError: More than one node, for which there is `unisono run`.

    Source: torch.distributed.launcher.api (2.13). Fields of its agent have no effect.
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

    def __post_init__(self) -> None:
        if self.max_nodes != 1:
            raise UnsupportedError(
                f"elastic_launch starts processes on one host only, got max_nodes={self.max_nodes}",
                hint="unisono run --nnodes",
            )


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
            call = (entrypoint, *args)
            how = config.start_method
            results = launch(_without_rank, config.nproc_per_node, call, start_method=how)
            return dict(enumerate(results))
        except Exception as error:
            failure = error if isinstance(error, WorkerFailedError) else error.__cause__
            if not isinstance(failure, WorkerFailedError):
                raise
            if left <= 0:
                raise failure from error if failure is not error else None
            left -= 1


def _without_rank(rank: int, fn: Callable[..., Any], *args: Any) -> Any:
    return fn(*args)
