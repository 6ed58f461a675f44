"""Stages: all ranks advance one stage at a time, on arrays, or a few ranks stand for all.

A message is received in the stage in which it is sent, and within a stage a rank sends before it
receives. So the times of all ranks after a stage follow from those before the stage. This equals
the events if no message waits for a link that several ranks share. Otherwise the messages of a
stage are served in the order of arrival, and before those of the next stage. That order is
approximate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from unisono.core.schedules.ir import BoolArray, IntArray
from unisono.errors import InvalidArgumentError
from unisono.workbench.simulate.evaluators.costs import Costs
from unisono.workbench.simulate.evaluators.result import CAUSES, Result
from unisono.workbench.simulate.evaluators.traffic import (
    RECV,
    SEND,
    Traffic,
    TrafficRows,
    sum_of,
)
from unisono.workbench.simulate.networks import Network, check_sum

# Rows come as blocks in the order of ranks. Up to this number of blocks, one after another is
# faster than to sort the rows by rank.
_RUNS = 8
# Rows of a stage above which ranks advance one after another: more take about 1 GiB.
LARGE = 4_000_000
# See `rank_by_rank`.
Arrivals = Callable[[int, IntArray, IntArray, IntArray], IntArray | None]
Taken = tuple[IntArray, IntArray, IntArray]


class _Hop(NamedTuple):
    """The n-th links of the messages that cross n links or more.

    Attributes:
        message: Number of each message.
        link: Its link.
        step: From the begin of the link's service to the arrival at the next link.
        busy: How long the link serves the message.
        rest: From the begin of the link's service to the end of the message, if no link is busy.
        shared: Whether the link takes messages of several ranks.
        once: Whether no link serves two of these messages.
        lanes: How many messages the link serves at the same time; None if each link serves one.
    """

    message: IntArray
    link: IntArray
    step: IntArray
    busy: IntArray
    rest: IntArray
    shared: BoolArray
    once: bool
    lanes: IntArray | None


class _StagePlan(NamedTuple):
    """The part of a stage that follows from its rows alone, so that equal stages share it.

    Attributes:
        rows: The rows.
        total: Time that each rank spends on its rows [p].
        source: The rank that sends each message.
        sent: Time that this rank has spent when the message goes.
        rank: The rank of each receive, sorted.
        message: The message of each receive.
        before: Time that the rank has spent before each receive.
        head: The first receive of each rank.
        latency: Latency of each message.
        moving: Time of each message for its bytes, on free links.
        most: Time by which this stage moves the last clock at most.
        hops: The links of the messages; None without contention.
    """

    rows: TrafficRows
    total: IntArray
    source: IntArray
    sent: IntArray
    rank: IntArray
    message: IntArray
    before: IntArray
    head: IntArray
    latency: IntArray
    moving: IntArray
    most: float
    hops: Sequence[_Hop] | None = None


class _StageState:
    """The clocks of all ranks, and what is on the critical path of each.

    Args:
        network: The links.
        costs: The work of ranks besides messages.
        contended: Whether links serve in turn.
    """

    def __init__(self, network: Network, costs: Costs, *, contended: bool) -> None:
        p = network.size
        self.network, self.costs = network, costs
        self.clock = np.full(p, costs.start_ps, np.int64)
        # Latency, sending, busy and messages on the path to each rank.
        self.path = [np.zeros(p, np.int64) for _ in range(4)]
        # Without contention of no links.
        self.busy = np.zeros(network.links if contended else 0, np.int64)
        lanes = np.maximum(network.lanes(np.arange(len(self.busy))), 1)
        # The first lane of each link, and the link of each lane.
        self.lanes = np.cumsum(lanes) - lanes, np.repeat(np.arange(len(lanes)), lanes)
        self.free = np.zeros(len(self.lanes[1]), np.int64)
        self.exact, self.messages, self.nbytes = True, 0, 0
        self.plan: _StagePlan | None = None
        # Of all clocks and links, at most.
        self.most = float(costs.start_ps)

    def advance(self, rows: TrafficRows) -> None:
        """Execute the rows of one stage of all ranks."""
        plan = self.plan
        if plan is None or not _equal(rows, plan.rows):
            plan = self.plan = self._planned(rows)
        self.most += plan.most
        check_sum(self.most)
        if len(plan.source):
            end, parts = self._deliver(plan, self.clock[plan.source] + plan.sent)
            # As if the rank had waited for this message before its first row.
            self._wait(plan, end[plan.message] - plan.before, parts)
            self.messages += len(plan.source)
            self.nbytes += sum_of(rows.nbytes[rows.kind == SEND])
        self.clock += plan.total

    def _planned(self, rows: TrafficRows) -> _StagePlan:
        """Match the messages of a stage, and compute what they cost."""
        p, network = len(self.clock), self.network
        cost = self.costs.of(rows)
        most = np.bincount(rows.rank, cost, p).max()
        spent, total = _spent(rows.rank, cost, p)
        send, receive = (np.flatnonzero(rows.kind == kind) for kind in (SEND, RECV))
        source, target, nbytes = rows.rank[send], rows.peer[send], rows.nbytes[send]
        rank, before = rows.rank[receive], (spent - cost)[receive]
        found = matched(source, target, rows.peer[receive], rank, p)
        if found is None:
            raise _unmatched(len(send), len(receive))
        if (rank[1:] < rank[:-1]).any():
            order = np.argsort(rank, kind="stable")
            rank, found, before = rank[order], found[order], before[order]
        columns = (rows, total, source, spent[send], rank, found, before, _heads(rank))
        if not len(self.busy):
            latency, moving = network.alone(source, target, nbytes)
            most += (latency + moving).max(initial=0)
            return _StagePlan(*columns, latency, moving, most)
        links = network.routes(source, target)
        latencies, busy = network.costs(links, nbytes)
        hops = list(self._hops(links, latencies, busy))
        latency = latencies.sum(axis=1)
        most += latency.max(initial=0) + sum(_longest(hop) for hop in hops)
        return _StagePlan(*columns, latency, busy.max(axis=1, initial=0), most, hops)

    def _hops(self, links: IntArray, latency: IntArray, busy: IntArray) -> Iterator[_Hop]:
        """Yield the links of messages, hop by hop; all arrays are [messages, hops]."""
        rest = latency[:, ::-1].cumsum(axis=1)[:, ::-1] + busy
        step = latency if self.network.cut_through else latency + busy
        own = np.array([group.own for group in self.network.groups])
        for hop in range(links.shape[1]):
            here = np.flatnonzero(links[:, hop] >= 0)
            link = links[here, hop]
            once = len(np.unique(link)) == len(link)
            costs = [column[here, hop] for column in (step, busy, rest)]
            lanes = self.network.lanes(link)
            several = lanes if (lanes != 1).any() else None
            shared = ~own[self.network.kinds(link)]
            yield _Hop._make((here, link, *costs, shared, once, several))

    def _wait(self, plan: _StagePlan, begin: IntArray, parts: Sequence[IntArray]) -> None:
        """Set the clock of each rank to the latest `begin` of its receives, if it is later."""
        head, rank = plan.head, plan.rank
        if len(head) < len(rank):
            best = np.maximum.reduceat(begin, head)
            hits = np.flatnonzero(begin == np.repeat(best, np.diff(np.append(head, len(rank)))))
            head = hits[np.searchsorted(hits, head)]
        later = head[begin[head] > self.clock[rank[head]]]
        who, m = rank[later], plan.message[later]
        before = plan.source[m]
        for path, part in zip(self.path, parts, strict=True):
            path[who] = path[before] + part[m]
        self.clock[who] = begin[later]

    def _deliver(self, plan: _StagePlan, at: IntArray) -> tuple[IntArray, list[IntArray]]:
        """Return when messages arrive, and their latency, bytes, waiting and number."""
        one, waited = np.ones_like(at), np.zeros_like(at)
        if plan.hops is None:
            return at + plan.latency + plan.moving, [plan.latency, plan.moving, waited, one]
        head, end = at.copy(), at.copy()
        for message, link, step, busy, rest, shared, once, lanes in plan.hops:
            arrival = head[message]
            if lanes is not None:
                begin = self._in_lanes(link, arrival, busy, lanes)
            elif once:
                lane = self.lanes[0][link]
                begin = np.maximum(arrival, self.free[lane])
                self.free[lane] = begin + busy
                self.busy[link] += busy
            else:
                begin = self._serve(self.lanes[0][link], arrival, busy)
            late = begin - arrival
            self.exact = self.exact and not late[shared].any()
            waited[message] += late
            end[message] = np.maximum(end[message], begin + rest)
            head[message] = begin + step
        return end, [plan.latency, end - at - plan.latency - waited, waited, one]

    def advance_each(self, traffic: Traffic, k: int) -> bool:
        """Execute a stage with `rank_by_rank`; return False if not all ranks send alike."""
        p, network = len(self.clock), self.network
        period = network.period if p % network.period == 0 else p

        def travel(rank: int, way: IntArray, nbytes: IntArray) -> IntArray:
            latency, moving = network.alone((rank - way) % p, np.full_like(way, rank), nbytes)
            return latency + moving

        # From ranks that are a period apart the network looks the same.
        @lru_cache(maxsize=256)
        def equal(rank: int, nbytes: int) -> IntArray:
            return travel(rank, np.arange(p), np.full(p, nbytes))

        def arrivals(rank: int, way: IntArray, nbytes: IntArray, sent: IntArray) -> IntArray:
            self.messages += len(way)
            self.nbytes += sum_of(nbytes)
            one = int(nbytes[0])
            same = (nbytes == one).all()
            time = equal(rank % period, one)[way] if same else travel(rank, way, nbytes)
            return self.clock[rank - way] + sent[way] + time

        taken = rank_by_rank(traffic, k, self.costs, self.clock, arrivals)
        if taken is None:
            return False
        self.clock, source, size = taken
        self.most = float(self.clock.max())
        later = np.flatnonzero(source >= 0)
        before = source[later]
        zero, one = np.zeros_like(later), np.ones_like(later)
        parts = (*network.alone(before, later, size[later]), zero, one)
        for path, part in zip(self.path, parts, strict=True):
            path[later] = path[before] + part
        return True

    def _in_lanes(
        self, link: IntArray, arrival: IntArray, busy: IntArray, lanes: IntArray
    ) -> IntArray:
        """Let each message take a lane of its link; return when each service begins.

        Messages take the lanes in turn, by arrival, the lane first that is free first. So each
        takes the lane that is free first if all are equally large.
        """
        begin, waits = arrival.copy(), np.flatnonzero(lanes > 0)
        np.add.at(self.busy, link[lanes == 0], busy[lanes == 0])
        if len(waits):
            waits = waits[np.lexsort((arrival[waits], link[waits]))]
            link, lanes = link[waits], lanes[waits]
            head = _heads(link)
            turn = np.arange(len(link)) - np.repeat(head, np.diff(np.append(head, len(link))))
            by_time = np.lexsort((self.free, self.lanes[1]))
            lane = by_time[self.lanes[0][link] + turn % lanes]
            begin[waits] = self._serve(lane, arrival[waits], busy[waits])
        return begin

    def _serve(self, lane: IntArray, arrival: IntArray, busy: IntArray) -> IntArray:
        """Let lanes serve messages in the order of arrival; return when each service begins.

        begin_i = max(arrival_i, begin_{i-1} + busy_{i-1}), a running maximum of arrivals less the
        sum of what was served before.
        """
        order = np.lexsort((arrival, lane))
        lane, busy = lane[order], busy[order]
        head = _heads(lane)
        length = np.diff(np.append(head, len(lane)))
        begin = np.maximum(arrival[order], np.where(_is_head(lane), self.free[lane], 0))
        served = np.cumsum(busy) - busy
        served -= np.repeat(served[head], length)
        begin -= served
        # One running maximum over all lanes: the numbers of each lie above those of the last.
        low = int(begin.min())
        span = int(begin.max()) - low + 1
        if span * len(head) >= 1 << 62:
            raise InvalidArgumentError(
                f"simulate: {len(head)} links over {span} ps are too many for one stage"
            )
        lift = np.repeat(np.arange(len(head)) * span, length)
        begin = np.maximum.accumulate(begin - low + lift) - lift + low + served
        last = head + length - 1
        self.free[lane[last]] = begin[last] + busy[last]
        np.add.at(self.busy, self.lanes[1][lane], busy)
        back = np.empty_like(begin)
        back[order] = begin
        return back


def _longest(hop: _Hop) -> float:
    """Return the longest time for which a link serves messages of a stage."""
    if hop.once or not len(hop.link):
        return float(hop.busy.max(initial=0))
    order = np.argsort(hop.link)
    return float(np.add.reduceat(hop.busy[order].astype(float), _heads(hop.link[order])).max())


def rank_by_rank(
    traffic: Traffic, k: int, costs: Costs, start: IntArray, arrivals: Arrivals
) -> Taken | None:
    """Execute a stage with the rows of one rank at a time in memory.

    All ranks must send as rank 0 does, one message to each of the same distances. So the time of a
    message is known without the rows of its sender.

    Args:
        traffic: The schedule.
        k: The stage.
        costs: The work of ranks besides messages.
        start: When each rank begins.
        arrivals: Returns when the messages to a rank arrive, or None to stop. For each message it
            takes the distance from the sender, or that less p, and the bytes. The last argument
            is what a sender has spent when its message to each distance goes [p].

    Returns:
        When each rank ends, and the sender and the bytes of the message for which it waited last,
        or -1 [p each]. None if not all ranks send alike.
    """
    p = len(start)
    distance, sent, first = np.arange(p), np.full(p, -1), np.empty(0, np.int64)
    clock, (source, size) = start.copy(), np.full((2, p), -1)
    for rank in range(p):
        rows = traffic.rows(k, [distance[rank : rank + 1]])
        cost = costs.of(rows)
        check_sum(2 * cost.sum(dtype=float))
        spent = np.cumsum(cost)
        send, receive = (_places(rows.kind == kind) for kind in (SEND, RECV))
        # A negative index counts from the end. A division would take several times as long.
        away, way = distance[rows.peer[send] - rank], rank - rows.peer[receive]
        nbytes = rows.nbytes[receive]
        if rank == 0:
            first, sent[away] = away, spent[send]
        left = sent >= 0
        alike = bool(len(way) == len(away) == np.count_nonzero(left) > 0)
        left[way] = False
        alike &= np.array_equal(away, first) and np.array_equal(spent[send], sent[away])
        there = arrivals(rank, way, nbytes, sent) if alike and not left.any() else None
        if there is None:
            return None
        begin = there - (spent[receive] - cost[receive])
        if (latest := begin.max()) > clock[rank]:
            clock[rank], m = latest, int(begin.argmax())
            source[rank], size[rank] = rank - way[m], nbytes[m]
        clock[rank] += spent[-1]
    check_sum(clock.max())
    return clock, source, size


def _places(chosen: BoolArray) -> IntArray | slice:
    """Return the indices of the entries that are true; a slice, which is faster, if it is one."""
    first, number = int(chosen.argmax()) if len(chosen) else 0, np.count_nonzero(chosen)
    run = slice(first, first + number)
    return run if chosen[run].all() else np.flatnonzero(chosen)


def _spent(rank: IntArray, cost: IntArray, p: int) -> tuple[IntArray, IntArray]:
    """Return what the rank of each row has spent when the row ends, and each rank's total."""
    total = np.zeros(p, np.int64)
    if not cost.any():
        return cost, total
    cuts = np.flatnonzero(rank[1:] <= rank[:-1]) + 1
    if len(cuts) > _RUNS:
        order = np.argsort(rank, kind="stable")
        sums, head = np.cumsum(cost[order]), _heads(rank[order])
        last = np.append(head[1:], len(rank)) - 1
        sums -= np.repeat(sums[head] - cost[order[head]], last - head + 1)
        total[rank[order[head]]] = sums[last]
        spent = np.empty_like(cost)
        spent[order] = sums
        return spent, total
    spent = cost.copy()
    for low, high in pairwise([0, *cuts.tolist(), len(rank)]):
        total[rank[low:high]] += cost[low:high]
        spent[low:high] = total[rank[low:high]]
    return spent, total


