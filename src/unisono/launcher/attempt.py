"""One attempt: the workers of one node in one world, from their start to the end of the last.

An attempt starts all workers and waits until all have ended. If a worker fails, the others get
SIGTERM, and SIGKILL after the grace period. At its end an attempt kills all processes that its
workers left behind, so that none of them lives on into the next attempt.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from unisono.core.base.config import environ
from unisono.core.base.source.stacks import offered_stacks
from unisono.core.base.source.where import place_of
from unisono.core.platform.posix import SIGKILL
from unisono.launcher.back_off import BackOff
from unisono.launcher.environment import ERROR_FILE_VARIABLE, NodePlace, worker_environment
from unisono.launcher.output.console import WorkerName
from unisono.launcher.output.files import Output
from unisono.launcher.output.reader import WorkerStream
from unisono.launcher.report import ExitLog, WorkerFailure, error_text
from unisono.launcher.signals import Signals
from unisono.launcher.spec import LaunchResult, LaunchSpec
from unisono.launcher.workers.cpu_binding import Binding
from unisono.launcher.workers.descendants import Descendants
from unisono.launcher.workers.oom import OomWatch
from unisono.launcher.workers.replacements import Replacements
from unisono.launcher.workers.warm import WarmWorkers
from unisono.launcher.workers.worker import CommandWorker, Worker
from unisono.launcher.workers.worker_group import WorkerGroup

_TAIL_WAIT_S = 0.2
_KILL_TIMEOUT_S = 10.0


@dataclass(frozen=True, kw_only=True)
class LaunchResources:
    """The parts of a launch on this host that all its attempts share.

    Attributes:
        spec: The launch.
        binding: The CPUs of each worker.
        signals: Signals, and wake-ups by other threads of the agent.
        warm: Half-started workers. An attempt takes those of the attempt before it, and starts
            others for the next attempt.
        descendants: The processes that an attempt kills at its end if not all workers succeeded.
        back_off: The pauses before restarts.
    """

    spec: LaunchSpec
    binding: Binding
    signals: Signals
    warm: WarmWorkers
    descendants: Descendants
    back_off: BackOff = field(default_factory=BackOff)


class Attempt:
    """Runs the workers once; use once.

    Args:
        resources: The parts of the launch that outlive the attempt.
        output: The output of the workers.
        place: This node's place in the world.
        number: Number of the attempt of this agent, from 0.
        stop_in_s: Function that returns in how many seconds workers that still run must be
            stopped because of other nodes; infinity without such an order. The attempt calls it
            at each wake-up.
        on_failure: Function that is called once with the first failure as soon as that is known;
            other workers may still be ending.
        replacements: The rules for failures that do not end the attempt; None: each ends it.
    """

    def __init__(
        self,
        resources: LaunchResources,
        output: Output,
        place: NodePlace,
        number: int,
        *,
        stop_in_s: Callable[[], float],
        on_failure: Callable[[WorkerFailure], None],
        replacements: Replacements | None = None,
    ) -> None:
        self._resources = resources
        self._output = output
        self._place = place
        self._number = number
        self._stop_in_s = stop_in_s
        self._on_failure = on_failure
        self._group: WorkerGroup[Worker] = WorkerGroup(resources.spec.grace_s)
        self._error_sources: dict[int, tuple[WorkerStream, str]] = {}
        self._exits = ExitLog(self._error_text)
        # The signal that ends the attempt.
        self._signum: int | None = None
        self._oom = OomWatch()
        self._replacements = replacements or Replacements(place)

    def run(self) -> LaunchResult:
        """Start the workers and return when all of them have ended.

        Returns:
            The failures on this node only, without restarts and reason.

        Raises:
            LaunchError: A worker could not be started. The workers started before it have been
                stopped.
        """
        with self._oom:
            with contextlib.ExitStack() as stack:
                stack.callback(self._kill_and_reap)
                for local_rank in range(self._resources.spec.nprocs):
                    self._group.add(worker := self._start(local_rank))
                    if self._place.node.joined:
                        self._replacements.newcomers.add(worker)
                self._resources.warm.begin(wanted=self._may_follow())
                self._show_status()
                self._watch()
            workers = self._group.workers
            return LaunchResult(
                failures=tuple(self._exits.failures(stopped_by_signal=self._signum is not None)),
                stopped=tuple(worker.rank for worker in workers if worker.stopped),
                left_s=self._exits.left_s,
                places=self._exits.places,
                signum=self._signum,
                ended_well=all(worker.exit_code == 0 for worker in workers),
                idle=not workers,
            )

    def _may_follow(self) -> bool:
        """Whether there can be a further attempt."""
        limits = self._resources.spec.limits
        return (
            self._place.world.restarts < limits.max_restarts or limits.min_nodes < limits.max_nodes
        )

    def _start(self, local_rank: int, **variables: str) -> CommandWorker:
        env = self._environment(local_rank) | variables
        worker = self._resources.warm.take(local_rank, env) or self._new_worker(local_rank, env)
        worker.rank = self._place.first_rank + local_rank
        stderr = self._output.attach(worker, self._name(local_rank))
        self._error_sources[worker.rank] = stderr, env[ERROR_FILE_VARIABLE]
        return worker

    def _name(self, local_rank: int) -> WorkerName:
        return WorkerName(
            rank=self._place.first_rank + local_rank,
            local_rank=local_rank,
            attempt=self._number + self._replacements.count,
            role=self._place.node.role,
        )

    def _environment(self, local_rank: int) -> dict[str, str]:
        inherited = environ()
        env = dict(inherited) | worker_environment(local_rank, self._place, inherited=inherited)
        env |= self._resources.binding.environment(local_rank, inherited)
        env[ERROR_FILE_VARIABLE] = self._output.error_file(self._name(local_rank))
        return env

    def _new_worker(
        self, local_rank: int, env: Mapping[str, str], pass_fds: Sequence[int] = ()
    ) -> CommandWorker:
        return CommandWorker(
            self._place.first_rank + local_rank,
            self._resources.spec.commands[local_rank],
            env,
            stdout=self._output.stdout,
            cpus=self._resources.binding.cpus(local_rank),
            pass_fds=pass_fds,
        )

    def _watch(self) -> None:
        group, resources = self._group, self._resources
        while group.running or (self._replacements.asked and not group.stopping):
            # Before any wait: an order to stop may have come with the order to start, and no
            # wake-up will follow it.
            if not group.stopping and self._stop_in_s() == 0.0:
                group.stop(signal.SIGTERM)
            group.wait(self._timeout(), [resources.signals.fd])
            for signum in resources.signals.read():
                self._on_signal(signum)
            resources.descendants.reap([*group.pids(), *resources.warm.pids()])
            for worker in group.ended():
                resources.descendants.wait_if_exiting(2 * _KILL_TIMEOUT_S)
                self._on_exit(worker)
                self._show_status()
            self._on_answers()
            self._on_clock()
            if not group.stopping:
                first_rank = self._place.first_rank
                running = {worker.rank - first_rank: worker for worker in group.workers}
                resources.warm.look(running, self._environment, self._new_worker)
        for worker, failure in self._replacements.asked:
            self._exits.add(worker.rank, worker.pid, failure.exit_code, failure.hint)
        # All workers have ended, so no further failure will explain the known failure.
        if not group.stopping and self._exits.known_in_s() < float("inf"):
            self._fail()

    def _show_status(self) -> None:
        restarts = self._place.world.restarts + self._replacements.count
        self._output.status(len(self._group.running), restarts)

    def _timeout(self) -> float:
        waits = [self._group.kill_in_s()]
        if not self._group.stopping:
            waits += [self._exits.known_in_s(), self._stop_in_s()]
            waits.append(self._replacements.look_in_s(self._group.running))
            waits.append(self._replacements.answer_in_s())
            if (due_s := self._resources.warm.due_s()) is not None:
                waits.append(due_s)
        return min(waits)

    def _on_signal(self, signum: int) -> None:
        if not self._resources.signals.ends(signum):
            self._group.send_signal(signum)
        elif self._signum is None:
            self._signum = signum
            # Of a person, who may wonder where the ranks were.
            if signum == signal.SIGINT and not self._group.stopping:
                self._note_places()
            self._group.stop(signum)
        else:
            # With the second signal the user ends the grace period.
            self._group.kill_now()

    def _on_exit(self, worker: Worker) -> None:
        """Record the end of a worker, unless the others can go on."""
        if worker.stopped or worker.exit_code is None:
            return
        if worker.exit_code and not self._group.stopping:
            stderr, _ = self._error_sources[worker.rank]
            stderr.ended.wait(_TAIL_WAIT_S)
        hint = self._oom.hint(worker.pid) if worker.exit_code == -SIGKILL else ""
        unexplained = self._exits.known_in_s() == float("inf")
        if worker.exit_code and unexplained and not self._group.stopping:
            failure = self._exits.failure(worker.rank, worker.pid, worker.exit_code, hint)
            if self._replacements.ask(worker, failure, self._group.running):
                return
            if self._does_without(worker, failure):
                return
        self._exits.add(worker.rank, worker.pid, worker.exit_code, hint)

    def _on_answers(self) -> None:
        """Replace the workers for which the job has a restart left."""
        while not self._group.stopping and (found := self._replacements.answered()) is not None:
            worker, failure, answer = found
            if answer.granted:
                self._replacements.notify(
                    f"{failure.line_with_reason()}; "
                    f"replacement {answer.used} of {self._place.max_restarts}"
                )
                self._replace(worker, failure)
            elif not self._does_without(worker, failure):
                self._exits.add(worker.rank, worker.pid, failure.exit_code, failure.hint)
            self._show_status()

    def _replace(self, worker: Worker, failure: WorkerFailure) -> None:
        """Start a replacement, which waits until the other ranks take it in, if they have met."""
        self._exits.replaced(failure)
        joins = self._replacements.has_met(worker.rank)
        variables = {"UNISONO_JOIN": "1"} if joins else {}
        new = self._start(worker.rank - self._place.first_rank, **variables)
        if joins:
            self._replacements.newcomers.add(new)
        self._group.replace(worker, new)

    def _does_without(self, worker: Worker, failure: WorkerFailure) -> bool:
        """Go on without a worker that failed, if enough others are left."""
        group = self._group
        if not self._replacements.may_do_without(worker, group.workers):
            return False
        self._exits.replaced(failure)
        group.replace(worker, None)
        self._replacements.notify(
            f"{failure.line_with_reason()}; "
            f"going on with {len(group.workers)} of {self._resources.spec.nprocs} workers"
        )
        return True

    def _on_clock(self) -> None:
        for worker in self._replacements.unneeded(self._group.running):
            self._group.replace(worker, None)
        if not self._group.stopping and self._exits.known_in_s() == 0.0:
            self._fail()
        self._group.kill_if_due()

    def _fail(self) -> None:
        if self._note_places() and self._exits.settle_again():
            return
        self._on_failure(self._exits.failures()[0])
        self._group.stop(signal.SIGTERM)

    def _note_places(self) -> dict[int, str]:
        """Note where the workers are before they are stopped; return what those that end printed.

        A rank that failed may take longer to end than the one whose end was detected.
        """
        # A rank that timed out cannot name the late rank if the group is of torch's own backend.
        # By process, because a program may change its RANK.
        ranks = {worker.pid: worker.rank for worker in self._group.running}
        stacks = {ranks[each.pid]: each.rows for each in offered_stacks(ranks)}
        in_user_code = {rank for rank, rows in stacks.items() if any(row[3] for row in rows)}
        printed = self._exits.printed(set(ranks.values()) - in_user_code)
        self._exits.places = {rank: place_of(rows) for rank, rows in stacks.items()} | printed
        return printed

    def _kill_and_reap(self) -> None:
        """Kill all processes of the attempt, and only then release their process numbers."""
        self._group.kill()
        if self._group.stopping or self._group.running:
            self._resources.descendants.kill(_KILL_TIMEOUT_S, spared=self._resources.warm.pids())
        self._group.reap()

    def _error_text(self, rank: int) -> str:
        stderr, error_file = self._error_sources[rank]
        return error_text(stderr.tail(), error_file)
