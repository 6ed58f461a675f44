"""Networks of links: which links a message crosses, and what each link costs.

A `LinkSpec` is a latency and a bandwidth. A route is at most `hops` links. Links
serve in turn: a message that arrives at a busy link waits until the link is free. Networks pass
messages on in two ways. With *cut-through* the head goes on after the latency of a link while the
rest follows. With *store and forward* a link passes on the whole message.

All routes are computed for many messages at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from unisono.core.schedules.ir import BoolArray, IntArray
from unisono.errors import InvalidArgumentError

_PS_PER_NS = 1000
LONGEST_PS = 10**16
"""The longest time of a message on a link: sums of hundreds have less than 64 bits."""
_MOST_PS = 4 * 10**18


def check_sum(ps: float) -> None:
    """Check that a clock, or the time for which a link serves, has less than 64 bits.

    Raises:
        InvalidArgumentError: It has not, or sums with it would not.
    """
    if ps > _MOST_PS:
        raise InvalidArgumentError(
            f"simulate: times add up to {ps / 1e12:g} s, expected at most {_MOST_PS // 10**12} s"
        )


def whole_ps(ps: np.ndarray[Any, np.dtype[np.floating[Any]]]) -> IntArray:
    """Return times rounded to whole picoseconds.

    Raises:
        InvalidArgumentError: One is longer than `LONGEST_PS`.
    """
    if ps.size and not ps.max() <= LONGEST_PS:
        raise InvalidArgumentError(
            f"a message takes {ps.max() / 1e12:g} s on a link, expected at most "
            f"{LONGEST_PS // 10**12} s"
        )
    whole: IntArray = np.rint(ps).astype(np.int64)
    return whole


@dataclass(frozen=True)
class LinkSpec:
    """The kind of a link.

    Attributes:
        latency_ps: From the begin of a message at one end to its begin at the other end.
        gbps: Bandwidth in bytes per nanosecond, that is, 1e9 bytes per second.
        whole: Cut durations to whole nanoseconds, as ASTRA-sim does.
    """

    latency_ps: int = 0
    gbps: float = float("inf")
    whole: bool = False

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            InvalidArgumentError: The latency is negative, or the bandwidth is not above 0.
        """
        if not (self.latency_ps >= 0 and self.gbps > 0):
            raise InvalidArgumentError(
                f"a link has a latency >= 0 and a bandwidth > 0, got {self.latency_ps} ps and "
                f"{self.gbps} GB/s"
            )

    def as_tcp(self) -> LinkSpec:
        """Return the link as TCP uses it: latency * 13.01, bandwidth * 0.97 / 1.05.

        Source: SimGrid's model LV08, without the limit of TCP's window.
        """
        return LinkSpec(round(self.latency_ps * 13.01), self.gbps * 0.97 / 1.05, self.whole)

    def busy_ps(self, nbytes: IntArray) -> IntArray:
        """Return how long messages occupy the link."""
        if len(nbytes) > 1 and (nbytes == nbytes[0]).all():
            return np.full_like(nbytes, self.busy_ps(nbytes[:1])[0])
        ns = nbytes / self.gbps
        return whole_ps((np.floor(ns) if self.whole else ns) * _PS_PER_NS)


class LinkGroup(NamedTuple):
    """Links of one spec, with consecutive numbers.

    Attributes:
        name: Text in which `{}` is the place in the group.
        number: Number of links.
        spec: Their spec.
        own: Whether each link takes messages of one rank only, as their first link.
        ends: If there is a link from each of n ends to each of n ends, n; else 0.
        lanes: Messages that a link serves at the same time, each with the bandwidth of the spec.
        ample: Whether it has a lane for each message that can come, so that none ever waits.
    """

    name: str
    number: int
    spec: LinkSpec
    own: bool = False
    ends: int = 0
    lanes: int = 1
    ample: bool = False


