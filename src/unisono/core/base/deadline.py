"""Deadlines: points on `time.monotonic()`, the clock of every wait."""

from __future__ import annotations

import math
import time
from datetime import timedelta
from numbers import Real
from operator import index
from typing import Any

from unisono.errors import ArgumentTypeError, InvalidArgumentError

Timeout = float | int | timedelta
"""A duration given by a user: seconds, or a timedelta; NumPy's numbers and timedelta64 as well."""


def to_seconds(timeout: Timeout, what: str = "timeout") -> float:
    """Return a duration in seconds; infinity is allowed, negative and NaN are not.

    Raises:
        ArgumentTypeError: The value is not a number or timedelta.
        InvalidArgumentError: The value is negative or NaN.
    """
    if type(timeout) is float and timeout >= 0:
        return timeout  # the common case, faster by some hundred nanoseconds
    seconds = _seconds(timeout)
    if seconds is None:
        raise ArgumentTypeError(
            f"{what} must be seconds (float) or datetime.timedelta, got {type(timeout).__name__}"
        )
    if math.isnan(seconds) or seconds < 0:
        raise InvalidArgumentError(f"{what} must not be negative, got {timeout!r}")
    return seconds


def _seconds(timeout: Any) -> float | None:
    """Return a duration in seconds; None if the object is none."""
    kind = getattr(getattr(timeout, "dtype", None), "kind", "")
    if kind == "m":
        # NumPy counts a timedelta64 as a number, of its own unit.
        timeout = timeout.astype("m8[us]").item()
    if isinstance(timeout, timedelta):
        return timeout.total_seconds()
    if isinstance(timeout, bool) or kind == "b":
        return None
    try:
        whole = isinstance(timeout, Real) or hasattr(timeout, "__index__")
        return float(timeout if isinstance(timeout, Real) else index(timeout)) if whole else None
    except OverflowError:
        return math.inf if timeout > 0 else -math.inf
    except TypeError:
        return None


class Deadline:
    """The moment at which a wait ends with a time-out.

    A call makes one deadline and passes it down. All nested waits then share one time-out.
    """

    __slots__ = ("_at", "timeout_s")

    def __init__(self, timeout: Timeout) -> None:
        self.timeout_s = to_seconds(timeout)
        self._at = time.monotonic() + self.timeout_s

    @classmethod
    def ending(cls, timeout_s: float, left_s: float) -> Deadline:
        """Return a deadline of this time-out that has only `left_s` left."""
        made = cls(timeout_s)
        made._at = time.monotonic() + left_s
        return made

    def earlier(self, seconds: float) -> Deadline:
        """Return a deadline that is earlier by `seconds`, but at most by 0.8 of the time-out."""
        other = Deadline(self.timeout_s)
        other._at = self._at - min(seconds, 0.8 * self.timeout_s)
        return other

    def within(self, seconds: float) -> Deadline:
        """Return the earlier of this deadline and one in `seconds`."""
        return Deadline(min(seconds, self.remaining()))

    def remaining(self) -> float:
        """Return the seconds left, never negative."""
        return max(0.0, self._at - time.monotonic())

    def expired(self) -> bool:
        """Return whether no time is left."""
        return time.monotonic() >= self._at

    def __str__(self) -> str:
        """Return the whole time-out in words: "30.0 s", "20 ms"."""
        timeout_s = self.timeout_s
        return f"{timeout_s * 1e3:.3g} ms" if timeout_s < 0.1 else f"{timeout_s:.1f} s"

    def __repr__(self) -> str:
        return f"<Deadline {self.remaining():.3f} s of {self.timeout_s:g} s left>"
