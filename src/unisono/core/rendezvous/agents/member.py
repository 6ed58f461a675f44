"""Decide the next actions of one agent: a pure function of its knowledge and the time.

All agents share an `AgentsState` (see `state.py`). An `AgentMemory` is the
knowledge of one agent besides: the world of its workers, and the times of the last changes. Times
are of the agent's own monotonic clock, so the clocks of hosts need not agree. A node is alive while
its heartbeat counter grows.

An agent may stand still (stopped, swapped out, a frozen machine) while the others go on. Then its
clock goes on, too, but it does not see their heartbeats. So it judges a node only by what it has
read of it. The time between two readings counts as half of `dead_after_s` at most.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from unisono.core.rendezvous.agents.state import (
    AgentEvent,
    AgentsState,
    Cause,
    JobLimits,
    Join,
    LastCallPassed,
    Left,
    Node,
    NodeLost,
    Phase,
    rank_taken,
)


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Time-outs and pauses of an agent, in seconds.

    Attributes:
        join_timeout_s: Longest wait to become part of a world.
        last_call_s: Wait for further nodes when there are enough.
        dead_after_s: Time without a heartbeat after which a node counts as lost.
        poll_s: Pause between reads of the shared state while workers run.
        beat_s: Pause between heartbeats.
        close_s: Longest time that the host of the store serves the others after the end.
    """

    join_timeout_s: float = 600.0
    last_call_s: float = 30.0
    dead_after_s: float = 10.0
    poll_s: float = 0.1
    beat_s: float = 1.0
    close_s: float = 30.0


@dataclass(frozen=True)
class Start:
    """Action: start the workers of a world."""

    epoch: int


@dataclass(frozen=True)
class Stop:
    """Action: end the workers of a world, then report it with `stopped`.

    Attributes:
        epoch: The number of the world.
        reason: The cause, in words.
        unexplained: Whether workers of another node report only that a peer was lost. The peer may
            be a worker of this node that has not yet ended and reported the cause.
    """

    epoch: int
    reason: str
    unexplained: bool = False


@dataclass(frozen=True)
class End:
    """Action: end the agent; `ok` is whether the job succeeded.

    `at_once` is False if workers that run may end by themselves before.
    """

    ok: bool
    reason: str
    at_once: bool = True


Action = Start | Stop | End


@dataclass(frozen=True)
class Beat:
    """The last heartbeat count of another node.

    Attributes:
        count: The count.
        came_s: Time of the first reading that had this count.
        read_s: Time of the last reading.
        silent_s: Time between these two, without the parts in which this agent stood still.
    """

    count: int
    came_s: float
    read_s: float
    silent_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class AgentMemory:
    """The knowledge of one agent besides the shared state.

    Attributes:
        node: The agent.
        limits: The limits that its user set.
        timing: The time-outs and pauses that its user set.
        epoch: World in which its workers run, or ran last.
        running: Whether its workers may still run.
        stopping: Whether `Stop` was returned for them.
        ended: Whether `End` was returned.
        joining_since_s: Time at which it began to wait for a world; None while it has a world.
        changed_s: Time of the last change among the nodes of the forming world.
        seen_nodes: Epoch and ids of these nodes.
        hosts: Names of the hosts of all nodes that were ever seen.
        beats: Last heartbeat of each other node.
    """

    node: Node
    limits: JobLimits
    timing: Timing = field(default_factory=Timing)
    epoch: int = 0
    running: bool = False
    stopping: bool = False
    ended: bool = False
    joining_since_s: float | None = None
    changed_s: float = 0.0
    seen_nodes: tuple[int, tuple[str, ...]] = (-1, ())
    hosts: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    beats: Mapping[str, Beat] = field(default_factory=lambda: MappingProxyType({}))


def observe(member: AgentMemory, counts: Mapping[str, int], now: float) -> AgentMemory:
    """Return the member with the heartbeat counts of the other nodes."""
    beats = {}
    for node_id, count in counts.items():
        known = member.beats.get(node_id)
        if known is None or known.count != count:
            beats[node_id] = Beat(count, now, now)
        else:
            passed_s = min(now - known.read_s, member.timing.dead_after_s / 2)
            beats[node_id] = replace(known, read_s=now, silent_s=known.silent_s + passed_s)
    return replace(member, beats=MappingProxyType(beats))


def stopped(member: AgentMemory) -> AgentMemory:
    """Return the member after its workers have ended, for any reason."""
    return replace(member, running=False, stopping=False)


