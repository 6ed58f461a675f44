"""The end of something that runs elsewhere: set once, waited for by anybody."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any, Protocol, Self

from unisono.base.deadline import Deadline
from unisono.base.log import get_logger
from unisono.errors import ClosedError

__all__ = ["Completion", "Source"]

_log = get_logger("base.completion")

_forks = 0
"""Between this process and the first one that loaded this."""


def _count_fork() -> None:
    global _forks
    _forks += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_count_fork)


class Source(Protocol):
    """Where something ends of which nobody tells its completion."""

    def poll(self) -> object:
        """Finish the completion if it has ended."""

    def wait(self, deadline: Deadline | None) -> bool:
        """Block until it has ended; False if the deadline passed first.

        The completion is finished then, or about to be by another thread.
        """

    def watch(self) -> bool:
        """Have the completion finished by another thread; False: it has ended already."""


class Completion:
    """Becomes done exactly once, with or without an error.

    Transfers of a transport, submissions to an engine and the works that users hold are all
    completions, so that waiting, polling and chaining are written here only.

    Theory of operation: `_gate` is a lock that is held until the end. Who waits takes it and
    gives it back for the next one. An Event does the same at several times the price, and a
    small message costs little more than its completion.

    What ends in C++ has a source: nobody is woken there to finish the completion, unless a callback
    waits for that. Whoever asks looks at the source.

    Args:
        any_process: A child of a fork may end its copy. What a thread of the parent would end
            never ends there.
    """

    __slots__ = ("_callbacks", "_done", "_forks", "_gate", "_lock", "_source", "error")

    def __init__(self, *, any_process: bool = False) -> None:
        self._lock = threading.Lock()
        self._gate = threading.Lock()
        self._gate.acquire()
        self._done = False
        self._forks = None if any_process else _forks
        self._callbacks: list[Callable[[Any], object]] = []
        self._source: Source | None = None
        self.error: BaseException | None = None

    def ends_with(self, source: Source) -> None:
        """Look at `source` for the end, until it is finished."""
        self._source = source

    def done(self) -> bool:
        """Whether it has ended, well or badly."""
        if not self._done and (source := self._source) is not None:
            source.poll()
        return self._done

    def finish(self, error: BaseException | None = None) -> bool:
        """End it; only the first call counts and returns True.

        Callbacks run on the calling thread, in the order they were added. What they raise is
        logged: this thread may be one that all other transfers depend on.
        """
        with self._lock:
            if self._done:
                return False
            self.error = error
            self._done = True
            self._source = None
            callbacks, self._callbacks = self._callbacks, []
        self._gate.release()
        for callback in callbacks:
            self._call(callback)
        return True

    def wait_until(self, deadline: Deadline | None) -> bool:
        """Block until done or expired; return whether it is done.

        Raises:
            ClosedError: It ends in the parent of this fork only. Nothing else is raised.
        """
        if not self._done:
            source = self._source
            if source is not None and not source.wait(deadline):
                return self._done
            if self._forks not in (None, _forks):
                raise ClosedError(
                    "what the parent of this fork has begun can be waited for there only"
                )
            limit = None if deadline is None else deadline.remaining()
            if limit is None or limit > threading.TIMEOUT_MAX:
                limit = -1
            if not self._gate.acquire(timeout=limit):
                return self._done
            self._gate.release()
        return True

    def add_callback(self, callback: Callable[[Self], object]) -> None:
        """Call `callback(self)` when done; at once if it is done already."""
        with self._lock:
            done, source = self._done, self._source
            if not done:
                self._callbacks.append(callback)
        if done:
            self._call(callback)
        elif source is not None and not source.watch():
            self.finish()

    def _call(self, callback: Callable[[Any], object]) -> None:
        try:
            callback(self)
        except Exception:
            _log.exception("a callback raised")
