"""Links that serve in turn, event by event.

A rank executes its rows in order: a send takes the rank's time and never blocks; a receive waits
for its message. A message crosses the links of its route. A link serves first come, first served:
its service begins at max(arrival, free). So a link needs no queue, only the time at which it
becomes free, if messages arrive in the order of time. A heap gives that order. A link that only
one rank sends to, as its first link, needs no heap: its messages come in the rank's own order.

Messages that arrive at the same time are served in the order in which their arrivals were
determined.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from heapq import heapreplace
from random import Random
from typing import NamedTuple

import numpy as np

from unisono.core.schedules.ir import BoolArray, IntArray
from unisono.errors import InvalidArgumentError
from unisono.workbench.simulate.evaluators.agenda import Agenda
from unisono.workbench.simulate.evaluators.costs import Costs
from unisono.workbench.simulate.evaluators.result import CAUSES, Result
from unisono.workbench.simulate.evaluators.stages import matched
from unisono.workbench.simulate.evaluators.traffic import RECV, SEND, TrafficRows, sum_of
from unisono.workbench.simulate.networks import Network, check_sum

_TAKES, _WORKS = -1, -2


class MessagePlan(NamedTuple):
    """All messages of a run; message m crosses the links at m * width, m * width + 1, ...

    Attributes:
        send: Row of the send of each message.
        receive: Row of its receive.
        latency: Sum of the latencies of its links.
        links: Number of each link among the links in use, flat; -1 after the last.
        step: From the begin of a link's service to the arrival at the next link, flat.
        busy: How long a link serves the message, flat.
        rest: From the begin of a link's service to the end of the message, if no link is busy.
        private: Whether only one rank sends to the first link.
        names: The network's numbers of the links in use.
        lanes: Messages that each link in use serves at the same time; 0: as many as come.
        width: Links per message, plus 1.
    """

    send: IntArray
    receive: IntArray
    latency: IntArray
    links: IntArray
    step: IntArray
    busy: IntArray
    rest: IntArray
    private: BoolArray
    names: IntArray
    lanes: IntArray
    width: int


def plan(rows: TrafficRows, network: Network, *, contended: bool = True) -> MessagePlan:
    """Match messages, and compute their routes and the costs of their links.

    Raises:
        InvalidArgumentError: A message has no receiver, or a receive no message.
    """
    send, into = (np.flatnonzero(rows.kind == kind) for kind in (SEND, RECV))
    source, target, nbytes = rows.rank[send], rows.peer[send], rows.nbytes[send]
    found = matched(source, target, rows.peer[into], rows.rank[into], network.size)
    if found is None:
        raise InvalidArgumentError(
            f"simulate: {len(send)} messages are sent and {len(into)} received, between other "
            "ranks or in another number"
        )
    receive = np.empty_like(send)
    receive[found] = into
    if not contended:
        # Each message has a link of its own.
        count = len(send)
        latency, moving = network.alone(source, target, nbytes)
        own = np.arange(count)
        columns = (own, latency, moving, latency + moving)
        flat = [_flat(column[:, None]) for column in columns]
        return MessagePlan._make((send, receive, latency, *flat, own == own, own, own * 0 + 1, 2))
    return on_links(rows, network, send, receive, network.routes(source, target))


def on_links(
    rows: TrafficRows, network: Network, send: IntArray, receive: IntArray, links: IntArray
) -> MessagePlan:
    """Return the plan of messages with these rows and these links, [messages, hops]."""
    # Ranks advance about stage by stage, so messages of one stage are near each other in memory.
    order = np.argsort(rows.stage[send], kind="stable")
    send, receive, links = send[order], receive[order], links[order]
    latency, busy = network.costs(links, rows.nbytes[send])
    later = latency[:, ::-1].cumsum(axis=1)[:, ::-1]
    names, number = np.unique(links, return_inverse=True)
    absent = int(len(names) > 0 and names[0] < 0)
    number = number.reshape(links.shape) - absent
    step = latency if network.cut_through else latency + busy
    flat = [_flat(column) for column in (number, step, busy, later + busy)]
    private = _private(number, rows.rank[send], len(names) - absent, network.size)
    names, width = names[absent:], links.shape[1] + 1
    columns = (send, receive, later[:, 0], *flat, private, names, network.lanes(names), width)
    return MessagePlan._make(columns)


def _flat(column: IntArray) -> IntArray:
    return np.pad(column, ((0, 0), (0, 1)), constant_values=-1).ravel()


def _private(links: IntArray, source: IntArray, used: int, ranks: int) -> BoolArray:
    """Return for which messages only their own rank sends to their first link."""
    low, high = np.full(used, ranks), np.full(used, -1)
    np.minimum.at(low, links[:, 0], source)
    np.maximum.at(high, links[:, 0], source)
    # Messages that come from another link do not arrive in the order of one rank.
    later = links[:, 1:]
    high[later[later >= 0]] = ranks
    private: BoolArray = (low == high)[links[:, 0]]
    return private


class Trace(NamedTuple):
    """The times of a run, in picoseconds.

    Attributes:
        clock: End of each rank.
        begin: Begin of each row.
        arrival: Arrival of the message of each row that receives; else -1.
        sent: When each message was sent.
        end: When each message was there.
        waited: How long each message waited for links.
        served: When each link began to serve each message, at the places of `MessagePlan.links`.
    """

    clock: list[int]
    begin: list[int]
    arrival: list[int]
    sent: list[int]
    end: list[int]
    waited: list[int]
    served: list[int]


class Begin(NamedTuple):
    """The state in which a run begins.

    Attributes:
        clock: When each rank begins.
        free: When each link in use becomes free; empty if all are free.
        order: The ranks in the order in which they take their first rows; empty if by number.
        pools: When each lane of a link in use becomes free, for links of several lanes.
        turns: Draws the order of messages that arrive at the same time; None: as determined.
    """

    clock: list[int]
    free: Sequence[int] = ()
    order: Sequence[int] = ()
    pools: Mapping[int, list[int]] = {}
    turns: Random | None = None


class Traced(NamedTuple):
    """A run with all its times.

    Attributes:
        result: The result.
        messages: The messages.
        times: The times of rows and messages.
        path: Messages of the critical path, the last first.
    """

    result: Result
    messages: MessagePlan
    times: Trace
    path: list[int]


def run(rows: TrafficRows, network: Network, costs: Costs, *, contended: bool = True) -> Result:
    """Execute the rows of all ranks; see `traced`."""
    done = traced(rows, network, costs, contended=contended)
    cost, p = costs.of(rows).tolist(), network.size

    def again(seed: int) -> int:
        """Return the end if random messages of those that arrive at one time go first."""
        turns = Random(seed)
        begin = Begin([costs.start_ps] * p, order=turns.sample(range(p), p), turns=turns)
        cores = _Cores(p, network.period, costs) if costs.cores else None
        return max(_execute(rows, done.messages, cost, begin, cores).clock)

    return replace(done.result, again=again) if contended else done.result


def traced(rows: TrafficRows, network: Network, costs: Costs, *, contended: bool = True) -> Traced:
    """Execute the rows of all ranks.

    Args:
        rows: The rows, rank by rank.
        network: The links.
        costs: The work of ranks besides messages.
        contended: Whether links serve in turn. Otherwise each message finds its links free.

    Raises:
        InvalidArgumentError: Messages do not match, or ranks wait for each other.

    Cost: O(n h log n) for n messages over h links; 1 event per link that ranks share.
    """
    messages = plan(rows, network, contended=contended)
    begin = Begin([costs.start_ps] * network.size)
    return executed(rows, messages, network, costs, begin, contended=contended)


def executed(
    rows: TrafficRows,
    messages: MessagePlan,
    network: Network,
    costs: Costs,
    begin: Begin,
    *,
    contended: bool,
) -> Traced:
    """Execute the rows of some ranks, whose messages are planned; see `traced`."""
    cost = costs.of(rows).tolist()
    cores = None
    if costs.cores:
        cores = _Cores(len(begin.clock), network.period, costs)
    trace = _execute(rows, messages, cost, begin, cores)
    check_sum(max(trace.clock))
    busy = None
    if contended:
        links, times = messages.links, messages.busy
        used = np.bincount(links[links >= 0], times[links >= 0], len(messages.names))
        check_sum(used.max(initial=0))
        busy = np.zeros(network.links, np.int64)
        busy[messages.names] = used.astype(np.int64)
        busy = network.per_lane(busy)
    finish = np.array(trace.clock, np.int64)
    last = int(np.argmax(finish))
    end = int(np.searchsorted(rows.rank, last + 1)) - 1
    parts, path = critical_path(rows, messages, trace, last, end)
    causes = dict(zip(CAUSES, (*parts, int(finish[last]) - sum(parts)), strict=True))
    passed = (*rows.rank[messages.send[path]].tolist()[::-1], last)
    result = Result(
        finish, causes, passed, len(path), len(messages.send),
        sum_of(rows.nbytes[messages.send]), busy, True, "events", network,
    )  # fmt: skip
    return Traced(result, messages, trace, path)


class _LinkState:
    """The plan and the trace of a run as lists of Python integers, and the links' state."""

    def __init__(self, rows: TrafficRows, messages: MessagePlan, start: Begin) -> None:
        columns = (messages.step, messages.busy, messages.rest)
        # Few are different. Equal tuples are one tuple, so that more of them fit into caches.
        same: dict[tuple[int, int, int], tuple[int, int, int]] = {}
        costs = zip(*(column.tolist() for column in columns), strict=True)
        self.costs = [same.setdefault(cost, cost) for cost in costs]
        self.links = messages.links.tolist()
        self.receive = messages.receive.tolist()
        self.target = rows.rank[messages.receive].tolist()
        # Per row: the message that it sends, or _TAKES, or _WORKS.
        does = np.where(rows.kind == RECV, _TAKES, _WORKS)
        does[messages.send] = np.arange(len(messages.send))
        self.does = does.tolist()
        bounds = np.searchsorted(rows.rank, np.arange(len(start.clock) + 1)).tolist()
        self.place, self.stop = bounds[:-1], bounds[1:]
        count = len(self.receive)
        begin, arrival, served = [0] * len(rows.rank), [-1] * len(rows.rank), [0] * len(self.links)
        sent, end, waited = ([0] * count for _ in range(3))
        self.trace = Trace(start.clock, begin, arrival, sent, end, waited, served)
        self.free = list(start.free) or [0] * len(messages.names)
        # Links with lanes are never free at a time of their own. Without lanes they always are.
        self.pools: dict[int, list[int]] = {}
        for link in np.flatnonzero(messages.lanes != 1).tolist():
            self.free[link] = -1
            self.pools[link] = list(start.pools.get(link, ())) or [0] * int(messages.lanes[link])
        self.agenda = Agenda(start.turns)
        self.ready = deque(start.order or range(len(start.clock)))

    def server(self) -> Callable[[int, int, int], None]:
        """Return the function by which a link serves message m that arrives at `time`."""
        links, costs, free, put = self.links, self.costs, self.free, self.agenda.put
        ready, pools = self.ready, self.pools
        receive, target, place = self.receive, self.target, self.place
        arrival, ends, waited = self.trace.arrival, self.trace.end, self.trace.waited
        served = self.trace.served

        def serve(time: int, code: int, m: int) -> None:
            link = links[code]
            step, busy, rest = costs[code]
            begun = free[link]
            if begun < 0:
                # A link with lanes: the one that is free first.
                begun = time
                if pool := pools[link]:
                    begun = max(time, pool[0])
                    waited[m] += begun - time
                    heapreplace(pool, begun + busy)
            else:
                if begun < time:
                    begun = time
                else:
                    waited[m] += begun - time
                free[link] = begun + busy
            served[code] = begun
            end = begun + rest
            if end < ends[m]:
                end = ends[m]
            ends[m] = end
            if links[code + 1] >= 0:
                put(begun + step, code + 1)
                return
            row = receive[m]
            arrival[row] = end
            if place[target[m]] == row:
                ready.append(target[m])

        return serve


