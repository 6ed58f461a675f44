"""The examination of a job's hosts: they meet in a store, and probe each other in rounds."""

from __future__ import annotations

import contextlib
import re
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from unisono.core.base import document
from unisono.core.base.deadline import Deadline
from unisono.core.rendezvous.agents.state import JobLimits
from unisono.core.rendezvous.endpoint import is_host_of
from unisono.core.stores import PrefixStore, Store
from unisono.core.stores.tcp.client import RefusalGrace
from unisono.core.stores.tcp.handshake import TOKEN_HINT
from unisono.core.stores.tcp.refusals import refused_client
from unisono.errors import RendezvousError, StoreError, StoreTimeoutError
from unisono.launcher.spec import NodeMeeting
from unisono.workbench.cli.doctor.facts import Examination, HostFacts, HostLink
from unisono.workbench.cli.doctor.host import examine_host, resolve
from unisono.workbench.cli.doctor.links import Peer, Probe, Responder

_POLL_S = 0.05
_RATES_S = 3.0
"""Time for the rates of all pairs. Each host sends to one host and receives from one at a time."""

_MOST_RATE_S = 0.5
_STEP_S = 30.0
"""Time for a step, such as the connections of all hosts, which need at most 4 s. Only hosts that
have ended, and very busy hosts, miss it."""

_PIECE_BYTES = 400
"""IPv4 passes packets of 576 bytes on every path."""

