"""A value that comes later, with torch.futures.Future's methods."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextvars import copy_context
from typing import Any

from unisono.backends import Pending
from unisono.base.completion import Completion
from unisono.base.deadline import Deadline, Timeout
from unisono.base.log import get_logger
from unisono.errors import CollectiveTimeoutError, UsageError

__all__ = ["Future", "collect_all"]

_log = get_logger("groups.future")


class Future:
    """A value that is set once.

    Callbacks run on the thread that ends the future, in the context (`contextvars`) that they
    were added in; at once if it is done already.

    Args:
        calls: What the value comes from. Whoever waits watches their deadlines.
        what: What it is the future of, for errors.

    Source: torch.futures.Future (2.13).
    """

    def __init__(self, calls: Sequence[Pending] = (), what: str = "") -> None:
        self._what = what
        self._completion = Completion(any_process=not calls)
        self._value: Any = None
        self._calls = tuple(calls)
        # Taken by the one who sets it, never released.
        self._claim = threading.Lock()

    def done(self) -> bool:
        """Whether it has a value or an error."""
        return self._completion.done()

    def set_result(self, value: Any) -> None:
        """Set the value and run the callbacks.

        Raises:
            UsageError: It is done already.
        """
        self._claim_once()
        self._value = value
        self._completion.finish()

    def set_exception(self, error: BaseException) -> None:
        """Set an error, which `wait` and `value` raise, and run the callbacks.

        Raises:
            UsageError: It is done already.
        """
        self._claim_once()
        self._completion.finish(error)

    def wait(self, timeout: Timeout | None = None) -> Any:
        """Return the value once it is there; raise the error if there is one.

        Raises:
            CollectiveTimeoutError: Not done in time; the future itself goes on.
        """
        limit = None if timeout is None else Deadline(timeout)
        done = self.done() or all(call.wait_or_expire(limit) for call in self._calls)
        if not done or not self._completion.wait_until(limit):
            assert limit is not None
            of = f" of {self._what}" if self._what else ""
            raise CollectiveTimeoutError(
                f"the future{of} had no value after {limit.timeout_s:g} s; it goes on"
            )
        return self.value()

    def value(self) -> Any:
        """Return the value, or raise the error.

        Raises:
            UsageError: Not done yet.
        """
        if not self.done():
            raise UsageError("the future has no value yet", hint="call wait() first")
        if self._completion.error is not None:
            raise self._completion.error
        return self._value

    def exception(self) -> BaseException | None:
        """Return the error, or None if there is none (yet)."""
        return self._completion.error

    def add_done_callback(self, callback: Callable[[Future], object]) -> None:
        """Call `callback(self)` once done.

        An exception in the callback is logged and otherwise ignored, as in torch.
        """
        context = copy_context()

        def run(completion: Completion) -> None:
            try:
                context.run(callback, self)
            except (Exception, SystemExit):
                _log.exception("a done-callback raised")

        self._completion.add_callback(run)

    def then(self, callback: Callable[[Future], Any]) -> Future:
        """Return a future of `callback(self)`; an exception in it becomes that future's error."""
        result = Future(self._calls, self._what)
        context = copy_context()

        def run(completion: Completion) -> None:
            try:
                value = context.run(callback, self)
            except (Exception, SystemExit) as error:
                result.set_exception(error)
            else:
                result.set_result(value)

        self._completion.add_callback(run)
        return result

    def _claim_once(self) -> None:
        if not self._claim.acquire(blocking=False):
            raise UsageError("the future is done already")

    def __repr__(self) -> str:
        if not self.done():
            return "<Future pending>"
        error = self._completion.error
        return "<Future done>" if error is None else f"<Future failed: {error!r}>"


def collect_all(futures: Sequence[Future]) -> Future:
    """Return a future of the list of futures, done when all are; it fails if one of them does.

    Source: torch.futures.collect_all (2.13).
    """
    waiting = list(futures)
    whats = dict.fromkeys(future._what for future in waiting if future._what)
    result = Future([call for future in waiting for call in future._calls], ", ".join(whats))
    left = Completion()

    def ended(future: Future) -> None:
        if all(f.done() for f in waiting) and left.finish():
            errors = [f.exception() for f in waiting]
            error = next((e for e in errors if e is not None), None)
            if error is None:
                result.set_result(list(waiting))
            else:
                result.set_exception(error)

    for future in waiting:
        future.add_done_callback(ended)
    if not waiting:
        result.set_result([])
    return result