class _Cores:
    """The cores of each host; a rank takes the core that is free first, first come, first served.

    Args:
        ranks: Number of ranks.
        per_host: Ranks per host.
        costs: The number of cores, and what it costs to change the rank of a core.
    """

    def __init__(self, ranks: int, per_host: int, costs: Costs) -> None:
        self.per_host, self.switch_ps, self.wake_ps = per_host, costs.switch_ps, costs.wake_ps
        # When each core becomes free, and the rank that had it last.
        self.hosts = [[(0, -1)] * costs.cores for _ in range(-(-ranks // per_host))]

    def take(self, rank: int, time: int, cost: int) -> int:
        """Work for `cost` from `time` on or later; return the end."""
        host = self.hosts[rank // self.per_host]
        free, before = host[0]
        for candidate in host:
            # A core that the rank had last needs no switch.
            if candidate[1] == rank and candidate[0] <= max(time, free):
                free, before = candidate
        end = max(time, free) + cost + (self.switch_ps if before not in (-1, rank) else 0)
        host[host.index((free, before))] = (end, rank)
        host.sort()
        return end


def _execute(
    rows: TrafficRows, messages: MessagePlan, cost: list[int], start: Begin, cores: _Cores | None
) -> Trace:
    """Advance all ranks."""
    state, clock = _LinkState(rows, messages, start), start.clock
    private, width = messages.private.tolist(), messages.width
    place, stop, ready, put = state.place, state.stop, state.ready, state.agenda.put
    serve, agenda, does = state.server(), state.agenda, state.does
    begin, arrival, sent = state.trace.begin, state.trace.arrival, state.trace.sent
    now, events = 0, iter(list[int]())
    while True:
        while ready:
            rank = ready.popleft()
            i, last, time = place[rank], stop[rank], clock[rank]
            while i < last:
                begin[i], spent = time, cost[i]
                if (m := does[i]) == _TAKES:
                    there = arrival[i]
                    if there < 0:
                        break
                    if there > time:
                        time = there
                        if cores is not None:
                            spent += cores.wake_ps
                if cores is None or not spent:
                    time += spent
                elif time > now:
                    # Ranks take cores in the order of time.
                    put(time, -1 - rank)
                    time = begin[i]
                    break
                else:
                    time = cores.take(rank, time, spent)
                if m >= 0:
                    sent[m] = time
                    if private[m]:
                        serve(time, m * width, m)
                    else:
                        put(time, m * width)
                i += 1
            place[rank], clock[rank] = i, time
        for code in events:
            if code < 0:
                ready.append(-1 - code)
            else:
                serve(now, code, code // width)
            if ready:
                break
        else:
            if not agenda.times:
                break
            now, batch = agenda.next()
            events = iter(batch)
    stuck = [rank for rank in range(len(clock)) if place[rank] < stop[rank]]
    if stuck:
        peer = int(rows.peer[place[stuck[0]]])
        raise InvalidArgumentError(
            f"simulate: {len(stuck)} ranks wait for each other; rank {stuck[0]} waits for a "
            f"message from rank {peer}"
        )
    return state.trace


def critical_path(
    rows: TrafficRows, messages: MessagePlan, trace: Trace, rank: int, row: int
) -> tuple[tuple[int, int, int], list[int]]:
    """Return what the path to a row of a rank is made of, and its messages, the last first.

    Returns:
        The times for latency, bytes and busy links; the rest is what ranks do. The messages.
    """
    received = np.full(len(rows.rank), -1)
    received[messages.receive] = np.arange(len(messages.receive))
    path: list[int] = []
    latency = moving = busy = 0
    while row >= 0 and rows.rank[row] == rank:
        m = int(received[row])
        if m < 0 or trace.arrival[row] <= trace.begin[row]:
            row -= 1
            continue
        latency += int(messages.latency[m])
        busy += trace.waited[m]
        moving += trace.end[m] - trace.sent[m] - int(messages.latency[m]) - trace.waited[m]
        row = int(messages.send[m])
        rank = int(rows.rank[row])
        path.append(m)
    return (latency, moving, busy), path