class Network:
    """Links between ranks 0..size-1, and the routes over them.

    Attributes:
        size: Number of ranks.
        groups: The links, numbered group by group.
        first: Number of the first link of each group.
        cut_through: Whether the head of a message goes on before its tail has arrived.
        period: The network looks the same from rank r and from r + period, modulo the size.
        flips: Whether it looks the same, too, if a bit of all ranks is flipped that is not
            below the period.
    """

    flips = True

    def __init__(
        self, size: int, groups: Sequence[LinkGroup], *, cut_through: bool = True, period: int = 1
    ) -> None:
        if size < 1:
            raise InvalidArgumentError(f"a network has 1 rank or more, got {size}")
        self.size = size
        self.groups = tuple(groups)
        *first, self.links = np.cumsum([0, *(group.number for group in groups)]).tolist()
        self.first = tuple(first)
        self.cut_through = cut_through
        self.period = period

    def routes(self, source: IntArray, target: IntArray) -> IntArray:
        """Return the links of each message, int64 [messages, hops]; -1 after the last link."""
        raise NotImplementedError

    def kinds(self, links: IntArray) -> IntArray:
        """Return the group of each link; -1 for no link."""
        found = np.searchsorted(self.first, links, side="right") - 1
        return np.where(links < 0, -1, found)

    def lanes(self, links: IntArray) -> IntArray:
        """Return how many messages each link serves at the same time; 0 if none ever waits."""
        lanes = [0 if group.ample else group.lanes for group in self.groups]
        return np.array(lanes)[self.kinds(links)]

    def per_lane(self, busy: IntArray) -> IntArray:
        """Return the mean over the lanes of each link, from the sums of all links."""
        numbers = [group.number for group in self.groups]
        mean: IntArray = busy // np.repeat([group.lanes for group in self.groups], numbers)
        return mean

    def folded(self, links: IntArray, copies: int, *, flips: bool) -> IntArray:
        """Return the first image of each link under the translations of ranks by size / copies.

        Args:
            links: Numbers of links; -1 stays.
            copies: Number of translations; each must map the network on itself.
            flips: Whether translations flip bits; otherwise they add.
        """
        kinds, result = self.kinds(links), links.copy()
        for kind, (group, first) in enumerate(zip(self.groups, self.first, strict=True)):
            place = links[here := kinds == kind] - first
            if group.ends:
                step = group.ends // copies
                source, target = np.divmod(place, group.ends)
                by = source // step * step
                target = target ^ by if flips else (target - by) % group.ends
                place = (source - by) * group.ends + target
            else:
                place %= group.number // copies
            result[here] = first + place
        return result

    def costs(self, links: IntArray, nbytes: IntArray) -> tuple[IntArray, IntArray]:
        """Return the latency and the occupation of each link of each message, [messages, hops]."""
        kinds = self.kinds(links)
        latency, busy = np.zeros((2, *links.shape), np.int64)
        for kind, group in enumerate(self.groups):
            here = kinds == kind
            if here.any():
                latency[here] = group.spec.latency_ps
                duration = group.spec.busy_ps(nbytes)
                busy[here] = np.broadcast_to(duration[:, None], links.shape)[here]
        return latency, busy

    def alone(self, source: IntArray, target: IntArray, nbytes: IntArray) -> tuple[IntArray, ...]:
        """Return the latency of messages that find all links free, then the time for their bytes.

        Cut-through: sum of latencies; the time on the slowest link. Otherwise: both are sums.
        """
        links = self.routes(source, target)
        latency, busy = self.costs(links, nbytes)
        total = latency.sum(axis=1)
        return total, busy.max(axis=1) if self.cut_through else busy.sum(axis=1)

    def cuts(self) -> list[tuple[int, float]]:
        """Return groups of ranks, and the bandwidth at which all of a group send or receive."""
        raise NotImplementedError

    def link_name(self, link: int) -> str:
        """Return what a link connects."""
        kind = int(self.kinds(np.array([link]))[0])
        return self.groups[kind].name.format(link - self.first[kind])

    def group(self, link: int) -> LinkGroup:
        """Return the group of a link."""
        return self.groups[int(self.kinds(np.array([link]))[0])]


