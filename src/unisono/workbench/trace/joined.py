"""The records of several ranks, joined: which calls belong together, and which messages."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import zip_longest

from unisono.core.recorder.flight_recorder import GroupRecords, RankRecords
from unisono.core.recorder.records import TraceRecord
from unisono.errors import InvalidArgumentError
from unisono.workbench.trace.decoding import DEFAULT_NAME

_PAIRED = {"send", "recv", "recv_array"}
# Outcomes of receives that have taken no message.
_NOTHING_TAKEN = {"timed out", "cancelled", "interrupted"}
_FOLLOWED = {"completed", "running", "queued"}


def begin_of(record: TraceRecord) -> int:
    """Return when a call has begun to run, or, if it is queued, when it was made."""
    return record.enqueued_ns if record.started_ns is None else record.started_ns


def end_of(record: TraceRecord, records: RankRecords) -> int:
    """Return when a call ended, or when its rank was read; its begin if only the end is unknown."""
    if record.ended_ns is None:
        return read_ns(records) if record.is_open else begin_of(record)
    return record.ended_ns


def read_ns(each: RankRecords) -> int:
    """Return when a rank was read; the last time in its records if the file does not have it."""
    if each.origin is not None:
        return each.origin.wall_ns
    records = [record for group in each.groups for record in group.records]
    return max((record.ended_ns or begin_of(record) for record in records), default=0)


@dataclass(frozen=True)
class JoinedCall:
    """A collective on all ranks.

    Attributes:
        seq: Its number in the group.
        records: By global rank.
    """

    seq: int
    records: dict[int, TraceRecord]

    def arrivals(self) -> dict[int, int]:
        """Return when each rank has begun to run the call, by rank."""
        return {
            rank: begin_of(record)
            for rank, record in self.records.items()
            if record.outcome != "queued"
        }


@dataclass(frozen=True)
class JoinedMessage:
    """A send and its receive, or one of them.

    Attributes:
        source: Global rank of the sender.
        target: Global rank of the receiver.
        send: None if the sender has not sent.
        receive: None if the receiver has not asked.
    """

    source: int
    target: int
    send: TraceRecord | None
    receive: TraceRecord | None


@dataclass(frozen=True)
class JoinedGroup:
    """The calls of one group.

    Attributes:
        name: Of the group.
        ranks: Global ranks of the members; of those with records if no file has the members.
        are_known: Whether a file has the members.
        members: The records of the ranks with a file, by rank.
        calls: In the order of their numbers.
        messages: Of the pairs of ranks that have all their records.
    """

    name: str
    ranks: tuple[int, ...]
    are_known: bool
    members: dict[int, GroupRecords]
    calls: list[JoinedCall]
    messages: list[JoinedMessage]

    def first_seq(self) -> int:
        """Return the number of the first call that no rank has lost."""
        return max((calls[0].seq for calls in self._calls_of().values() if calls), default=0)

    def last_seqs(self) -> dict[int, int]:
        """Return the number of the last call that each rank has recorded, by rank; 0: none.

        A rank that has lost records, and has none of a collective, is not there.
        """
        return {
            rank: calls[-1].seq if calls else 0
            for rank, calls in self._calls_of().items()
            if calls or not self.members[rank].has_lost
        }

    def late(self) -> dict[tuple[int, int], tuple[int, TraceRecord]]:
        """Return the rank for which each call waited at least, with the record of that rank.

        It is the last rank of a collective that all ranks have begun, or the sender of a message
        that was received. The keys are the rank and the number of the record.
        """
        found = {}
        for call in self.calls:
            arrivals = call.arrivals()
            if len(arrivals) == len(self.ranks):
                last = max(arrivals, key=arrivals.__getitem__)
                for rank in arrivals.keys() - {last}:
                    found[rank, call.records[rank].number] = last, call.records[last]
        for message in self.messages:
            if message.send is not None and message.receive is not None:
                found[message.target, message.receive.number] = message.source, message.send
        return found

    def _calls_of(self) -> dict[int, list[TraceRecord]]:
        return {
            rank: [record for record in group.records if not record.is_message]
            for rank, group in self.members.items()
        }


def by_rank(found: Sequence[RankRecords]) -> dict[int, RankRecords]:
    """Return the records by rank.

    Raises:
        InvalidArgumentError: A rank is there twice.
    """
    ranks: dict[int, RankRecords] = {}
    for each in found:
        assert each.rank is not None
        if each.rank in ranks:
            raise InvalidArgumentError(f"there are two files of rank {each.rank}")
        ranks[each.rank] = each
    return dict(sorted(ranks.items()))


def join(ranks: Mapping[int, RankRecords]) -> list[JoinedGroup]:
    """Return the groups, each with its calls of all ranks."""
    members: dict[tuple[str, tuple[int, ...]], dict[int, GroupRecords]] = {}
    names: dict[tuple[str, tuple[int, ...]], str] = {}
    known = {(group.key, group.ranks) for each in ranks.values() for group in each.groups}
    for rank, each in ranks.items():
        for group in each.groups:
            # Groups that torch splits from another have equal keys.
            key = group.key, group.ranks or _members_of(group, rank, ranks, known)
            none = {
                each: GroupRecords(key[0], group.name, key[1]) for each in key[1] if each in ranks
            }
            members.setdefault(key, none)[rank] = group
            names[key] = group.name
    return [
        JoinedGroup(
            names[key], key[1] or tuple(found), bool(key[1]), found, _calls(found),
            list(_messages(found)),
        )
        for key, found in members.items()
    ]  # fmt: skip


def _members_of(
    group: GroupRecords,
    rank: int,
    ranks: Mapping[int, RankRecords],
    known: Set[tuple[str, tuple[int, ...]]],
) -> tuple[int, ...]:
    """Return the members of a group that one rank's file does not have; () if no file has them."""
    others = {found for key, found in known if key == group.key and rank in found}
    if group.name == DEFAULT_NAME:
        return tuple(sorted(set(ranks).union(*others)))
    return others.pop() if len(others) == 1 else ()


