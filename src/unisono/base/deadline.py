"""One clock for every wait: a deadline is a point on `time.monotonic()`."""

from __future__ import annotations

import math
import time
from datetime import timedelta

from unisono.errors import ArgumentTypeError, InvalidArgumentError

__all__ = ["Deadline", "Timeout", "to_seconds"]

Timeout = float | int | timedelta
"""A duration given by a user: seconds, or a timedelta."""


def to_seconds(timeout: Timeout, what: str = "timeout") -> float:
    """Return a duration in seconds; infinity is allowed, negative and NaN are not.

    Raises:
        ArgumentTypeError: Not a number or timedelta.
        InvalidArgumentError: Negative or NaN.
    """
    if type(timeout) is float and timeout >= 0:
        return timeout  # the common case, some hundred nanoseconds faster
    if isinstance(timeout, timedelta):
        seconds = timeout.total_seconds()
    elif isinstance(timeout, (int, float)) and not isinstance(timeout, bool):
        seconds = float(timeout)
    else:
        raise ArgumentTypeError(
            f"{what} must be seconds (float) or datetime.timedelta, got {type(timeout).__name__}"
        )
    if math.isnan(seconds) or seconds < 0:
        raise InvalidArgumentError(f"{what} must not be negative, got {timeout!r}")
    return seconds


class Deadline:
    """The moment after which a wait gives up.

    Made once per call and passed down, so that nested waits share one budget instead of
    each starting its own.
    """

    __slots__ = ("_at", "timeout_s")

    def __init__(self, timeout: Timeout) -> None:
        self.timeout_s = to_seconds(timeout)
        self._at = time.monotonic() + self.timeout_s

    def earlier(self, seconds: float) -> Deadline:
        """Return a deadline that many seconds before this one, but not in its first fifth."""
        other = Deadline(self.timeout_s)
        other._at = self._at - min(seconds, 0.8 * self.timeout_s)
        return other

    def remaining(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self._at - time.monotonic())

    def expired(self) -> bool:
        """Whether no time is left."""
        return time.monotonic() >= self._at

    def __str__(self) -> str:
        """Return the whole time-out in words: "30.0 s", "20 ms"."""
        timeout_s = self.timeout_s
        return f"{timeout_s * 1e3:.3g} ms" if timeout_s < 0.1 else f"{timeout_s:.1f} s"

    def __repr__(self) -> str:
        return f"<Deadline {self.remaining():.3f} s of {self.timeout_s:g} s left>"
