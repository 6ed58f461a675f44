"""How long the calls of a job take: as recorded, or as simulated on a network."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from unisono.core.schedules import Topology, available, build, select
from unisono.core.schedules.choice.far import round_trip_class
from unisono.core.schedules.ir import ROOTED, IntArray
from unisono.errors import InvalidArgumentError, UnisonoError
from unisono.workbench.replay.engine import before_of
from unisono.workbench.replay.job import MESSAGE, OPERATIONS, Job, JobCall
from unisono.workbench.simulate import (
    Channels,
    Costs,
    LinkSpec,
    Machine,
    Network,
    Traffic,
    simulate,
)
from unisono.workbench.simulate.channels import in_channels
from unisono.workbench.simulate.evaluators.evaluate import all_rows
from unisono.workbench.simulate.evaluators.links import Begin, MessagePlan, executed, plan
from unisono.workbench.simulate.evaluators.traffic import MOST_BYTES, TrafficRows
from unisono.workbench.simulate.networks import whole_ps

# Rows of a call that run event by event, with ranks that begin at different times. More are run
# once, as if all ranks began with the last.
_MOST_ROWS = 30_000
# Between the ranks of a call. In picoseconds more have more than 64 bits.
_MOST_APART_PS = 10**18


class RecordedTimes:
    """Calls take as long after their last rank as in the recording."""

    exact = True

    def __init__(self, job: Job) -> None:
        self._calls = job.calls
        self._begins: list[dict[int, int]] = []
        for call, before in zip(job.calls, before_of(job), strict=True):
            free = job.calls[before].ends_ps if before >= 0 else {}
            self._begins.append({r: max(at, free.get(r, at)) for r, at in call.begins_ps.items()})
        sends = [
            (call, then)
            for call, then in zip(job.calls, self._begins, strict=True)
            if call.op == MESSAGE
        ]
        largest = max((call.nbytes for call, at in sends if _is_free(call, at)), default=-1)
        # The least size of the sends that waited for a receiver which came later. One that others
        # of its size did without only happened to end after the receiver had asked.
        self._waits_from = min(
            (call.nbytes for call, at in sends if _outlasts(call, at) and call.nbytes > largest),
            default=math.inf,
        )

    def ends(self, call: int, begins: Mapping[int, int]) -> dict[int, int]:
        """Return the recorded ends, moved by how much later the last rank begins.

        A rank that ended before the last had begun did not wait for it.
        """
        then, ends = self._begins[call], self._calls[call].ends_ps
        last, last_then = max(begins.values()), max(then.values())
        return {
            rank: at + ends[rank] - then[rank]
            if ends[rank] < last_then
            else max(at, last + ends[rank] - last_then)
            for rank, at in begins.items()
        }

    def sent(self, call: int, made_ps: int, asked_ps: int | None) -> int | None:
        """Return the end of a send that takes as long as the recorded one.

        One that waited for its receiver takes as long after both calls as that. If its receiver had
        asked before, it would wait if one of at most its size has waited, and none of that size or
        more has not.
        """
        source, target = self._calls[call].members
        then, end = self._begins[call], self._calls[call].ends_ps[source]
        waits = _outlasts(self._calls[call], then)
        if then[target] <= then[source]:
            waits = self._waits_from <= self._calls[call].nbytes
        if not waits:
            return made_ps + end - then[source]
        late = end - max(then.values())
        return None if asked_ps is None else max(made_ps, max(made_ps, asked_ps) + late)

    def received(self, call: int, sent_ps: int, asked_ps: int) -> int:
        """Return the end of a receive that takes as long after both calls as the recorded one."""
        _, target = self._calls[call].members
        late = self._calls[call].ends_ps[target] - max(self._begins[call].values())
        return max(asked_ps, max(sent_ps, asked_ps) + late)


def _is_free(call: JobCall, then: Mapping[int, int]) -> bool:
    """Return whether a send ended before its receiver asked."""
    source, target = call.members
    return call.ends_ps[source] < then[target]


def _outlasts(call: JobCall, then: Mapping[int, int]) -> bool:
    """Return whether a send ended after its receiver had asked, which was after the send."""
    source, target = call.members
    return then[source] < then[target] < call.ends_ps[source]


class Placed(Network):
    """Some places of a network, for a group: member m is at `places[m]`.

    Args:
        network: The whole network.
        places: Where the members are.
        slow: By how much links are slower, by number.
        period: Members per host, if that is equal; else their number.
    """

    flips = False

    def __init__(
        self, network: Network, places: IntArray, slow: Mapping[int, float], period: int
    ) -> None:
        groups = [group._replace(own=False) for group in network.groups]
        super().__init__(len(places), groups, cut_through=network.cut_through, period=period)
        self._network, self._places, self._slow = network, places, slow

    def routes(self, source: IntArray, target: IntArray) -> IntArray:
        """Return the links between the places."""
        return self._network.routes(self._places[source], self._places[target])

    def costs(self, links: IntArray, nbytes: IntArray) -> tuple[IntArray, IntArray]:
        """Return those of the network; slow links serve a message for longer."""
        latency, busy = super().costs(links, nbytes)
        for link, factor in self._slow.items():
            busy = np.where(links == link, whole_ps(busy * factor), busy)
        return latency, busy

    def cuts(self) -> list[tuple[int, float]]:
        """Return those of the network."""
        return self._network.cuts()


def links_named(network: Network, name: str) -> list[int]:
    """Return the links with a name, or whose names go on after it.

    Raises:
        InvalidArgumentError: There is no such link.
    """
    found = []
    for first, group in zip(network.first, network.groups, strict=True):
        before, after = group.name.split("{}")
        digits = name[len(before) :].split(" ")[0]
        whole = f"{before}{digits}{after} "
        if digits.isdecimal() and int(digits) < group.number and whole.startswith(name + " "):
            found.append(first + int(digits))
    if not found:
        names = ", ".join(f"'{group.name.format(0)}'" for group in network.groups)
        raise InvalidArgumentError(f"replay: there is no link '{name}'; links are called {names}")
    return found


class _CallKind(NamedTuple):
    """A kind of call: what runs, or the ends after the last begin if it is too large for that."""

    rows: TrafficRows | None
    messages: MessagePlan | None
    network: Network
    costs: Costs
    copies: int
    ends_ps: IntArray | None


class Simulated:
    """Calls take as long as their schedules on a network.

    Args:
        job: The job.
        net: The machine.
        size: Ranks of the network.
        places: Where each rank of the job is.
        slow_links: By how much links are slower, by name.

    Attributes:
        exact: Whether all calls were run event by event.
        algorithms: What each operation took.

    Raises:
        InvalidArgumentError: There is no link of a name, or the machine has another model.
    """

    def __init__(
        self, job: Job, net: Machine, size: int, places: Sequence[int], slow_links: dict[str, float]
    ) -> None:
        if net.values["model"] == "loggops":
            raise InvalidArgumentError(
                f"replay: net {net.name} is for the model loggops, expected links or alpha-beta"
            )
        for call in job.calls:
            if call.nbytes > MOST_BYTES:
                raise InvalidArgumentError(
                    f"replay: {call.name} has {call.nbytes} bytes, expected at most {MOST_BYTES}"
                )
        self.exact = True
        self.algorithms: dict[str, set[str]] = {}
        self._job, self._net, self._size = job, net, size
        self._places, self._slow = np.array(places), slow_links
        self._prepared: dict[tuple[Any, ...], _CallKind] = {}
        self._done: dict[tuple[Any, ...], IntArray] = {}
        self._slow_of(net.network("", size))

    def ends(self, call: int, begins: Mapping[int, int]) -> dict[int, int]:
        """Run the schedule with ranks that begin at different times."""
        each = self._job.calls[call]
        members = each.members
        if len(members) == 1:
            return dict(begins)
        base = min(begins.values())
        if max(begins.values()) - base > _MOST_APART_PS:
            raise InvalidArgumentError(
                f"replay: ranks make {each.name} more than {_MOST_APART_PS // 10**12} s apart"
            )
        key = each.op, each.nbytes, each.itemsize, each.algorithm, each.members
        if key not in self._prepared:
            self._prepared[key] = self._prepare(each)
        kind, clock = self._prepared[key], np.array([begins[rank] - base for rank in members])
        if kind.ends_ps is not None:
            ends = clock.max() + kind.ends_ps
            return dict(zip(members, (base + end for end in ends.tolist()), strict=True))
        done = *key, clock.tobytes()
        if done not in self._done:
            assert kind.rows is not None
            assert kind.messages is not None
            start = np.repeat(clock + kind.costs.start_ps, kind.copies).tolist()
            contended = self._net.values["model"] == "links"
            ran = executed(
                kind.rows, kind.messages, kind.network, kind.costs, Begin(start),
                contended=contended,
            )  # fmt: skip
            self._done[done] = ran.result.finish_ps.reshape(-1, kind.copies).max(axis=1)
        ends = self._done[done]
        return dict(zip(members, (base + end for end in ends.tolist()), strict=True))

    def sent(self, call: int, made_ps: int, asked_ps: int | None = None) -> int:
        """Return when the sender has done its work, for which it waits for no receiver."""
        costs, nbytes = self._net.costs(""), np.array([self._job.calls[call].nbytes])
        return made_ps + costs.send_ps + int(costs.messages.busy_ps(nbytes)[0])

    def received(self, call: int, sent_ps: int, asked_ps: int) -> int:
        """Return when a message that finds all links free has come."""
        each = self._job.calls[call]
        costs, nbytes = self._net.costs(""), np.array([each.nbytes])
        placed = self._placed("", each.members)
        way = placed.alone(np.array([0]), np.array([1]), nbytes)
        came = self.sent(call, sent_ps) + sum(int(part[0]) for part in way)
        return max(asked_ps, came) + costs.recv_ps + int(costs.messages.busy_ps(nbytes)[0])

    def _slow_of(self, network: Network) -> dict[int, float]:
        return {
            link: factor
            for name, factor in self._slow.items()
            for link in links_named(network, name)
        }

    def _placed(self, algorithm: str, members: Sequence[int]) -> Network:
        """Return the network as the members see it."""
        network = self._net.network(algorithm, self._size)
        places = self._places[list(members)]
        if len(places) == self._size and not self._slow and (np.diff(places) == 1).all():
            return network
        return Placed(network, places, self._slow_of(network), self._local(places))

    def _local(self, places: IntArray) -> int:
        """Return the members per host, if it is equal and they are numbered so; else 1."""
        hosts = places // self._net.values["ranks_per_host"]
        first = np.flatnonzero(np.diff(hosts, prepend=-1))
        counts = np.diff(first, append=len(hosts))
        # Each host comes once.
        even = len(first) == len(np.unique(hosts)) and (counts == counts[0]).all()
        return int(counts[0]) if even else 1

    def _prepare(self, call: JobCall) -> _CallKind:
        p, net, places = len(call.members), self._net, self._places[list(call.members)]
        local = self._local(places)
        names = () if call.op not in OPERATIONS else available(call.op, p, local=local)
        if not names:
            group = self._job.groups[call.group].name
            raise InvalidArgumentError(
                f"replay: group '{group}': {call.name} cannot be simulated, {call.op} has no "
                f"schedules for {p} ranks",
                hint="without --net it takes as long as in the recording",
            )
        apart = local < p
        trip = round_trip_class(2 * net.delay_us(self._size)) if apart else 0
        topology = Topology(p, False, local, trip)
        known = call.algorithm if call.algorithm in names else None
        choice = select(call.op, call.nbytes, topology, known)
        self.algorithms.setdefault(call.op, set()).add(choice.algorithm)
        root = 0 if call.op in ROOTED else -1
        schedule = build(call.op, choice.algorithm, p, root, choice.pipeline, local)
        network, costs, copies = self._placed(choice.algorithm, call.members), net.costs(""), 1
        values = net.of(choice.algorithm)
        if values["channels"] > 1:
            try:
                schedule = in_channels(schedule, values["channels"], local)
                copies = values["channels"]
                network = Channels(network, copies, LinkSpec(0, values["channel_gbps"]))
            except UnisonoError:
                # Other operations have no channels, and then no limits of channels.
                self.exact = self.exact and not call.nbytes
        costs = net.costs(choice.algorithm)
        traffic = Traffic(schedule, call.nbytes, call.itemsize, values["padded"], work=costs.works)
        parts = [traffic]
        if costs.agreement_bytes and copies == 1:
            agreement = build("barrier", "dissemination", p)
            parts.insert(0, Traffic(agreement, 0, message_bytes=costs.agreement_bytes))
        contended = net.values["model"] == "links"
        if sum(part.stages * max(1, part.count(0)) for part in parts) > _MOST_ROWS:
            self.exact = False
            if isinstance(network, Placed):
                network.period = network.size
            result = simulate(
                schedule, call.nbytes, network, costs, itemsize=call.itemsize,
                padded=values["padded"], contended=contended,
            )  # fmt: skip
            ends = result.finish_ps.reshape(-1, copies).max(axis=1)
            return _CallKind(None, None, network, costs, copies, ends)
        rows = all_rows(parts)
        messages = plan(rows, network, contended=contended)
        return _CallKind(rows, messages, network, costs, copies, None)