def decide(
    member: AgentMemory, state: AgentsState, now: float
) -> tuple[AgentMemory, list[AgentEvent], list[Action]]:
    """Return the new member, the events to apply to the state, and the actions to execute.

    Call it after every change of the state, and also from time to time without a change. Apply all
    events. It may return an event again until the state has it; `apply` ignores a repeated event.
    """
    if member.ended:
        # The reports of the nodes are still exchanged, but not with lost nodes.
        member, lost = without_lost(member, state)
        return member, [*lost], []
    nodes = (state.epoch, tuple(node.id for node in state.members))
    if nodes != member.seen_nodes:
        member = replace(member, seen_nodes=nodes, changed_s=now)
    here = {node.id: node.host for node in (*state.members, *state.waiting)}
    member = replace(member, hosts=MappingProxyType({**member.hosts, **here}))
    member, lost = without_lost(member, state)
    events: list[AgentEvent] = [*lost]
    if member.running:
        member, actions = _while_running(member, state)
        return member, events, actions
    member, more, actions = _while_idle(member, state, now)
    return member, events + more, actions


def without_lost(member: AgentMemory, state: AgentsState) -> tuple[AgentMemory, list[NodeLost]]:
    """Return the events of lost nodes, and the member without what it has read of them.

    Such a node may join again before its next heartbeat is read.
    """
    limit_s = member.timing.dead_after_s
    beats, found = {}, []
    # In a running world a node whose workers have succeeded may leave without harm.
    done = state.succeeded if state.phase is Phase.RUNNING else ()
    for node_id, beat in member.beats.items():
        if node_id in done or beat.silent_s < limit_s:
            beats[node_id] = beat
        elif node_id in state.present:
            # The state has only the id of an expected node, not its host.
            host = member.hosts.get(node_id, node_id)
            found.append(
                NodeLost(node_id, f"node {host} was lost (no heartbeat for {limit_s:g} s)")
            )
    return replace(member, beats=MappingProxyType(beats)), found


def _while_running(member: AgentMemory, state: AgentsState) -> tuple[AgentMemory, list[Action]]:
    mine = state.epoch == member.epoch and state.is_member(member.node.id)
    if member.stopping or (mine and state.phase in (Phase.RUNNING, Phase.FINISHED)):
        return member, []
    unexplained = state.cause is Cause.CONSEQUENCE
    return replace(member, stopping=True), [Stop(member.epoch, state.reason, unexplained)]


def _while_idle(
    member: AgentMemory, state: AgentsState, now: float
) -> tuple[AgentMemory, list[AgentEvent], list[Action]]:
    me = member.node.id
    if state.over:
        return _end(member, state.phase is Phase.FINISHED, state.reason)
    if state.phase is Phase.RUNNING and state.is_member(me):
        if state.epoch == member.epoch:
            # The workers of this node have ended. The event with their result is not applied yet.
            return replace(member, joining_since_s=None), [], []
        member = replace(member, epoch=state.epoch, running=True, joining_since_s=None)
        return member, [], [Start(state.epoch)]
    since_s = now if member.joining_since_s is None else member.joining_since_s
    member = replace(member, joining_since_s=since_s)
    if now - since_s >= member.timing.join_timeout_s:
        reason = _join_timed_out(member, state)
        member, _, actions = _end(member, False, reason)
        return member, [Left(me, reason)], actions
    if me not in (node.id for node in (*state.members, *state.waiting)):
        # If the world went on without this node, the node may join the same world again.
        return replace(member, epoch=0), [Join(member.node, member.limits)], []
    rival = state.rival_of(member.node)
    if rival is not None and (beat := member.beats.get(rival.id)) and beat.came_s > since_s:
        # The rival is alive, so this node does not replace it.
        error = rank_taken(member.node, rival)
        member, _, actions = _end(member, False, f"{error.what} ({error.hint})")
        return member, [Left(me, error.what)], actions
    if state.may_form and now - member.changed_s >= member.timing.last_call_s:
        return member, [LastCallPassed(state.epoch)], []
    return member, [], []


def _end(
    member: AgentMemory, ok: bool, reason: str
) -> tuple[AgentMemory, list[AgentEvent], list[Action]]:
    return replace(member, ended=True), [], [End(ok, reason)]


def _join_timed_out(member: AgentMemory, state: AgentsState) -> str:
    limit_s = member.timing.join_timeout_s
    hosts = ", ".join(node.host for node in state.members) or "none"
    text = (
        f"the rendezvous timed out after {limit_s:g} s: {len(state.members)} of at least "
        f"{member.limits.min_nodes} nodes came ({hosts})"
    )
    return f"{text}; before that, {state.reason}" if state.reason else text
