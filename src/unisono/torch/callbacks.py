"""Threads for what users chain to futures."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

__all__ = ["CallbackThreads"]


class CallbackThreads:
    """Runs tasks on threads that are made when all others are busy.

    A callback may wait for another operation, whose own callbacks must then run on another
    thread; torch's PowerSGD hook does so. The threads are daemons: a callback that waits for a
    lost peer must not keep the process from ending, as those of `concurrent.futures` would.

    Args:
        name: Of the group, for the threads' names.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._closed = False

    def run(self, task: Callable[[], object]) -> None:
        """Run `task` soon, on another thread; on this one if the threads are gone already."""
        with self._lock:
            if closed := self._closed:
                pass
            elif self._idle:
                self._idle -= 1
            else:
                name = f"unisono-callbacks-{self._name}-{len(self._threads)}"
                thread = threading.Thread(target=self._work, name=name, daemon=True)
                self._threads.append(thread)
                thread.start()
            if not closed:
                self._tasks.put(task)
        if closed:
            task()

    def close(self, timeout_s: float = 10.0) -> None:
        """End the threads once they have run what they have; wait for them, but not for ever."""
        with self._lock:
            self._closed = True
            threads, self._threads = self._threads, []
            for _ in threads:
                self._tasks.put(None)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(timeout_s)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()
            # An idle thread must not keep the tensors of its last task alive.
            del task
            with self._lock:
                self._idle += 1
