"""A value that comes later, with torch.futures.Future's methods."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from unisono.base.completion import Completion
from unisono.base.deadline import Deadline, Timeout
from unisono.base.log import get_logger
from unisono.errors import CollectiveTimeoutError, UsageError

__all__ = ["Future", "collect_all"]

_log = get_logger("groups.future")


class Future:
    """A value that is set once.

    Source: torch.futures.Future (2.13).
    """

    def __init__(self) -> None:
        self._completion = Completion()
        self._value: Any = None

    def done(self) -> bool:
        """Whether it has a value or an error."""
        return self._completion.done()

    def set_result(self, value: Any) -> None:
        """Set the value and run the callbacks.

        Raises:
            UsageError: It is done already.
        """
        self._value = value
        self._finish(None)

    def set_exception(self, error: BaseException) -> None:
        """Set an error, which `wait` and `value` raise, and run the callbacks.

        Raises:
            UsageError: It is done already.
        """
        self._finish(error)

    def wait(self, timeout: Timeout | None = None) -> Any:
        """Return the value once it is there; raise the error if there is one.

        Raises:
            CollectiveTimeoutError: Not done in time; the future itself goes on.
        """
        deadline = None if timeout is None else Deadline(timeout)
        if not self._completion.wait_until(deadline):
            raise CollectiveTimeoutError(f"the future had no value after {timeout} s")
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
        """Call `callback(self)` once done, on the thread that ends it; now if it is done.

        An exception in the callback is logged and otherwise ignored, as in torch.
        """

        def run(completion: Completion) -> None:
            try:
                callback(self)
            except Exception:
                _log.exception("a done-callback raised")

        self._completion.add_callback(run)

    def then(self, callback: Callable[[Future], Any]) -> Future:
        """Return a future of `callback(self)`; an exception in it becomes that future's error."""
        result = Future()

        def run(completion: Completion) -> None:
            try:
                value = callback(self)
            except Exception as error:
                result.set_exception(error)
            else:
                result.set_result(value)

        self._completion.add_callback(run)
        return result

    def _finish(self, error: BaseException | None) -> None:
        if not self._completion.finish(error):
            raise UsageError("the future is done already")

    def __repr__(self) -> str:
        if not self.done():
            return "<Future pending>"
        error = self._completion.error
        return "<Future done>" if error is None else f"<Future failed: {error!r}>"


def collect_all(futures: Sequence[Future]) -> Future:
    """Return a future of the list of futures, done when all of them are.

    Source: torch.futures.collect_all (2.13).
    """
    result = Future()
    left = Completion()
    waiting = list(futures)

    def ended(future: Future) -> None:
        if all(f.done() for f in waiting) and left.finish():
            result.set_result(list(waiting))

    for future in waiting:
        future.add_done_callback(ended)
    if not waiting:
        result.set_result([])
    return result
