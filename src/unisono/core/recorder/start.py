"""Begin to record the calls of a group, and everything that this process does with records."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from unisono.core.base import config
from unisono.core.recorder.files import keep_for_stats, watch_signal
from unisono.core.recorder.metrics import serve_metrics
from unisono.core.recorder.records import GroupTrace


def make_trace(
    rank: int,
    ranks: tuple[int, ...],
    name: str,
    key: str,
    local_rank: Callable[[Mapping[str, str]], int | None],
) -> GroupTrace | None:
    """Return the trace of a new group; None if UNISONO_TRACE is 0.

    Args:
        rank: Global rank of this process.
        ranks: Global ranks of the members.
        name: Name of the group.
        key: Name that no other group of the world has.
        local_rank: Returns the number of this process on its host, from its environment.

    Raises:
        InvalidArgumentError: UNISONO_METRICS_PORT is no port.
        UnsupportedError: UNISONO_METRICS_PORT is set without the extra `metrics`.
    """
    if not config.get_flag("UNISONO_TRACE"):
        return None
    trace = GroupTrace(rank, ranks, name, key)
    watch_signal()
    keep_for_stats(trace)
    serve_metrics(local_rank)
    return trace