def shifted(ranks: Mapping[int, RankRecords], by_ns: Mapping[int, int]) -> dict[int, RankRecords]:
    """Return the records with their times moved, by rank."""

    def move(record: TraceRecord, ns: int) -> TraceRecord:
        return replace(
            record,
            enqueued_ns=record.enqueued_ns + ns,
            started_ns=None if record.started_ns is None else record.started_ns + ns,
            ended_ns=None if record.ended_ns is None else record.ended_ns + ns,
            wait_begun_ns=None if record.wait_begun_ns is None else record.wait_begun_ns + ns,
        )

    def move_all(each: RankRecords, ns: int) -> RankRecords:
        groups = [replace(g, records=[move(r, ns) for r in g.records]) for g in each.groups]
        origin = each.origin and replace(each.origin, wall_ns=each.origin.wall_ns + ns)
        return replace(each, groups=groups, origin=origin)

    return {rank: move_all(each, by_ns[rank]) for rank, each in ranks.items()}


def _calls(members: Mapping[int, GroupRecords]) -> list[JoinedCall]:
    calls: dict[tuple[int, int], JoinedCall] = {}
    for rank, group in members.items():
        parts: defaultdict[int, int] = defaultdict(int)
        for record in group.records:
            if not record.is_message:
                # NCCL gives coalesced calls one number.
                key = record.seq, parts[record.seq]
                parts[record.seq] += 1
                calls.setdefault(key, JoinedCall(record.seq, {})).records[rank] = record
    return [calls[key] for key in sorted(calls)]


def _messages(members: Mapping[int, GroupRecords]) -> Iterator[JoinedMessage]:
    """Pair messages in the order in which their ranks have made the calls.

    If a rank has lost records, its first record does not belong to the first of its peer.
    """
    streams: dict[tuple[int, int, int], tuple[list[TraceRecord], list[TraceRecord]]] = {}
    unclear: set[tuple[int, int]] = set()
    for rank, group in members.items():
        for record in group.records:
            is_send, peer = record.op == "send", record.peer
            if peer is None or peer not in members or record.op not in _PAIRED:
                continue
            ends = (rank, peer) if is_send else (peer, rank)
            if record.tag is None or (not is_send and record.outcome in _NOTHING_TAKEN):
                continue
            if group.has_lost or record.tag < 0:  # any tag
                unclear.add(ends)
            streams.setdefault((*ends, record.tag), ([], []))[0 if is_send else 1].append(record)
    for (source, target, _), (sends, receives) in streams.items():
        if (source, target) in unclear:
            continue
        for send, receive in zip_longest(sends, receives):
            if any(each and each.outcome not in _FOLLOWED for each in (send, receive)):
                break
            yield JoinedMessage(source, target, send, receive)
