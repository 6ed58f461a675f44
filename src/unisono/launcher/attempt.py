"""One attempt: the workers of one node in one world, from their start to the end of the last.

Start all; wait until all have ended. If one fails, the others get SIGTERM, and SIGKILL after the
grace period. In the end whatever is left of the workers is killed, whether all went well or not,
so that nothing of one attempt lives on into the next.
"""

from __future__ import annotations

import contextlib
import selectors
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from unisono.base.config import environ
from unisono.base.deadline import Deadline
from unisono.launcher.environment import ERROR_FILE_VARIABLE, Place, worker_environment
from unisono.launcher.output.files import Output, WorkerName
from unisono.launcher.output.reader import Stream
from unisono.launcher.report import Ends, Failure, error_text
from unisono.launcher.signals import Signals
from unisono.launcher.spec import LaunchSpec
from unisono.launcher.workers.cpu_binding import Binding
from unisono.launcher.workers.descendants import Family
from unisono.launcher.workers.oom import OomWatch
from unisono.launcher.workers.warm import WarmWorkers
from unisono.launcher.workers.worker import Worker

__all__ = ["Attempt", "Outcome"]

_POLL_S = 0.05
_TAIL_WAIT_S = 0.2
_END_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How an attempt ended.

    Attributes:
        failures: Workers that failed by themselves; the root cause first.
        stopped: Ranks that the agent ended.
        left_s: By rank that ended with exit code 0, when; seconds since the epoch.
        signum: The signal that ended it, or None.
        succeeded: Whether every worker ended with exit code 0.
    """

    failures: tuple[Failure, ...]
    stopped: tuple[int, ...]
    left_s: dict[int, float]
    signum: int | None
    succeeded: bool


class Attempt:
    """Runs the workers once; use once.

    Args:
        spec: What to launch.
        place: This node's place in the world.
        number: Which attempt of this agent it is, from 0.
        binding: CPUs of each worker.
        output: Where the workers' output goes.
        signals: Waited at; a knock makes it ask `stop_in_s`.
        warm: Half-started workers, taken if there are any, and made for the next attempt.
        family: Who may be killed in the end, if not all went well.
        stop_in_s: Returns in how many seconds the rendezvous wants the workers to have ended by
            themselves, or be stopped; infinity if it does not.
        on_failure: Called once, when it is known that workers failed, while the others are
            still ending; with the first failure.
    """

    def __init__(
        self,
        spec: LaunchSpec,
        place: Place,
        number: int,
        *,
        binding: Binding,
        output: Output,
        signals: Signals,
        warm: WarmWorkers,
        family: Family,
        stop_in_s: Callable[[], float],
        on_failure: Callable[[Failure], None],
    ) -> None:
        self._spec = spec
        self._place = place
        self._number = number
        self._binding = binding
        self._output = output
        self._signals = signals
        self._stop_in_s = stop_in_s
        self._on_failure = on_failure
        self._warm = warm
        self._family = family
        self._workers: list[Worker] = []
        self._running: list[Worker] = []
        self._stderr: dict[int, Stream] = {}
        self._error_files: dict[int, str] = {}
        self._signum: int | None = None
        self._stopping = False
        self._ends = Ends(self._error_text)
        self._grace: Deadline | None = None
        self._oom = OomWatch()

    def run(self) -> Outcome:
        """Start the workers and return when all of them have ended.

        Raises:
            LaunchError: A worker could not be started; those that were have been ended.
        """
        with self._oom:
            with contextlib.ExitStack() as stack:
                stack.callback(self._end)
                for local_rank in range(self._spec.nprocs):
                    self._start(local_rank)
                self._warm.begin(wanted=self._may_follow())
                self._output.status(len(self._workers), self._place.world.restarts)
                self._watch()
            return Outcome(
                failures=tuple(self._ends.failures()),
                stopped=tuple(worker.rank for worker in self._workers if worker.stopped),
                left_s=self._ends.left_s,
                signum=self._signum,
                succeeded=all(worker.exit_code == 0 for worker in self._workers),
            )

    def _may_follow(self) -> bool:
        """Whether there can be another attempt after this one."""
        limits = self._spec.limits
        return (
            self._place.world.restarts < limits.max_restarts or limits.min_nodes < limits.max_nodes
        )

    def _start(self, local_rank: int) -> None:
        env = self._environment(local_rank)
        worker = self._warm.take(local_rank, env) or self._new_worker(local_rank, env)
        worker.rank = self._place.first_rank + local_rank
        self._workers.append(worker)
        self._running.append(worker)
        self._error_files[worker.rank] = env[ERROR_FILE_VARIABLE]
        self._stderr[worker.rank] = self._output.attach(worker, self._name(local_rank))

    def _name(self, local_rank: int) -> WorkerName:
        return WorkerName(
            rank=self._place.first_rank + local_rank,
            local_rank=local_rank,
            attempt=self._number,
            role=self._place.node.role,
        )

    def _environment(self, local_rank: int) -> dict[str, str]:
        inherited = environ()
        env = dict(inherited) | worker_environment(local_rank, self._place, inherited=inherited)
        env |= self._binding.environment(local_rank, inherited)
        env[ERROR_FILE_VARIABLE] = self._output.error_file(self._name(local_rank))
        return env

    def _new_worker(
        self, local_rank: int, env: Mapping[str, str], pass_fds: Sequence[int] = ()
    ) -> Worker:
        return Worker(
            self._place.first_rank + local_rank,
            self._spec.commands[local_rank],
            env,
            stdout=self._output.stdout,
            cpus=self._binding.cpus(local_rank),
            pass_fds=pass_fds,
        )

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._signals.fd, selectors.EVENT_READ)
            for worker in self._running:
                if worker.exit_fd is not None:
                    selector.register(worker.exit_fd, selectors.EVENT_READ)
            while self._running:
                # Before any wait: an order to stop may have come with the one to start.
                if not self._stopping and self._stop_in_s() == 0.0:
                    self._stop(signal.SIGTERM)
                selector.select(self._timeout())
                for signum in self._signals.read():
                    self._on_signal(signum)
                self._family.reap([*(w.pid for w in self._workers), *self._warm.pids()])
                for worker in [w for w in self._running if w.poll() is not None]:
                    self._running.remove(worker)
                    if worker.exit_fd is not None:
                        selector.unregister(worker.exit_fd)
                    self._family.look_away(2 * _END_S)
                    self._on_exit(worker)
                    self._output.status(len(self._running), self._place.world.restarts)
                self._on_clock()
                if not self._stopping:
                    self._warm.look(self._workers, self._environment, self._new_worker)
            # All have ended, so nobody here will say more.
            if not self._stopping and self._ends.known_in_s() < float("inf"):
                self._fail()

    def _timeout(self) -> float | None:
        waits = []
        if self._grace is not None:
            waits.append(self._grace.remaining())
        if not self._stopping:
            soon_s = min(self._ends.known_in_s(), self._stop_in_s())
            waits += [soon_s] if soon_s < float("inf") else []
        if any(worker.exit_fd is None for worker in self._running):
            waits.append(_POLL_S)
        if not self._stopping and (due_s := self._warm.due_s()) is not None:
            waits.append(due_s)
        return min(waits, default=None)

    def _on_signal(self, signum: int) -> None:
        if not self._signals.ends(signum):
            for worker in self._workers:
                worker.send(signum)
        elif self._signum is None:
            self._signum = signum
            self._stop(signum)
        else:
            # The user will not wait any longer.
            self._grace = Deadline(0)

    def _on_exit(self, worker: Worker) -> None:
        if worker.stopped or worker.exit_code is None:
            return
        if worker.exit_code and not self._stopping:
            self._stderr[worker.rank].ended.wait(_TAIL_WAIT_S)
        hint = self._oom.hint(worker.pid) if worker.exit_code == -signal.SIGKILL else ""
        self._ends.note(worker.rank, worker.pid, worker.exit_code, hint)

    def _on_clock(self) -> None:
        if not self._stopping and self._ends.known_in_s() == 0.0:
            self._fail()
        if self._grace is not None and self._grace.expired():
            self._grace = None
            for worker in self._workers:
                worker.kill_group()

    def _fail(self) -> None:
        self._on_failure(self._ends.failures()[0])
        self._stop(signal.SIGTERM)

    def _stop(self, signum: int) -> None:
        self._stopping = True
        self._grace = Deadline(self._spec.grace_s)
        for worker in self._workers:
            worker.stop(signum)

    def _end(self) -> None:
        """End everything that still runs, and only then give the numbers back."""
        for worker in self._workers:
            worker.kill_group()
        if self._stopping or self._running:
            self._family.end(_END_S, spared=self._warm.pids())
        for worker in self._workers:
            worker.reap()

    def _error_text(self, rank: int) -> str:
        return error_text(self._stderr[rank].tail(), self._error_files[rank])