def _is_head(values: IntArray) -> BoolArray:
    """Return which entries of a sorted array differ from the entry before."""
    return np.append(True, values[1:] != values[:-1])


def _heads(values: IntArray) -> IntArray:
    return np.flatnonzero(_is_head(values))


def matched(
    source: IntArray, target: IntArray, from_: IntArray, to: IntArray, p: int
) -> IntArray | None:
    """Return for each receive the number of its message, first in, first out.

    Return None if a message has no receiver, or a receive no message.

    Args:
        source: The rank of each send.
        target: The peer of each send.
        from_: The peer of each receive.
        to: The rank of each receive.
        p: A number above all of them.
    """
    if len(source) == len(from_):
        number = np.full(p, -1)
        number[source] = np.arange(len(source))
        found = number[from_]
        alone = len(source) <= p and (number[source] == np.arange(len(source))).all()
        if alone and (found >= 0).all() and (target[found] == to).all():
            return found
        sent, received = source * p + target, from_ * p + to
        out, into = np.argsort(sent, kind="stable"), np.argsort(received, kind="stable")
        if (sent[out] == received[into]).all():
            found = np.empty_like(out)
            found[into] = out
            return found
    return None


def run(
    parts: Sequence[Traffic],
    network: Network,
    costs: Costs,
    *,
    contended: bool = True,
    large: bool = False,
) -> Result | None:
    """Evaluate schedules one after another, stage by stage, with all ranks.

    Args:
        parts: The schedules.
        network: The links.
        costs: The work of ranks besides messages.
        contended: Whether links serve in turn.
        large: Whether some stages have more rows than `LARGE`. Return None if such a stage is not
            without contention, or if ranks send in different ways.

    Raises:
        InvalidArgumentError: Messages and receives of a stage do not match.

    Cost: about 20 NumPy operations per stage on arrays of its rows.
    """
    state = _StageState(network, costs, contended=contended)
    ranks = np.arange(network.size)
    for traffic in parts:
        for k in range(traffic.stages):
            if not large or traffic.count(k) <= LARGE:
                state.advance(traffic.rows(k, [ranks]))
            elif contended or not state.advance_each(traffic, k):
                return None
    last = int(np.argmax(state.clock))
    latency, moving, busy, hops = (int(path[last]) for path in state.path)
    ends = int(state.clock[last]) - latency - moving - busy
    causes = dict(zip(CAUSES, (latency, moving, busy, ends), strict=True))
    return Result(
        state.clock, causes, (), hops, state.messages, state.nbytes,
        network.per_lane(state.busy) if contended else None, state.exact, "stages", network,
    )  # fmt: skip


def _unmatched(sent: int, received: int) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"simulate: the {sent} messages of a stage do not match its {received} receives"
    )


def _equal(rows: TrafficRows, others: TrafficRows) -> bool:
    """Return whether two stages do the same; the number of the stage does not count."""
    pairs = zip((rows.peer, *rows[:-1]), (others.peer, *others[:-1]), strict=True)
    return all(np.array_equal(column, other) for column, other in pairs)
