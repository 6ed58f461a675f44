"""The elastic rendezvous as a pure state machine: which nodes form the current world.

All agents of a job share one `State`, a small document in a store. Whoever wants to change it
computes `apply(state, event)` and writes the result with compare_set; if somebody else was
faster, it reads again and applies the event to what it finds. So events come in one order for
all, and none is lost. Nothing here reads a clock or does I/O.

            Join: enough nodes                       all members Succeeded
    JOINING ------------------> RUNNING (epoch + 1) -----------------------> FINISHED
       ^                           |  Failed with no restart left
       +---------------------------+---------------------------------------> FAILED
         Failed, Lost, Left, Join

A world is one epoch. It ends at most once, and so counts at most once against `max_restarts`,
however many nodes report its end: events that name an epoch are ignored when it is over.

Restarts are counted when a worker failed by itself. If workers only report a lost peer, the
count waits until the next world forms: a node that turned out to be lost or to have left is a
change of membership, which costs no restart.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

from unisono.errors import RendezvousError

__all__ = [
    "Cause",
    "Event",
    "Failed",
    "Join",
    "LastCall",
    "Left",
    "Limits",
    "Lost",
    "Node",
    "Phase",
    "State",
    "Succeeded",
    "apply",
    "dumps",
    "loads",
]


class Phase(StrEnum):
    """What the job as a whole is doing."""

    JOINING = "joining"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"


class Cause(StrEnum):
    """Why the last world ended."""

    NONE = ""
    FAILURE = "failure"
    CONSEQUENCE = "consequence"
    MEMBERSHIP = "membership"


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What all agents of a job must have been told alike."""

    min_nodes: int
    max_nodes: int
    max_restarts: int


@dataclass(frozen=True, kw_only=True)
class Node:
    """One agent.

    Attributes:
        id: Never used twice.
        host: Name shown to people.
        address: Where the other nodes reach it.
        nprocs: Number of its workers.
        role: Their role, as of `--role`.
        wish: Group rank that it must get (`--node-rank`), or None.
    """

    id: str
    host: str
    address: str
    nprocs: int
    role: str = "default"
    wish: int | None = None


@dataclass(frozen=True, kw_only=True)
class State:
    """The shared document.

    Attributes:
        limits: Of the first node; others must agree. None before.
        epoch: Number of the current or last world; the first is 1.
        phase: What the job is doing.
        members: RUNNING: the world, by group rank. JOINING: who has come so far.
        expected: JOINING: members of the last world that are still to come; their places
            are kept.
        waiting: Nodes for which there is no place now.
        succeeded: Members whose workers have all ended well.
        order: Members of the last world, by group rank.
        restarts: Worlds that were lost to a failing worker.
        cause: Why the last world ended.
        blamed: The node that reported it.
        reason: The same in words.
    """

    limits: Limits | None = None
    epoch: int = 0
    phase: Phase = Phase.JOINING
    members: tuple[Node, ...] = ()
    expected: tuple[str, ...] = ()
    waiting: tuple[Node, ...] = ()
    succeeded: tuple[str, ...] = ()
    order: tuple[str, ...] = ()
    restarts: int = 0
    cause: Cause = Cause.NONE
    blamed: str = ""
    reason: str = ""

    @property
    def over(self) -> bool:
        """Whether there will be no further world."""
        return self.phase in (Phase.FINISHED, Phase.FAILED)

    @property
    def present(self) -> tuple[str, ...]:
        """The ids of all nodes that take part in any way."""
        return (*(node.id for node in (*self.members, *self.waiting)), *self.expected)

    def is_member(self, node_id: str) -> bool:
        """Whether a node belongs to the current world, or to the one that is forming."""
        return any(node.id == node_id for node in self.members)


@dataclass(frozen=True)
class Join:
    """A node without running workers wants to be part of the next world."""

    node: Node
    limits: Limits


@dataclass(frozen=True)
class LastCall:
    """Nobody came for a while: form the world from the nodes that are there."""

    epoch: int


@dataclass(frozen=True)
class Failed:
    """Workers of a member failed; `original` if not only because a peer was lost."""

    node_id: str
    epoch: int
    original: bool
    reason: str


@dataclass(frozen=True)
class Succeeded:
    """All workers of a member ended with exit code 0."""

    node_id: str
    epoch: int


