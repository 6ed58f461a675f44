"""The workers of one attempt on one host, which are stopped together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from multiprocessing import connection
from typing import Any, Generic, TypeVar

from unisono.core.base.deadline import Deadline
from unisono.launcher.workers.worker import Worker

W = TypeVar("W", bound=Worker)

_POLL_S = 0.05
"""Pause between two looks at workers whose end wakes no wait."""


class WorkerGroup(Generic[W]):
    """The workers of one attempt, or of one `spawn`.

    Args:
        grace_s: Seconds between the signal of `stop` and SIGKILL.

    Attributes:
        grace_s: See above.
        workers: All workers, by local rank.
        running: Workers whose end has not been handled yet.
        stopping: Whether `stop` was called.
    """

    def __init__(self, grace_s: float) -> None:
        self.grace_s = grace_s
        self.workers: list[W] = []
        self.running: list[W] = []
        self.stopping = False
        self._kill_at: Deadline | None = None

    def add(self, worker: W) -> None:
        """Add a worker that was started."""
        self.workers.append(worker)
        self.running.append(worker)

    def replace(self, old: W, new: W | None) -> None:
        """Kill what is left of a worker and release it; `new` takes its place."""
        old.kill()
        old.reap()
        if old in self.running:
            self.running.remove(old)
        self.workers.remove(old)
        if new is not None:
            self.add(new)

    def wait(self, limit_s: float, others: Iterable[Any] = ()) -> list[Any]:
        """Wait until a worker may have ended or another can be read; return the latter.

        Args:
            limit_s: How long to wait at most.
            others: Descriptors, sockets or connections of multiprocessing.
        """
        exits = {worker.exit for worker in self.running}
        limit_s = min(limit_s, _POLL_S if None in exits else limit_s)
        watched = [*others, *exits - {None}]
        ready = connection.wait(watched, None if limit_s == float("inf") else limit_s)
        return [each for each in ready if each not in exits]

    def ended(self) -> Iterator[W]:
        """Yield the running workers that have ended; each is no longer among `running` then."""
        for worker in [each for each in self.running if each.poll() is not None]:
            self.running.remove(worker)
            yield worker

    def pids(self) -> list[int]:
        """Return the process numbers of all workers."""
        return [worker.pid for worker in self.workers]

    def send_signal(self, signum: int) -> None:
        """Send a signal to each worker that runs."""
        for worker in self.workers:
            worker.send_signal(signum)

    def stop(self, signum: int) -> None:
        """Ask each worker by a signal to end, and begin the grace period."""
        self.stopping = True
        self._kill_at = Deadline(self.grace_s)
        for worker in self.workers:
            worker.stop(signum)

    def kill_now(self) -> None:
        """End the grace period."""
        self._kill_at = Deadline(0)

    def kill_in_s(self) -> float:
        """Return in how many seconds the grace period ends; infinity if there is none."""
        return float("inf") if self._kill_at is None else self._kill_at.remaining()

    def kill_if_due(self) -> None:
        """Kill the workers if the grace period is over."""
        if self.kill_in_s() == 0.0:
            self._kill_at = None
            self.kill()

    def kill(self) -> None:
        """Kill the workers and their process groups."""
        for worker in self.workers:
            worker.kill()

    def reap(self) -> None:
        """Release the process numbers of the workers; see `Worker.reap`."""
        for worker in self.workers:
            worker.reap()
