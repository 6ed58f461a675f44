"""What one agent does next, as a pure function of what it knows and the time.

`State` (see `unisono.rendezvous.state`) is what all agents share; a `Member` is what one of them
remembers besides: which world its workers run in, and when it last saw something change. Times
are of its own monotonic clock, so that clocks need not agree between hosts: a node is alive as
long as its heartbeat counter moves, whatever the time is there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from unisono.rendezvous.state import (
    Cause,
    Event,
    Join,
    LastCall,
    Left,
    Limits,
    Lost,
    Node,
    Phase,
    State,
    rank_taken,
    rival_of,
)

__all__ = ["Action", "End", "Member", "Start", "Stop", "Timing", "decide", "observe", "stopped"]


@dataclass(frozen=True, kw_only=True)
class Timing:
    """How long agents wait for each other, in seconds.

    Attributes:
        join_timeout_s: To become part of a world.
        last_call_s: For further nodes, once there are enough.
        dead_after_s: Without a heartbeat, until a node counts as lost.
    """

    join_timeout_s: float = 600.0
    last_call_s: float = 30.0
    dead_after_s: float = 10.0


@dataclass(frozen=True)
class Start:
    """Start the workers of a world."""

    epoch: int


@dataclass(frozen=True)
class Stop:
    """End the workers of a world, then say so with `stopped`.

    Attributes:
        epoch: That of the world.
        reason: Why, in words.
        unexplained: Workers of another node only report that a peer was lost: perhaps one of
            these here, which has yet to end and to say why.
    """

    epoch: int
    reason: str
    unexplained: bool = False


@dataclass(frozen=True)
class End:
    """There is nothing more to do; `ok` says whether the job succeeded."""

    ok: bool
    reason: str


Action = Start | Stop | End


@dataclass(frozen=True, kw_only=True)
class Member:
    """What one agent knows beside the shared state.

    Attributes:
        node: The agent.
        limits: What it was told.
        timing: Likewise.
        epoch: World that its workers run in, or ran in last.
        running: Whether they (may) still run.
        stopping: Whether they were told to end.
        ended: Whether End was said.
        joining_since_s: When it began to wait for a world; None while it has one.
        changed_s: When the nodes of the forming world last changed.
        seen_nodes: Those nodes.
        hosts: Names of the hosts of all nodes that were ever seen.
        beats: Last heartbeat count of each other node, and when it appeared.
    """

    node: Node
    limits: Limits
    timing: Timing = field(default_factory=Timing)
    epoch: int = 0
    running: bool = False
    stopping: bool = False
    ended: bool = False
    joining_since_s: float | None = None
    changed_s: float = 0.0
    seen_nodes: tuple[int, tuple[str, ...]] = (-1, ())
    hosts: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    beats: Mapping[str, tuple[int, float]] = field(default_factory=lambda: MappingProxyType({}))


def observe(member: Member, counts: Mapping[str, int], now: float) -> Member:
    """Take note of the other nodes' heartbeat counts."""
    beats = {}
    for node_id, count in counts.items():
        known = member.beats.get(node_id)
        fresh = known is None or known[0] != count
        beats[node_id] = (count, now) if fresh or known is None else known
    return replace(member, beats=MappingProxyType(beats))


def stopped(member: Member) -> Member:
    """Take note that the workers have ended, however they did."""
    return replace(member, running=False, stopping=False)


def decide(member: Member, state: State, now: float) -> tuple[Member, list[Event], list[Action]]:
    """Return what to remember, what to tell the others, and what to do.

    To be called after every change of the state, and again after some time without one. It
    may say the same event again until the state shows it; `apply` ignores what it knows.
    """
    if member.ended:
        return member, [], []
    nodes = (state.epoch, tuple(node.id for node in state.members))
    if nodes != member.seen_nodes:
        member = replace(member, seen_nodes=nodes, changed_s=now)
    here = {node.id: node.host for node in (*state.members, *state.waiting)}
    member = replace(member, hosts=MappingProxyType({**member.hosts, **here}))
    events: list[Event] = list(_lost_nodes(member, state, now))
    if member.running:
        member, actions = _while_running(member, state)
        return member, events, actions
    member, more, actions = _while_idle(member, state, now)
    return member, events + more, actions


def _lost_nodes(member: Member, state: State, now: float) -> list[Lost]:
    limit_s = member.timing.dead_after_s
    found = []
    # Who has done its part in a world that still runs may go without harm.
    done = state.succeeded if state.phase is Phase.RUNNING else ()
    for node_id in state.present:
        if node_id in done:
            continue
        _, since_s = member.beats.get(node_id, (0, now))
        if node_id != member.node.id and now - since_s >= limit_s:
            # An expected one is in the state by its number only.
            who = member.hosts.get(node_id, node_id)
            found.append(Lost(node_id, f"node {who} was lost (no heartbeat for {limit_s:g} s)"))
    return found


def _while_running(member: Member, state: State) -> tuple[Member, list[Action]]:
    mine = state.epoch == member.epoch and state.is_member(member.node.id)
    if member.stopping or (mine and state.phase in (Phase.RUNNING, Phase.FINISHED)):
        return member, []
    unexplained = state.cause is Cause.CONSEQUENCE
    return replace(member, stopping=True), [Stop(member.epoch, state.reason, unexplained)]


def _while_idle(
    member: Member, state: State, now: float
) -> tuple[Member, list[Event], list[Action]]:
    me = member.node.id
    if state.over:
        return _end(member, state.phase is Phase.FINISHED, state.reason)
    if state.phase is Phase.RUNNING and state.is_member(me):
        if state.epoch == member.epoch:
            # Our workers have ended; the event that says how is on its way.
            return replace(member, joining_since_s=None), [], []
        member = replace(member, epoch=state.epoch, running=True, joining_since_s=None)
        return member, [], [Start(state.epoch)]
    since_s = now if member.joining_since_s is None else member.joining_since_s
    member = replace(member, joining_since_s=since_s)
    if now - since_s >= member.timing.join_timeout_s:
        reason = _nobody_came(member, state)
        member, _, actions = _end(member, False, reason)
        return member, [Left(me, reason)], actions
    if me not in (node.id for node in (*state.members, *state.waiting)):
        return member, [Join(member.node, member.limits)], []
    rival = rival_of(member.node, state)
    if rival is not None and member.beats.get(rival.id, (0, 0.0))[1] > since_s:
        # It lives, so this node is not there to replace it.
        error = rank_taken(member.node, rival)
        member, _, actions = _end(member, False, f"{error.what} ({error.hint})")
        return member, [Left(me, error.what)], actions
    enough = state.phase is Phase.JOINING and len(state.members) >= member.limits.min_nodes
    if enough and now - member.changed_s >= member.timing.last_call_s:
        return member, [LastCall(state.epoch)], []
    return member, [], []


def _end(member: Member, ok: bool, reason: str) -> tuple[Member, list[Event], list[Action]]:
    return replace(member, ended=True), [], [End(ok, reason)]


def _nobody_came(member: Member, state: State) -> str:
    limit_s = member.timing.join_timeout_s
    hosts = ", ".join(node.host for node in state.members) or "none"
    text = (
        f"the rendezvous timed out after {limit_s:g} s: {len(state.members)} of at least "
        f"{member.limits.min_nodes} nodes came ({hosts})"
    )
    return f"{text}; before that, {state.reason}" if state.reason else text