@dataclass(frozen=True)
class Left:
    """A node goes, by its own decision."""

    node_id: str
    reason: str


@dataclass(frozen=True)
class Lost:
    """A node shows no sign of life."""

    node_id: str
    reason: str


Event = Join | LastCall | Failed | Succeeded | Left | Lost


def apply(state: State, event: Event) -> State:
    """Return the state after an event; the same object if the event changes nothing.

    Raises:
        RendezvousError: A node cannot join, because it was started with other limits or with
            a node rank that another node has.
    """
    match event:
        case Join():
            after = _join(state, event)
        case LastCall():
            after = state
            if event.epoch == state.epoch and _enough(state):
                after = _form(state)
        case Failed():
            after = _failed(state, event)
        case Succeeded():
            after = _succeeded(state, event)
        case Left() | Lost():
            after = _gone(state, event)
    return state if after == state else after


def _join(state: State, event: Join) -> State:
    node = event.node
    if state.limits is None:
        state = replace(state, limits=event.limits)
    elif state.limits != event.limits:
        raise RendezvousError(
            f"node {node.host} was started with {_words(event.limits)}, "
            f"but the job runs with {_words(state.limits)}",
            hint="start every node with the same --nnodes and --max-restarts",
        )
    if node.id in (n.id for n in (*state.members, *state.waiting)) or state.over:
        return state
    rival = next((n for n in state.members if n.wish == node.wish), None)
    if node.wish is not None and rival is not None and state.epoch == 0:
        raise RendezvousError(
            f"--node-rank {node.wish} of host {node.host} is taken by host {rival.host}",
            hint="give each node a different --node-rank, 0 to nnodes - 1",
        )
    if state.phase is Phase.RUNNING and _has_room(state, node) and not state.succeeded:
        reason = f"node {node.host} joined"
        state = _end_world(state, Cause.MEMBERSHIP, node.id, reason)
    if state.phase is Phase.JOINING and _has_room(state, node):
        return _settle(_admit(state, node))
    return replace(state, waiting=(*state.waiting, node))


def _words(limits: Limits) -> str:
    return f"--nnodes {limits.min_nodes}:{limits.max_nodes} --max-restarts {limits.max_restarts}"


def _has_room(state: State, node: Node) -> bool:
    """Whether a node can be admitted without taking a place that is kept for another."""
    assert state.limits is not None
    if node.wish is not None and any(n.wish == node.wish for n in state.members):
        return False
    if node.id in state.expected:
        return True
    return len(state.members) + len(state.expected) < state.limits.max_nodes


def _admit(state: State, node: Node) -> State:
    return replace(
        state,
        members=(*state.members, node),
        expected=_without(state.expected, node.id),
    )


def _failed(state: State, event: Failed) -> State:
    if event.epoch != state.epoch or state.over or event.node_id not in state.order:
        return state
    cause = Cause.FAILURE if event.original else Cause.CONSEQUENCE
    if state.phase is Phase.RUNNING:
        state = _end_world(state, cause, event.node_id, event.reason)
        return _settle(_count(state)) if event.original else state
    if event.original and state.cause is Cause.CONSEQUENCE:
        # The node that only lost a peer was quicker than the one which says why.
        known = replace(state, cause=cause, blamed=event.node_id, reason=event.reason)
        return _settle(_count(known))
    return state


def _end_world(state: State, cause: Cause, blamed: str, reason: str) -> State:
    members = tuple(node.id for node in state.members)
    ended = replace(
        state,
        phase=Phase.JOINING,
        members=(),
        expected=members,
        order=members,
        succeeded=(),
        cause=cause,
        blamed=blamed,
        reason=reason,
    )
    return _promote(ended)


def _promote(state: State) -> State:
    """Give free places to nodes that wait for one."""
    for node in state.waiting:
        if _has_room(state, node):
            state = _admit(state, node)
            state = replace(state, waiting=tuple(n for n in state.waiting if n.id != node.id))
    return state


def _count(state: State) -> State:
    """Count the end of a world as a restart, or fail if there was none left."""
    assert state.limits is not None
    if state.restarts >= state.limits.max_restarts:
        return replace(state, phase=Phase.FAILED)
    return replace(state, restarts=state.restarts + 1)


