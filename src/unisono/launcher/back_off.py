"""The pause before a restart: longer and longer while workers fail at once."""

from __future__ import annotations

import time

from unisono.core.base.deadline import Deadline

FIRST_S = 0.1
"""The second pause. The first is 0: most failures have nothing to do with the one before."""

LONGEST_S = 5.0
"""The longest pause. More delays a job whose cause of failure has gone; less costs CPU time."""

AT_ONCE_S = 5.0
"""A failure within this time after a restart makes the next pause longer. More slows down jobs
whose failures have different causes; less misses workers that import much before they fail."""


class BackOff:
    """The pauses of one agent: 0, then `FIRST_S`, and twice the last one up to `LONGEST_S`."""

    def __init__(self) -> None:
        self._pause_s = 0.0
        self._restart_s = float("-inf")
        self._end: Deadline | None = None

    def begin(self) -> float:
        """Begin the pause after a failure that came just now; return its length in seconds."""
        now = time.monotonic()
        if now - self._restart_s > AT_ONCE_S:
            self._pause_s = 0.0
        else:
            self._pause_s = min(max(2 * self._pause_s, FIRST_S), LONGEST_S)
        self._restart_s = now + self._pause_s
        self._end = Deadline(self._pause_s)
        return self._pause_s

    def in_s(self) -> float:
        """Return in how many seconds to call `over`; infinity if it has returned True."""
        return float("inf") if self._end is None else self._end.remaining()

    def over(self) -> bool:
        """Whether there is no pause now."""
        if self._end is not None and self._end.expired():
            self._end = None
        return self._end is None
