"""Run a job in virtual time, and read what bound it."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from unisono.errors import InvalidArgumentError
from unisono.workbench.replay.job import MESSAGE, Job, JobStep

COMPUTE = -1
"""In place of a call: the rank computes."""


class Pricing(Protocol):
    """Says when calls end."""

    def ends(self, call: int, begins: Mapping[int, int]) -> Mapping[int, int]:
        """Return when a collective ends on each rank, from when each begins it."""

    def sent(self, call: int, made_ps: int, asked_ps: int | None) -> int | None:
        """Return when a message has left its sender.

        None: it depends on when the receiver asks for it, of which `asked_ps` is None: not yet.
        """

    def received(self, call: int, sent_ps: int, asked_ps: int) -> int:
        """Return when a message has come, from when its ranks made the calls."""


class RankSpan(NamedTuple):
    """A part of a rank's time: it computes, or waits for a call."""

    begin_ps: int
    end_ps: int
    call: int


@dataclass(frozen=True)
class Played:
    """A job that has run; spans follow each other without gaps.

    Attributes:
        spans: Of each rank.
        begins: When each member of a call began it, after the calls of the group before it.
        ends: When it ended on each.
        made: Number of spans of the rank before it made the call.
        marks_ps: When the last call of each training step ended on rank 0.
    """

    spans: list[list[RankSpan]]
    begins: list[dict[int, int]]
    ends: list[dict[int, int]]
    made: list[dict[int, int]]
    marks_ps: list[int]

    def end_ps(self, rank: int) -> int:
        """Return when a rank ended; 0 if it did nothing."""
        return self.spans[rank][-1].end_ps if self.spans[rank] else 0


def changed(job: Job, compute: float, slow: Mapping[int, float]) -> Job:
    """Return the job with its computing times multiplied: of all ranks, and of slow ones."""

    def by(rank: int, step: JobStep) -> JobStep:
        return step._replace(gap_ps=round(step.gap_ps * compute * slow.get(rank, 1.0)))

    steps = [[by(rank, step) for step in each] for rank, each in enumerate(job.steps)]
    return replace(job, steps=steps)


def play(job: Job, pricing: Pricing) -> Played:
    """Run a job.

    Raises:
        InvalidArgumentError: Ranks wait for each other.
    """
    played = _Runner(job, pricing).run()
    calls = [job.steps[0][mark].call for mark in job.marks]
    return replace(played, marks_ps=[played.ends[call][0] for call in calls])


def before_of(job: Job) -> list[int]:
    """Return the call of the group before each call; -1: there is none, or it is a message."""
    found, last = [], dict[int, int]()
    for number, call in enumerate(job.calls):
        found.append(-1 if call.op == MESSAGE else last.get(call.group, -1))
        if call.op != MESSAGE:
            last[call.group] = number
    return found


