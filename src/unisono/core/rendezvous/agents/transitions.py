"""The elastic rendezvous as a pure state machine: which nodes form the current world.

All agents of a job share one `AgentsState`, a small document in a store. To change it, an agent
computes `apply(state, event)` and writes the result with compare_set. If another agent was faster,
the agent reads the new state and applies the event to it. So all agents see the same order of
events, and none is lost. Nothing here reads a clock or does I/O.

            Join: enough nodes                       all members Succeeded
    JOINING ------------------> RUNNING (epoch + 1) -----------------------> FINISHED
       ^                           |  Failed with no restart left
       +---------------------------+---------------------------------------> FAILED
         Failed, NodeLost, Left, Join

With `JobLimits.replaces` the world goes on if a node joins or leaves and the limits allow that. The
workers of the new node wait until the others take them in.

A world is one epoch. It ends at most once, so it counts at most once against `max_restarts`. If
several nodes report its end, the later events are ignored, because they name a past epoch.

A restart is counted when a worker itself failed. If workers only report a lost peer, the count
waits until the next world forms. If a node was lost or has left by then, the cause is a change of
membership, which costs no restart.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from unisono.core.rendezvous.agents.state import (
    AgentEvent,
    AgentsState,
    Cause,
    Departure,
    Failed,
    Idle,
    JobLimits,
    Join,
    LastCallPassed,
    Left,
    MemberEvent,
    Node,
    NodeLost,
    Phase,
    Replaced,
    Succeeded,
    Unmet,
    rank_taken,
)
from unisono.errors import RendezvousError


def apply(state: AgentsState, event: AgentEvent) -> AgentsState:
    """Return the state after an event; the same object if the event changes nothing.

    Raises:
        RendezvousError: A node cannot join, because it has other limits, or the node rank of
            another node.
    """
    match event:
        case Join():
            after = _join(state, event)
        case LastCallPassed():
            passed = event.epoch == state.epoch and state.may_form
            after = _form(state) if passed else state
        case Failed():
            after = _failed(state, event)
        case Replaced():
            granted = _is_current(state, event) and state.restart_left
            after = replace(state, replaced=state.replaced + 1) if granted else state
        case Idle():
            after = _idle(state, event.node_id, event.idle) if _is_current(state, event) else state
        case Unmet():
            after = state
            if _is_current(state, event) and (gone := state.gone):
                reason = f"node {gone[0].host} was lost or left before the ranks met"
                after = _end_world(state, Cause.MEMBERSHIP, gone[0].id, reason)
        case Succeeded():
            after = _succeeded(state, event)
        case Departure():
            after = _gone(state, event)
    return state if after == state else after


def _join(state: AgentsState, event: Join) -> AgentsState:
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
    # In a later epoch the node may replace a lost node.
    if state.epoch == 0 and (rival := state.rival_of(node)) is not None:
        raise rank_taken(node, rival)
    if state.phase is Phase.RUNNING and _has_room(state, node) and not event.limits.replaces:
        reason = f"node {node.host} joined"
        state = _end_world(state, Cause.MEMBERSHIP, node.id, reason)
    if _has_room(state, node):
        return _form_if_complete(_admit(state, node))
    return replace(state, waiting=(*state.waiting, node))


def _words(limits: JobLimits) -> str:
    nodes = f"--nnodes {limits.min_nodes}:{limits.max_nodes}"
    restart = " --restart worker" if limits.replaces else ""
    workers = f" --nproc-per-node {limits.min_nprocs}:MAX" if limits.min_nprocs else ""
    return f"{nodes} --max-restarts {limits.max_restarts}{restart}{workers}"


def _has_room(state: AgentsState, node: Node) -> bool:
    """Return whether a node can be admitted without taking a place kept for another node."""
    assert state.limits is not None
    if state.rival_of(node) is not None or state.succeeded:
        return False
    if node.id in state.expected:
        return True
    return len(state.members) + len(state.expected) < state.limits.max_nodes


def _admit(state: AgentsState, node: Node) -> AgentsState:
    state = replace(
        state,
        members=(*state.members, node),
        expected=_without(state.expected, node.id),
    )
    if state.phase is Phase.JOINING:
        return state
    return replace(
        state,
        order=(*state.order, replace(node, joined=True)),
        idle=(*state.idle, node.id),
        reason=f"node {node.host} joined",
    )


def _is_current(state: AgentsState, event: MemberEvent) -> bool:
    """Return whether an event is of a member of the running world."""
    running = state.phase is Phase.RUNNING and event.epoch == state.epoch
    return running and state.is_member(event.node_id)


def _failed(state: AgentsState, event: Failed) -> AgentsState:
    ids = [node.id for node in state.order]
    if event.epoch != state.epoch or state.over or event.node_id not in ids:
        return state
    cause = Cause.FAILURE if event.original else Cause.CONSEQUENCE
    if state.phase is Phase.RUNNING:
        if not state.is_member(event.node_id):
            return state
        state = _end_world(state, cause, event.node_id, event.reason)
        return _form_if_complete(_count_restart(state)) if event.original else state
    if event.original and state.cause is Cause.CONSEQUENCE:
        # A node that only lost a peer reported first. This node reports the cause.
        known = replace(state, cause=cause, blamed=event.node_id, reason=event.reason)
        return _form_if_complete(_count_restart(known))
    return state


def _end_world(state: AgentsState, cause: Cause, blamed: str, reason: str) -> AgentsState:
    members = tuple(node.id for node in state.members)
    ended = replace(
        state,
        phase=Phase.JOINING,
        members=(),
        expected=members,
        order=state.members,
        succeeded=(),
        left=(),
        idle=(),
        cause=cause,
        blamed=blamed,
        reason=reason,
    )
    return _promote(ended)


def _promote(state: AgentsState) -> AgentsState:
    """Give free places to waiting nodes."""
    for node in state.waiting:
        if _has_room(state, node):
            state = _admit(state, node)
            state = replace(state, waiting=tuple(n for n in state.waiting if n.id != node.id))
    return state


def _count_restart(state: AgentsState) -> AgentsState:
    """Count the end of a world as a restart, or fail if no restart is left."""
    if not state.restart_left:
        return replace(state, phase=Phase.FAILED)
    return replace(state, restarts=state.restarts + 1)


def _idle(state: AgentsState, node_id: str, idle: bool) -> AgentsState:
    others = _without(state.idle, node_id)
    return replace(state, idle=(*others, node_id) if idle else others)


def _succeeded(state: AgentsState, event: Succeeded) -> AgentsState:
    if not _is_current(state, event) or event.node_id in state.succeeded:
        return state
    state = replace(state, succeeded=(*state.succeeded, event.node_id))
    return _finish_if_done(_idle(state, event.node_id, event.idle))


def _finish_if_done(state: AgentsState) -> AgentsState:
    """Finish the job if all members have succeeded."""
    if len(state.succeeded) < len(state.members):
        return state
    if len(state.idle) < len(state.members):
        return replace(state, phase=Phase.FINISHED)
    # No worker of these nodes was ever taken in, so the job has not run to its end.
    reason = "all nodes that held the state of the job left"
    return _end_world(state, Cause.MEMBERSHIP, state.idle[0], reason)


def _gone(state: AgentsState, event: Departure) -> AgentsState:
    if event.node_id not in state.present:
        return state
    if state.phase is Phase.RUNNING and state.is_member(event.node_id):
        if event.node_id in state.succeeded:
            # The world goes on without it. But no node must wait for it at the end of the job.
            return replace(state, left=(*state.left, event.node_id))
        if _goes_on_without(state, event):
            state = replace(_idle(state, event.node_id, False), reason=event.reason)
        else:
            state = _end_world(state, Cause.MEMBERSHIP, event.node_id, event.reason)
    elif state.cause is Cause.CONSEQUENCE and event.node_id in state.expected:
        state = replace(state, cause=Cause.MEMBERSHIP, blamed=event.node_id, reason=event.reason)
    state = replace(
        state,
        members=tuple(n for n in state.members if n.id != event.node_id),
        waiting=tuple(n for n in state.waiting if n.id != event.node_id),
        expected=_without(state.expected, event.node_id),
    )
    if state.over:
        return state
    if state.phase is Phase.RUNNING:
        # Without `replaces` the waiting nodes have a place in the next world at the earliest.
        replaces = state.limits is not None and state.limits.replaces
        return _finish_if_done(_promote(state)) if replaces else state
    state = _form_if_complete(_promote(state))
    return _fail_if_hopeless(state, event) if isinstance(event, NodeLost) else state


def _goes_on_without(state: AgentsState, event: Departure) -> bool:
    """Return whether the workers of the other members go on without a member."""
    assert state.limits is not None
    enough = len(state.members) > state.limits.min_nodes
    # The first agent serves the workers' store. It stays if it also serves the agents' store.
    first = state.order[0]
    stays = isinstance(event, Left) and first.serves
    kept = state.limits.durable or event.node_id != first.id or stays
    return state.limits.replaces and enough and kept


def _fail_if_hopeless(state: AgentsState, event: NodeLost) -> AgentsState:
    """Fail if too few nodes are left and the job has no restarts."""
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


def _form_if_complete(state: AgentsState) -> AgentsState:
    """Form the world if it has the largest size or all nodes of the last world."""
    if not state.enough:
        return state
    assert state.limits is not None
    full = len(state.members) == state.limits.max_nodes
    all_back = state.epoch > 0 and not state.expected
    return _form(state) if full or all_back else state


def _form(state: AgentsState) -> AgentsState:
    if state.cause is Cause.CONSEQUENCE:
        # Every node is alive, so a worker failed without a report.
        state = _count_restart(replace(state, cause=Cause.FAILURE))
        if state.over:
            return state
    before = {node.id: i for i, node in enumerate(state.order)}

    def place(item: tuple[int, Node]) -> tuple[int, bool, int, int]:
        arrival, node = item
        fixed = len(state.members) if node.node_rank is None else node.node_rank
        # The first node serves the workers' store, so the loss of one host costs both stores.
        return fixed, not node.serves, before.get(node.id, len(before)), arrival

    members = tuple(node for _, node in sorted(enumerate(state.members), key=place))
    return replace(
        state,
        epoch=state.epoch + 1,
        phase=Phase.RUNNING,
        members=members,
        expected=(),
        order=members,
        succeeded=(),
        cause=Cause.NONE,
    )


def _without(ids: Iterable[str], node_id: str) -> tuple[str, ...]:
    return tuple(each for each in ids if each != node_id)
