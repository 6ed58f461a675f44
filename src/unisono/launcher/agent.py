"""The agent of one node: takes part in the rendezvous and runs one attempt per world.

    agent ─┬─ rendezvous   thread; exchanges messages with other agents through a store
           ├─ output       thread; reads the workers' output
           └─ attempt      the workers of the present world (see `unisono.launcher.attempt`)

With one node the rendezvous has a store in memory and sends no heartbeats; the rest is equal. The
agent forwards a signal to its workers (not to their children). After the grace period, or at the
second signal, it sends SIGKILL. Then the node leaves, and the other nodes may continue.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from unisono.core.base import document
from unisono.core.base.config import get
from unisono.core.base.deadline import Deadline
from unisono.core.rendezvous.agents.dynamic import Changed, DynamicRendezvous, RestartsLeft
from unisono.core.rendezvous.agents.member import End, Stop
from unisono.core.rendezvous.agents.state import Failed, Node, Succeeded
from unisono.core.rendezvous.agents.worker_world import (
    WorkerStore,
    WorkerWorld,
    job_prefix,
    workers_url,
)
from unisono.core.rendezvous.endpoint import open_endpoint, own_address
from unisono.core.rendezvous.services import open_service, service_host
from unisono.core.stores import FileStore, HashStore, PrefixStore, Store
from unisono.errors import LaunchError
from unisono.launcher.attempt import Attempt, LaunchResources
from unisono.launcher.environment import LOOPBACK, NodePlace, new_launch_id
from unisono.launcher.output.files import Output
from unisono.launcher.report import SETTLE_S, WorkerFailure, root_cause_first, signal_name
from unisono.launcher.signals import Signals
from unisono.launcher.spec import LaunchResult, LaunchSpec, NodeMeeting
from unisono.launcher.traceback_text import is_consequence
from unisono.launcher.workers.cpu_binding import Binding
from unisono.launcher.workers.descendants import Descendants
from unisono.launcher.workers.replacements import Replacements
from unisono.launcher.workers.warm import WarmWorkers

Canceled = Callable[[], bool]
"""Function that returns whether to give up a wait."""

_DRAIN_S = 60.0
_REPORT_S = 10.0
_PATIENCE_S = 5.0


class _Orders:
    """The latest orders of the rendezvous to this agent.

    Args:
        rendezvous: The rendezvous.
        notify: Function that shows a line of text.

    Attributes:
        end: The order to end, or None.
        stop: The order to stop the workers of the present world, or None.
    """

    def __init__(self, rendezvous: DynamicRendezvous, notify: Callable[[str], None]) -> None:
        self._rendezvous = rendezvous
        self._notify = notify
        self._answers: deque[RestartsLeft] = deque()
        self._stop_at = Deadline(0.0)
        self.end: End | None = None
        self.stop: Stop | None = None

    def take(self) -> WorkerWorld | None:
        """Take all new orders; return a world to start if that is the latest order."""
        world: WorkerWorld | None = None
        while (order := self._rendezvous.next_order()) is not None:
            match order:
                case WorkerWorld():
                    world, self.stop = order, None
                case Stop():
                    self.stop = order
                    self._stop_at = Deadline(SETTLE_S if order.unexplained else 0.0)
                case End():
                    self.end, world = order, None
                    if not order.at_once:
                        self._notify(f"{order.reason}; the workers go on until they need it")
                case RestartsLeft():
                    self._answers.append(order)
                case Changed(reason):
                    self._notify(reason)
        return world

    def answer(self) -> RestartsLeft | None:
        """Take the oldest answer about a replacement; after the world's end each is a refusal."""
        self.take()
        if self._answers:
            return self._answers.popleft()
        return None if self.end is None and self.stop is None else RestartsLeft(granted=False)

    def stop_in_s(self) -> float:
        """Return in how many seconds the workers must be stopped; infinity without an order."""
        self.take()
        if self.end is not None and self.end.at_once:
            return 0.0
        return float("inf") if self.stop is None else self._stop_at.remaining()


