"""The agent: starts the workers of one host, watches them, and ends them together.

    agent ─┬─ TCPStore on a port that the system chooses; workers rendezvous there
           ├─ reaper     ends the workers if the agent is killed
           ├─ tee        their output, line by line
           └─ workers    one session each

Life of a launch: start all; wait until all have ended. If one fails, the others get SIGTERM,
and SIGKILL after the grace period. A signal to the launcher is passed on to the workers (not
to their children), again with SIGKILL after the grace period or at the second signal. In the
end whatever is left in the workers' process groups is killed, whether all went well or not.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from unisono.base.config import environ
from unisono.base.deadline import Deadline
from unisono.elastic.environment import (
    LAUNCH_VARIABLE,
    LOOPBACK,
    new_launch_id,
    worker_environment,
)
from unisono.elastic.process import Reaper, Worker
from unisono.elastic.report import Failure, extract_traceback, is_consequence, order
from unisono.elastic.tee import Stream, Tee
from unisono.stores import TCPStore

__all__ = ["GRACE_S", "SETTLE_S", "Agent", "LaunchResult", "LaunchSpec", "forwarded_signals"]

GRACE_S = 5.0
"""Default time between SIGTERM and SIGKILL. A script that writes a checkpoint on SIGTERM
needs more; a rank that hangs in a collective would only waste a longer one."""

SETTLE_S = 1.0
"""How long to wait for the original failure after one that only reports a lost peer."""

_FORWARDED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT")
_POLL_S = 0.05
_TAIL_WAIT_S = 0.2
_DRAIN_S = 5.0


@dataclass(frozen=True, kw_only=True)
class LaunchSpec:
    """What to launch.

    Attributes:
        command: Program and arguments, the same for every worker.
        nprocs: Number of workers.
        grace_s: Seconds between the request to end and SIGKILL.
    """

    command: Sequence[str]
    nprocs: int
    grace_s: float = GRACE_S


@dataclass(frozen=True, kw_only=True)
class LaunchResult:
    """How a launch ended.

    Attributes:
        failures: Workers that failed by themselves; the root cause first.
        stopped: Ranks that the agent ended.
        signum: The signal that ended the launch, or None.
    """

    failures: tuple[Failure, ...]
    stopped: tuple[int, ...]
    signum: int | None

    @property
    def exit_code(self) -> int:
        """0, the root cause's exit code, or 128 + signal as in a shell."""
        if self.signum is not None:
            return 128 + self.signum
        if not self.failures:
            return 0
        code = self.failures[0].exit_code
        return code if code > 0 else 128 - code