class _FlatRouting(Network):
    """Each message crosses as many links as the network has groups, one of each."""

    def alone(self, source: IntArray, target: IntArray, nbytes: IntArray) -> tuple[IntArray, ...]:
        """Return the latency and the time for the bytes of messages that find all links free."""
        spec, hops = self.groups[0].spec, len(self.groups)
        busy = spec.busy_ps(nbytes)
        latency = np.full_like(busy, hops * spec.latency_ps)
        return latency, busy if self.cut_through else hops * busy


class FullyConnected(_FlatRouting):
    """A link from each rank to each other rank."""

    def __init__(self, size: int, spec: LinkSpec, *, cut_through: bool = True) -> None:
        links = [LinkGroup("pair {}", size * size, spec, own=True, ends=size)]
        super().__init__(size, links, cut_through=cut_through)

    def cuts(self) -> list[tuple[int, float]]:
        """Return each rank with its links to all others."""
        return [(1, (self.size - 1) * self.groups[0].spec.gbps)]

    def routes(self, source: IntArray, target: IntArray) -> IntArray:
        """Return the link of each pair."""
        return (source * self.size + target)[:, None]


class Switch(_FlatRouting):
    """A link from each rank to one switch, and a link back."""

    def __init__(self, size: int, spec: LinkSpec, *, cut_through: bool = True) -> None:
        links = [
            LinkGroup("rank {} out", size, spec, own=True),
            LinkGroup("rank {} in", size, spec),
        ]
        super().__init__(size, links, cut_through=cut_through)

    def cuts(self) -> list[tuple[int, float]]:
        """Return each rank with its link."""
        return [(1, self.groups[0].spec.gbps)]

    def routes(self, source: IntArray, target: IntArray) -> IntArray:
        """Return the link up and the link down."""
        return np.stack([source, self.size + target], axis=1)


class Torus(Network):
    """A grid of `width` x `height` ranks; each row and each column is a ring both ways.

    Rank y * width + x is at (x, y). A message goes along its row, then along its column, the
    shorter way around. A ring is a torus of height 1.
    """

    flips = False

    def __init__(
        self, width: int, height: int, spec: LinkSpec, *, cut_through: bool = True
    ) -> None:
        size = width * height
        ways = ("right", "left") if height == 1 else ("right", "left", "up", "down")
        links = [LinkGroup(f"rank {{}} {way}", size, spec) for way in ways]
        period = 1 if height == 1 else width
        super().__init__(size, links, cut_through=cut_through, period=period)
        self.width, self.height = width, height

    def cuts(self) -> list[tuple[int, float]]:
        """Return each rank with its links to its neighbours."""
        return [(1, len(self.groups) * self.groups[0].spec.gbps)]

    def routes(self, source: IntArray, target: IntArray) -> IntArray:
        """Return the links along the row, then those along the column."""
        (y, x), (to_y, to_x) = divmod(source, self.width), divmod(target, self.width)
        place, right = _shorter_way(x, to_x, self.width)
        row = np.where(right, 0, self.size) + y[:, None] * self.width + place
        links = np.where(place < 0, -1, row)
        if self.height == 1:
            return links
        place, up = _shorter_way(y, to_y, self.height)
        column = np.where(up, 2 * self.size, 3 * self.size) + place * self.width + to_x[:, None]
        # A message that leaves its row early, or crosses no link of it, goes on along its column.
        column = np.where(place < 0, _SKIP, column)
        return _packed(np.concatenate([np.where(links < 0, _SKIP, links), column], axis=1))


def _shorter_way(start: IntArray, end: IntArray, length: int) -> tuple[IntArray, BoolArray]:
    """Return the places that messages leave on the shorter way around a ring, -1 after the last.

    Also return whether the way goes up, [messages, 1]; if both ways are equally long, it does.
    """
    distance = (end - start) % length
    up = 2 * distance <= length
    steps = np.where(up, distance, length - distance)[:, None]
    hop = np.arange(max(int(steps.max(initial=0)), 1))
    place = (start[:, None] + np.where(up, 1, -1)[:, None] * hop) % length
    return np.where(hop < steps, place, -1), up[:, None]


