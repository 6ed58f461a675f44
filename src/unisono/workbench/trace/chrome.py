"""The timeline of a job in the format of Chrome's trace viewer, which Perfetto reads as well.

Source: "Trace Event Format", Google 2016.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from unisono.core.recorder.flight_recorder import RankRecords
from unisono.core.recorder.records import TraceRecord
from unisono.workbench.trace.clocks import Axis
from unisono.workbench.trace.joined import JoinedGroup, begin_of, end_of, read_ns

TraceEvent = dict[str, Any]

# Perfetto cuts times to nanoseconds and drops a slice that begins before the end of the one before.
# So a slice is 1 ns shorter than its call.
_GAP_NS = 1

# Viewers draw nothing for a slice without length, and an arrow must end inside its slice.
_LEAST_NS = 4


def chrome_trace(
    ranks: Mapping[int, RankRecords], groups: Sequence[JoinedGroup], axis: Axis
) -> dict[str, Any]:
    """Return the document for json.dump. A process is a rank, a thread is a group on a rank.

    A time is in microseconds since the first call. A call that has not ended reaches to the time
    at which its rank was read.

    Args:
        ranks: With times on the axis, at least one.
        groups: Of `join`, with these ranks.
        axis: The time axis.
    """
    times = [r.enqueued_ns for g in groups for each in g.members.values() for r in each.records]
    events = _EventList(ranks, min(times, default=0))
    for group in groups:
        events.add_group(group, axis.worst_ns() or 0)
    return {
        "traceEvents": [*events.names(), *events.events],
        "displayTimeUnit": "ns",
        "otherData": {
            "axis": str(axis),
            "zero_ns_since_1970": min(times, default=0),
            "error_ns": axis.error_ns,
        },
    }


class _EventList:
    """Collects the events of all groups."""

    def __init__(self, ranks: Mapping[int, RankRecords], zero_ns: int) -> None:
        self.events: list[TraceEvent] = []
        self._ranks = ranks
        self._zero_ns = zero_ns
        self._ids = itertools.count(1)
        # Perfetto takes threads of one number for one thread, also if their processes differ.
        self._threads = itertools.count(max(ranks) + 1)
        # By rank and thread: the name of the row, and the end of its last slice.
        self._rows: dict[int, dict[int, tuple[str, int]]] = {rank: {} for rank in ranks}

    def add_group(self, group: JoinedGroup, error_ns: int) -> None:
        """Add the slices and arrows of one group. Waits within the error are left out."""
        places: dict[tuple[int, int], tuple[int, TraceRecord]] = {}
        for rank, member in group.members.items():
            for record in sorted(member.records, key=begin_of):
                if record.outcome == "queued" or begin_of(record) > record.enqueued_ns:
                    self._add_queued(rank, record)
                if record.outcome != "queued":
                    places[rank, record.number] = self._add_slice(group, rank, record), record
        for (rank, number), (last, its) in group.late().items():
            if (rank, number) not in places:  # it is queued
                continue
            row, record = places[rank, number]
            begin_ns, ready_ns, end_ns = begin_of(record), begin_of(its), self._end(rank, record)
            waits = begin_ns + error_ns < ready_ns < end_ns
            if waits:
                name, dur = f"waits for rank {last}", (ready_ns - begin_ns - _GAP_NS) / 1e3
                self._add("X", "wait", rank, row, begin_ns, name=name, dur=dur)
            if (waits or record.is_message) and (last, its.number) in places:
                name, arrow = "message" if record.is_message else "last rank", next(self._ids)
                source, _ = places[last, its.number]
                self._add("s", "arrow", last, source, ready_ns, name=name, id=arrow)
                # The slice is 1 ns shorter, and its begin and length may each lose 1 ns as floats.
                self._add("f", "arrow", rank, row, end_ns - 3, name=name, id=arrow, bp="e")

    def names(self) -> Iterator[TraceEvent]:
        """Yield the names of processes and threads."""
        for rank, each in self._ranks.items():
            origin = f" ({each.origin.host}, pid {each.origin.pid})" if each.origin else ""
            yield _meta("process_name", rank, 0, name=f"rank {rank}{origin}")
            yield _meta("process_sort_index", rank, 0, sort_index=rank)
            for row, (name, _) in self._rows[rank].items():
                yield _meta("thread_name", rank, row, name=name)
                yield _meta("thread_sort_index", rank, row, sort_index=row)

    def _end(self, rank: int, record: TraceRecord) -> int:
        return max(end_of(record, self._ranks[rank]), begin_of(record) + _LEAST_NS)

    def _add_slice(self, group: JoinedGroup, rank: int, record: TraceRecord) -> int:
        """Add the part of a call in which it runs; return its row, the first that is free."""
        begin_ns, end_ns = begin_of(record), self._end(rank, record)
        name = group.name + (", messages" if record.is_message else "")
        rows = self._rows[rank]
        free = [row for row, (of, till_ns) in rows.items() if of == name and till_ns <= begin_ns]
        row = free[0] if free else next(self._threads)
        rows[row] = name, end_ns
        text, dur = name_of(record), (end_ns - begin_ns - _GAP_NS) / 1e3
        self._add("X", record.op, rank, row, begin_ns, name=text, dur=dur, args=_args(record))
        return row

    def _add_queued(self, rank: int, record: TraceRecord) -> None:
        """Add the part in which a call is in the queue, where calls overlap: a slice with an id."""
        own = {"local": hex(next(self._ids))}
        queued = {"name": f"{record.op} #{record.seq} queued", "id2": own}
        end_ns = read_ns(self._ranks[rank]) if record.outcome == "queued" else begin_of(record)
        self._add("b", "queued", rank, 0, record.enqueued_ns, args=_args(record), **queued)
        self._add("e", "queued", rank, 0, max(end_ns, record.enqueued_ns), **queued)

    def _add(self, phase: str, category: str, rank: int, row: int, ns: int, **more: Any) -> None:
        place = {"ph": phase, "cat": category, "pid": rank, "tid": row}
        self.events.append(place | {"ts": (ns - self._zero_ns) / 1e3} | more)


def name_of(record: TraceRecord) -> str:
    """Return "all_reduce #8", with the outcome unless the call has completed."""
    name = f"{record.op} #{record.seq}"
    if record.outcome in ("completed", "ended"):
        return name
    return f"{name} under way" if record.is_open else f"{name} {record.outcome}"


def _args(record: TraceRecord) -> dict[str, Any]:
    found: dict[str, Any] = {
        "number": record.seq,
        "dtype": record.dtype,
        "count": record.count,
        "bytes": record.nbytes,
        "algorithm": record.algorithm,
        "route": record.route,
        "call site": f"{record.file}:{record.line} in {record.function}" if record.file else "",
        "outcome": record.outcome,
        "waited us": record.waited_ns / 1e3,
        "waited for rank": record.waited_for,
    }
    return found | ({"peer": record.peer, "tag": record.tag} if record.is_message else {})


def _meta(what: str, rank: int, thread: int, **args: Any) -> TraceEvent:
    return {"ph": "M", "name": what, "pid": rank, "tid": thread, "ts": 0, "args": args}
