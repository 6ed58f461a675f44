"""A few ranks that stand for all, where a schedule looks the same from many ranks.

A *translation* adds a number to all ranks, modulo p, or flips bits of all ranks. If it maps a
schedule and the network on themselves, a rank and its image end at the same time. A ring on uniform
links needs one rank; on hosts of L ranks it needs L. Links have images, too: a link that ranks
share serves the messages of the followed ranks in turn, as it serves their images elsewhere.

The rows of the followed ranks are compared with those of an image, in each stage a new image.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from unisono.core.schedules.ir import IntArray, is_power_of_two
from unisono.workbench.simulate.evaluators import links
from unisono.workbench.simulate.evaluators.costs import Costs
from unisono.workbench.simulate.evaluators.result import CAUSES, Result
from unisono.workbench.simulate.evaluators.stages import matched
from unisono.workbench.simulate.evaluators.traffic import (
    RECV,
    SEND,
    Traffic,
    TrafficRows,
    joined,
    sum_of,
)
from unisono.workbench.simulate.networks import Network, check_sum

# Stages and rows per table: larger tables cost memory, smaller tables cost NumPy calls.
_STAGES = 2048
_ROWS = 1 << 18
# Rows of the followed ranks that events take in a minute and 2 GiB.
SHARED_ROWS = 4_000_000
# An odd number, so that its multiples reach all images in turn.
_STRIDE = 0x9E3779B1


class Images(NamedTuple):
    """A group of translations: the ranks below `followed` stand for all `size` ranks.

    Attributes:
        size: World size.
        followed: Number of ranks to follow; a divisor of the world size.
        flips: Whether a translation flips bits; otherwise it adds.
        unordered: Whether a rank takes the receives of a stage by distance, not in their order.
            A rank may do so if a receive takes no time: it ends when the last message is there.
    """

    size: int
    followed: int
    flips: bool
    unordered: bool = False

    def back(self, ranks: IntArray, by: IntArray) -> IntArray:
        """Undo translations by multiples of `followed`; -1 stays."""
        moved = ranks ^ by if self.flips else (ranks - by) % self.size
        return np.where(ranks < 0, -1, moved)

    def way(self, source: IntArray, target: IntArray) -> IntArray:
        """Return what translations keep of a message, beside the places of its ends."""
        return source ^ target if self.flips else (target - source) % self.size

    def fold(self, network: Network, numbers: IntArray) -> IntArray:
        """Return the first image of each link."""
        return network.folded(numbers, self.size // self.followed, flips=self.flips)


def find_images(
    parts: Sequence[Traffic], network: Network, *, unordered: bool = False
) -> Images | None:
    """Return translations that map sampled stages of all parts on themselves, or None.

    A stage is compared on the images by 1, 2, 4, ... times the followed ranks, and on others.
    """
    p, followed = network.size, network.period
    if p % followed or p == followed:
        return None
    choices = [Images(p, followed, False, unordered)]
    if network.flips and is_power_of_two(p) and is_power_of_two(followed):
        choices.append(Images(p, followed, True, unordered))
    number = p // followed
    some = {0, number - 1, *(1 << j for j in range(number.bit_length() - 1))}
    some |= {_other(j, number) for j in range(32)}
    rows = max(len(part.rows(0, [np.arange(followed)]).rank) for part in parts)
    blocks = np.array(sorted(some)[: max(3, 4 * _ROWS // (rows + 1))])[:, None] * followed
    ranks = (blocks + np.arange(followed)).ravel()
    for images in choices:
        if all(
            _followed(traffic.rows(k, [ranks]), images, len(blocks)) is not None
            for traffic in parts
            for k in _sample(traffic.stages)
        ):
            return images
    return None


def _other(k: int, number: int) -> int:
    """Return a number from 1 to `number` - 1 that depends on k."""
    return 1 + k * _STRIDE % (number - 1)


def _sample(stages: int) -> list[int]:
    """Return all stages if there are few, otherwise the first, the last and some between."""
    return list(range(stages)) if stages <= 64 else [k * (stages - 1) // 31 for k in range(32)]


def _followed(rows: TrafficRows, images: Images, copies: int) -> TrafficRows | None:
    """Return the rows of the followed ranks by (stage, rank), or None if they have other images.

    Args:
        rows: Rows of the followed ranks and, in each stage, of `copies` - 1 images of them.
        images: The translations.
        copies: The number of images in each stage, the followed ranks included.
    """
    by = rows.rank // images.followed * images.followed
    turn = by if len(rows.stage) and rows.stage[0] == rows.stage[-1] else by > 0
    rows = rows._replace(rank=rows.rank - by, peer=images.back(rows.peer, by))
    keys = [rows.rank, rows.stage, turn]
    if images.unordered:
        # A rank sends first in each stage. Local work has no rows.
        rows = rows._replace(reduces=np.zeros_like(rows.reduces))
        distance = np.where(rows.kind == RECV, images.way(rows.peer, rows.rank), -1)
        keys.insert(0, distance)
    rows = rows.take(np.lexsort(keys))
    count, left = divmod(len(rows.rank), copies)
    own = rows.take(slice(count))
    for column, expected in zip(rows, own, strict=True):
        if left or (column.reshape(copies, count) != expected).any():
            return None
    return own


def _tables(traffic: Traffic, images: Images) -> Iterator[TrafficRows | None]:
    """Yield the rows of the followed ranks by (stage, rank), some stages at a time.

    Yield None, and stop, if an image of the rows of some stage is not what the schedule has.
    """
    own = np.arange(images.followed)
    number = images.size // images.followed
    stages, k = 1, 0
    while k < traffic.stages:
        some = range(k, min(k + stages, traffic.stages))
        ranks = [np.append(own, own + _other(j, number) * images.followed) for j in some]
        rows = traffic.rows(k, ranks)
        followed = _followed(rows, images, 2)
        yield followed
        if followed is None:
            return
        k += len(some)
        stages = max(1, min(_STAGES, _ROWS * len(some) // (len(rows.rank) + 1)))


class _Clocks:
    """The clocks of the followed ranks, and what is on the critical path of each."""

    def __init__(self, images: Images, network: Network, costs: Costs) -> None:
        self.images, self.network, self.costs = images, network, costs
        self.clock = [costs.start_ps] * images.followed
        # Latency, bytes and messages; tuples, because a send keeps those of its time.
        self.path = [(0, 0, 0)] * images.followed
        self.messages = self.nbytes = 0

    def advance(self, rows: TrafficRows) -> bool:
        """Execute some stages; return False if their messages do not match."""
        images, place = self.images, rows.stage - rows.stage[:1]
        # Within a stage a rank sends before it receives, so all sends of a stage may go first.
        head = np.append(True, (rows.rank[1:] != rows.rank[:-1]) | (place[1:] != place[:-1]))
        got = np.cumsum(rows.kind == RECV)
        got -= np.maximum.accumulate(np.where(head, got - (rows.kind == RECV), 0))
        order = np.argsort(2 * place + (got > 0), kind="stable")
        rows, place = rows.take(order), place[order] * images.followed
        sends, receives = (np.flatnonzero(rows.kind == kind) for kind in (SEND, RECV))
        send, receive = rows.take(sends), rows.take(receives)
        found = matched(
            place[sends] + send.rank,
            images.way(send.rank, send.peer),
            place[receives] + receive.peer % images.followed,
            images.way(receive.peer, receive.rank),
            max(images.size, int(place.max(initial=0)) + images.followed),
        )
        if found is None:
            return False
        parts = self.network.alone(send.rank, send.peer, send.nbytes)
        message = np.full(len(order), -1)
        message[sends], message[receives] = np.arange(len(sends)), found
        self._execute(rows, message, *parts)
        self.messages += len(sends)
        self.nbytes += sum_of(send.nbytes)
        return True

    def _execute(
        self, rows: TrafficRows, message: IntArray, latency: IntArray, moving: IntArray
    ) -> None:
        clock, path = self.clock, self.path
        travels, moves = latency.tolist(), moving.tolist()
        sent: list[tuple[int, tuple[int, int, int]]] = []
        columns = (rows.rank, rows.kind, message, self.costs.of(rows))
        for rank, kind, m, cost in zip(*(column.tolist() for column in columns), strict=True):
            if kind == RECV:
                begun, before = sent[m]
                if (arrival := begun + travels[m] + moves[m]) > clock[rank]:
                    clock[rank] = arrival
                    path[rank] = (before[0] + travels[m], before[1] + moves[m], before[2] + 1)
            clock[rank] += cost
            if kind == SEND:
                sent.append((clock[rank], path[rank]))


def run(parts: Sequence[Traffic], network: Network, costs: Costs, images: Images) -> Result | None:
    """Evaluate schedules one after another with the followed ranks alone.

    Return None if the schedule turns out not to look the same from all ranks.

    Cost: `Schedule.steps` and some microseconds per row of the followed ranks.
    """
    clocks = _Clocks(images, network, costs)
    for traffic in parts:
        for rows in _tables(traffic, images):
            if rows is None or not clocks.advance(rows):
                return None
    times = images.size // images.followed
    check_sum(max(clocks.clock))
    last = clocks.clock.index(max(clocks.clock))
    latency, moving, hops = clocks.path[last]
    parts_ps = (latency, moving, 0, clocks.clock[last] - latency - moving)
    return Result(
        np.tile(np.array(clocks.clock, np.int64), times), dict(zip(CAUSES, parts_ps,
        strict=True)), (), hops, clocks.messages * times, clocks.nbytes * times, None, True,
        f"stages of {images.followed} of {images.size} ranks", network,
    )  # fmt: skip


def run_shared(
    parts: Sequence[Traffic], network: Network, costs: Costs, images: Images
) -> Result | None:
    """Evaluate schedules with the followed ranks alone, event by event, where links are shared.

    A message of a followed rank crosses the images of its links among the links of the followed
    ranks. Each of these links thus serves as many messages as it serves among all ranks. Messages
    that arrive at the same time may be served in another order than among all ranks.

    Return None if the schedule turns out not to look the same from all ranks, or has too many
    rows.

    Cost: as the events, for the rows of the followed ranks.
    """
    tables = shared_rows(parts, images)
    run = traced(joined(tables), network, costs, images) if tables else None
    return for_all(run.result, images) if run else None


def shared_rows(parts: Sequence[Traffic], images: Images) -> list[TrafficRows] | None:
    """Return the rows of the followed ranks, or None if ranks differ, or if rows are too many."""
    found: list[TrafficRows] = []
    for traffic in parts:
        for table in _tables(traffic, images):
            if table is None or sum(len(each.rank) for each in found) > SHARED_ROWS:
                return None
            found.append(table)
    return found


def traced(
    rows: TrafficRows, network: Network, costs: Costs, images: Images
) -> links.Traced | None:
    """Execute the rows of the followed ranks, event by event, or return None if they do not match.

    Args:
        rows: The rows, rank by rank.
        network: The links; all of them, of which the first images are used.
        costs: The work of ranks besides messages.
        images: The translations.
    """
    sends, receives = (np.flatnonzero(rows.kind == kind) for kind in (SEND, RECV))
    send, receive = rows.take(sends), rows.take(receives)
    found = matched(
        send.rank,
        images.way(send.rank, send.peer),
        receive.peer % images.followed,
        images.way(receive.peer, receive.rank),
        images.size,
    )
    if found is None:
        return None
    into = np.empty_like(sends)
    into[found] = receives
    own = images.fold(network, network.routes(send.rank, send.peer))
    messages = links.on_links(rows, network, sends, into, own)
    begin = links.Begin([costs.start_ps] * images.followed)
    return links.executed(rows, messages, network, costs, begin, contended=True)


def for_all(result: Result, images: Images) -> Result:
    """Return the result of all ranks, from that of the followed ranks."""
    copies, network, busy = images.size // images.followed, result.network, result.link_busy_ps
    if busy is not None:
        few = network.links <= SHARED_ROWS
        busy = busy[images.fold(network, np.arange(network.links))] if few else None
    return replace(
        result, finish_ps=np.tile(result.finish_ps, copies), path=(), link_busy_ps=busy,
        messages=result.messages * copies, nbytes=result.nbytes * copies,
        method=f"events of {images.followed} of {images.size} ranks",
    )  # fmt: skip
