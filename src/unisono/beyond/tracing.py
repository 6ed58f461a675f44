"""The recorded calls of a group, as functions."""

from __future__ import annotations

from typing import Any

from unisono.core.groups.world import require_group
from unisono.core.recorder import GroupStats, GroupTrace, TraceRecord, stats_of
from unisono.errors import UnsupportedError


def trace_records(group: Any = None) -> list[TraceRecord]:
    """Return the records of this rank's last 2,048 calls in a group, oldest first.

    Sends and receives are calls, too. Every call is recorded, also if it runs in C++ without
    Python. Records of calls that are under way have the outcome "queued" or "running". Another
    thread may call this function while a call waits.

    Args:
        group: The default group if None.

    Raises:
        InvalidArgumentError: This rank is no member of the group.
        UnsupportedError: The group keeps no records, because of UNISONO_TRACE=0 or its backend.
    """
    return _trace(group, "trace_records").records()


def stats(group: Any = None) -> GroupStats:
    """Return calls, bytes and times of this rank's calls in a group, and its waits.

    `print(dist.stats())` and a notebook show a table: calls, bytes, median and worst time of each
    operation, and the ranks for which this rank has waited. The call does not communicate.

    Args:
        group: The default group if None.

    Raises:
        InvalidArgumentError: This rank is no member of the group.
        UnsupportedError: The group keeps no records, because of UNISONO_TRACE=0 or its backend.
    """
    return stats_of(_trace(group, "stats"))


def _trace(group: Any, called: str) -> GroupTrace:
    pg = require_group(group)
    found = next((b.trace for b in pg.backends.values() if b.trace is not None), None)
    if found is None:
        raise UnsupportedError(
            f"{called}: group '{pg.name}' keeps no records",
            hint="UNISONO_TRACE=0 and backends other than unisono keep none",
        )
    return found
