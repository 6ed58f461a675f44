"""How late this process's threads wake up: what a busy machine adds to every bound on a time."""

import threading
import time

HANDOVERS = 6
"""A call that ends passes through some threads; each may be as late as one that only sleeps."""


# How often to measure before a bound is broken for good: nothing else makes up for a virtual
# machine that stands still for a second.
_ROUNDS = 8


def best_s(measure, enough_s):
    """Return the least of what `measure()` returns, in seconds; less than `enough_s` will do."""
    least_s = measure()
    for _ in range(_ROUNDS - 1):
        if least_s < enough_s:
            break
        least_s = min(least_s, measure())
    return least_s


class Lateness:
    """Measures while the with block runs.

    Attributes:
        most_s: The most that a thread which only sleeps was late.
    """

    STEP_S = 0.005

    def __init__(self):
        self.most_s = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._measure)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *exception):
        self._stop.set()
        self._thread.join()

    @property
    def slack_s(self):
        """What to add to a bound."""
        return HANDOVERS * self.most_s

    def _measure(self):
        before_s, ended = time.monotonic(), False
        while not ended:
            ended = self._stop.wait(self.STEP_S)
            now_s = time.monotonic()
            # The last time counts as well: what ended the block may have been what was late.
            self.most_s = max(self.most_s, now_s - before_s - self.STEP_S)
            before_s = now_s
