"""Stages: all ranks advance one stage at a time, on arrays, or a few ranks stand for all.

A message is received in the stage in which it is sent, and within a stage a rank sends before it
receives. So the times of all ranks after a stage follow from those before the stage. This equals
the events if no message waits for a link that several ranks share. Otherwise the messages of a
stage are served in the order of arrival, and before those of the next stage. That order is
approximate.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from unisono.errors import InvalidArgumentError
from unisono.schedules.ir import BoolArray, IntArray
from unisono.simulate.costs import Costs
from unisono.simulate.networks import Network
from unisono.simulate.result import CAUSES, Result
from unisono.simulate.traffic import RECV, SEND, Rows, Traffic

# Rows come as blocks in the order of ranks. Up to this number of blocks, one after another is
# faster than to sort the rows by rank.
_RUNS = 8
# Rows of a stage above which ranks advance one after another: more take about 1 GiB.
LARGE = 4_000_000


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
    """

    message: IntArray
    link: IntArray
    step: IntArray
    busy: IntArray
    rest: IntArray
    shared: BoolArray
    once: bool


class _Plan(NamedTuple):
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
        hops: The links of the messages; None without contention.
    """

    rows: Rows
    total: IntArray
    source: IntArray
    sent: IntArray
    rank: IntArray
    message: IntArray
    before: IntArray
    head: IntArray
    latency: IntArray
    moving: IntArray
    hops: Sequence[_Hop] | None = None


class _State:
    """The clocks of all ranks, and what is on the critical path of each.

    Args:
        network: The links.
        costs: The work of ranks besides messages.
        contended: Whether links serve in turn.
    """

    def __init__(self, network: Network, costs: Costs, *, contended: bool) -> None:
        p = network.size
        self.network, self.costs, self.contended = network, costs, contended
        self.clock = np.full(p, costs.start_ps, np.int64)
        # Latency, bytes, links busy and messages on the path to each rank.
        self.path = [np.zeros(p, np.int64) for _ in range(4)]
        self.free = np.zeros(network.links if contended else 0, np.int64)
        self.busy = self.free.copy()
        self.exact, self.messages, self.nbytes = True, 0, 0
        self.plan: _Plan | None = None

    def advance(self, rows: Rows) -> None:
        """Execute the rows of one stage of all ranks."""
        plan = self.plan
        if plan is None or not _equal(rows, plan.rows):
            plan = self.plan = self._planned(rows)
        if len(plan.source):
            end, parts = self._deliver(plan, self.clock[plan.source] + plan.sent)
            # As if the rank had waited for this message before its first row.
            self._wait(plan, end[plan.message] - plan.before, parts)
            self.messages += len(plan.source)
            self.nbytes += int(rows.nbytes[rows.kind == SEND].sum())
        self.clock += plan.total

    def _planned(self, rows: Rows) -> _Plan:
        """Match the messages of a stage, and compute what they cost."""
        p, network = len(self.clock), self.network
        cost = self.costs.of(rows)
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
        if not self.contended:
            latency, moving = network.alone(source, target, nbytes)
            return _Plan(*columns, latency, moving)
        links = network.routes(source, target)
        latencies, busy = network.costs(links, nbytes)
        hops = list(self._hops(links, latencies, busy))
        return _Plan(*columns, latencies.sum(axis=1), busy.max(axis=1, initial=0), hops)

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
            yield _Hop._make((here, link, *costs, ~own[self.network.kinds(link)], once))

    def _wait(self, plan: _Plan, begin: IntArray, parts: Sequence[IntArray]) -> None:
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

    def _deliver(self, plan: _Plan, at: IntArray) -> tuple[IntArray, list[IntArray]]:
        """Return when messages arrive, and their latency, bytes, waiting and number."""
        one, waited = np.ones_like(at), np.zeros_like(at)
        if plan.hops is None:
            return at + plan.latency + plan.moving, [plan.latency, plan.moving, waited, one]
        head, end = at.copy(), at.copy()
        for message, link, step, busy, rest, shared, once in plan.hops:
            arrival = head[message]
            if once:
                begin = np.maximum(arrival, self.free[link])
                self.free[link] = begin + busy
                self.busy[link] += busy
            else:
                begin = self._serve(link, arrival, busy)
            late = begin - arrival
            self.exact = self.exact and not late[shared].any()
            waited[message] += late
            end[message] = np.maximum(end[message], begin + rest)
            head[message] = begin + step
        return end, [plan.latency, end - at - plan.latency - waited, waited, one]

    def advance_each(self, traffic: Traffic, k: int) -> bool:
        """Execute a stage rank by rank, because the rows of all ranks would not fit in memory.

        All ranks must send as rank 0 does, to the same distances. So the time of a message is
        known without the rows of its sender. Return False if they do not.
        """
        p = len(self.clock)
        clock, paths = self.clock.copy(), [path.copy() for path in self.path]
        messages, nbytes = self.messages, self.nbytes
        sends, at = np.empty((0, 0), np.int64), np.full(p, -1)
        zero, one = np.zeros(p, np.int64), np.ones(p, np.int64)
        for rank in range(p):
            rows = traffic.rows(k, [np.array([rank])])
            cost = self.costs.of(rows)
            spent = np.cumsum(cost)
            send, receive = (np.flatnonzero(rows.kind == kind) for kind in (SEND, RECV))
            # Without a division, which takes several times as long.
            away, way = rows.peer[send] - rank, rank - rows.peer[receive]
            away[away < 0] += p
            way[way < 0] += p
            own = np.stack([away, spent[send]])
            if rank == 0:
                sends = own
                at[own[0]] = own[1]
            source = rows.peer[receive]
            taken = np.zeros(p, bool)
            taken[way] = True
            once = len(way) == len(send) == np.count_nonzero(taken)
            if not np.array_equal(own, sends) or not once or (at[way] < 0).any():
                return False
            target = np.full_like(source, rank)
            latency, moving = self.network.alone(source, target, rows.nbytes[receive])
            begin = self.clock[source] + at[way] + latency + moving - (spent - cost)[receive]
            if len(begin) and begin.max() > clock[rank]:
                m = int(begin.argmax())
                clock[rank] = begin[m]
                for path, old, part in zip(
                    paths, self.path, (latency, moving, zero, one), strict=True
                ):
                    path[rank] = old[source[m]] + part[m]
            clock[rank] += cost.sum()
            nbytes += int(rows.nbytes[send].sum())
            messages += len(send)
        self.clock, self.path = clock, paths
        self.messages, self.nbytes = messages, nbytes
        return True

    def _serve(self, link: IntArray, arrival: IntArray, busy: IntArray) -> IntArray:
        """Let links serve messages in the order of arrival; return when each service begins.

        begin_i = max(arrival_i, begin_{i-1} + busy_{i-1}), a running maximum of arrivals less the
        sum of what was served before.
        """
        order = np.lexsort((arrival, link))
        link, busy = link[order], busy[order]
        head = _heads(link)
        length = np.diff(np.append(head, len(link)))
        begin = np.maximum(arrival[order], np.where(_is_head(link), self.free[link], 0))
        served = np.cumsum(busy) - busy
        served -= np.repeat(served[head], length)
        begin -= served
        # One running maximum over all links: each link's numbers lie above those of the last.
        low = int(begin.min())
        span = int(begin.max()) - low + 1
        if span * len(head) >= 1 << 62:
            raise InvalidArgumentError(
                f"simulate: {len(head)} links over {span} ps are too many for one stage"
            )
        lift = np.repeat(np.arange(len(head)) * span, length)
        begin = np.maximum.accumulate(begin - low + lift) - lift + low + served
        last = head + length - 1
        self.free[link[last]] = begin[last] + busy[last]
        np.add.at(self.busy, link, busy)
        back = np.empty_like(begin)
        back[order] = begin
        return back


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
    state = _State(network, costs, contended=contended)
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
        state.busy if contended else None, state.exact, "stages", network,
    )  # fmt: skip


def _unmatched(sent: int, received: int) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"simulate: the {sent} messages of a stage do not match its {received} receives"
    )


def _equal(rows: Rows, others: Rows) -> bool:
    """Return whether two stages do the same; the number of the stage does not count."""
    pairs = zip((rows.peer, *rows[:-1]), (others.peer, *others[:-1]), strict=True)
    return all(np.array_equal(column, other) for column, other in pairs)