class _Runner:
    """The ranks, each up to what it waits for.

    Calls do not compete, so no clock of the world is needed: a call ends at times that follow from
    those at which its ranks made it.
    """

    def __init__(self, job: Job, pricing: Pricing) -> None:
        n = len(job.calls)
        self._job, self._pricing = job, pricing
        self._clock, self._place = list(job.start_ps), [0] * len(job.steps)
        self._before = before_of(job)
        self._after = {before: call for call, before in enumerate(self._before) if before >= 0}
        self._clocks: list[dict[int, int]] = [{} for _ in range(n)]
        self._waiters: list[list[int]] = [[] for _ in range(n)]
        self._ready = deque(range(len(job.steps)))
        # Ranks whose step goes on after its wait.
        self._woken: set[int] = set()
        begins, ends, made = ([dict[int, int]() for _ in range(n)] for _ in range(3))
        self._played = Played([[] for _ in job.steps], begins, ends, made, [])

    def run(self) -> Played:
        """Advance all ranks to their ends."""
        while self._ready:
            self._advance(self._ready.popleft())
        for rank, place in enumerate(self._place):
            if place < len(self._job.steps[rank]):
                call = self._job.calls[self._job.steps[rank][place].call]
                group = self._job.groups[call.group].name
                raise InvalidArgumentError(
                    f"replay: rank {rank} waits for {call.name} of group '{group}' for ever: its "
                    "ranks wait for each other"
                )
        return self._played

    def _advance(self, rank: int) -> None:
        steps = self._job.steps[rank]
        while self._place[rank] < len(steps):
            step, again = steps[self._place[rank]], rank in self._woken
            if not again:
                self._until(rank, self._clock[rank] + step.gap_ps, COMPUTE)
                if step.makes:
                    self._make(rank, step.call)
            self._woken.discard(rank)
            if step.waits:
                if rank not in self._played.ends[step.call]:
                    self._waiters[step.call].append(rank)
                    return
                self._until(rank, self._played.ends[step.call][rank], step.call)
            self._place[rank] += 1

    def _until(self, rank: int, end_ps: int, call: int) -> None:
        if end_ps > self._clock[rank]:
            self._played.spans[rank].append(RankSpan(self._clock[rank], end_ps, call))
            self._clock[rank] = end_ps

    def _make(self, rank: int, call: int) -> None:
        clock = self._clocks[call][rank] = self._clock[rank]
        self._played.made[call][rank] = len(self._played.spans[rank])
        each = self._job.calls[call]
        if each.op != MESSAGE:
            self._resolve(call)
            return
        source, target = each.members
        self._played.begins[call][rank] = clock
        sent, asked = (self._clocks[call].get(end) for end in (source, target))
        if sent is None:
            return
        left = self._pricing.sent(call, sent, asked)
        if left is not None and source not in self._played.ends[call]:
            self._end(call, source, left)
        if asked is not None:
            self._end(call, target, self._pricing.received(call, sent, asked))

    def _resolve(self, call: int) -> None:
        """End a collective that all members have made, and those after it."""
        while call >= 0 and len(self._clocks[call]) == len(self._job.calls[call].members):
            before = self._before[call]
            if before >= 0 and not self._played.ends[before]:
                return
            for rank, clock in self._clocks[call].items():
                free = self._played.ends[before][rank] if before >= 0 else clock
                self._played.begins[call][rank] = max(clock, free)
            for rank, end in self._pricing.ends(call, self._played.begins[call]).items():
                self._end(call, rank, end)
            call = self._after.get(call, -1)

    def _end(self, call: int, rank: int, end_ps: int) -> None:
        self._played.ends[call][rank] = end_ps
        if rank in self._waiters[call]:
            self._waiters[call].remove(rank)
            self._woken.add(rank)
            self._ready.append(rank)


class Leg(NamedTuple):
    """A part of the critical path: a rank computes, or a call moves its data."""

    rank: int
    begin_ps: int
    end_ps: int
    call: int


def critical_path(job: Job, run: Played) -> list[Leg]:
    """Return what bound the end of the rank that ends last, the first part first.

    The legs follow each other without gaps: a call that was waited for leads to the last of its
    ranks that came before its end.
    """
    before = before_of(job)
    rank = max(range(len(run.spans)), key=run.end_ps)
    now, place, call = run.end_ps(rank), len(run.spans[rank]), COMPUTE
    legs: list[Leg] = []
    while True:
        if call == COMPUTE:
            if place == 0:
                return legs[::-1]
            place -= 1
            span = run.spans[rank][place]
            if span.call == COMPUTE:
                legs.append(Leg(rank, span.begin_ps, now, COMPUTE))
                now = span.begin_ps
                continue
            call = span.call
        begins = run.begins[call]
        came = [each for each in begins if begins[each] <= now]
        last = max(came, key=lambda each: (begins[each], each == rank))
        if now > begins[last]:
            legs.append(Leg(rank, begins[last], now, call))
        now, rank = begins[last], last
        earlier, place = before[call], run.made[call][rank]
        made = run.spans[rank][place - 1].end_ps if place else job.start_ps[rank]
        # The call before it in the group may have ended after this rank made this one.
        call = earlier if earlier >= 0 and now > made else COMPUTE


def shares(legs: list[Leg]) -> Counter[tuple[int, int]]:
    """Return the time of a critical path by (rank, `COMPUTE`), and by (-1, call)."""
    found: Counter[tuple[int, int]] = Counter()
    for leg in legs:
        found[(leg.rank, COMPUTE) if leg.call == COMPUTE else (-1, leg.call)] += (
            leg.end_ps - leg.begin_ps
        )
    return found
