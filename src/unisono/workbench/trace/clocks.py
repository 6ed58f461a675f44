"""One time axis for ranks of several hosts. Pure.

A call of ranks on several hosts is a round trip. No rank ends an all_reduce before all ranks have
begun it, and no receive ends before its send begins. So calls bound the difference of two clocks
from both sides, and the tightest bounds count.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from unisono.core.recorder.flight_recorder import RankRecords
from unisono.core.recorder.records import TraceRecord
from unisono.workbench.trace.joined import JoinedGroup

# Operations that end on a rank only after all ranks have begun them.
_ROUND_TRIPS = ("all_reduce", "all_gather", "reduce_scatter")

_UNKNOWN = ""
"""The clock of files without the name of a clock."""


class Trip(NamedTuple):
    """A question to a rank, which answered with the time of its monotonic clock.

    Attributes:
        asker: Clock of the asking process.
        asked_ns: When the question left.
        clock: Clock of the rank.
        answer_ns: Its answer.
        got_ns: When the answer was there.
    """

    asker: str
    asked_ns: int
    clock: str
    answer_ns: int
    got_ns: int


@dataclass(frozen=True)
class Axis:
    """The time axis: the wall clock of one host.

    Attributes:
        host: Name of this host.
        shift_ns: To add to the times of a rank's records, by rank.
        error_ns: How far a host's times may be wrong against this host's, by name of the host; None
            if no bound is known.
    """

    host: str
    shift_ns: dict[int, int]
    error_ns: dict[str, int | None]

    def worst_ns(self) -> int | None:
        """Return the largest error; None if one is unknown."""
        errors = list(self.error_ns.values())
        known = [error for error in errors if error is not None]
        return max(known, default=0) if len(known) == len(errors) else None

    def __str__(self) -> str:
        if not self.error_ns:
            return "time axis: one clock, error 0"
        bounds = sorted((e or 0, host) for host, e in self.error_ns.items() if e is not None)
        unknown = sorted(host for host, error in self.error_ns.items() if error is None)
        text = f"time axis: clock of {self.host or 'the files'}"
        if bounds:
            text += f"; error at most {bounds[-1][0] / 1e3:.1f} us ({bounds[-1][1]})"
        if unknown:
            names = ", ".join(unknown[:4]) + (", ..." if len(unknown) > 4 else "")
            text += f"; wall clocks with unknown error: {names}"
        return text


def align(
    ranks: Mapping[int, RankRecords], groups: Sequence[JoinedGroup], trips: Iterable[Trip] = ()
) -> Axis:
    """Return the time axis of some ranks.

    Args:
        ranks: At least one.
        groups: Of `join`, with the times of the ranks.
        trips: Questions to ranks, if they could be asked.
    """
    clocks = {r: each.origin.clock if each.origin else _UNKNOWN for r, each in ranks.items()}
    # The wall clock of a rank minus its monotonic clock.
    ahead = {
        rank: each.origin.wall_ns - each.origin.monotonic_ns if each.origin else 0
        for rank, each in ranks.items()
    }
    firsts = {clock: rank for rank, clock in sorted(clocks.items(), reverse=True)}
    reference = next(iter(clocks.values()))
    latest = _bounds(groups, clocks, ahead)
    for trip in trips:
        _tighten(latest, trip.asker, trip.clock, trip.got_ns - trip.answer_ns)
        _tighten(latest, trip.clock, trip.asker, trip.answer_ns - trip.asked_ns)
    places = _place(reference, latest)
    shift: dict[int, int] = {}
    errors: dict[str, int | None] = {}
    for rank, clock in clocks.items():
        place = places.get(clock)
        # Without a bound, the wall clocks are taken as equal.
        base = ahead[firsts[reference]] - ahead[rank]
        shift[rank] = 0 if place is None else base + place[0]
        if clock != reference:
            # Containers may have equal names.
            host = _host(ranks[rank])
            known = place is not None and errors.get(host, 0) is not None
            errors[host] = max(place[1], errors.get(host) or 0) if place and known else None
    if reference == _UNKNOWN and len(ranks) > 1:
        errors = dict.fromkeys(map(_host, ranks.values()))
    return Axis(_host(ranks[firsts[reference]]), shift, errors)


def _host(records: RankRecords) -> str:
    return records.origin.host if records.origin else f"rank {records.rank}"


_Bounds = defaultdict[str, dict[str, int]]
"""[a][b]: the most that may be added to the times of b if 0 is added to the times of a."""


def _tighten(latest: _Bounds, a: str, b: str, bound: int) -> None:
    latest[a][b] = min(bound, latest[a].get(b, bound))


def _bounds(
    groups: Sequence[JoinedGroup], clocks: Mapping[int, str], ahead: Mapping[int, int]
) -> _Bounds:
    """Return the bounds that calls and messages give, for times of the monotonic clocks."""
    latest: _Bounds = defaultdict(dict)
    if len(set(clocks.values())) < 2:
        return latest
    for group in groups:
        for call in group.calls:
            records = call.records
            if len(records) < len(group.ranks) or not all(map(_waits_for_all, records.values())):
                continue
            begun: dict[str, int] = {}
            ended: dict[str, int] = {}
            for rank, begin in call.arrivals().items():
                clock, end = clocks[rank], records[rank].ended_ns
                if records[rank].outcome == "completed" and end is not None:
                    ended[clock] = min(end - ahead[rank], ended.get(clock, end - ahead[rank]))
                begun[clock] = max(begin - ahead[rank], begun.get(clock, begin - ahead[rank]))
            for a, end in ended.items():
                for b, begin in begun.items():
                    if a != b:
                        _tighten(latest, a, b, end - begin)
        for message in group.messages:
            a, b = clocks[message.target], clocks[message.source]
            if a == b or message.send is None or message.receive is None:
                continue
            if message.receive.outcome == "completed" and message.receive.ended_ns is not None:
                end = message.receive.ended_ns - ahead[message.target]
                _tighten(latest, a, b, end - message.send.enqueued_ns + ahead[message.source])
    return latest


def _waits_for_all(record: TraceRecord) -> bool:
    # A rank without elements need not be waited for.
    return record.op == "barrier" or (record.op.startswith(_ROUND_TRIPS) and record.count > 0)


def _place(reference: str, latest: _Bounds) -> dict[str, tuple[int, int]]:
    """Return what to add to the times of each clock, and the error, along the best paths."""
    places, done = {reference: (0, 0)}, set[str]()
    while left := places.keys() - done:
        a = min(left, key=lambda clock: places[clock][1])
        done.add(a)
        for b, most in latest[a].items():
            least = -latest[b].get(a, math.inf) if b in latest else -math.inf
            if least == -math.inf or b in done:
                continue
            # Clocks that drift against one another can make `least` the larger one.
            error = places[a][1] + int(abs(most - least) // 2) + 1
            if b not in places or error < places[b][1]:
                places[b] = places[a][0] + int(most + least) // 2, error
    return places
