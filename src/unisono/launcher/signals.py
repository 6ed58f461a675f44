"""The file descriptor at which the agent waits: for signals, and for wake-ups by its threads."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Collection
from typing import Self

ENDING = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT")
"""Signals that end the launch, unless the user names others."""

PASSED_ON = ("SIGUSR1", "SIGUSR2")
"""Signals that the agent forwards to the workers, unless they end the launch."""

_WAKE = b"\0"


class Signals:
    """Turns signals into bytes on a file descriptor, from `__enter__` to `__exit__`.

    A signal that was ignored before (nohup, a shell's background job) stays ignored. Outside
    the main thread signals cannot be caught; only `wake` makes the descriptor readable.

    Args:
        ending: Names of the signals that end the launch. SIGUSR1 and SIGUSR2 are caught in any
            case, because batch systems announce the end of a job to the workers by them.

    Attributes:
        fd: Readable when there is something to `read`.
    """

    def __init__(self, ending: Collection[str] = ENDING) -> None:
        self._ending = {getattr(signal, name) for name in ending}
        self._previous: dict[int, object] = {}
        self._wakeup = -1

    def __enter__(self) -> Self:
        self.fd, self._sender = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(self._sender, False)
        if threading.current_thread() is threading.main_thread():
            # If SIGCHLD were ignored (inherited), the kernel would discard exit codes.
            self._previous[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, _do_nothing)
            self._wakeup = signal.set_wakeup_fd(self._sender, warn_on_full_buffer=False)
            for signum in self._ending | {getattr(signal, name) for name in PASSED_ON}:
                if signal.getsignal(signum) is not signal.SIG_IGN:
                    self._previous[signum] = signal.signal(signum, _do_nothing)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._previous:
            signal.set_wakeup_fd(self._wakeup)
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)  # type: ignore[arg-type]
        os.close(self.fd)
        os.close(self._sender)

    def ends(self, signum: int) -> bool:
        """Whether a signal ends the launch; otherwise it is only passed on to the workers."""
        return signum in self._ending

    def any_ends(self) -> bool:
        """Read all signals; return whether one of them ends the launch."""
        return any(map(self.ends, self.read()))

    def wake(self) -> None:
        """Make `fd` readable, from any thread."""
        # If the pipe is full, it is readable already.
        with contextlib.suppress(BlockingIOError):
            os.write(self._sender, _WAKE)

    def read(self) -> list[int]:
        """Return the signals that came, oldest first, without SIGCHLD and wake-ups."""
        try:
            return [n for n in os.read(self.fd, 4096) if n not in (_WAKE[0], signal.SIGCHLD)]
        except BlockingIOError:
            return []


def _do_nothing(signum: int, frame: object) -> None:
    """Handle a signal: without a handler, Python writes nothing to the descriptor."""
