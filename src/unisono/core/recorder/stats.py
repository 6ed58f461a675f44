"""Statistics of a group's calls, from its totals and its records."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from statistics import median
from typing import Any

from unisono.core.base.grouping import grouped
from unisono.core.recorder.records import GroupTrace


@dataclass(frozen=True, slots=True)
class OperationStats:
    """The calls of one operation on this rank. Times are from the call to its end, in seconds.

    Attributes:
        calls: Number of calls that have ended, with or without an error.
        nbytes: Sum of the sizes of their data, each as in `TraceRecord.nbytes`.
        total_s: Sum of their times.
        median_s: Median over the calls that the ring still has; 0 without one.
        worst_s: The longest time.
    """

    calls: int
    nbytes: int
    total_s: float
    median_s: float
    worst_s: float


@dataclass(frozen=True, slots=True)
class GroupStats:
    """The cost of one group's calls on this rank.

    Attributes:
        group: Name of the group.
        rank: Global rank of this process.
        operations: By name; the operation with the largest sum of times is first.
        waited_s: Seconds that this rank has waited for each other rank, by global rank; the rank
            with the longest waits is first.
    """

    group: str
    rank: int
    operations: dict[str, OperationStats]
    waited_s: dict[int, float]

    def __str__(self) -> str:
        lines = [self._title()]
        for op, calls, mb, median_us, worst_ms in self._rows():
            lines.append(f"{op:28}{calls:>9}{mb:>11}{median_us:>12}{worst_ms:>11}")
        return "\n".join([*lines, self._waits()])

    def _repr_html_(self) -> str:
        """Return the table for a notebook."""
        head, *rows = (
            "".join(f"<td>{escape(cell)}</td>" for cell in cells) for cells in self._rows()
        )
        head = head.replace("td>", "th>")
        body = "".join(f"<tr>{row}</tr>" for row in rows)
        return (
            f"<table><caption>{escape(self._title())}</caption><thead><tr>{head}</tr></thead>"
            f"<tbody>{body}</tbody></table><p>{escape(self._waits())}</p>"
        )

    def _title(self) -> str:
        return f"group '{self.group}' on rank {self.rank}"

    def _rows(self) -> Iterator[tuple[str, ...]]:
        yield "operation", "calls", "MB", "median us", "worst ms"
        for op, row in self.operations.items():
            mb, median_us = f"{row.nbytes / 1e6:.3f}", f"{row.median_s * 1e6:.1f}"
            yield op, str(row.calls), mb, median_us, f"{row.worst_s * 1e3:.3f}"

    def _waits(self) -> str:
        waits = [f"rank {rank} {s:.3f} s" for rank, s in self.waited_s.items() if s > 0]
        return f"waited for {', '.join(waits[:8]) or 'no rank'}"


def stats_of(trace: GroupTrace) -> GroupStats:
    """Return the statistics of a group on this rank."""
    sums: dict[str, list[float]] = {}
    for kind, calls, elements, total_ns, worst_ns in trace.totals():
        row = sums.setdefault(kind.op, [0, 0, 0.0, 0.0])
        row[0] += calls
        row[1] += elements * kind.itemsize
        row[2] += total_ns / 1e9
        row[3] = max(row[3], worst_ns / 1e9)
    times = times_of(trace)
    operations = {
        op: OperationStats(
            int(calls), int(nbytes), total_s, median(times.get(op, [0])) / 1e9, worst_s
        )
        for op, (calls, nbytes, total_s, worst_s) in sums.items()
    }
    waited = {rank: ns / 1e9 for rank, ns in trace.waited_ns().items()}
    return GroupStats(
        trace.name,
        trace.rank,
        dict(sorted(operations.items(), key=lambda item: -item[1].total_s)),
        dict(sorted(waited.items(), key=lambda item: -item[1])),
    )


def times_of(trace: GroupTrace) -> dict[str, list[int]]:
    """Return the times of the calls that the ring still has, in nanoseconds, by operation."""
    ended = ((each, each.ended_ns) for each in trace.records())
    return grouped((each.op, ns - each.enqueued_ns) for each, ns in ended if ns is not None)


def stragglers(all_stats: list[GroupStats]) -> dict[int, float]:
    """Return the seconds that all ranks together have waited for each rank, longest first.

    Args:
        all_stats: Of the same group, from all ranks.
    """
    sums: dict[int, float] = {}
    for stats in all_stats:
        for rank, waited_s in stats.waited_s.items():
            sums[rank] = sums.get(rank, 0.0) + waited_s
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


def open_calls(trace: GroupTrace) -> dict[str, Any]:
    """Return the calls that have not ended, the bytes moved and the time waited, for JSON."""
    now_ns = time.time_ns()
    moved_bytes = 0
    for kind, _, elements, *_ in trace.totals():
        moved_bytes += elements * kind.itemsize
    return {
        "waited_s": sum(trace.waited_ns().values()) / 1e9,
        "moved_bytes": moved_bytes,
        "open": [
            {
                "call": f"{record.op} #{record.seq}",
                "since_s": (now_ns - (record.started_ns or record.enqueued_ns)) / 1e9,
                "message": record.is_message,
                "seq": record.seq,
                "peer": record.peer,
                "at": (record.file, record.line),
            }
            for record in trace.records(only_open=True)
        ],
    }
