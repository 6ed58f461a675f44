"""The elastic rendezvous over any Store: the thin shell around `state` and `member`.

A thread of its own talks to the store, so that the agent hears a signal or the end of a worker
even while the store's host does not answer. The agent leaves events in an inbox and takes
orders (`World`, `Stop`, `End`) from an outbox; `wake` is called for each of them.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from unisono.base.deadline import Deadline
from unisono.base.log import get_logger
from unisono.errors import RendezvousError, StoreError, UnisonoError
from unisono.rendezvous.endpoint import is_host_of
from unisono.rendezvous.member import (
    Action,
    End,
    Member,
    Start,
    Stop,
    Timing,
    decide,
    observe,
    stopped,
)
from unisono.rendezvous.state import (
    Event,
    Failed,
    Left,
    Limits,
    Lost,
    Node,
    Phase,
    State,
    Succeeded,
    dumps,
    loads,
)
from unisono.rendezvous.transitions import apply
from unisono.stores import HashStore, PrefixStore, Store, TCPStore

__all__ = ["DynamicRendezvous", "Order", "World"]

_LOG = get_logger("rendezvous")
_STATE = "state"
_IDLE_POLL_S = 0.03


@dataclass(frozen=True, kw_only=True)
class World:
    """Order to start the workers of a world.

    Attributes:
        epoch: Its number.
        members: Its nodes by group rank.
        group_rank: Place of this node.
        restarts: Worlds that failed before.
        master_addr: Where the workers' store listens.
        master_port: Likewise.
    """

    epoch: int
    members: tuple[Node, ...]
    group_rank: int
    restarts: int
    master_addr: str
    master_port: int


Order = World | Stop | End


class DynamicRendezvous:
    """One agent's part in the rendezvous.

    Args:
        open_store: Opens the store that all agents share, on this object's thread; returns
            it with the address under which the other nodes reach this one. It is given a
            function that says whether to give up.
        node: This agent; its address is filled in.
        limits: Equal on all agents.
        timing: How long to wait.
        run_id: Keeps several jobs in one store apart.
        poll_s: Pause between looks at the store while workers run.
        beat_s: Pause between heartbeats.
        worker_port: Port of the workers' store; 0 for any.
        worker_token: Token of the workers' store.
        share_port: The workers use the rendezvous store's own server (`--master-port`);
            otherwise every world has a new one.
        close_s: How long the host of the store waits for the others in the end.
        wake: Called, on the thread, after an order was put into the outbox.
    """

    def __init__(
        self,
        open_store: Callable[[Callable[[], bool]], tuple[Store, str]],
        node: Node,
        limits: Limits,
        timing: Timing,
        *,
        run_id: str,
        poll_s: float = 0.1,
        beat_s: float = 1.0,
        worker_port: int = 0,
        worker_token: str = "",
        share_port: bool = False,
        close_s: float = 30.0,
        wake: Callable[[], None],
    ) -> None:
        self._open_store = open_store
        self._member = Member(node=node, limits=limits, timing=timing)
        self._run_id = run_id
        self._poll_s = poll_s
        self._beat_s = beat_s
        self._worker_port = worker_port
        self._worker_token = worker_token
        self._share_port = share_port
        self._close_s = close_s
        self._wake = wake
        self._alone = limits.max_nodes == 1
        self._next_beat_s = 0.0
        self._pending: State | None = None
        self._base: Store | None = None
        self._worker_store: TCPStore | None = None
        self._inbox: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._outbox: queue.SimpleQueue[Order] = queue.SimpleQueue()
        self._leaving = False
        self._abandoned = False
        self._thread = threading.Thread(target=self._run, name="unisono-rendezvous", daemon=True)
        self._thread.start()

    def next_order(self) -> Order | None:
        """Return the oldest order that was not taken yet, or None."""
        try:
            return self._outbox.get_nowait()
        except queue.Empty:
            return None

    def failed(self, epoch: int, *, original: bool, reason: str) -> None:
        """Tell that workers failed; the others may still be ending."""
        self._inbox.put(Failed(self._member.node.id, epoch, original, reason))

    def succeeded(self, epoch: int) -> None:
        """Tell that all workers ended well."""
        self._inbox.put(Succeeded(self._member.node.id, epoch))

    def stopped(self) -> None:
        """Tell that no worker of this node runs any more."""
        self._inbox.put(None)

    def leave(self, reason: str, *, broken: bool = False) -> None:
        """Tell that this node goes; `broken`: it could not do its part."""
        kind = Lost if broken else Left
        self._inbox.put(kind(self._member.node.id, reason))

    def exchange(self, text: str, timeout_s: float) -> list[str]:
        """Publish a text; return those of all members of the last world that came in time.

        Nodes that have left or were lost are not waited for.
        """
        if self._base is None or self._alone:
            return [text]
        store = self._prefixed(self._base)
        deadline = Deadline(timeout_s)
        try:
            epoch = loads(store.get(_STATE)).epoch
            store.set(f"report/{epoch}/{self._member.node.id}", text)
            while True:
                state = loads(store.get(_STATE))
                keys = {node_id: f"report/{epoch}/{node_id}" for node_id in state.order}
                there = [key for key in keys.values() if store.check([key])]
                awaited = [keys[i] for i in state.present if i in keys and keys[i] not in there]
                if not awaited or deadline.expired():
                    return [store.get(key).decode() for key in there] or [text]
                time.sleep(_IDLE_POLL_S)
        except UnisonoError:
            # The store's host is gone; what this node knows must do.
            return [text]

    def progress(self) -> str:
        """Return in words who has come and what the node waits for."""
        if self._base is None:
            return "the store is not open yet"
        state, limits = self._state, self._member.limits
        hosts = ", ".join(node.host for node in state.members) or "none"
        match state.phase:
            case Phase.JOINING:
                text = f"{len(state.members)} of at least {limits.min_nodes} came ({hosts})"
            case Phase.RUNNING if state.is_member(self._member.node.id):
                done = len(state.succeeded)
                text = f"{done} of {len(state.members)} nodes are done ({hosts})"
            case _:
                text = f"there is no place now; running: {hosts}"
        return f"{text}; before that, {state.reason}" if state.reason else text

    def hosted_for(self) -> list[str]:
        """Return the hosts that need the store of this process, if it has it."""
        state = self._state if self._base is not None and is_host_of(self._base) else State()
        me = self._member.node.id
        return [node.host for node in (*state.members, *state.waiting) if node.id != me]

    @property
    def node_id(self) -> str:
        """The id of this agent."""
        return self._member.node.id

    @property
    def blamed(self) -> str:
        """The id of the node that ended the last world."""
        return self._state.blamed

    def close(self) -> None:
        """Leave if that was not done, serve the store as long as others need it, and end."""
        self.leave("its agent ended")
        self._thread.join()

    def abandon(self) -> None:
        """Make `close` return soon, even if others need the store."""
        self._abandoned = True
        self._inbox.put(None)

    def is_closed(self, timeout_s: float) -> bool:
        """Wait for the thread to end after `leave`; return whether it has."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # Everything below runs on the thread.

    _state = State()

    def _run(self) -> None:
        try:
            self._base, address = self._open_store(lambda: self._abandoned or self._left())
            node = replace(self._member.node, address=address)
            self._member = replace(self._member, node=node)
            store = self._prefixed(self._base)
            store.compare_set(_STATE, b"", dumps(State()))
            while not self._leaving:
                self._turn(store)
                self._take(store, self._pause_s())
            self._linger(store)
            self._clean_up(store)
        except UnisonoError as error:
            self._say(End(False, self._lost_store(error)))
        except Exception as error:
            _LOG.exception("the rendezvous failed")
            self._say(End(False, f"internal error in the rendezvous: {error!r}"))
        finally:
            for each in (self._worker_store, self._base):
                if each is not None:
                    each.close()

    def _prefixed(self, store: Store) -> Store:
        return PrefixStore(f"unisono/rendezvous/{self._run_id}", store)

    def _left(self) -> bool:
        """Whether the agent said that it goes before the store was even open."""
        return not self._inbox.empty()

    def _lost_store(self, error: UnisonoError) -> str:
        if isinstance(error, StoreError) and self._base is not None:
            text = f"the rendezvous store is gone: {error.what}"
            return text if self._member.running else f"{text}; before that, {self.progress()}"
        return f"{error.what} ({error.hint})" if error.hint else error.what

    def _pause_s(self) -> float | None:
        if self._alone:
            return None
        return self._poll_s if self._member.running else min(self._poll_s, _IDLE_POLL_S)

    def _take(self, store: Store, pause_s: float | None) -> None:
        """Wait for an event from the agent and pass it on."""
        try:
            event = self._inbox.get(timeout=pause_s)
        except queue.Empty:
            return
        if event is None:
            self._member = stopped(self._member)
        else:
            self._change(store, event)
            mine = isinstance(event, Left | Lost) and event.node_id == self._member.node.id
            self._leaving = self._leaving or mine

    def _turn(self, store: Store) -> None:
        """Look at the state and do what follows from it, until nothing more does."""
        self._beat(store)
        while True:
            self._state = state = loads(store.get(_STATE))
            self._member, events, actions = decide(self._member, state, time.monotonic())
            changed = [self._change(store, event) for event in events]
            for action in actions:
                self._do(store, action, state)
            if not any(changed):
                break
        self._start_pending(store)

    def _beat(self, store: Store) -> None:
        now = time.monotonic()
        if self._alone or now < self._next_beat_s:
            return
        self._next_beat_s = now + self._beat_s
        store.add(f"beat/{self._member.node.id}", 1)
        others = [i for i in loads(store.get(_STATE)).present if i != self._member.node.id]
        counts = store.multi_get([f"beat/{node_id}" for node_id in others])
        beats = {i: int(count) for i, count in zip(others, counts, strict=True)}
        self._member = observe(self._member, beats, time.monotonic())

    def _change(self, store: Store, event: Event) -> bool:
        """Apply an event to the shared state, whoever else changes it at the same time.

        Returns whether the event made a difference.
        """
        text = store.get(_STATE)
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
            text = found

    def _do(self, store: Store, action: Action, state: State) -> None:
        if isinstance(action, Start):
            self._pending = state
            if state.members[0].id == self._member.node.id:
                self._open_worker_store(store, state.epoch)
        else:
            self._pending = None
            self._say(action)

    def _open_worker_store(self, store: Store, epoch: int) -> None:
        """Give the workers of a world a store without a trace of the last one."""
        address = self._member.node.address
        if self._worker_store is not None:
            self._worker_store.close()
            self._worker_store = None
        if self._share_port and isinstance(self._base, TCPStore):
            for key in self._base.list_keys():
                if not key.startswith("unisono/rendezvous/"):
                    self._base.delete_key(key)
            address, port = self._base.host, self._base.port
        else:
            try:
                self._worker_store = TCPStore(
                    address,
                    self._worker_port,
                    is_master=True,
                    wait_for_workers=False,
                    token=self._worker_token,
                )
            except StoreError as error:
                raise RendezvousError(f"cannot open the workers' store: {error.what}") from error
            port = self._worker_store.port
        store.set(f"master/{epoch}", f"{port} {address}")

    def _start_pending(self, store: Store) -> None:
        """Order a start as soon as the first node has opened the workers' store."""
        state = self._pending
        if state is None or not store.check([f"master/{state.epoch}"]):
            return
        port, _, address = store.get(f"master/{state.epoch}").decode().partition(" ")
        ids = [node.id for node in state.members]
        self._pending = None
        self._say(
            World(
                epoch=state.epoch,
                members=state.members,
                group_rank=ids.index(self._member.node.id),
                restarts=state.restarts,
                master_addr=address,
                master_port=int(port),
            )
        )

    def _linger(self, store: Store) -> None:
        """Serve the store until the other nodes have no more use for it."""
        if self._base is None or not is_host_of(self._base):
            return
        deadline: Deadline | None = None
        while not self._abandoned:
            self._beat(store)
            self._state = state = loads(store.get(_STATE))
            others = [i for i in state.present if i != self._member.node.id]
            if state.phase in (Phase.FINISHED, Phase.FAILED) and deadline is None:
                deadline = Deadline(self._close_s)
            if not others or (deadline is not None and deadline.expired()):
                return
            _, events, _ = decide(replace(self._member, ended=False), state, time.monotonic())
            for event in events:
                if isinstance(event, Lost):
                    self._change(store, event)
            try:
                self._inbox.get(timeout=_IDLE_POLL_S)
            except queue.Empty:
                continue

    def _clean_up(self, store: Store) -> None:
        """Take the run out of a store that goes on, if this node is the last: its name is free."""
        if self._base is None or isinstance(self._base, TCPStore | HashStore):
            return
        state = loads(store.get(_STATE))
        if state.phase in (Phase.FINISHED, Phase.FAILED) and not state.present:
            for key in store.list_keys():
                store.delete_key(key)

    def _say(self, order: Order) -> None:
        self._outbox.put(order)
        self._wake()
