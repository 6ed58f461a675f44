"""A thread that is started on first use, safely even if Ctrl-C interrupts the start."""

from __future__ import annotations

import threading
from collections.abc import Callable

from unisono.core.base.seam import cpp


class WorkerThread:
    """Runs a function on one thread, which `start` starts.

    After Ctrl-C in `Thread.start` the caller does not know whether the thread runs. So the new
    thread registers itself, too. If another thread is registered already, the new thread ends.

    Attributes:
        thread: The thread; None before the start.

    Args:
        name: Name of the thread.
    """

    def __init__(self, name: str) -> None:
        self.thread: threading.Thread | None = None
        self._name = name
        # Reentrant, because a signal handler may run in a thread that holds the lock.
        self._lock = threading.RLock()

    def start(self, run: Callable[[], object]) -> None:
        """Start the thread with `run`, unless there is a thread already."""
        if self.thread is None:
            thread = threading.Thread(target=self._begin, args=(run,), name=self._name, daemon=True)
            thread.start()
            self._register(thread)

    def is_here(self) -> bool:
        """Return whether the calling thread is this worker's thread."""
        return threading.current_thread() is self.thread

    def join(self, timeout_s: float | None = None) -> None:
        """Wait for the end of the thread, unless there is none or it is the caller."""
        if self.thread is not None and not self.is_here():
            self.thread.join(timeout_s)

    def _register(self, thread: threading.Thread) -> None:
        with self._lock:
            if self.thread is None:
                self.thread = thread

    def _begin(self, run: Callable[[], object]) -> None:
        self._register(threading.current_thread())
        cpp.mark_worker()
        if self.is_here():
            run()
