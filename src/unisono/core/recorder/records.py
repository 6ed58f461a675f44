"""The records of a group's last calls, as a program reads them."""

from __future__ import annotations

import itertools
import os
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter

import numpy as np

from unisono.core.base.types import DType
from unisono.core.recorder import ring
from unisono.core.recorder.recorder import make_recorder, place_of, read_ticks
from unisono.errors import (
    ClosedError,
    CollectiveAbortedError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    PeerLostError,
)

MESSAGES = frozenset(
    [
        "send",
        "recv",
        "recv_array",
        "probe",
        "put",
        "get",
        "accumulate",
        "fetch_add",
        "compare_and_swap",
        "signal",
        "wait_signal",
        "flush",
    ]
)
"""The operations that are messages between two ranks."""

# 1 + Code of native/core/status.hpp.
_OUTCOMES = {
    **{0: "running", 1: "completed", 2: "mismatch", 3: "timed out", 4: "peer lost"},
    **{5: "aborted", 7: "interrupted", 8: "peer left", 10: "out of memory", 13: "closed"},
    **{14: "cancelled"},
}
_FAILED = 6
_OF_ERRORS: list[tuple[type[BaseException], int]] = [
    (CollectiveMismatchError, 2),
    (CollectiveTimeoutError, 3),
    (PeerLostError, 4),
    (CollectiveAbortedError, 5),
    (KeyboardInterrupt, 7),
    (MemoryError, 10),
    (ClosedError, 13),
]


@dataclass(frozen=True, slots=True)
class TraceRecord:
    """One call of this rank in a group. Times are in nanoseconds since 1970; None: not yet.

    Attributes:
        number: Of the record, from 1. Gaps are calls that went another way.
        seq: Number of the call among the group's collectives, or among this rank's messages.
        op: Name of the function: "all_reduce", "send".
        dtype: Of the elements; "" without memory.
        count: Elements; of one block if there is one per rank.
        nbytes: Their size.
        algorithm: Name of the algorithm; "" for a message.
        route: "shared memory" or "messages".
        peer: Global rank of a message's other end; None for a collective, or if it is not known.
        tag: Of a message; None for a collective.
        fingerprint: Of a collective: equal on all ranks if the calls match. 0 for a message.
        file: Where the caller made the call; "" if it is unknown.
        line: In the file.
        function: In which the line is.
        enqueued_ns: When the caller made the call.
        started_ns: When the call had its turn.
        ended_ns: When it ended.
        outcome: "queued", "running", "completed", "mismatch", "timed out", "peer lost", "aborted",
            "failed", ...; "ended" in a file that has neither the time nor whether it failed.
        waited_ns: How long the call waited for other ranks.
        waited_for: The global rank for which it waited longest, or waits now; None without waits.
        wait_begun_ns: Of a collective: when the caller began to wait for its end, which is when it
            made the call unless that is asynchronous. None: not yet, or it is not known.
    """

    number: int
    seq: int
    op: str
    dtype: str
    count: int
    nbytes: int
    algorithm: str
    route: str
    peer: int | None
    tag: int | None
    fingerprint: int
    file: str
    line: int
    function: str
    enqueued_ns: int
    started_ns: int | None
    ended_ns: int | None
    outcome: str
    waited_ns: int
    waited_for: int | None
    wait_begun_ns: int | None = None

    @property
    def is_open(self) -> bool:
        """Whether the call has not ended."""
        return self.ended_ns is None and self.outcome != "ended"

    @property
    def is_message(self) -> bool:
        """Whether the call is a send or a receive."""
        return self.tag is not None


# Wall clock = _scale * ticks; made again for each reading, so that a corrected clock counts.
_first = read_ticks()