class Agent:
    """Runs one launch; use once.

    Args:
        spec: The launch.
        notify: Function that shows a line of text about an event: a restart, a node that came
            or left.
        descendants: The processes that the agent may kill. None: all that are started from now on.

    Attributes:
        examine: Function that examines the hosts before the nodes meet. It takes a store and a
            function that returns whether to give up, and raises RendezvousError to end the launch.
    """

    def __init__(
        self,
        spec: LaunchSpec,
        notify: Callable[[str], None] = lambda line: None,
        descendants: Descendants | None = None,
    ) -> None:
        self.examine: Callable[[PrefixStore, Canceled], None] = lambda store, canceled: None
        self._notify = notify
        self._run_id = spec.run_id or new_launch_id()
        # Agents on several nodes cannot agree on a secret, so the user must set UNISONO_TOKEN.
        self._token = get("UNISONO_TOKEN") or (new_launch_id() if spec.is_single_node else "")
        self._resources = LaunchResources(
            spec=spec,
            binding=Binding.make(spec.bind, spec.nprocs),
            signals=Signals(spec.signals),
            warm=WarmWorkers(spec.commands, spec.warm),
            descendants=Descendants() if descendants is None else descendants,
        )
        self._output: Output | None = None
        self._restarts = 0
        self._signum: int | None = None
        self._hurried = False
        # The attempts, and the replacements of this node, each with a log folder of its own.
        self._made = 0

    def run(self) -> LaunchResult:
        """Take part in the job until it ends, or until a signal ends the part of this node.

        Raises:
            LaunchError: A worker could not be started. The workers started before it have been
                stopped.
        """
        resources, spec = self._resources, self._resources.spec
        with contextlib.ExitStack() as stack:
            stack.enter_context(resources.signals)
            output = self._output = Output(
                spec.logs, run_id=self._run_id, nprocs=spec.nprocs, notify=self._notify
            )
            stack.callback(self._drain, output)
            if resources.binding.report:
                self.notify(resources.binding.report)
            self._rendezvous = self._join()
            self._orders = _Orders(self._rendezvous, self.notify)
            stack.callback(self._leave)
            stack.callback(resources.warm.close)
            result = self._run_worlds(output)
        # Now the console has all output.
        text = result.failures[0].text if result.failures else ""
        return replace(result, is_shown=output.ends_with(text))

    def notify(self, line: str) -> None:
        """Show a line of text; while the launch runs, without waiting for a reader."""
        (self._notify if self._output is None else self._output.notify)(line)

    @property
    def may_wait(self) -> bool:
        """Whether the report may wait for a reader: no signal came, and the output is read."""
        hurried = self._signum is not None or self._hurried
        return not (hurried or (self._output is not None and self._output.is_stuck))

    def _join(self) -> DynamicRendezvous:
        spec = self._resources.spec
        meeting, single = spec.meeting, spec.is_single_node
        host = socket.gethostname()
        node = Node(
            id=f"{host}_{os.getpid()}_{os.urandom(4).hex()}",
            host=host,
            address=LOOPBACK,
            nprocs=spec.nprocs,
            role=spec.role,
            node_rank=meeting.node_rank,
        )

        def open_store(canceled: Canceled) -> tuple[Store, str]:
            store: Store = HashStore()
            address = LOOPBACK
            if not single:
                store, address = open_shared(meeting, canceled)
            try:
                self.examine(examination_store(store, self._run_id), canceled)
            except BaseException:
                store.close()
                raise
            return store, address

        return DynamicRendezvous(
            open_store,
            node,
            spec.limits,
            meeting.timing,
            run_id=self._run_id,
            worker_store=WorkerStore(
                port=spec.master_port,
                token=self._token,
                shared=meeting.share_port and not single,
                service=workers_url(meeting.service, self._run_id) if spec.limits.durable else "",
            ),
            wake=self._resources.signals.wake,
        )

    def _run_worlds(self, output: Output) -> LaunchResult:
        result = None
        while (world := self._next_world()) is not None:
            result = self._run_world(world, output)
            self._signum = result.signum or self._signum
            if self._signum is not None:
                break
        return self._launch_result(result)

    def _next_world(self) -> WorkerWorld | None:
        """Wait for a world to run; None if no world will follow."""
        patience_s: float | None = _PATIENCE_S
        signals = self._resources.signals
        while True:
            if (world := self._orders.take()) is not None or self._orders.end is not None:
                return world
            if not select.select([signals.fd], [], [], patience_s)[0]:
                self.notify(f"waiting for other nodes: {self._rendezvous.progress()}")
                patience_s = None
            if (signum := signals.ending()) is not None:
                self._signum = signum
                return None

    def _run_world(self, world: WorkerWorld, output: Output) -> LaunchResult:
        spec = self._resources.spec
        self._restarts = world.restarts
        failed = False

        def on_failure(failure: WorkerFailure) -> None:
            nonlocal failed
            failed = True
            self._rendezvous.report(
                Failed,
                world.epoch,
                original=not is_consequence(failure.text),
                reason=failure.line_with_reason(),
            )
            used = world.restarts + self._rendezvous.state.replaced
            if used < spec.limits.max_restarts:
                pause_s = self._resources.back_off.begin()
                later = f" in {pause_s:g} s" if pause_s >= 1.0 else ""
                self.notify(
                    f"{failure.line_with_reason()}; "
                    f"restart {used + 1} of {spec.limits.max_restarts}{later}"
                )

        place = NodePlace(
            world=world,
            run_id=self._run_id,
            max_restarts=spec.limits.max_restarts,
            one_gpu_each=spec.one_gpu_each,
            token=self._token,
            replaces=spec.limits.replaces,
        )
        replacements = self._replacements(place)
        attempt = Attempt(
            self._resources,
            output,
            place,
            self._made,
            stop_in_s=self._orders.stop_in_s,
            on_failure=on_failure,
            replacements=replacements,
        )
        try:
            result = attempt.run()
        except LaunchError as error:
            self._rendezvous.leave(f"node {socket.gethostname()}: {error.what}", broken=True)
            raise
        self._made += 1 + replacements.count
        if result.ended_well:
            self._rendezvous.report(Succeeded, world.epoch, idle=result.idle)
        elif self._orders.stop is not None and not failed and result.signum is None:
            self.notify(f"workers were stopped: {self._orders.stop.reason}")
        if result.signum is None:
            # After a signal this node leaves instead. If it reported `stopped` first, all nodes
            # would seem ready for the next world. A worker of another node that lost its peer to
            # the signal would then count as the failure.
            self._wait()
            self._rendezvous.stopped()
        return result

    def _replacements(self, place: NodePlace) -> Replacements:
        spec = self._resources.spec
        return Replacements(
            place,
            self._rendezvous if spec.limits.replaces else None,
            self._orders.answer,
            spec.limits.min_nprocs or spec.nprocs,
            self.notify,
            self._resources.back_off,
        )

    def _wait(self) -> None:
        """Wait before a restart, until a signal or the end of the job."""
        signals, back_off = self._resources.signals, self._resources.back_off
        while self._signum is None and self._orders.end is None and not back_off.over():
            select.select([signals.fd], [], [], back_off.in_s())
            self._signum = signals.ending()
            self._orders.take()

    def _launch_result(self, result: LaunchResult | None) -> LaunchResult:
        end = self._orders.end
        failed = end is not None and not end.ok
        found = result or LaunchResult(failures=(), stopped=(), left_s={}, places={}, signum=None)
        # A worker may have failed before the signal came, while others were still ending.
        failures = () if self._signum is None else found.failures
        if result is not None and failed:
            failures = self._all_failures(result)
        # Clocks of different nodes cannot be compared.
        here = bool(failures) and failures[0].node in ("", self._rendezvous.node_id)
        return replace(
            found,
            failures=failures,
            left_s=found.left_s if here else {},
            signum=self._signum,
            restarts=self._restarts + self._rendezvous.state.replaced,
            reason=end.reason if end is not None and failed else "",
        )

    def _all_failures(self, result: LaunchResult) -> tuple[WorkerFailure, ...]:
        """Return the failures of all nodes in the last world, the root cause first."""
        rendezvous = self._rendezvous
        found = [replace(failure, node=rendezvous.node_id) for failure in result.failures]
        limit_s = _REPORT_S + self._resources.spec.grace_s
        mine = document.dumps(found)
        for text in rendezvous.exchange(mine, limit_s, canceled=self._is_hurried):
            try:
                found += document.loads(list[WorkerFailure], text) if text != mine else []
            except (ValueError, TypeError) as error:
                self.notify(f"the failures of another node cannot be read: {error}")
        return tuple(root_cause_first(found, first=rendezvous.state.blamed))

    def _drain(self, output: Output) -> None:
        """Pass on the rest of the workers' output; a signal ends the wait for its reader."""
        grace_s = self._resources.spec.grace_s
        output.close(_DRAIN_S if self._signum is None else min(grace_s, _DRAIN_S), self._is_hurried)

    def _is_hurried(self) -> bool:
        """Whether a signal has come since the last worker ended."""
        self._hurried = self._hurried or self._resources.signals.ending() is not None
        return self._hurried

    def _leave(self) -> None:
        """Leave the rendezvous; an agent that serves its store waits for the other agents."""
        host = socket.gethostname()
        how = f" ({signal_name(self._signum)})" if self._signum is not None else ""
        self._rendezvous.leave(f"node {host} left{how}")
        notified = False
        limit = Deadline(self._resources.spec.grace_s)
        while not self._rendezvous.is_closed(timeout_s=0.0):
            select.select([self._resources.signals.fd], [], [], 0.05)
            if self._is_hurried():
                self._rendezvous.abandon()
            others = self._rendezvous.hosted_for()
            if (self._hurried or self._signum is not None) and not others and limit.expired():
                return  # The store's host does not answer. The thread ends with the process.
            if self._signum is not None and others and not notified:
                notified = True
                self.notify(
                    f"serving the rendezvous for {', '.join(sorted(set(others)))}; "
                    "a second signal ends that"
                )
        self._rendezvous.close()


def examination_store(store: Store, run_id: str) -> PrefixStore:
    """Return the part of the rendezvous store for the examination of a job's hosts."""
    return PrefixStore(f"{job_prefix(run_id)}/doctor", store)


def open_shared(meeting: NodeMeeting, canceled: Canceled) -> tuple[Store, str]:
    """Open the store that all agents share; return it and this node's own address.

    Raises:
        RendezvousError: The store cannot be served here, or no store answered.
        HandshakeError: The store refused this process, or is no store.
    """
    # An agent that cannot reach the store for longer counts as lost for the others.
    read_timeout_s = max(1.0, meeting.timing.dead_after_s)
    if meeting.service:
        address = meeting.address or own_address(service_host(meeting.service))
        return open_service(meeting.service, "", timeout=read_timeout_s), address
    if isinstance(meeting.endpoint, str):
        return FileStore(meeting.endpoint), meeting.address or socket.gethostname()
    host, port = meeting.endpoint
    store = open_endpoint(
        host,
        port,
        hosting=meeting.hosting,
        timeout_s=meeting.timing.join_timeout_s,
        read_timeout_s=read_timeout_s,
        canceled=canceled,
    )
    return store, meeting.address or own_address(host, serves=store.is_master)
