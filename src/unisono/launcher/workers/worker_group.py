"""The workers of one attempt on one host, which are stopped together."""

from __future__ import annotations

from unisono.base.deadline import Deadline
from unisono.launcher.workers.worker import Worker


class WorkerGroup:
    """The workers of one attempt.

    Args:
        grace_s: Seconds between the signal of `stop` and SIGKILL.

    Attributes:
        workers: All workers, by local rank.
        running: Workers whose end the attempt has not handled yet.
        stopping: Whether `stop` was called.
    """

    def __init__(self, grace_s: float) -> None:
        self.workers: list[Worker] = []
        self.running: list[Worker] = []
        self.stopping = False
        self._grace_s = grace_s
        self._kill_at: Deadline | None = None

    def add(self, worker: Worker) -> None:
        """Add a worker that was started."""
        self.workers.append(worker)
        self.running.append(worker)

    def replace(self, old: Worker, new: Worker | None) -> None:
        """Kill what is left of a worker and release it; `new` takes its place."""
        old.kill_group()
        old.reap()
        if old in self.running:
            self.running.remove(old)
        self.workers.remove(old)
        if new is not None:
            self.add(new)

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
        self._kill_at = Deadline(self._grace_s)
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
            worker.kill_group()

    def reap(self) -> None:
        """Release the process numbers of the workers; see `Worker.reap`."""
        for worker in self.workers:
            worker.reap()