def read_clocks() -> tuple[int, int]:
    """Return the monotonic and the wall clock at one moment: the closest of some readings."""
    readings = []
    for _ in range(3):
        before, wall, after = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
        readings.append((after - before, (before + after) // 2, wall))
    _, monotonic, wall = min(readings)
    return monotonic, wall


class _Clock:
    """Converts ticks to times."""

    def __init__(self) -> None:
        self.ticks, now = read_ticks()
        monotonic_ns, wall_ns = read_clocks()
        self._wall_ns = wall_ns - (monotonic_ns - now)
        spent = self.ticks - _first[0]
        self._ns = (now - _first[1]) / spent if spent > 0 else 1.0

    def span(self, ticks: int) -> int:
        """Return the nanoseconds of a number of ticks."""
        return round(ticks * self._ns)

    def when(self, ticks: int) -> int | None:
        """Return nanoseconds since 1970; None for 0."""
        return self._wall_ns + self.span(ticks - self.ticks) if ticks else None


class GroupTrace:
    """The recorded calls of one group on this rank.

    Args:
        rank: Global rank of this process.
        ranks: Global ranks of the members, in group order.
        name: Name of the group.
        key: Name of the group that no other group of the world has.

    Attributes:
        recorder: Writes the records; in C++ if it is built.
        number: Counts the groups of this process.
    """

    def __init__(self, rank: int, ranks: tuple[int, ...], name: str, key: str) -> None:
        self.rank = rank
        self.ranks = ranks
        self.name = name
        self.key = key
        self.number = next(_numbers)
        self.recorder = make_recorder(len(ranks))
        with _lock:
            _all.add(self)

    def begin_message(
        self, op: str, dtype: DType | None, count: int, peer: int | None, tag: int
    ) -> int:
        """Begin the record of a message; `peer` is a global rank."""
        number = ring.number_of_kind(op, dtype, route="messages")
        seq, member = self.recorder.count_message(), self._member(peer)
        return int(self.recorder.begin(number, seq, tag & (1 << 64) - 1, count, member))

    def end(self, number: int, error: BaseException | None) -> None:
        """End the record of a collective with its error, or None."""
        self.recorder.end(number, _outcome(error))

    def end_message(self, number: int, error: BaseException | None, peer: int | None) -> None:
        """End the record of a message; `peer` is a global rank."""
        self.recorder.end_message(number, _outcome(error), self._member(peer))

    @contextmanager
    def waiting(self, peer: int) -> Iterator[None]:
        """Record that the collective that runs waits for a global rank in the with block."""
        self.recorder.begin_wait(self._member(peer))
        try:
            yield
        finally:
            self.recorder.end_wait()

    def _member(self, peer: int | None) -> int:
        return -1 if peer is None or peer not in self.ranks else self.ranks.index(peer)

    def records(self, *, only_open: bool = False) -> list[TraceRecord]:
        """Return the records, oldest first; `only_open`: of the calls that have not ended."""
        return list(self.newest(only_open=only_open))[::-1]

    def newest(self, *, only_open: bool = False) -> Iterator[TraceRecord]:
        """Yield the records, newest first; `only_open`: of the calls that have not ended."""
        clock, rows = _Clock(), np.frombuffer(self.recorder.snapshot(), ring.RECORD)
        is_wanted = rows["outcome"] == 0 if only_open else rows["outcome"] != ring.DROPPED
        rows = rows[is_wanted & (rows["number"] > 0)]
        waiting_for = self.recorder.waiting_for
        names = ring.RECORD.names or ()
        for row in rows[np.argsort(rows["number"])[::-1]].tolist():
            yield self._record(dict(zip(names, row, strict=True)), clock, waiting_for)

    def site(self, seq: int) -> str:
        """Return file and line of the caller of collective `seq`; "" if they are unknown."""
        found = (each for each in self.newest() if each.seq == seq and not each.is_message)
        record = next(found, None)
        return f"{os.path.basename(record.file)}:{record.line}" if record and record.file else ""

    def _record(self, row: dict[str, int], clock: _Clock, waiting_for: int) -> TraceRecord:
        kind = ring.kind_of(row["kind"])
        is_message = kind.op in MESSAGES
        outcome = _OUTCOMES.get(row["outcome"], "failed")
        waited, waited_for = row["waited"], row["waited_for"]
        if not row["outcome"] and is_message:
            waited, waited_for = clock.ticks - row["enqueued"], row["peer"]
        elif not row["outcome"] and not row["started"]:
            outcome = "queued"
        elif not row["outcome"]:
            # It is the only collective that runs.
            waited, waited_for = clock.ticks - row["started"], waiting_for
        file, line, function = place_of(row["site"], row["offset"])
        enqueued_ns = clock.when(row["enqueued"])
        assert enqueued_ns is not None
        return TraceRecord(
            number=row["number"],
            seq=row["seq"],
            op=kind.op,
            dtype=kind.dtype,
            count=row["count"],
            nbytes=row["count"] * kind.itemsize,
            algorithm=kind.algorithm,
            route=kind.route,
            peer=self._global(row["peer"]) if is_message else None,
            tag=_signed(row["word"]) if is_message else None,
            fingerprint=0 if is_message else row["word"],
            file=file,
            line=line,
            function=function,
            enqueued_ns=enqueued_ns,
            started_ns=clock.when(row["started"]),
            ended_ns=clock.when(row["ended"]),
            outcome=outcome,
            waited_ns=clock.span(waited),
            waited_for=self._global(waited_for),
            wait_begun_ns=None if is_message else _wait_begun(row, clock),
        )

    def _global(self, member: int) -> int | None:
        return None if member < 0 else self.ranks[member]

    def waited_ns(self) -> dict[int, int]:
        """Return how long this rank has waited for each other rank, by global rank.

        Waits that go on count, too: those of open messages, and of the collective that runs.
        """
        clock = _Clock()
        waits = zip(self.ranks, self.recorder.waited(), strict=True)
        waited = {rank: clock.span(ticks) for rank, ticks in waits if rank != self.rank}
        for each in self.newest(only_open=True):
            if each.is_message and each.peer in waited:
                waited[each.peer] += each.waited_ns
        return waited

    def totals(self) -> Iterator[tuple[ring.RecordKind, int, int, int, int]]:
        """Yield (kind, calls, elements, time in ns, worst time in ns) of every kind that ended."""
        clock, rows = _Clock(), np.frombuffer(self.recorder.totals(), ring.TOTAL)
        # Of thousands of kinds, a job uses some dozens.
        used = np.flatnonzero(rows["calls"])
        for number, row in zip(used.tolist(), rows[used].tolist(), strict=True):
            calls, elements, ticks, worst = row
            yield ring.kind_of(number), calls, elements, clock.span(ticks), clock.span(worst)


_lock = threading.RLock()
_numbers = itertools.count()
_all: weakref.WeakSet[GroupTrace] = weakref.WeakSet()


def all_traces() -> list[GroupTrace]:
    """Return the traces of the groups of this process, by rank.

    A destroyed group is among them until it is collected, because an error often ends it. A new
    group of the same key takes its place.
    """
    with _lock:
        traces = sorted(_all, key=attrgetter("number"))
    newest = {(trace.rank, trace.key): trace for trace in traces}
    return sorted(newest.values(), key=attrgetter("rank", "number"))


def _outcome(error: BaseException | None) -> int:
    if error is None:
        return 1
    return next((number for kind, number in _OF_ERRORS if isinstance(error, kind)), _FAILED)


def _wait_begun(row: dict[str, int], clock: _Clock) -> int | None:
    if (after := row["peer"]) == ring.NO_WAIT:
        return None
    return clock.when(row["enqueued"] + (max(after, 0) << ring.WAIT_SHIFT))


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word