@contextlib.contextmanager
def forwarded_signals() -> Iterator[int]:
    """Turn termination signals into bytes on a file descriptor while the block runs.

    A signal that was ignored before (nohup, a shell's background job) stays ignored. Outside
    the main thread signals cannot be caught, and nothing ever arrives.
    """
    receiver, sender = os.pipe()
    os.set_blocking(sender, False)
    previous = {}
    try:
        if threading.current_thread() is threading.main_thread():
            # With SIGCHLD ignored (inherited), the kernel would throw exit codes away.
            previous[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            wakeup = signal.set_wakeup_fd(sender, warn_on_full_buffer=False)
            for name in _FORWARDED:
                signum = getattr(signal, name)
                if signal.getsignal(signum) is not signal.SIG_IGN:
                    previous[signum] = signal.signal(signum, lambda signum, frame: None)
        yield receiver
    finally:
        if previous:
            signal.set_wakeup_fd(wakeup)
        for signum, handler in previous.items():
            signal.signal(signum, handler)
        os.close(receiver)
        os.close(sender)


class Agent:
    """Runs one launch; use once."""

    def __init__(self, spec: LaunchSpec) -> None:
        self._spec = spec
        self._launch_id = new_launch_id()
        self._workers: list[Worker] = []
        self._stderr: dict[int, Stream] = {}
        self._ended_s: dict[int, float] = {}
        self._signum: int | None = None
        self._stopping = False
        self._settle: Deadline | None = None
        self._grace: Deadline | None = None

    def run(self) -> LaunchResult:
        """Start the workers and return when all of them have ended.

        Raises:
            LaunchError: A worker could not be started; those that were have been ended.
        """
        with contextlib.ExitStack() as stack:
            signals = stack.enter_context(forwarded_signals())
            store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
            stack.callback(store.close)
            tee = Tee()
            stack.callback(tee.close, _DRAIN_S)
            reaper = Reaper(self._launch_id)
            stack.callback(self._end, reaper)
            for rank in range(self._spec.nprocs):
                self._start(rank, store.port, reaper, tee)
            tee.start()
            self._watch(signals)
        return self._result()

    def _start(self, rank: int, port: int, reaper: Reaper, tee: Tee) -> None:
        inherited = environ()
        env = dict(inherited) | worker_environment(
            rank,
            self._spec.nprocs,
            master_port=port,
            launch_id=self._launch_id,
            inherited=inherited,
        )
        env[LAUNCH_VARIABLE] = self._launch_id
        # Workers write whole lines to a terminal, but to a pipe or file in pieces, which
        # would mix the ranks' lines; so there they go through the tee.
        pipe_stdout = self._spec.nprocs > 1 and not sys.stdout.isatty()
        worker = Worker(rank, self._spec.command, env, pipe_stdout=pipe_stdout)
        self._workers.append(worker)
        reaper.watch(worker)
        self._stderr[rank] = tee.add(worker.stderr, sys.stderr.buffer, keep_tail=True)
        if worker.stdout is not None:
            tee.add(worker.stdout, sys.stdout.buffer)

    def _watch(self, signals: int) -> None:
        running = list(self._workers)
        with selectors.DefaultSelector() as selector:
            selector.register(signals, selectors.EVENT_READ)
            for worker in running:
                if worker.exit_fd is not None:
                    selector.register(worker.exit_fd, selectors.EVENT_READ)
            while running:
                for key, _ in selector.select(self._timeout(running)):
                    if key.fd == signals:
                        for signum in os.read(signals, 64):
                            self._on_signal(signum)
                for worker in [w for w in running if w.poll() is not None]:
                    running.remove(worker)
                    if worker.exit_fd is not None:
                        selector.unregister(worker.exit_fd)
                    self._on_exit(worker)
                self._on_clock()

    def _timeout(self, running: Sequence[Worker]) -> float | None:
        waits = [d.remaining() for d in (self._settle, self._grace) if d is not None]
        if any(worker.exit_fd is None for worker in running):
            waits.append(_POLL_S)
        return min(waits, default=None)

    def _on_signal(self, signum: int) -> None:
        if self._stopping:
            # The user will not wait any longer.
            self._grace = Deadline(0)
        else:
            self._signum = signum
            self._stop(signum)

    def _on_exit(self, worker: Worker) -> None:
        self._ended_s[worker.rank] = time.monotonic()
        if worker.exit_code == 0 or self._stopping:
            return
        stderr = self._stderr[worker.rank]
        stderr.ended.wait(_TAIL_WAIT_S)
        if not is_consequence(extract_traceback(stderr.tail())):
            self._stop(signal.SIGTERM)
        elif self._settle is None:
            # The rank that failed first may need longer to end; let it say why.
            self._settle = Deadline(SETTLE_S)

    def _on_clock(self) -> None:
        if self._settle is not None and self._settle.expired():
            self._stop(signal.SIGTERM)
        if self._grace is not None and self._grace.expired():
            self._grace = None
            for worker in self._workers:
                worker.kill_group()

    def _stop(self, signum: int) -> None:
        self._stopping = True
        self._settle = None
        self._grace = Deadline(self._spec.grace_s)
        for worker in self._workers:
            worker.stop(signum)

    def _end(self, reaper: Reaper) -> None:
        """End everything that still runs, and only then give the numbers back."""
        for worker in self._workers:
            worker.kill_group()
        reaper.forget()
        try:
            for worker in self._workers:
                worker.reap()
        finally:
            clean = not self._stopping and len(self._ended_s) == self._spec.nprocs
            reaper.close(sweep=not clean)

    def _result(self) -> LaunchResult:
        failures = [
            Failure(
                rank=worker.rank,
                pid=worker.pid,
                exit_code=worker.exit_code,
                time_s=self._ended_s[worker.rank],
                text=extract_traceback(self._stderr[worker.rank].tail()),
            )
            for worker in self._workers
            if worker.exit_code and not worker.stopped
        ]
        return LaunchResult(
            failures=tuple(order(failures)),
            stopped=tuple(worker.rank for worker in self._workers if worker.stopped),
            signum=self._signum,
        )
