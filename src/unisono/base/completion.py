"""The end of something that runs elsewhere: set once, waited for by anybody."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Self

from unisono.base.deadline import Deadline

__all__ = ["Completion"]


class Completion:
    """Becomes done exactly once, with or without an error.

    Transfers of a transport, submissions to an engine and the works that users hold are all
    completions, so that waiting, polling and chaining are written here only.
    """

    __slots__ = ("_callbacks", "_event", "_lock", "error")

    def __init__(self) -> None:
        self._event = threading.Event()
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[Self], None]] = []
        self.error: BaseException | None = None

    def done(self) -> bool:
        """Whether it has ended, well or badly."""
        return self._event.is_set()

    def finish(self, error: BaseException | None = None) -> bool:
        """End it; only the first call counts and returns True.

        Callbacks run on the calling thread, in the order they were added.
        """
        with self._lock:
            if self._event.is_set():
                return False
            self.error = error
            self._event.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(self)
        return True

    def wait_until(self, deadline: Deadline | None) -> bool:
        """Block until done or expired; return whether it is done. Raises nothing."""
        if deadline is None or deadline.timeout_s > threading.TIMEOUT_MAX:
            return self._event.wait()
        return self._event.wait(deadline.remaining())

    def add_callback(self, callback: Callable[[Self], None]) -> None:
        """Call `callback(self)` when done; at once if it is done already."""
        with self._lock:
            if not self._event.is_set():
                self._callbacks.append(callback)
                return
        callback(self)
