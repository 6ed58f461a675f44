"""Jobs from records: of this library, and of torch's flight recorder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from unisono.core.base.text import name_ranks
from unisono.core.recorder.flight_recorder import RankRecords
from unisono.core.recorder.records import MESSAGES, TraceRecord
from unisono.errors import InvalidArgumentError
from unisono.workbench.replay.job import (
    BLOCKS,
    MESSAGE,
    OPERATIONS,
    Job,
    JobCall,
    JobGroup,
    JobStep,
    check_ranks,
    find_marks,
)
from unisono.workbench.trace.decoding import itemsize_of
from unisono.workbench.trace.joined import JoinedCall, JoinedGroup, begin_of

# Names of operations without "_", in small letters; the longest that begins a name counts.
_STARTS = {"allreducebarrier": "barrier"} | {op.replace("_", ""): op for op in OPERATIONS}
_PS = 1000
# In place of a time: nobody has waited for the call.
_NEVER = -1


class _CallEvent(NamedTuple):
    """A call of a rank: when it was made, ended, and waited for (None: not known; or `_NEVER`)."""

    begin_ps: int
    end_ps: int
    wait_ps: int | None
    call: int


def op_of(name: str) -> str:
    """Return the operation with schedules that a name of torch or of this library stands for."""
    plain = name.lower().replace("_", "")
    starts = sorted(_STARTS, key=len, reverse=True)
    return next((_STARTS[start] for start in starts if plain.startswith(start)), name)


def job_of(ranks: Mapping[int, RankRecords], groups: Sequence[JoinedGroup]) -> Job:
    """Return the job that ranks have recorded.

    Args:
        ranks: With times on one axis.
        groups: Of `join`, with these ranks.

    Raises:
        InvalidArgumentError: The file of a rank is missing, ranks made different calls, or there
            are no calls.
    """
    check_ranks(ranks, {rank for group in groups for rank in group.ranks})
    builder = _Builder(ranks)
    for group in groups:
        builder.add_group(group)
    return builder.job()


class _Builder:
    def __init__(self, ranks: Mapping[int, RankRecords]) -> None:
        self._foreign = {rank for rank, each in ranks.items() if each.origin is None}
        self._events: dict[int, list[_CallEvent]] = {rank: [] for rank in ranks}
        self._keys: dict[int, tuple[object, ...]] = {}
        self._groups: list[JobGroup] = []
        self._calls: list[JobCall] = []
        self._left_out: Counter[str] = Counter()
        self._endless = False

    def add_group(self, group: JoinedGroup) -> None:
        number = len(self._groups)
        self._groups.append(JobGroup(group.name, group.ranks))
        whole = [call for call in group.calls if self._is_whole(call, group)]
        for call in _between(group.calls, whole):
            absent = sorted(set(group.ranks) - set(call.records))
            first = next(iter(call.records.values()))
            raise InvalidArgumentError(
                f"replay: group '{group.name}': {first.op} #{call.seq} has not ended on "
                f"{name_ranks(absent or sorted(call.records))}, but a later call has"
            )
        lost = Counter(next(iter(call.records.values())).op for call in group.calls)
        self._left_out += lost - Counter(next(iter(c.records.values())).op for c in whole)
        for call in whole:
            self._add(number, group, call)
        for message in group.messages:
            send, receive = message.send, message.receive
            if message.source == message.target:  # no communication
                continue
            if send and receive and send.ended_ns and receive.ended_ns:
                found = {message.source: send, message.target: receive}
                self._put(number, MESSAGE, f"send #{send.seq}", send.nbytes, found)
        paired = sum(call.op == MESSAGE and call.group == number for call in self._calls)
        others = [r.op for m in group.members.values() for r in m.records if r.op in MESSAGES]
        if len(others) > 2 * paired:
            self._left_out["message"] += len(others) - 2 * paired

    def _is_whole(self, call: JoinedCall, group: JoinedGroup) -> bool:
        records = call.records.values()
        ended = all(record.outcome in ("completed", "ended") for record in records)
        return ended and set(call.records) == set(group.ranks)

    def _add(self, number: int, group: JoinedGroup, call: JoinedCall) -> None:
        found = {rank: call.records[rank] for rank in group.ranks}
        ops = {rank: op_of(record.op) for rank, record in found.items()}
        first = group.ranks[0]
        for rank, op in ops.items():
            if op != ops[first]:
                raise InvalidArgumentError(
                    f"replay: group '{group.name}': call #{call.seq} is {found[first].op} on rank "
                    f"{first} and {found[rank].op} on rank {rank}"
                )
        sizes = [record.nbytes for record in found.values()]
        blocks = ops[first] in BLOCKS
        # torch's files have the size of the input, which has all blocks in these operations.
        whole = first in self._foreign and ops[first] in ("reduce_scatter", "scatter", "all_to_all")
        nbytes = sum(sizes) if blocks and not whole else max(sizes)
        # new_group and the like move no data of the caller: their ranks meet.
        op = ops[first] if nbytes or ops[first] in OPERATIONS else "barrier"
        self._put(number, op, f"{found[first].op} #{call.seq}", nbytes, found)

    def _put(
        self, group: int, op: str, name: str, nbytes: int, found: Mapping[int, TraceRecord]
    ) -> None:
        begins = {rank: self._begin(rank, record) * _PS for rank, record in found.items()}
        last, ends = max(begins.values()), {}
        for rank, record in found.items():
            if record.ended_ns is None:
                self._endless = True
            ends[rank] = last if record.ended_ns is None else record.ended_ns * _PS
            ends[rank] = max(ends[rank], begins[rank])
        rank, first = next(iter(found.items()))
        # torch's files have the count of one tensor, and the bytes of all.
        is_foreign = rank in self._foreign
        item = itemsize_of(first.dtype) if is_foreign else first.nbytes // max(1, first.count)
        call = len(self._calls)
        self._calls.append(
            JobCall(
                name, op, group, tuple(found), nbytes - nbytes % max(1, item), max(1, item),
                first.algorithm, begins, ends,
            )
        )  # fmt: skip
        self._keys[call] = group, op, nbytes, first.file, first.line
        for rank, record in found.items():
            wait = None if record.wait_begun_ns is None else record.wait_begun_ns * _PS
            if wait is None and op != MESSAGE and rank not in self._foreign:
                wait = _NEVER
            self._events[rank].append(_CallEvent(begins[rank], ends[rank], wait, call))

    def _begin(self, rank: int, record: TraceRecord) -> int:
        # A call of NCCL is made long before the GPU begins it.
        return begin_of(record) if rank in self._foreign else record.enqueued_ns

    def job(self) -> Job:
        if not self._calls:
            raise InvalidArgumentError("replay: no call has ended on all ranks of its group")
        zero = min(min(call.begins_ps.values()) for call in self._calls)
        calls = [
            replace(
                each, begins_ps={r: t - zero for r, t in each.begins_ps.items()},
                ends_ps={r: t - zero for r, t in each.ends_ps.items()},
            )
            for each in self._calls
        ]  # fmt: skip
        steps, starts = [], []
        for _, events in sorted(self._events.items()):
            points = sorted(_points(sorted(events, key=lambda e: (e.begin_ps, e.end_ps, e.call))))
            starts.append(points[0][0] - zero if points else 0)
            steps.append(list(_steps(points)))
        keys = [self._keys[step.call] for step in steps[0] if step.makes]
        made = [at for at, step in enumerate(steps[0]) if step.makes]
        return Job(
            self._groups, calls, steps, starts, [made[at] for at in find_marks(keys)],
            list(self._notes()),
        )  # fmt: skip

    def _notes(self) -> Iterator[str]:
        for op, number in sorted(self._left_out.items()):
            if number:
                yield f"left out, its time counts as compute: {op} ({number})"
        if self._endless:
            yield "the files have no ends of calls: the time of calls counts as compute"


def _between(calls: list[JoinedCall], whole: list[JoinedCall]) -> Iterator[JoinedCall]:
    """Yield the calls between whole ones that are not whole."""
    places = {id(call): place for place, call in enumerate(calls)}
    known = {places[id(call)] for call in whole}
    yield from (
        calls[at] for at in range(min(known, default=0), max(known, default=0)) if at not in known
    )


_ThreadPoint = tuple[int, int, int, bool, bool]
"""Time, then the end of the call, its number, and whether the rank makes it and waits for it."""


def _points(events: Sequence[_CallEvent]) -> Iterator[_ThreadPoint]:
    """Yield what the thread of a rank does.

    Where nothing says when it waited, a call in which it made another is taken for asynchronous,
    and the next thing after its end for the wait. All other calls block.
    """
    begins = [event.begin_ps for event in events]
    for place, (begin, end, wait, call) in enumerate(events):
        later = begins[place + 1 :]
        if wait is None and later and later[0] < end:
            wait = next((other for other in later if other >= end), end)
            # Before what is done then.
            wait = max(end, wait - 1)
        if wait == _NEVER:
            yield begin, begin, call, True, False
        elif wait is None or wait <= begin:
            yield begin, end, call, True, True
        else:
            yield begin, begin, call, True, False
            yield wait, max(wait, end), call, False, True


def _steps(points: Sequence[_ThreadPoint]) -> Iterator[JobStep]:
    free = points[0][0] if points else 0
    for begin, end, call, makes, waits in points:
        yield JobStep(max(0, begin - free), call, makes, waits)
        free = max(free, end)
