"""What a job that has run says: times, shares, the critical path; as text, JSON and a timeline."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from unisono.workbench.replay.engine import COMPUTE, Leg, Played, critical_path, shares
from unisono.workbench.replay.job import Job

_MOST_RANKS = 16
_MOST_LEGS = 8
_US = 1e6


@dataclass(frozen=True)
class ReplayOutcome:
    """A job with its run.

    Attributes:
        name: "recorded" or "predicted".
        job: The job.
        run: Its run.
        path: The critical path.
    """

    name: str
    job: Job
    run: Played
    path: list[Leg]

    @classmethod
    def of(cls, name: str, job: Job, run: Played) -> ReplayOutcome:
        """Return the outcome, with its critical path."""
        return cls(name, job, run, critical_path(job, run))

    @property
    def total_ps(self) -> int:
        """From the begin of the first rank to the end of the last."""
        ranks = range(len(self.job.steps))
        return max(map(self.run.end_ps, ranks)) - min(self.job.start_ps)

    @property
    def step_ps(self) -> int:
        """The median training step; all of the time if no steps are known."""
        marks = self.run.marks_ps
        times = [b - a for a, b in itertools.pairwise(marks)]
        return round(median(times)) if times else self.total_ps

    def exposed_ps(self, rank: int) -> int:
        """How long a rank did nothing but wait for calls."""
        return sum(s.end_ps - s.begin_ps for s in self.run.spans[rank] if s.call != COMPUTE)

    def late_ps(self, rank: int) -> int:
        """How long of it the last rank of the call had not come."""
        late = 0
        for span in self.run.spans[rank]:
            if span.call != COMPUTE:
                came = max(self.run.begins[span.call].values())
                late += max(0, min(came, span.end_ps) - span.begin_ps)
        return late

    def share(self) -> float:
        """Return the exposed share of the time of all ranks."""
        ranks = range(len(self.job.steps))
        spent = sum(self.run.end_ps(rank) - self.job.start_ps[rank] for rank in ranks)
        return sum(map(self.exposed_ps, ranks)) / max(1, spent)


def lines(outcomes: Sequence[ReplayOutcome]) -> Iterator[str]:
    """Yield the text: all outcomes, and the groups, ranks and critical path of the last."""
    last = outcomes[-1]
    for outcome in outcomes:
        steps = max(0, len(outcome.run.marks_ps) - 1)
        each = f"step {_us(outcome.step_ps)} us (median of {steps}), " if steps else ""
        yield (
            f"{outcome.name:<10}{each}all {_us(outcome.total_ps)} us, exposed "
            f"{outcome.share():.1%}, {len(outcome.job.steps)} ranks"
        )
    first = outcomes[0]
    if len(outcomes) > 1:
        yield f"predicted / recorded: {last.step_ps / max(1, first.step_ps):.3f}"
    yield (
        f"{'group':<24}{'operation':<16}{'calls':>7}{'bytes':>15}{'us per call':>13}{'exposed':>9}"
    )
    yield from _group_lines(last)
    yield f"{'rank':<8}{'compute us':>13}{'exposed us':>13}{'for a rank':>13}{'exposed':>9}"
    order = sorted(range(len(last.job.steps)), key=last.exposed_ps)
    shown = sorted(order[: _MOST_RANKS // 2] + order[_MOST_RANKS // 2 :][-_MOST_RANKS // 2 :])
    for rank in shown:
        spent, exposed = last.run.end_ps(rank) - last.job.start_ps[rank], last.exposed_ps(rank)
        yield (
            f"{rank:<8}{_us(spent - exposed):>13}{_us(exposed):>13}{_us(last.late_ps(rank)):>13}"
            f"{exposed / max(1, spent):>9.1%}"
        )
    if len(order) > len(shown):
        yield f"# {len(order) - len(shown)} ranks between these are left out"
    yield from _path_lines(last)


def _us(ps: float) -> str:
    return f"{ps / _US:,.1f}"


def _group_lines(outcome: ReplayOutcome) -> Iterator[str]:
    for row in group_rows(outcome):
        yield (
            f"{row['group']:<24}{row['op']:<16}{row['calls']:>7}{row['bytes']:>15,}"
            f"{row['call_us']:>13,.1f}{row['exposed']:>9.1%}"
        )


def group_rows(outcome: ReplayOutcome) -> list[dict[str, Any]]:
    """Return a row per name of groups and operation, with times per call and of all ranks."""
    job, run = outcome.job, outcome.run
    calls: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    for number, call in enumerate(job.calls):
        calls[job.groups[call.group].name, call.op].append(number)
    waits: Counter[int] = Counter()
    spent = 0
    for rank, spans in enumerate(run.spans):
        spent += run.end_ps(rank) - job.start_ps[rank]
        for span in spans:
            waits[span.call] += span.end_ps - span.begin_ps
    rows = []
    for (group, op), numbers in calls.items():
        took = [
            max(run.ends[n].values()) - max(run.begins[n].values()) for n in numbers if run.ends[n]
        ]
        exposed = sum(waits[number] for number in numbers)
        rows.append(
            {
                "group": group, "op": op, "calls": len(numbers),
                "bytes": sum(job.calls[number].nbytes for number in numbers),
                "call_us": median(took) / _US if took else 0.0,
                "exposed_us": exposed / _US, "exposed": exposed / max(1, spent),
            }
        )  # fmt: skip
    return rows


def _path_lines(outcome: ReplayOutcome) -> Iterator[str]:
    total = max(1, sum(leg.end_ps - leg.begin_ps for leg in outcome.path))
    yield f"critical path: {_us(total)} us"
    names: Counter[str] = Counter()
    for (rank, call), ps in shares(outcome.path).items():
        names[_leg_name(outcome.job, rank, call)] += ps
    for name, ps in names.most_common(_MOST_LEGS):
        yield f"  {ps / total:>6.1%}  {_us(ps):>13} us  {name}"
    if len(names) > _MOST_LEGS:
        rest = total - sum(ps for _, ps in names.most_common(_MOST_LEGS))
        yield f"  {rest / total:>6.1%}  {_us(rest):>13} us  {len(names) - _MOST_LEGS} others"


def _leg_name(job: Job, rank: int, call: int) -> str:
    if call == COMPUTE:
        return f"compute of rank {rank}"
    return f"{job.calls[call].op} of group '{job.groups[job.calls[call].group].name}'"


def document(outcome: ReplayOutcome) -> dict[str, Any]:
    """Return all values of an outcome, for JSON."""
    job, run = outcome.job, outcome.run
    return {
        "name": outcome.name,
        "ranks": len(job.steps),
        "step_us": outcome.step_ps / _US,
        "steps_us": [(b - a) / _US for a, b in itertools.pairwise(run.marks_ps)],
        "total_us": outcome.total_ps / _US,
        "exposed": outcome.share(),
        "groups": group_rows(outcome),
        "per_rank": [
            {
                "rank": rank,
                "end_us": run.end_ps(rank) / _US,
                "exposed_us": outcome.exposed_ps(rank) / _US,
                "late_us": outcome.late_ps(rank) / _US,
            }
            for rank in range(len(job.steps))
        ],
        "path": [
            {
                "rank": leg.rank, "begin_us": leg.begin_ps / _US, "end_us": leg.end_ps / _US,
                "what": "compute" if leg.call == COMPUTE else job.calls[leg.call].name,
                "group": "" if leg.call == COMPUTE else job.groups[job.calls[leg.call].group].name,
            }
            for leg in outcome.path
        ],
    }  # fmt: skip


def timeline(outcome: ReplayOutcome) -> dict[str, Any]:
    """Return the run in the format of Chrome's trace viewer, which Perfetto reads.

    A process is a rank: its first row is the program, then a row per group. One process is the
    critical path.
    """
    job, run = outcome.job, outcome.run
    events: list[dict[str, Any]] = []

    def add(process: int, row: int, begin_ps: int, end_ps: int, name: str, **more: Any) -> None:
        # Perfetto drops a slice that begins before the end of the one before.
        times = {"ts": begin_ps / _US, "dur": max(0.0, (end_ps - begin_ps) / _US - 0.001)}
        events.append({"ph": "X", "pid": process, "tid": row, "name": name, "args": more} | times)

    def named(process: int, row: int, name: str) -> None:
        # Perfetto takes rows of one number for one row, also in different processes.
        events.append(
            {"ph": "M", "name": "thread_name", "pid": process, "tid": row, "args": {"name": name}}
        )

    rows, width, ranks = len(job.groups) + 1, len(job.steps), len(job.steps)
    for rank in range(ranks):
        name = {"name": f"rank {rank}"}
        events.append({"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": name})
        named(rank, width + rank * rows, "program")
        for span in run.spans[rank]:
            what = "compute" if span.call == COMPUTE else f"waits for {job.calls[span.call].name}"
            add(rank, width + rank * rows, span.begin_ps, span.end_ps, what)
    for number, call in enumerate(job.calls):
        for rank, end in run.ends[number].items():
            row, begin = width + rank * rows + 1 + call.group, run.begins[number][rank]
            last = max(run.begins[number], key=run.begins[number].__getitem__)
            add(rank, row, begin, end, call.name, bytes=call.nbytes, last_rank=last)
    for group, each in enumerate(job.groups):
        for rank in each.ranks:
            named(rank, width + rank * rows + 1 + group, each.name)
    path = {"name": "critical path"}
    events.append({"ph": "M", "name": "process_name", "pid": ranks, "tid": 0, "args": path})
    for leg in outcome.path:
        what = _leg_name(job, leg.rank, leg.call)
        add(ranks, width + ranks * rows, leg.begin_ps, leg.end_ps, what, rank=leg.rank)
    return {"traceEvents": events, "displayTimeUnit": "ns"}
