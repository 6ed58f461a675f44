"""The pause before a restart: longer and longer while workers fail at once."""

from __future__ import annotations

import time

FIRST_S = 0.1
"""The second pause. The first is 0: most failures have nothing to do with the one before."""

LONGEST_S = 5.0
"""The longest pause. A job that fails at once for ever then costs no more than a few starts."""

AT_ONCE_S = 5.0
"""A failure so long after a restart, or sooner, makes the next pause longer."""


class BackOff:
    """The pauses of one agent: 0, then `FIRST_S`, and twice the last one up to `LONGEST_S`."""

    def __init__(self) -> None:
        self._pause_s = 0.0
        self._restart_s = float("-inf")

    def pause_s(self) -> float:
        """Return how long to wait before the restart after a failure that came just now."""
        now = time.monotonic()
        if now - self._restart_s > AT_ONCE_S:
            self._pause_s = 0.0
        else:
            self._pause_s = min(max(2 * self._pause_s, FIRST_S), LONGEST_S)
        self._restart_s = now + self._pause_s
        return self._pause_s
