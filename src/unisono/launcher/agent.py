"""The agent of one node: takes part in the rendezvous and runs one attempt per world.

    agent ─┬─ rendezvous   thread; talks with the agents of the other nodes through a store
           ├─ output       thread; the workers' output, line by line
           └─ attempt      the workers of the present world (see `unisono.launcher.attempt`)

With one node the rendezvous has a store in memory and no heartbeats; all else is the same. A
signal to the agent is passed on to its workers (not to their children), with SIGKILL after the
grace period or at the second signal; then the node leaves, and the others may go on.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
from collections.abc import Callable
from dataclasses import asdict, replace

from unisono.base.config import get
from unisono.base.deadline import Deadline
from unisono.errors import LaunchError
from unisono.launcher.attempt import Attempt, Outcome
from unisono.launcher.environment import LOOPBACK, Place, new_launch_id
from unisono.launcher.output.files import Output
from unisono.launcher.report import SETTLE_S, Failure, is_consequence, order, signal_name
from unisono.launcher.signals import Signals
from unisono.launcher.spec import LaunchResult, LaunchSpec, Meeting
from unisono.launcher.workers.cpu_binding import Binding
from unisono.launcher.workers.descendants import Family
from unisono.launcher.workers.warm import WarmWorkers
from unisono.rendezvous.dynamic import DynamicRendezvous, WorkerStore, WorkerWorld
from unisono.rendezvous.endpoint import open_endpoint, own_address
from unisono.rendezvous.member import End, Stop
from unisono.rendezvous.services import open_service, service_host
from unisono.rendezvous.state import Node
from unisono.stores import FileStore, HashStore, Store

__all__ = ["Agent"]

_DRAIN_S = 60.0
_REPORT_S = 10.0
_PATIENCE_S = 5.0


class Agent:
    """Runs one launch; use once.

    Args:
        spec: What to launch.
        notify: Called with a line of text when something happens that a user should know:
            a restart, a node that came or went.
        family: Who may be killed; all that is started from now on if None.
    """

    def __init__(
        self,
        spec: LaunchSpec,
        notify: Callable[[str], None] = lambda line: None,
        family: Family | None = None,
    ) -> None:
        self._spec = spec
        self._notify = notify
        self._run_id = spec.run_id or new_launch_id()
        # Agents on several nodes cannot agree on a secret by themselves: there the user gives it.
        alone = spec.limits.max_nodes == 1
        self._token = get("UNISONO_TOKEN") or (new_launch_id() if alone else "")
        self._binding = Binding.make(spec.bind, spec.nprocs)
        self._signals = Signals(spec.signals)
        self._warm = WarmWorkers(spec.commands, spec.warm)
        self._family = Family() if family is None else family
        self._output: Output | None = None
        self._end: End | None = None
        self._stop: Stop | None = None
        self._stop_at = Deadline(0.0)
        self._restarts = 0
        self._signum: int | None = None
        self._hurried = False
        self._attempts = 0

    def run(self) -> LaunchResult:
        """Take part in the job until it is over, or until a signal ends this node's part.

        Raises:
            LaunchError: A worker could not be started; those that were have been ended.
        """
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._signals)
            output = self._output = Output(
                self._spec.logs,
                run_id=self._run_id,
                nprocs=self._spec.nprocs,
                notify=self._notify,
            )
            stack.callback(self._drain, output)
            if self._binding.report:
                self.tell(self._binding.report)
            self._rendezvous = self._join()
            stack.callback(self._leave)
            stack.callback(self._warm.close)
            return self._run_worlds(output)

    def tell(self, line: str) -> None:
        """Show a line of text; while the launch runs, without waiting for a reader."""
        (self._notify if self._output is None else self._output.tell)(line)

    @property
    def may_wait(self) -> bool:
        """Whether what is still to be said waits for a reader: no signal came, somebody reads."""
        hurried = self._signum is not None or self._hurried
        return not (hurried or (self._output is not None and self._output.is_stuck))

    def _join(self) -> DynamicRendezvous:
        spec, meeting = self._spec, self._spec.meeting
        host = os.uname().nodename
        node = Node(
            id=f"{host}_{os.getpid()}_{os.urandom(4).hex()}",
            host=host,
            address=LOOPBACK,
            nprocs=spec.nprocs,
            role=spec.role,
            node_rank=meeting.node_rank,
        )
        alone = spec.limits.max_nodes == 1
        return DynamicRendezvous(
            _open_private if alone else lambda canceled: _open_shared(meeting, canceled),
            node,
            spec.limits,
            replace(meeting.timing, poll_s=spec.monitor_interval_s),
            run_id=self._run_id,
            worker_store=WorkerStore(
                port=spec.master_port,
                token=self._token,
                shared=meeting.share_port and not alone,
            ),
            wake=self._signals.knock,
        )

    def _run_worlds(self, output: Output) -> LaunchResult:
        outcome = None
        while True:
            world = self._next_world()
            if world is None:
                return self._result(outcome)
            outcome = self._run_world(world, output)
            if outcome.signum is not None:
                self._signum = outcome.signum
                return self._result(outcome)

    def _next_world(self) -> WorkerWorld | None:
        """Wait for a world to run; None if there will be none."""
        patience_s: float | None = _PATIENCE_S
        while True:
            if (world := self._take_orders()) is not None or self._end is not None:
                return world
            if not select.select([self._signals.fd], [], [], patience_s)[0]:
                self.tell(f"waiting for other nodes: {self._rendezvous.progress()}")
                patience_s = None
            for signum in self._signals.read():
                if self._signals.ends(signum):
                    self._signum = signum
                    return None

    def _take_orders(self) -> WorkerWorld | None:
        """Note what the rendezvous says; return a world to start if it is the latest order."""
        world: WorkerWorld | None = None
        while (order := self._rendezvous.next_order()) is not None:
            match order:
                case WorkerWorld():
                    world, self._stop = order, None
                case Stop():
                    self._stop = order
                    self._stop_at = Deadline(SETTLE_S if order.unexplained else 0.0)
                case End():
                    self._end, world = order, None
        return world

    def _stop_in_s(self) -> float:
        self._take_orders()
        if self._end is not None:
            return 0.0
        return float("inf") if self._stop is None else self._stop_at.remaining()

    def _run_world(self, world: WorkerWorld, output: Output) -> Outcome:
        self._restarts = world.restarts
        self._failed = False

        def on_failure(failure: Failure) -> None:
            self._failed = True
            self._rendezvous.failed(
                world.epoch,
                original=not is_consequence(failure.text),
                reason=failure.line_with_reason(),
            )
            if world.restarts < self._spec.limits.max_restarts:
                self.tell(
                    f"{failure.line_with_reason()}; "
                    f"restart {world.restarts + 1} of {self._spec.limits.max_restarts}"
                )

        place = Place(
            world=world,
            run_id=self._run_id,
            max_restarts=self._spec.limits.max_restarts,
            one_gpu_each=self._spec.one_gpu_each,
            token=self._token,
        )
        attempt = Attempt(
            self._spec,
            place,
            self._attempts,
            binding=self._binding,
            output=output,
            signals=self._signals,
            warm=self._warm,
            family=self._family,
            stop_in_s=self._stop_in_s,
            on_failure=on_failure,
        )
        self._attempts += 1
        try:
            outcome = attempt.run()
        except LaunchError as error:
            self._rendezvous.leave(f"node {os.uname().nodename}: {error.what}", broken=True)
            raise
        if outcome.succeeded:
            self._rendezvous.succeeded(world.epoch)
        elif self._stop is not None and not self._failed and outcome.signum is None:
            self.tell(f"workers were stopped: {self._stop.reason}")
        if outcome.signum is None:
            # Else this node leaves now. Were it back for a moment, all would be, and a worker of
            # another node that lost its peer to the signal would count as one that failed.
            self._rendezvous.stopped()
        return outcome

    def _result(self, outcome: Outcome | None) -> LaunchResult:
        failed = self._end is not None and not self._end.ok
        failures: tuple[Failure, ...] = ()
        if outcome is not None and failed:
            failures = self._all_failures(outcome)
        elif outcome is not None and self._signum is not None:
            # A worker may have failed before the signal came, while others were still ending.
            failures = outcome.failures
        # Clocks of different nodes cannot be compared.
        here = bool(failures) and failures[0].node in ("", self._rendezvous.node_id)
        return LaunchResult(
            failures=failures,
            stopped=outcome.stopped if outcome is not None else (),
            left_s=outcome.left_s if outcome is not None and here else {},
            signum=self._signum,
            restarts=self._restarts,
            reason=self._end.reason if self._end is not None and failed else "",
        )

    def _all_failures(self, outcome: Outcome) -> tuple[Failure, ...]:
        """Return the failures of all nodes in the last world, the root cause first."""
        rendezvous = self._rendezvous
        found = [replace(failure, node=rendezvous.node_id) for failure in outcome.failures]
        text = json.dumps([asdict(failure) for failure in found])
        texts = rendezvous.exchange(text, _REPORT_S + self._spec.grace_s)
        found = [Failure(**fields) for text in texts for fields in json.loads(text)]
        return tuple(order(found, first=rendezvous.blamed))

    def _drain(self, output: Output) -> None:
        """Pass on what the workers have still said; nobody who wants to end waits for a reader."""
        limit_s = _DRAIN_S if self._signum is None else min(self._spec.grace_s, _DRAIN_S)
        output.close(limit_s, self._is_hurried)

    def _is_hurried(self) -> bool:
        """Whether a signal has come since the last worker ended."""
        self._hurried = self._hurried or self._signals.are_ending()
        return self._hurried

    def _leave(self) -> None:
        """Leave the rendezvous; whoever hosts its store stays as long as others need it."""
        host = os.uname().nodename
        how = f" ({signal_name(self._signum)})" if self._signum is not None else ""
        self._rendezvous.leave(f"node {host} left{how}")
        told = False
        while not self._rendezvous.is_closed(timeout_s=0.0):
            select.select([self._signals.fd], [], [], 0.05)
            if self._is_hurried():
                self._rendezvous.abandon()
            others = self._rendezvous.hosted_for()
            if self._signum is not None and others and not told:
                told = True
                self.tell(
                    f"serving the rendezvous for {', '.join(sorted(set(others)))}; "
                    "a second signal ends that"
                )
        self._rendezvous.close()


def _open_private(canceled: Callable[[], bool]) -> tuple[Store, str]:
    return HashStore(), LOOPBACK


def _open_shared(meeting: Meeting, canceled: Callable[[], bool]) -> tuple[Store, str]:
    """Open the store that all agents share; return it and this node's own address."""
    if isinstance(meeting.endpoint, str) and "://" in meeting.endpoint:
        address = meeting.address or own_address(service_host(meeting.endpoint))
        read_timeout_s = max(1.0, meeting.timing.dead_after_s)
        return open_service(meeting.endpoint, "", timeout=read_timeout_s), address
    if isinstance(meeting.endpoint, str):
        return FileStore(meeting.endpoint), meeting.address or os.uname().nodename
    host, port = meeting.endpoint
    store = open_endpoint(
        host,
        port,
        hosting=meeting.hosting,
        timeout_s=meeting.timing.join_timeout_s,
        # Whoever cannot reach the store for that long is lost to the others anyway.
        read_timeout_s=max(1.0, meeting.timing.dead_after_s),
        canceled=canceled,
    )
    return store, meeting.address or own_address(host)
