"""The records of this process at one moment, with its clocks."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from itertools import islice

from unisono.core.platform.machine import clock_name
from unisono.core.recorder.flight_recorder import GroupRecords, Origin, RankRecords
from unisono.core.recorder.records import GroupTrace, all_traces, read_clocks
from unisono.core.recorder.ring import RECORDS

# Records in the answer of a rank that is asked while its job runs. More would occupy the rank's
# interpreter for longer than half a second.
_MOST_RECORDS = 16_384


def records_of(
    rank: int, traces: Sequence[GroupTrace], most: int = RECORDS, *, runs: bool = False
) -> RankRecords:
    """Return the last records of groups.

    Args:
        rank: The rank of this process in them.
        traces: Of the groups.
        most: Records of each group.
        runs: Whether the job goes on.
    """
    groups = [
        GroupRecords(each.key, each.name, each.ranks, list(islice(each.newest(), most))[::-1])
        for each in traces
    ]
    monotonic_ns, wall_ns = read_clocks()
    return RankRecords(
        rank,
        groups,
        Origin(platform.node(), os.getpid(), clock_name(), monotonic_ns, wall_ns, runs),
    )


def live_records(rank: int) -> RankRecords:
    """Return the last records of all groups of a rank, in bounded size."""
    traces = [trace for trace in all_traces() if trace.rank == rank][-_MOST_RECORDS:]
    most = min(RECORDS, _MOST_RECORDS // max(1, len(traces)))
    return records_of(rank, traces, most, runs=True)
