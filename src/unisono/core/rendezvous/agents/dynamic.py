"""The elastic rendezvous over any Store: the I/O around `state` and `member`.

A separate thread uses the store. The agent can thus handle a signal or the end of a worker while
the store's host does not answer. The agent puts events into an inbox and takes orders
(`WorkerWorld`, `Stop`, `End`) from an outbox. The thread calls `wake` for each order.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from unisono.core.base.deadline import Deadline
from unisono.core.base.log import get_logger
from unisono.core.rendezvous.agents.member import (
    Action,
    AgentMemory,
    End,
    Start,
    Stop,
    Timing,
    decide,
    observe,
    stopped,
    without_lost,
)
from unisono.core.rendezvous.agents.state import (
    AgentEvent,
    AgentsState,
    Departure,
    JobLimits,
    Left,
    MemberEvent,
    Node,
    NodeLost,
    Phase,
    Replaced,
    dumps,
    loads,
)
from unisono.core.rendezvous.agents.transitions import apply
from unisono.core.rendezvous.agents.worker_world import WorkerStore, WorkerWorld, job_prefix
from unisono.core.rendezvous.endpoint import is_host_of
from unisono.core.stores import HashStore, PrefixStore, Store, TCPStore
from unisono.core.stores.api import DEFAULT_TIMEOUT, changed_too_often
from unisono.core.stores.tcp.client import RefusalGrace
from unisono.core.stores.tcp.handshake import TOKEN_HINT
from unisono.core.stores.tcp.refusals import forget_refused, refusal, refused_client
from unisono.errors import StoreError, UnisonoError

_LOG = get_logger("rendezvous")
_STATE = "state"
_IDLE_POLL_S = 0.03


@dataclass(frozen=True)
class RestartsLeft:
    """The answer to `ask_to_replace`: whether a restart was left, and how many of them are used."""

    granted: bool
    used: int = 0


@dataclass(frozen=True)
class Changed:
    """Another node joined or left the running world."""

    reason: str


Order = WorkerWorld | Stop | End | RestartsLeft | Changed


class DynamicRendezvous:
    """One agent's part in the rendezvous.

    Attributes:
        state: The shared document, as it was read last.

    Args:
        open_store: Function that opens the store of all agents, called on this object's thread.
            It returns the store and the address under which other nodes reach this node. Its
            argument is a function that returns whether to give up.
        node: This agent, without its address.
        limits: Equal on all agents.
        timing: Time-outs and pauses.
        run_id: Name of the job, which separates several jobs in one store.
        worker_store: Opens the workers' store; closed at the end.
        wake: Function that is called on the thread after each order was put into the outbox.
    """

    state = AgentsState()

    def __init__(
        self,
        open_store: Callable[[Callable[[], bool]], tuple[Store, str]],
        node: Node,
        limits: JobLimits,
        timing: Timing,
        *,
        run_id: str,
        worker_store: WorkerStore | None = None,
        wake: Callable[[], None],
    ) -> None:
        self._member = AgentMemory(node=node, limits=limits, timing=timing)
        self._worker_store = worker_store or WorkerStore()
        self._wake = wake
        self._next_beat_s = 0.0
        self._pending: AgentsState | None = None
        self._store: PrefixStore | None = None
        # Not a SimpleQueue: if a signal comes after the time-out of its `get`, it waits for ever.
        # A process that was stopped gets such signals (seen with Python 3.11).
        self._inbox: queue.Queue[AgentEvent | None] = queue.Queue()
        self._orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
        self._leaving = False
        self._abandoned = False
        self._thread = threading.Thread(
            target=self._run, args=(open_store, run_id), name="unisono-rendezvous", daemon=True
        )
        self._thread.start()

    def next_order(self) -> Order | None:
        """Remove and return the oldest order of the outbox, or None."""
        try:
            return self._orders.get_nowait()
        except queue.Empty:
            return None

    def report(self, kind: type[MemberEvent], epoch: int, **fields: Any) -> None:
        """Report an event of this node's workers; the order `RestartsLeft` answers `Replaced`."""
        self._inbox.put(kind(self.node_id, epoch, **fields))

    def stopped(self) -> None:
        """Report that no worker of this node runs any longer."""
        self._inbox.put(None)

    def leave(self, reason: str, *, broken: bool = False) -> None:
        """Report that this node leaves; `broken` if it leaves because of a fault."""
        kind = NodeLost if broken else Left
        self._inbox.put(kind(self.node_id, reason))

    def exchange(
        self, text: str, timeout_s: float, *, canceled: Callable[[], bool] = lambda: False
    ) -> list[str]:
        """Publish a text; return the texts of all members of the last world.

        The call waits until the time-out, or until `canceled`. It does not wait for nodes that
        have left or were lost.
        """
        store = self._store
        if store is None or self._is_only_node:
            return [text]
        deadline = Deadline(timeout_s)
        try:
            epoch = loads(store.get(_STATE)).epoch
            store.set(f"report/{epoch}/{self.node_id}", text)
            while True:
                state = loads(store.get(_STATE))
                keys = {node.id: f"report/{epoch}/{node.id}" for node in state.order}
                there = [key for key in keys.values() if store.check([key])]
                awaited = [keys[i] for i in state.present if i in keys and keys[i] not in there]
                if not awaited or deadline.expired() or canceled():
                    return [store.get(key).decode(errors="replace") for key in there] or [text]
                time.sleep(_IDLE_POLL_S)
        except UnisonoError:
            # The store's host is gone, so the texts of other nodes cannot be read.
            return [text]

    def progress(self) -> str:
        """Return a text that names the nodes present and what this node waits for."""
        if self._store is None:
            return "the store is not open yet"
        state, limits = self.state, self._member.limits
        hosts = ", ".join(node.host for node in state.members) or "none"
        match state.phase:
            case Phase.JOINING:
                text = f"{len(state.members)} of at least {limits.min_nodes} came ({hosts})"
            case Phase.RUNNING if state.is_member(self.node_id):
                done = len(state.succeeded)
                text = f"{done} of {len(state.members)} nodes are done ({hosts})"
            case _:
                text = f"there is no place now; running: {hosts}"
        return f"{text}; before that, {state.reason}" if state.reason else text

    def hosted_for(self) -> list[str]:
        """Return the hosts that need the store, if this process serves it."""
        store = self._store
        serves = store is not None and is_host_of(store.underlying_store)
        state = self.state if serves else AgentsState()
        me = self.node_id
        return [node.host for node in (*state.members, *state.waiting) if node.id != me]

    @property
    def others_hold_state(self) -> bool:
        """Whether workers of another node hold the state of the job."""
        return bool(self.state.holders(without=self.node_id))

    @property
    def restart_left(self) -> bool:
        """Whether a failure of a worker may cause a restart."""
        return self._thread.is_alive() and self.state.restart_left

    @property
    def node_id(self) -> str:
        """The id of this agent."""
        return self._member.node.id

    def close(self) -> None:
        """Leave, serve the store until no other node needs it, and end the thread."""
        self.leave("its agent ended")
        self._thread.join()

    def abandon(self) -> None:
        """Make `close` return soon, even if other nodes need the store."""
        self._abandoned = True
        self._inbox.put(None)

    def is_closed(self, timeout_s: float) -> bool:
        """Wait for the thread to end after `leave`; return whether it has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def _is_only_node(self) -> bool:
        return self._member.limits.max_nodes == 1

    # All methods below run on the thread.

    def _run(
        self, open_store: Callable[[Callable[[], bool]], tuple[Store, str]], run_id: str
    ) -> None:
        try:
            base, address = open_store(lambda: self._abandoned or self._has_event())
            self._store = store = PrefixStore(job_prefix(run_id), base, owns_store=True)
            node = replace(self._member.node, address=address, serves=is_host_of(base))
            self._member = replace(self._member, node=node)
            store.compare_set(_STATE, b"", dumps(AgentsState()))
            grace = RefusalGrace()
            while not self._leaving:
                is_due = self._beat(store)
                self._follow_state(store)
                if is_due and self.state.phase is Phase.JOINING:
                    self._leave_if_refused(store, grace)
                self._handle_event(store, self._pause_s())
            self._serve_others(store)
            self._clean_up(store)
        except UnisonoError as error:
            patient = self._member.limits.replaces and self._member.running
            self._put_order(End(False, self._lost_store(error), at_once=not patient))
        except Exception as error:
            _LOG.exception("the rendezvous failed")
            self._put_order(End(False, f"internal error in the rendezvous: {error!r}"))
        finally:
            self._worker_store.close()
            if self._store is not None:
                self._store.close()

    def _has_event(self) -> bool:
        """Return whether the inbox has an event; before the store is open this means to leave."""
        return not self._inbox.empty()

    def _lost_store(self, error: UnisonoError) -> str:
        if isinstance(error, StoreError) and self._store is not None:
            text = f"the rendezvous store is gone: {error.what}"
            return text if self._member.running else f"{text}; before that, {self.progress()}"
        return f"{error.what} ({error.hint})" if error.hint else error.what

    def _pause_s(self) -> float | None:
        if self._is_only_node:
            return None
        poll_s = self._member.timing.poll_s
        return poll_s if self._member.running else min(poll_s, _IDLE_POLL_S)

    def _handle_event(self, store: PrefixStore, pause_s: float | None) -> None:
        """Wait for an event from the agent, at most `pause_s`, and apply it."""
        try:
            event = self._inbox.get(timeout=pause_s)
        except queue.Empty:
            return
        if event is None:
            self._member = stopped(self._member)
        else:
            changed = self._apply(store, event)
            if isinstance(event, Replaced):
                self.state = loads(store.get(_STATE))
                used = self.state.restarts + self.state.replaced
                self._put_order(RestartsLeft(changed, used))
            mine = isinstance(event, Departure) and event.node_id == self.node_id
            self._leaving = self._leaving or mine

    def _follow_state(self, store: PrefixStore) -> None:
        """Read the state and act on it, until no event of this node changes it."""
        while True:
            before, self.state = self.state, loads(store.get(_STATE))
            state = self.state
            if state.phase is Phase.RUNNING and _others_changed(before, state):
                self._put_order(Changed(state.reason))
                self._worker_store.report_gone(store, state)
            self._member, events, actions = decide(self._member, state, time.monotonic())
            changed = [self._apply(store, event) for event in events]
            for action in actions:
                self._execute(store, action, state)
            if not any(changed):
                break
        self._start_pending(store)

    def _leave_if_refused(self, store: PrefixStore, grace: RefusalGrace) -> None:
        """Wait not much longer for nodes if the store has refused one for lack of a token."""
        came, needed = len(self.state.members), self._member.limits.min_nodes
        if came < needed and (client := grace.over(partial(refused_client, store))):
            text = f"the rendezvous store refused {client}, which is on another machine, because "
            text += f"there is no token: {came} of {needed} nodes came"
            self._apply(store, Left(self.node_id, text))
            self._put_order(End(False, f"{text} ({TOKEN_HINT})"))
            self._leaving = True

    def _beat(self, store: PrefixStore) -> bool:
        """Send a heartbeat and read those of the others, if it is time; return whether it was."""
        now = time.monotonic()
        if self._is_only_node or now < self._next_beat_s:
            return False
        self._next_beat_s = now + self._member.timing.beat_s
        store.add(f"beat/{self.node_id}", 1)
        others = [i for i in loads(store.get(_STATE)).present if i != self.node_id]
        counts = store.multi_get([f"beat/{node_id}" for node_id in others])
        beats = {i: int(count) for i, count in zip(others, counts, strict=True)}
        self._member = observe(self._member, beats, time.monotonic())
        return True

    def _apply(self, store: PrefixStore, event: AgentEvent) -> bool:
        """Apply an event to the shared state; retry if another node changes it meanwhile.

        Returns whether the event changed the state.
        """
        text, deadline = store.get(_STATE), Deadline(DEFAULT_TIMEOUT)
        while True:
            before = loads(text)
            after = apply(before, event)
            if after is before:
                return False
            wanted = dumps(after)
            found = store.compare_set(_STATE, text, wanted)
            if found == wanted:
                _LOG.info("%s: %s, epoch %d", event, after.phase, after.epoch)
                return True
            if found == text:
                # The last node of the run deleted it.
                raise StoreError(f"the state of the job was deleted from {store!r}")
            if deadline.expired():
                raise changed_too_often(store, _STATE, deadline)
            text = found

    def _execute(self, store: PrefixStore, action: Action, state: AgentsState) -> None:
        if isinstance(action, Start):
            self._pending = state
            if self._group_rank(state) == 0:
                here = self._member.node.address
                address, port = self._worker_store.open(store.underlying_store, here)
                store.set(f"master/{state.epoch}", f"{port} {address}")
                forget_refused(store)
        elif isinstance(action, Stop) and self._pending is not None:
            # The agent has no order to start this world, so it would never report `stopped`.
            self._pending = None
            self._member = stopped(self._member)
        else:
            if isinstance(action, End) and not action.ok and state.phase is Phase.JOINING:
                action = replace(action, reason=f"{action.reason}{refusal(store)}")
            self._pending = None
            self._put_order(action)

    def _start_pending(self, store: PrefixStore) -> None:
        """Order the start of the workers when the first node has opened their store."""
        state = self._pending
        if state is None or not store.check([f"master/{state.epoch}"]):
            return
        port, _, address = store.get(f"master/{state.epoch}").decode().partition(" ")
        group_rank = self._group_rank(state)
        self._pending = None
        self._put_order(
            WorkerWorld(
                epoch=state.epoch,
                members=state.order,
                group_rank=group_rank,
                restarts=state.restarts,
                master_addr=self._worker_store.seen_here(address) if group_rank == 0 else address,
                master_port=int(port),
                store_url=self._worker_store.url(state.epoch),
            )
        )

    def _group_rank(self, state: AgentsState) -> int:
        """Return the group rank of this node, which may have been in the same world before."""
        me = self.node_id
        return max(rank for rank, node in enumerate(state.order) if node.id == me)

    def _serve_others(self, store: PrefixStore) -> None:
        """Serve the store until no other node needs it."""
        if not is_host_of(store.underlying_store):
            return
        deadline: Deadline | None = None
        while not self._abandoned:
            self._beat(store)
            self.state = state = loads(store.get(_STATE))
            others = [i for i in state.present if i != self.node_id]
            if state.phase in (Phase.FINISHED, Phase.FAILED) and deadline is None:
                deadline = Deadline(self._member.timing.close_s)
            if not others or (deadline is not None and deadline.expired()):
                return
            self._member, lost = without_lost(self._member, state)
            for event in lost:
                self._apply(store, event)
            try:
                self._inbox.get(timeout=_IDLE_POLL_S)
            except queue.Empty:
                continue

    def _clean_up(self, store: PrefixStore) -> None:
        """Delete the run's keys from a lasting store if this is the last node.

        Another run can then use the same run id.
        """
        if isinstance(store.underlying_store, TCPStore | HashStore):
            return
        state = loads(store.get(_STATE))
        if state.phase in (Phase.FINISHED, Phase.FAILED) and not state.present:
            for key in store.list_keys():
                store.delete_key(key)

    def _put_order(self, order: Order) -> None:
        self._orders.put(order)
        self._wake()


def _others_changed(before: AgentsState, after: AgentsState) -> bool:
    """Return whether nodes joined or left a world without its end."""
    same = before.phase is Phase.RUNNING and before.epoch == after.epoch
    return same and [n.id for n in before.members] != [n.id for n in after.members]