def _succeeded(state: State, event: Succeeded) -> State:
    stale = event.epoch != state.epoch or state.phase is not Phase.RUNNING
    if stale or not state.is_member(event.node_id) or event.node_id in state.succeeded:
        return state
    succeeded = (*state.succeeded, event.node_id)
    done = len(succeeded) == len(state.members)
    return replace(state, succeeded=succeeded, phase=Phase.FINISHED if done else state.phase)


def _gone(state: State, event: Left | Lost) -> State:
    if event.node_id not in state.present:
        return state
    if state.phase is Phase.RUNNING and state.is_member(event.node_id):
        if event.node_id in state.succeeded:
            return state
        state = _end_world(state, Cause.MEMBERSHIP, event.node_id, event.reason)
    elif state.cause is Cause.CONSEQUENCE and event.node_id in state.expected:
        state = replace(state, cause=Cause.MEMBERSHIP, blamed=event.node_id, reason=event.reason)
    state = replace(
        state,
        members=tuple(n for n in state.members if n.id != event.node_id),
        waiting=tuple(n for n in state.waiting if n.id != event.node_id),
        expected=_without(state.expected, event.node_id),
    )
    if state.phase is not Phase.JOINING:
        return state
    state = _settle(_promote(state))
    return _fail_if_hopeless(state, event) if isinstance(event, Lost) else state


def _fail_if_hopeless(state: State, event: Lost) -> State:
    """Fail rather than wait for a replacement in a job that was not to be restarted."""
    assert state.limits is not None
    coming = len(state.members) + len(state.expected)
    hopeless = state.limits.max_restarts == 0 and coming < state.limits.min_nodes
    if state.phase is not Phase.JOINING or state.epoch == 0 or not hopeless:
        return state
    reason = (
        f"{event.reason}; {coming} of at least {state.limits.min_nodes} nodes left, "
        "and --max-restarts is 0"
    )
    return replace(state, phase=Phase.FAILED, reason=reason, blamed=event.node_id)


def _enough(state: State) -> bool:
    return (
        state.phase is Phase.JOINING
        and state.limits is not None
        and len(state.members) >= state.limits.min_nodes
    )


def _settle(state: State) -> State:
    """Form the world if nobody else is to be waited for."""
    if not _enough(state):
        return state
    assert state.limits is not None
    full = len(state.members) == state.limits.max_nodes
    all_back = state.epoch > 0 and not state.expected
    return _form(state) if full or all_back else state


def _form(state: State) -> State:
    if state.cause is Cause.CONSEQUENCE:
        # Every node is alive: it was a worker that failed, without saying why.
        state = _count(replace(state, cause=Cause.FAILURE))
        if state.over:
            return state
    before = {node_id: i for i, node_id in enumerate(state.order)}

    def place(item: tuple[int, Node]) -> tuple[int, int, int]:
        came, node = item
        wish = len(state.members) if node.wish is None else node.wish
        return wish, before.get(node.id, len(before)), came

    members = tuple(node for _, node in sorted(enumerate(state.members), key=place))
    return replace(
        state,
        epoch=state.epoch + 1,
        phase=Phase.RUNNING,
        members=members,
        expected=(),
        order=tuple(node.id for node in members),
        succeeded=(),
        cause=Cause.NONE,
    )


def _without(ids: Iterable[str], node_id: str) -> tuple[str, ...]:
    return tuple(each for each in ids if each != node_id)


def dumps(state: State) -> bytes:
    """Return the document's text for the store."""
    return json.dumps(asdict(state), separators=(",", ":"), sort_keys=True).encode()


def loads(text: bytes) -> State:
    """Return the state that `dumps` wrote; an empty text is the state before the first node.

    Raises:
        RendezvousError: The text is none of ours.
    """
    if not text:
        return State()
    try:
        fields: dict[str, Any] = json.loads(text)
        for name in ("members", "waiting"):
            fields[name] = tuple(Node(**node) for node in fields[name])
        for name in ("expected", "succeeded", "order"):
            fields[name] = tuple(fields[name])
        limits = fields["limits"]
        fields["limits"] = None if limits is None else Limits(**limits)
        fields["phase"] = Phase(fields["phase"])
        fields["cause"] = Cause(fields["cause"])
        return State(**fields)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RendezvousError(
            f"the rendezvous document is not one of this version of unisono: {error!r}",
            hint="another program uses the same store and --rdzv-id",
        ) from error