_LATE_S = 2.0
"""Time for each further step if hosts have missed one."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class ExamPlan:
    """The hosts to examine.

    Attributes:
        nprocs: Number of ranks on this host.
        limits: Number of hosts.
        meeting: How they meet.
        wanted: Names of the hosts, if they are known.
        show: Shows a line about the progress.
    """

    nprocs: int
    limits: JobLimits
    meeting: NodeMeeting
    wanted: Sequence[str] = ()
    show: Callable[[str], None]

    @property
    def endpoint(self) -> str:
        """Name or address of the host of the store; "" if a file or a service is the store."""
        endpoint = self.meeting.endpoint
        is_alone = self.limits.max_nodes == 1
        return "" if is_alone or isinstance(endpoint, str) else endpoint[0]


@dataclass(frozen=True)
class _Facts:
    """The facts about one host, and the `place` of its `Responder`."""

    host: HostFacts
    peer: Sequence[Any]

    def __post_init__(self) -> None:
        # Of another host, too.
        addresses, port, key = document.plain(self.peer)
        document.parse(list[str], addresses, name="addresses")
        document.parse(int, port, name="port")
        bytes.fromhex(key)


@dataclass(frozen=True)
class _Found:
    """The names of all hosts as one host resolves them, and its links to the others."""

    names: Mapping[str, Sequence[str] | None]
    links: Sequence[HostLink]


class Examiner:
    """This host's part in an examination; use once.

    Args:
        plan: Equal on all hosts, apart from `nprocs`.
    """

    def __init__(self, plan: ExamPlan) -> None:
        self._plan = plan
        self._number = 0
        self._step_s = _STEP_S
        self.host = examine_host(
            plan.nprocs, _addresses(plan), {plan.endpoint, *plan.wanted} - {""}
        )

    @property
    def is_first(self) -> bool:
        """Whether this host came first, so that it reports for all hosts."""
        return self._number == 0

    def alone(self) -> Examination:
        """Return the facts about this host only."""
        plan = self._plan
        return Examination(
            hosts=(self.host,),
            expected=plan.limits.min_nodes,
            wanted=plan.wanted,
            endpoint=plan.endpoint,
        )

    def examine(self, store: PrefixStore, canceled: Callable[[], bool]) -> Examination:
        """Meet the other hosts in `store`, and return the facts about all hosts.

        A host that comes after the others have begun is examined alone.

        Args:
            store: Without keys of an earlier examination.
            canceled: Function that returns whether to give up the wait for other hosts.

        Raises:
            RendezvousError: The wait was canceled.
            StoreError: The store has ended.
        """
        plan = self._plan
        if plan.limits.max_nodes == 1:
            return self.alone()
        responder = Responder(self.host.addresses)
        try:
            self._number = store.add("came", 1) - 1
            _publish(store, f"host/{self._number}", _Facts(self.host, responder.place))
            store.add("here", 1)
            members = self._members(store, canceled)
            if self._number not in members:
                plan.show("the other hosts have begun already; examining this host only")
                return replace(self.alone(), expected=1)
            found = self._probe_all(store, members)
            self._leave(store, len(members))
            return found
        finally:
            responder.close()

    def _members(self, store: Store, canceled: Callable[[], bool]) -> list[int]:
        """Return the numbers of the hosts that take part; the first host decides on them.

        Raises:
            RendezvousError: The wait was canceled, or the first host has ended.
        """
        limits, timing = self._plan.limits, self._plan.meeting.timing
        deadline, last_call, shown = Deadline(timing.join_timeout_s), Deadline(0.0), 0
        patience = Deadline(timing.join_timeout_s + _STEP_S)
        grace = RefusalGrace()
        while not store.check(["members"]):
            if (here := store.add("here", 0)) != shown:
                shown, last_call = here, Deadline(timing.last_call_s)
                self._plan.show(f"{here} of {limits.max_nodes} hosts came")
            is_enough = here >= limits.min_nodes and last_call.expired()
            if self.is_first and (here >= limits.max_nodes or is_enough or deadline.expired()):
                came = range(store.add("came", 0))
                _publish(store, "members", [n for n in came if store.check([f"host/{n}"])])
            if canceled():
                raise RendezvousError("the examination of the hosts was canceled")
            client = grace.over(partial(refused_client, store))
            if client and here < limits.min_nodes:
                raise RendezvousError(
                    f"the store refused {client}, which is on another machine, because there is "
                    "no token",
                    hint=TOKEN_HINT,
                )
            if patience.expired():
                raise RendezvousError(
                    "the host that began the examination has ended",
                    hint="start the command again on all hosts; if the store lasts, with another "
                    "--rdzv-id",
                )
            time.sleep(_POLL_S)
        return _published(store, "members", list[int], "the first host")

    def _probe_all(self, store: Store, members: Sequence[int]) -> Examination:
        """Probe the other members in steps that all hosts take together."""
        published = {n: _published(store, f"host/{n}", _Facts, f"host number {n}") for n in members}
        # By name and its number: host2 comes before host10.
        order = sorted(members, key=lambda number: _natural(published[number].host.name))
        names = _unique([published[number].host.name for number in order])
        hosts, peers = [], []
        for number, name in zip(order, names, strict=True):
            hosts.append(replace(published[number].host, name=name))
            peers.append(Peer(name, *published[number].peer))
        me = order.index(self._number)
        self._plan.show(f"probing {', '.join(names)}")
        found = resolve(host.name.partition("#")[0] for host in hosts)
        # In every round each host sends to another host.
        probes = [Probe(names[me], peer) for peer in (*peers[me + 1 :], *peers[:me])]
        pool = ThreadPoolExecutor(len(hosts))
        try:
            list(pool.map(Probe.open, probes))
            self._end_step(store, "open", len(hosts))
            for probe in probes:
                probe.ping()
            self._end_step(store, "pings", len(hosts))
            list(pool.map(Probe.send_burst, probes))
            rate_s = min(_MOST_RATE_S, _RATES_S / max(len(probes), 1))
            for number, probe in enumerate(probes):
                self._end_step(store, f"rate {number}", len(hosts))
                probe.measure_rate(rate_s)
        finally:
            pool.shutdown()
            for probe in probes:
                probe.close()
        mine = _Found(found, [probe.link for probe in probes])
        _publish(store, f"found/{self._number}", mine)
        return self._collected(store, order, hosts)

    def _collected(
        self, store: Store, numbers: Sequence[int], hosts: Sequence[HostFacts]
    ) -> Examination:
        """Return the facts of all hosts; without the links of hosts that do not publish them."""
        self._end_step(store, "found", len(hosts))
        keys = [f"found/{number}" for number in numbers]
        complete: list[HostFacts] = []
        links: list[HostLink] = []
        for key, host in zip(keys, hosts, strict=True):
            if store.check([key]):
                found = _published(store, key, _Found, host.name)
                host = replace(host, names={**found.names, **host.names})
                links += found.links
            complete.append(host)
        return replace(
            self.alone(),
            hosts=complete,
            links=links,
            expected=max(self._plan.limits.min_nodes, len(complete)),
        )

    def _leave(self, store: PrefixStore, count: int) -> None:
        """End the part of this host; wait for the others if they need this host."""
        store.add("ended", 1)
        deadline = Deadline(self._step_s)
        stays = self.is_first or is_host_of(store.underlying_store)
        # The host of the store may end before the host that came first.
        with contextlib.suppress(StoreError):
            while stays and not deadline.expired() and store.add("ended", 0) < count:
                time.sleep(_POLL_S)

    def _end_step(self, store: Store, name: str, count: int) -> None:
        """Wait until `count` hosts have taken a step; not for long if hosts have missed one."""
        key = f"step/{name}"
        if store.add(key, 1) == count:
            store.set(f"{key}/end", "")
        try:
            store.wait([f"{key}/end"], self._step_s)
        except StoreTimeoutError:
            self._step_s = _LATE_S


def _publish(store: Store, key: str, content: object) -> None:
    """Store a document in pieces that fit into the smallest packets.

    A path that drops full packets would also stop the exchange of facts about it.
    """
    data = zlib.compress(document.dumps(content).encode())
    pieces = range(0, len(data), _PIECE_BYTES)
    for number, start in enumerate(pieces):
        store.set(f"{key}/{number}", data[start : start + _PIECE_BYTES])
    store.set(key, f"{len(pieces)}")


def _published(store: Store, key: str, kind: type[T], host: str) -> T:
    """Return a document that a host has stored.

    Raises:
        RendezvousError: It is no such document.
    """
    try:
        pieces = [store.get(f"{key}/{number}") for number in range(int(store.get(key)))]
        # Of another host, so a few bytes may stand for gigabytes.
        packed = zlib.decompressobj()
        text = packed.decompress(b"".join(pieces), document.MOST_BYTES + 1)
        if not packed.eof and len(text) <= document.MOST_BYTES:
            raise ValueError("its end is missing")
        return document.loads(kind, text)
    except (ValueError, TypeError, KeyError, zlib.error) as error:
        raise RendezvousError(f"what {host} stored as {key!r} cannot be read: {error}") from error


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a key that orders names by the numbers in them."""
    return [(int(part) if part.isdecimal() else -1, part) for part in re.split(r"(\d+)", name)]


def _unique(names: Sequence[str]) -> list[str]:
    """Return the names; from the second host of a name on, the name has a number."""
    return [
        f"{name}#{before + 1}" if (before := list(names[:i]).count(name)) else name
        for i, name in enumerate(names)
    ]


def _addresses(plan: ExamPlan) -> Sequence[str]:
    """Return the addresses that ranks of this host would publish; none in a job of one host."""
    if plan.limits.max_nodes == 1:
        return ()
    # It loads NumPy, and `unisono run` without --doctor must not.
    from unisono.core.transports.tcp.address import own_hosts

    return own_hosts(plan.endpoint or None, apart=True)
