"""A thread that is started when it is first needed, wherever Ctrl-C may come."""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["Worker"]


class Worker:
    """Runs a function on one thread, once somebody asks for it.

    Ctrl-C in the middle of `Thread.start` leaves it open whether the thread runs. So the thread
    says so itself, too, and one that finds that another was first ends at once.

    Attributes:
        thread: None before it was started.

    Args:
        name: Of the thread.
    """

    def __init__(self, name: str) -> None:
        self.thread: threading.Thread | None = None
        self._name = name
        # A signal handler may come here while its own thread is here.
        self._lock = threading.RLock()

    def start(self, run: Callable[[], object]) -> None:
        """Run `run` on the thread, unless there is one already."""
        if self.thread is None:
            thread = threading.Thread(target=self._begin, args=(run,), name=self._name, daemon=True)
            thread.start()
            self._choose(thread)

    def is_here(self) -> bool:
        """Whether the calling thread is this one."""
        return threading.current_thread() is self.thread

    def join(self, timeout_s: float | None = None) -> None:
        """Wait for the end of the thread, if there is one and it is not the caller."""
        if self.thread is not None and not self.is_here():
            self.thread.join(timeout_s)

    def _choose(self, thread: threading.Thread) -> None:
        with self._lock:
            if self.thread is None:
                self.thread = thread

    def _begin(self, run: Callable[[], object]) -> None:
        self._choose(threading.current_thread())
        if self.is_here():
            run()
