"""The reading of records without a picture: which call differs, which rank is missing or late."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from unisono.core.base.grouping import grouped
from unisono.core.base.text import name_ranks
from unisono.core.recorder.flight_recorder import RankRecords
from unisono.core.recorder.records import TraceRecord
from unisono.workbench.trace.joined import JoinedCall, JoinedGroup, begin_of, end_of

_MOST_ROWS = 5

# A rank that is in a call for longer after it has ended on others is worth a line.
_LATE_NS = 1_000_000_000


class Anomaly(NamedTuple):
    """Something that is wrong.

    Attributes:
        at_ns: When the first rank made the call.
        text: One line.
        ranks: The ranks that differ or are missing.
    """

    at_ns: int
    text: str
    ranks: tuple[int, ...]


class _RankWait(NamedTuple):
    """A wait of one rank for another in one call."""

    ns: int
    rank: int
    waited_for: int
    record: TraceRecord

    def __str__(self) -> str:
        call = _name(self.record)
        return f"{_s(self.ns)}, of rank {self.rank} for rank {self.waited_for} in {call}"


def findings_of(ranks: Mapping[int, RankRecords], groups: Sequence[JoinedGroup]) -> list[Anomaly]:
    """Return what is wrong, the first in time first: the first call of each group that differs.

    Args:
        ranks: With times on one axis.
        groups: Of `join`, with these ranks.
    """
    found = [_first_difference(group, ranks) for group in groups]
    messages = [each for group in groups for each in _messages(group, ranks)]
    return sorted([*filter(None, found), *messages])


def report(ranks: Mapping[int, RankRecords], groups: Sequence[JoinedGroup]) -> Iterator[str]:
    """Yield the lines of the analysis; the first is the verdict.

    Args:
        ranks: With times on one axis, at least one.
        groups: Of `join`, with these ranks.
    """
    waits = list(_waits(groups))
    calls = sum(len(group.calls) for group in groups)
    longest = f"the longest wait is {_longest(waits)}" if waits else "no rank waited"
    findings = [finding.text for finding in findings_of(ranks, groups)]
    yield from findings or [f"the {calls} calls match; {longest}"]
    for group in groups:
        if missing := [rank for rank in group.ranks if rank not in ranks]:
            yield f"group '{group.name}': there are no records of {name_ranks(missing)}"
        last_seqs = group.last_seqs()
        most = max(last_seqs.values(), default=0)
        for seq in sorted({seq for seq in last_seqs.values() if seq < most}):
            which = [rank for rank, last in last_seqs.items() if last == seq]
            yield f"group '{group.name}': behind #{most} by {most - seq}: {name_ranks(which)}"
    yield from _table(waits, lambda wait: f"for rank {wait.waited_for}")
    yield from _table(waits, lambda wait: f"in {wait.record.op}{_site(wait.record)}")


def _table(waits: Iterable[_RankWait], title: Callable[[_RankWait], str]) -> Iterator[str]:
    """Yield a line for each of the titles with the longest waits."""
    rows = grouped((title(wait), wait) for wait in waits)
    sums = {name: sum(wait.ns for wait in row) for name, row in rows.items()}
    for name in sorted(sums, key=sums.__getitem__, reverse=True)[:_MOST_ROWS]:
        row = rows[name]
        yield f"waited {name}: {_s(sums[name])} in {len(row)} calls; longest {_longest(row)}"


def _longest(waits: Iterable[_RankWait]) -> _RankWait:
    return max(waits, key=lambda wait: wait.ns)


def _waits(groups: Iterable[JoinedGroup]) -> Iterator[_RankWait]:
    """Yield the waits that are recorded, or else seen from the times of the ranks."""
    for group in groups:
        late = group.late()
        for rank, member in group.members.items():
            for record in member.records:
                if record.waited_for is not None:
                    yield _RankWait(record.waited_ns, rank, record.waited_for, record)
                elif (rank, record.number) in late:
                    last, its = late[rank, record.number]
                    if (ns := begin_of(its) - begin_of(record)) > 0:
                        yield _RankWait(ns, rank, last, record)


def _first_difference(group: JoinedGroup, ranks: Mapping[int, RankRecords]) -> Anomaly | None:
    """Return the first call of a group that differs between ranks; None if there is none."""
    first_seq, last_seqs = group.first_seq(), group.last_seqs()
    for call in group.calls:
        at_ns = min(record.enqueued_ns for record in call.records.values())
        # A rank that was read before the call may have made it afterwards.
        missing = [
            rank
            for rank, seq in last_seqs.items()
            if seq < call.seq and at_ns < _read_ns(ranks[rank])
        ]
        no_records = [rank for rank in group.ranks if rank not in ranks]
        found = (
            _mismatch(call)
            or _absence(call, sorted(missing), no_records, ranks)
            or _failure(call, ranks)
            or (None if group.are_known else _unknown_absence(call, group))
        )
        if found and call.seq >= first_seq:
            return Anomaly(at_ns, f"group '{group.name}': {found[0]}", tuple(sorted(found[1])))
    return None


def _read_ns(records: RankRecords) -> float:
    """Return when a rank was read; infinity if the file does not have it."""
    return records.origin.wall_ns if records.origin else math.inf


def _mismatch(call: JoinedCall) -> tuple[str, list[int]] | None:
    """Return how the calls of the ranks differ. The calls of most ranks are taken for right."""
    kinds = grouped((record.fingerprint, rank) for rank, record in sorted(call.records.items()))
    if len(kinds) < 2:
        return None
    usual, *others = sorted(kinds.values(), key=len, reverse=True)
    sides = [(which, call.records[which[0]]) for which in (*others, usual)]
    hidden = "" if len({_what(record) for _, record in sides}) > 1 else " (another argument)"
    texts = [f"{name_ranks(which)}: {_what(r)}{hidden}{_site(r)}" for which, r in sides]
    if len(usual) == len(others[0]):
        others.append(usual)
    return f"call #{call.seq} differs: {'; '.join(texts)}", list(itertools.chain(*others))


def _absence(
    call: JoinedCall, missing: list[int], no_records: list[int], ranks: Mapping[int, RankRecords]
) -> tuple[str, list[int]] | None:
    """Return which ranks have not made a call that others have made."""
    made, record = sorted(call.records), min(call.records.values(), key=lambda r: r.enqueued_ns)
    if missing:
        ends = [_end_ns(each, ranks[rank]) for rank, each in call.records.items()]
        known = [end_ns for end_ns in ends if end_ns is not None]
        took = f" {_s(max(known) - record.enqueued_ns)}" if len(known) == len(ends) else ""
        waited = f"{name_ranks(made)} waited{took}{_site(record)}"
        begun = _not_yet("started", missing, ranks)
        return f"{name_ranks(missing)} {begun} {_name(record)}, in which {waited}", missing
    if no_records and any(
        each.outcome not in ("completed", "ended") for each in call.records.values()
    ):
        left = f"{_name(record)} did not end on {name_ranks(made)}, and {name_ranks(no_records)}"
        return f"{left} left no records{_site(record)}", no_records
    return None


def _not_yet(did: str, missing: Sequence[int], ranks: Mapping[int, RankRecords]) -> str:
    """Return "never started", or that ranks whose job runs on have not started."""
    origins = [ranks[rank].origin if rank in ranks else None for rank in missing]
    if all(origin is not None and origin.runs for origin in origins):
        return f"{'has' if len(missing) == 1 else 'have'} not {did}"
    return f"never {did}"


def _end_ns(record: TraceRecord, records: RankRecords) -> int | None:
    """Return when a call ended, or until when it is known to wait; None if neither is known."""
    return None if records.origin is None and record.ended_ns is None else end_of(record, records)


def _unknown_absence(call: JoinedCall, group: JoinedGroup) -> tuple[str, list[int]] | None:
    """Return that ranks may be missing in a call of a group whose members no file has.

    A rank that has made no call of the group may be no member.
    """
    record, made = next(iter(call.records.values())), name_ranks(sorted(call.records))
    unknown = f"the files do not name the group's members{_site(record)}"
    if any(each.outcome == "running" for each in call.records.values()):
        return f"{_name(record)} did not end on {made}, and {unknown}", []
    if len(group.ranks) == 1 and call is group.calls[-1]:
        return f"only {made} made {_name(record)}, and {unknown}", []
    return None


def _failure(call: JoinedCall, ranks: Mapping[int, RankRecords]) -> tuple[str, list[int]] | None:
    """Return how a call failed that all ranks have made, or which ranks are left in it."""
    outcomes = grouped((record.outcome, rank) for rank, record in sorted(call.records.items()))
    ends = [record.ended_ns for record in call.records.values() if record.ended_ns is not None]
    is_late = ends and any(
        record.is_open and _read_ns(ranks[rank]) > max(ends) + _LATE_NS
        for rank, record in call.records.items()
    )
    if not is_late and outcomes.keys() <= {"completed", "ended", "running", "queued"}:
        return None
    sides = [f"{outcome} on {name_ranks(which)}" for outcome, which in outcomes.items()]
    record = next(iter(call.records.values()))
    blamed = [rank for rank, each in call.records.items() if each.outcome != "completed"]
    return f"{_name(record)} is {'; '.join(sides)}{_site(record)}", blamed


def _messages(group: JoinedGroup, ranks: Mapping[int, RankRecords]) -> Iterator[Anomaly]:
    """Yield the messages that failed, or that wait without a counterpart."""
    alone = {id(m.send or m.receive) for m in group.messages if not (m.send and m.receive)}
    for rank, member in group.members.items():
        for record in member.records:
            waits_ns = _read_ns(ranks[rank]) - record.enqueued_ns
            if not record.is_message or record.outcome in ("completed", "queued", "cancelled"):
                continue
            if record.ended_ns is not None:
                why = f"is {record.outcome}"
            elif id(record) in alone and waits_ns > _LATE_NS:
                did = "received" if record.op == "send" else "sent"
                peers = [] if record.peer is None else [record.peer]
                why = f"waits for rank {record.peer}, which {_not_yet(did, peers, ranks)} it"
            else:
                continue
            text = f"group '{group.name}': {_name(record)} of rank {rank} {why}{_site(record)}"
            blamed = () if record.peer is None else (record.peer,)
            yield Anomaly(record.enqueued_ns, text, blamed)


def _what(record: TraceRecord) -> str:
    return record.op + (f" of {record.count} {record.dtype}" if record.dtype else "")


def _name(record: TraceRecord) -> str:
    return f"{record.op} #{record.seq}"


def _site(record: TraceRecord) -> str:
    # Errors and `unisono top` show no folder either.
    return f" ({os.path.basename(record.file)}:{record.line})" if record.file else ""


def _s(ns: int) -> str:
    unit, scale = ("s", 1e9) if ns >= 1e9 else ("ms", 1e6) if ns >= 1e6 else ("us", 1e3)
    return f"{ns / scale:.3g} {unit}" if ns < 1e12 else f"{ns / scale:.0f} s"
