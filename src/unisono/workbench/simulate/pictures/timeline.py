"""The messages of a schedule over time: for diagrams.

Two kinds of time. `in_rounds` needs no network: a message takes one round. `in_time` runs the
schedule in virtual time, and knows what is on the critical path and what links do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from unisono.core.schedules.ir import Op, Schedule
from unisono.core.schedules.registry import build
from unisono.errors import InvalidArgumentError, ScheduleError
from unisono.workbench.simulate.evaluators.costs import Costs
from unisono.workbench.simulate.evaluators.links import traced
from unisono.workbench.simulate.evaluators.result import Result
from unisono.workbench.simulate.evaluators.traffic import Traffic, joined
from unisono.workbench.simulate.networks import Network

# A picture does not show more messages clearly.
MOST_MESSAGES = 20_000


class TimedMessage(NamedTuple):
    """One message.

    Attributes:
        source: Sending rank.
        target: Receiving rank.
        begin: When it is sent: a round, or picoseconds.
        end: When it is there.
        stage: Stage of the schedule; -1 in the agreement before it.
        chunk: First chunk of the data; -1 if it is not known.
        nbytes: Bytes; 0 if no size is known.
        reduces: Whether the receiver reduces it.
        critical: Whether it is on the critical path.
    """

    source: int
    target: int
    begin: float
    end: float
    stage: int
    chunk: int = -1
    nbytes: int = 0
    reduces: bool = False
    critical: bool = False


class Span(NamedTuple):
    """Work of a rank, or a message on a link; `place` is the number of the rank or link."""

    place: int
    begin: float
    end: float


class FaultMark(NamedTuple):
    """Where the proof of a schedule fails.

    Attributes:
        rank: The rank, or None.
        stage: The stage; the number of stages for the result.
        text: What is wrong.
    """

    rank: int | None
    stage: int
    text: str


@dataclass(frozen=True)
class Timeline:
    """A schedule over time.

    Attributes:
        schedule: The schedule.
        messages: Sorted by begin.
        end: End of the last rank, or the number of stages.
        work: Work of ranks besides waiting for messages; empty without a network.
        service: When links carry messages; empty without a network.
        result: The simulated run; None without a network.
        fault: Where the proof fails; None for a schedule that is right.
        about: The size, the network and the like, for the title; "" without.
    """

    schedule: Schedule
    messages: tuple[TimedMessage, ...]
    end: float
    work: tuple[Span, ...] = ()
    service: tuple[Span, ...] = ()
    result: Result | None = None
    fault: FaultMark | None = None
    about: str = ""


def count_messages(schedule: Schedule) -> int:
    """Return the number of messages of a schedule; a post counts for each rank that reads it."""
    ranks, receiving = (
        np.arange(schedule.world_size),
        [Op.RECV, Op.RECV_REDUCE, Op.READ, Op.READ_REDUCE],
    )
    return sum(
        int(np.isin(schedule.steps(k, ranks)[:, 1], receiving).sum())
        for k in range(schedule.stages)
    )


def in_rounds(schedule: Schedule, error: ScheduleError | None = None) -> Timeline:
    """Return a schedule with a round as the unit of time.

    Args:
        schedule: The schedule.
        error: What its proof raised. Messages that are only sent, or only taken, are left out.
    """
    fault = None if error is None else _fault(schedule, error)
    messages = tuple(_messages(schedule))
    return Timeline(schedule, messages, float(schedule.stages), fault=fault)


def _fault(schedule: Schedule, error: ScheduleError) -> FaultMark:
    rank, step = error.context.rank, error.context.step
    stage = schedule.stages
    if rank is not None and step is not None:
        rows = [len(schedule.steps(k, np.array([rank]))) for k in range(schedule.stages)]
        stage = int(np.searchsorted(np.cumsum(rows), step, side="right"))
    return FaultMark(rank, stage, error.what)


def _messages(schedule: Schedule) -> Iterator[TimedMessage]:
    """Yield the messages; a post is one message to each rank that reads it."""
    receiving = {Op.RECV: False, Op.RECV_REDUCE: True, Op.READ: False, Op.READ_REDUCE: True}
    count = 0
    for k in range(schedule.stages):
        sent: dict[tuple[int, int], list[int]] = {}
        rows = schedule.steps(k, np.arange(schedule.world_size)).tolist()
        for rank, op, peer, _, chunk, *_ in rows:
            if op in (Op.SEND, Op.POST):
                others = [r for r in range(schedule.world_size) if r != rank]
                for target in others if peer == -1 else [peer]:
                    sent.setdefault((rank, target), []).append(chunk)
        for rank, op, peer, *_ in rows:
            if op in receiving:
                if not (chunks := sent.get((peer, rank))):
                    continue  # of a wrong schedule
                chunk = chunks.pop(0)
                _check(schedule, count := count + 1)
                yield TimedMessage(peer, rank, k, k + 1, k, chunk, reduces=receiving[Op(op)])


def in_time(
    schedule: Schedule,
    nbytes: int,
    network: Network,
    costs: Costs | None = None,
    *,
    itemsize: int = 1,
    padded: bool = False,
    contended: bool = True,
) -> Timeline:
    """Run a schedule in virtual time; the arguments are those of `simulate`.

    Raises:
        InvalidArgumentError: The network has another number of ranks, or there are more than
            `MOST_MESSAGES` messages.
    """
    p = schedule.world_size
    if network.size != p:
        raise InvalidArgumentError(f"the network has {network.size} ranks, expected {p}")
    costs = costs or Costs()
    tables = [Traffic(schedule, nbytes, itemsize, padded).all_rows()]
    if costs.agreement_bytes and p > 1:
        agreement = build("barrier", "dissemination", p)
        before = Traffic(agreement, 0, message_bytes=costs.agreement_bytes).all_rows()
        tables.insert(0, before._replace(stage=np.full_like(before.stage, -1)))
    rows = joined(tables)
    run = traced(rows, network, costs, contended=contended)
    plan, times, critical = run.messages, run.times, set(run.path)
    _check(schedule, len(plan.send))
    send, receive = rows.take(plan.send), rows.take(plan.receive)
    columns = (send.rank, receive.rank, times.sent, times.end, send.stage, send.nbytes)
    found = [
        TimedMessage(source, target, begin, end, stage, -1, size, reduces, m in critical)
        for m, (source, target, begin, end, stage, size, reduces) in enumerate(
            zip(*(np.asarray(c).tolist() for c in columns), receive.reduces.tolist(), strict=True)
        )
    ]
    # A row ends when the next row of its rank begins.
    last = np.append(rows.rank[1:] != rows.rank[:-1], True)
    ends = np.where(last, np.array(times.clock)[rows.rank], np.append(times.begin[1:], 0))
    spans = zip(rows.rank.tolist(), ends.tolist(), costs.of(rows).tolist(), strict=True)
    work = tuple(Span(rank, end - cost, end) for rank, end, cost in spans if cost)
    service: tuple[Span, ...] = ()
    if contended:
        links = plan.names[np.maximum(plan.links, 0)].tolist()
        each = zip(plan.links.tolist(), links, times.served, plan.busy.tolist(), strict=True)
        service = tuple(Span(link, t, t + busy) for at, link, t, busy in each if at >= 0 and busy)
    messages = tuple(sorted(found, key=lambda message: message.begin))
    return Timeline(schedule, messages, run.result.last_ps, work, service, run.result)


def _check(schedule: Schedule, count: int) -> None:
    if count > MOST_MESSAGES:
        raise InvalidArgumentError(
            f"{schedule.collective} ({schedule.algorithm}) on {schedule.world_size} ranks has more "
            f"than {MOST_MESSAGES:,} messages, which no picture shows",
            hint="take fewer ranks, or a smaller pipeline depth",
        )
