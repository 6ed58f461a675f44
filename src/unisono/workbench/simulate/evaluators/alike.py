"""A stage of p² messages on shared links, in which all ranks send alike.

In a reduction in the order of ranks all ranks send alike, but each receives in an order of its own.
Before it receives, its clock does not depend on that order. So the messages of such a stage arrive
as among a few ranks that stand for all; see `images`. With the times of arrival, each rank then
takes its receives, rank by rank. Later stages must be small: the events of all ranks follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from heapq import nlargest
from typing import NamedTuple

import numpy as np

from unisono.core.schedules.ir import IntArray
from unisono.workbench.simulate.evaluators import links, stages
from unisono.workbench.simulate.evaluators import symmetry as images
from unisono.workbench.simulate.evaluators.costs import Costs
from unisono.workbench.simulate.evaluators.result import CAUSES, Result
from unisono.workbench.simulate.evaluators.symmetry import Images
from unisono.workbench.simulate.evaluators.traffic import RECV, SEND, Traffic, TrafficRows, joined
from unisono.workbench.simulate.networks import Network

# The stage number of the rows of the large stage, above those of all stages before it.
_LARGE = 1 << 32


class _Head(NamedTuple):
    """The run of the followed ranks until the messages of the large stage arrive.

    Attributes:
        run: The run.
        rows: Its rows.
        first: The first row of each followed rank in the large stage.
        number: The message to each followed rank from each distance [followed, p].
        images: The translations.
    """

    run: links.Traced
    rows: TrafficRows
    first: IntArray
    number: IntArray
    images: Images


def run(parts: Sequence[Traffic], network: Network, costs: Costs) -> Result | None:
    """Evaluate schedules one after another, where links are shared.

    The result is exact on two conditions. Messages that arrive at the same time may be served in
    any order. No message of a later stage overtakes one of the large stage at a link.

    Return None for any of these reasons: The large stage is not the first of the last schedule, or
    not the only one. Ranks do not send alike. The network does not look the same from the ranks of
    each host. The followed ranks have too many rows.

    Cost: events for the rows of the followed ranks, then about 1 ms per 24,576 messages.
    """
    traffic = parts[-1]
    first, *others = (traffic.count(k) for k in range(traffic.stages))
    copies, rest = divmod(network.size, network.period)
    if not first > stages.LARGE >= sum(others) or rest or copies == 1:
        return None
    head = _head(parts, network, costs)
    taken = _taken(traffic, costs, head) if head else None
    if head is None or taken is None:
        return None
    later = [np.arange(network.size)] * (traffic.stages - 1)
    rows = traffic.rows(1, later) if later else head.rows.take(slice(0))
    tail, exact = _tail(joined([rows]), costs, head, taken[0])
    return _result(tail, head, taken[1], exact=exact)


def _head(parts: Sequence[Traffic], network: Network, costs: Costs) -> _Head | None:
    """Run the followed ranks until all messages arrive, or return None if ranks differ."""
    *before, traffic = parts
    p, followed = network.size, network.period
    own, view = np.arange(followed), Images(p, followed, False)
    tables = images.shared_rows(before, view)
    rows = traffic.rows(0, [own])
    send = rows.take(rows.kind == SEND)
    # A followed rank receives all images of its messages, in any order.
    target, kind = send.peer % followed, np.full_like(send.kind, RECV)
    receive = send._replace(rank=target, kind=kind, peer=(send.rank - send.peer + target) % p)
    large = joined([rows.take(rows.kind != RECV), receive])
    large = large._replace(stage=np.full_like(large.stage, _LARGE))
    rows = joined([*(tables or ()), large])
    few = tables is not None and len(rows.rank) <= images.SHARED_ROWS
    alike = few and np.isin(own, send.rank).all()
    traced = images.traced(rows, network, costs, view) if alike else None
    if traced is None:
        return None
    sends, number = traced.messages.send, np.full((followed, p), -1)
    chosen = np.flatnonzero(rows.stage[sends] == _LARGE)
    send = rows.take(sends[chosen])
    number[send.peer % followed, (send.peer - send.rank) % p] = chosen
    first = np.searchsorted(2 * rows.rank + (rows.stage == _LARGE), 2 * own + 1)
    return _Head(traced, rows, first, number, view)


def _taken(traffic: Traffic, costs: Costs, head: _Head) -> stages.Taken | None:
    """Execute the large stage, or return None if messages are not those of the followed ranks."""
    there = np.array(head.run.times.end)[head.number]
    sizes = head.rows.nbytes[head.run.messages.send][head.number]
    start = np.array(head.run.times.begin)[head.first]

    def arrivals(rank: int, way: IntArray, nbytes: IntArray, _: IntArray) -> IntArray | None:
        image = rank % len(start)
        return there[image][way] if (sizes[image][way] == nbytes).all() else None

    clock = np.tile(start, head.images.size // len(start))
    return stages.rank_by_rank(traffic, 0, costs, clock, arrivals)


def _tail(
    rows: TrafficRows, costs: Costs, head: _Head, clock: IntArray
) -> tuple[links.Traced, bool]:
    """Run all ranks from their clocks on, with links that are busy for the messages before.

    Also return whether all messages arrive at their links after the messages before.
    """
    network, before = head.run.result.network, head.run.messages
    place, arrival = _arrivals(head.run)
    free, last = np.full((2, len(before.names) + 1), -1)
    np.maximum.at(last, before.links[place], arrival)
    served = np.array(head.run.times.served)[place]
    ended = served + before.busy[place]
    np.maximum.at(free, before.links[place], ended)
    # The last entry is for links that no message crossed.
    messages = links.plan(rows, network)
    image = head.images.fold(network, messages.names)
    found = np.searchsorted(before.names, image)
    found[~np.isin(image, before.names)] = -1
    order = _order(head, place // before.width, arrival)
    pools = {}
    for link in np.flatnonzero(messages.lanes > 1).tolist():
        count = int(messages.lanes[link])
        times = ended[before.links[place] == found[link]]
        pools[link] = sorted(nlargest(count, [0] * count + times.tolist()))
    begin = links.Begin(clock.tolist(), free[found].tolist(), order.tolist(), pools)
    tail = links.executed(rows, messages, network, costs, begin, contended=True)
    place, arrival = _arrivals(tail)
    return tail, bool((arrival > last[found][messages.links[place]]).all())


def _arrivals(run: links.Traced) -> tuple[IntArray, IntArray]:
    """Return the places of `Plan.links` that have a link, and when messages arrive there."""
    messages, times = run.messages, run.times
    place = np.flatnonzero(messages.links >= 0)
    passed = np.array(times.served)[place - 1] + messages.step[place - 1]
    sent = np.array(times.sent, np.int64)[place // messages.width]
    return place, np.where(place % messages.width == 0, sent, passed)


def _order(head: _Head, message: IntArray, arrival: IntArray) -> IntArray:
    """Return all ranks in the order in which the events take the ranks after the head.

    Ranks whose last messages arrive at the same time go in the order of their senders, stage by
    stage. `arrival` is when each message arrives at its links, the last link last.
    """
    p, followed = head.images.size, head.images.followed
    ranks, turn = np.arange(p), np.arange(p)
    at = np.empty_like(head.run.messages.send)
    at[message] = arrival
    send = head.rows.take(head.run.messages.send)
    target, way = send.peer % followed, send.peer - send.rank
    by = np.lexsort((at, target, send.stage))
    for stage in np.split(by, np.flatnonzero(np.diff(send.stage[by])) + 1):
        last = stage[np.searchsorted(target[stage], ranks[:followed], side="right") - 1]
        last = np.tile(last, p // followed)
        turn[np.lexsort((turn[(ranks - way[last]) % p], at[last]))] = ranks
    return np.argsort(turn)


def _result(tail: links.Traced, head: _Head, source: IntArray, *, exact: bool) -> Result:
    """Return the result of both runs; the critical path goes on from the tail to the head."""
    result, before = tail.result, images.for_all(head.run.result, head.images)
    rank = result.path[0]
    image, row = rank % head.images.followed, int(head.first[rank % head.images.followed])
    if source[rank] >= 0:
        # As if the rank had waited for this message only.
        row = int(head.run.messages.receive[head.number[image, rank - source[rank]]])
        head.run.times.begin[row] = -1
    early, path = links.critical_path(head.rows, head.run.messages, head.run.times, image, row)
    parts = [ps + result.causes_ps[cause] for ps, cause in zip(early, CAUSES, strict=False)]
    busy = before.link_busy_ps
    if busy is not None and result.link_busy_ps is not None:
        busy = busy + result.link_busy_ps
    return replace(
        before, finish_ps=result.finish_ps, link_busy_ps=busy, exact=exact,
        causes_ps=dict(zip(CAUSES, (*parts, result.last_ps - sum(parts)), strict=True)),
        hops=len(path) + result.hops, messages=before.messages + result.messages,
        nbytes=before.nbytes + result.nbytes, method=f"{before.method}, then rank by rank",
    )  # fmt: skip
