"""Threads for the callbacks that users chain to futures."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

from unisono.core.base.log import get_logger, log_raised
from unisono.core.base.threads.worker import WorkerThread

__all__ = ["CallbackThreads"]

_log = get_logger("torch.callbacks")


class CallbackThreads:
    """Runs tasks on threads, and starts a new thread if all others are busy.

    A callback may wait for another operation, whose callbacks must then run on another thread.
    torch's PowerSGD hook does so. The threads are daemons, because a callback that waits for a lost
    peer must not keep the process alive. The threads of `concurrent.futures` would keep it alive.

    Args:
        name: Name of the group, for the threads' names.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        # Reentrant, because a signal handler may call `run` in a thread that holds the lock.
        self._lock = threading.RLock()
        self._workers: list[WorkerThread] = []
        self._idle = 0
        self._closed = False

    def run(self, task: Callable[[], object]) -> None:
        """Run `task` soon on another thread; after `close` run it here at once."""
        with self._lock:
            if not self._closed:
                self._tasks.put(task)
                if self._idle:
                    self._idle -= 1
                    return
                worker = WorkerThread(f"unisono-callbacks-{self._name}-{len(self._workers)}")
                self._workers.append(worker)
                worker.start(self._work)
                return
        task()

    def close(self, timeout_s: float = 10.0) -> None:
        """End the threads after their tasks; wait at most `timeout_s` for each."""
        for worker in self.end():
            worker.join(timeout_s)

    def end(self) -> list[WorkerThread]:
        """End the threads after their tasks; return them."""
        with self._lock:
            self._closed = True
            workers, self._workers = self._workers, []
            for _ in workers:
                self._tasks.put(None)
        return workers

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except BaseException:
                # The next task waits for this thread.
                log_raised(_log, "a callback raised")
            # An idle thread must not keep the tensors of its last task alive.
            del task
            with self._lock:
                self._idle += 1