class Hosts(Network):
    """Hosts of several ranks: shared memory inside, network interfaces between them.

    Each rank has a port to the memory of its host. The ranks of a host share its interfaces. Hosts
    may stand in pods, and all hosts of a pod share its links; see `Pods`. The last host and the
    last pod may have fewer ranks.

    Args:
        size: Number of ranks.
        per_host: Ranks per host, numbered host by host.
        inside: The port of a rank.
        between: A network interface; its latency is that between hosts.
        interfaces: Network interfaces per host.
        pods: How the pods are linked; None if there is one switch.
        cut_through: As for `Network`.
        blocks: Whether neighbours share an interface. Otherwise ranks take them in turn.
    """

    def __init__(
        self,
        size: int,
        per_host: int,
        inside: LinkSpec,
        between: LinkSpec,
        *,
        interfaces: int = 1,
        pods: Pods | None = None,
        cut_through: bool = True,
        blocks: bool = False,
    ) -> None:
        if interfaces < 1 or per_host < 1:
            raise InvalidArgumentError(
                f"{size} ranks on hosts of {per_host} with {interfaces} interfaces: expected 1 "
                "rank and 1 interface or more"
            )
        hosts = -(-size // per_host)
        into = LinkSpec(0, between.gbps, between.whole)
        links = [
            LinkGroup("rank {} to memory", size, inside, own=True),
            LinkGroup("rank {} from memory", size, LinkSpec(0, inside.gbps, inside.whole)),
            LinkGroup("interface {} out", hosts * interfaces, between),
            LinkGroup("interface {} in", hosts * interfaces, into),
        ]
        period = per_host
        if pods is not None:
            links += pods.links(hosts, interfaces, between)
            # Hashed links differ from host to host.
            period = size if pods.hashed else per_host * pods.hosts
        super().__init__(size, links, cut_through=cut_through, period=period)
        self.per_host, self.interfaces, self.pods = per_host, interfaces, pods
        place = np.arange(per_host)
        self._card = place * interfaces // per_host if blocks else place % interfaces

    def routes(self, source: IntArray, target: IntArray) -> IntArray:
        """Return the ports of two ranks of a host, or the interfaces of two hosts."""
        host, to_host = source // self.per_host, target // self.per_host
        away = host != to_host
        card, to_card = (self._card[r % self.per_host] for r in (source, target))
        leave = host * self.interfaces + card
        enter = to_host * self.interfaces + to_card
        links = [
            np.where(away, self.first[2] + leave, source),
            np.where(away, self.first[3] + enter, self.size + target),
        ]
        if self.pods is not None:
            pod, to_pod = host // self.pods.hosts, to_host // self.pods.hosts
            crossed = [pod, to_pod]
            if self.pods.hashed:
                number = -(-self.size // self.per_host // self.pods.hosts)
                if self.pods.dragonfly:
                    crossed, number = [pod * number + to_pod], number * number
                # Both interfaces of a message choose its lane, as ECMP does with addresses.
                flow = (leave * self.groups[3].number + enter).astype(np.uint64) * _GOLDEN
                lanes = self.groups[4].number // number
                lane = (flow >> np.uint64(33)).astype(np.int64) % lanes
                crossed = [link * lanes + lane for link in crossed]
            crossed = [first + link for first, link in zip(self.first[4:], crossed, strict=True)]
            links[1:1] = [np.where(pod != to_pod, link, _SKIP) for link in crossed]
        return _packed(np.stack(links, axis=1))

    def alone(self, source: IntArray, target: IntArray, nbytes: IntArray) -> tuple[IntArray, ...]:
        """Return what `Network.alone` does; there are only 2 or 3 kinds of routes."""
        host, to_host = source // self.per_host, target // self.per_host
        latency, moving = self._crossing((0, 1), nbytes)
        ways = [(host != to_host, (2, 3))]
        if self.pods is not None:
            over = range(4, len(self.groups))
            ways.append((host // self.pods.hosts != to_host // self.pods.hosts, (2, *over, 3)))
        for mask, groups in ways:
            there = self._crossing(groups, nbytes)
            latency, moving = np.where(mask, there[0], latency), np.where(mask, there[1], moving)
        return latency, moving

    def cuts(self) -> list[tuple[int, float]]:
        """Return ranks, hosts and pods with their bandwidths."""
        port, card = self.groups[0].spec.gbps, self.groups[2].spec.gbps
        found = [(1, port + card), (self.per_host, self.interfaces * card)]
        if self.pods is not None:
            members = self.per_host * self.pods.hosts
            total = self.pods.hosts * self.interfaces * card / self.pods.oversubscription
            found.append((members, total))
        return found

    def _crossing(self, groups: Sequence[int], nbytes: IntArray) -> tuple[IntArray, IntArray]:
        """Return latency and time for the bytes of messages that cross a link of each group."""
        specs = [self.groups[index].spec for index in groups]
        busy = [spec.busy_ps(nbytes) for spec in specs]
        latency = np.full_like(nbytes, sum(spec.latency_ps for spec in specs))
        return latency, np.maximum.reduce(busy) if self.cut_through else np.add.reduce(busy)


@dataclass(frozen=True)
class Pods:
    """Groups of hosts with links between them.

    All links of a pod together have the bandwidth of its interfaces, divided by the
    oversubscription, and each has about that of an interface. A message takes one of them. With
    adaptive routing it takes the link that is free first: without oversubscription none is ever
    busy, so pods equal one switch. In a dragonfly it may take the links to other pods, and what
    such a detour takes from others is left out.

    Attributes:
        hosts: Hosts per pod; the last pod may have fewer.
        oversubscription: Bandwidth of the interfaces of a pod, divided by that of its links.
        latency_ps: From one pod to another, in addition.
        dragonfly: Whether each pair of pods has links of its own. It counts only if `hashed`.
        hashed: Whether the two interfaces of a message choose its link, so that messages collide
            while other links are free (ECMP; a dragonfly with minimal routes).
    """

    hosts: int
    oversubscription: float = 1.0
    latency_ps: int = 0
    dragonfly: bool = False
    hashed: bool = False

    def links(self, hosts: int, interfaces: int, between: LinkSpec) -> list[LinkGroup]:
        """Return the links between the pods.

        Raises:
            InvalidArgumentError: A pod has no host, or the oversubscription is not above 0.
        """
        if self.hosts < 1 or not self.oversubscription > 0:
            raise InvalidArgumentError(
                f"pods of {self.hosts} hosts, oversubscription {self.oversubscription:g}: expected "
                "1 host or more, and an oversubscription > 0"
            )
        pods = -(-hosts // self.hosts)
        direct = self.dragonfly and self.hashed
        share = (
            self.hosts * interfaces / self.oversubscription / (max(pods - 1, 1) if direct else 1)
        )
        lanes = max(1, round(share))
        spec = LinkSpec(self.latency_ps, between.gbps * share / lanes, between.whole)
        down = LinkSpec(0, spec.gbps, between.whole)
        if direct:
            return [LinkGroup("link {} of pairs of pods", pods * pods * lanes, spec)]
        if self.hashed:
            names = ("link {} of pods, up", "link {} of pods, down")
            return [LinkGroup(n, pods * lanes, s) for n, s in zip(names, (spec, down), strict=True)]
        up = LinkGroup("pod {} up", pods, spec, lanes=lanes, ample=self.oversubscription <= 1)
        return [up, up._replace(name="pod {} down", spec=down)]


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_SKIP = -2


def _packed(links: IntArray) -> IntArray:
    """Return routes without the links to skip."""
    if not (links == _SKIP).any():
        return links
    order = np.argsort(links == _SKIP, axis=1, kind="stable")
    return np.maximum(np.take_along_axis(links, order, axis=1), -1)
