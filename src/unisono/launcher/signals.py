"""Signals as bytes on the file descriptor at which the agent waits; and signals that wait."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Collection, Iterator
from typing import Any, Self

from unisono.core.base.deadline import Deadline
from unisono.core.platform.posix import SIGCHLD, blocked, require_posix, set_blocking, unblock

ENDING = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT")
"""Signals that end the launch, unless the user names others."""

PASSED_ON = ("SIGUSR1", "SIGUSR2")
"""Signals that the agent forwards to the workers, unless they end the launch."""

_WAKE = b"\0"

_SAME_S = 0.5
"""How long a further ending signal of one kind is the same one. Slurm and systemd send it to all
processes, so that it comes directly and from the guard. If it counted as the second signal, the
workers would be killed before they could save their state.
"""


class Signals:
    """Turns signals into bytes on a file descriptor, from `__enter__` to `__exit__`.

    A signal that was ignored before (nohup) stays ignored. A signal that
    was blocked (by `fork_launcher`) is unblocked. Outside the main thread signals cannot be caught;
    only `wake` makes the descriptor readable.

    Args:
        ending: Names of the signals that end the launch. SIGUSR1 and SIGUSR2 are caught in any
            case, because batch systems announce the end of a job to the workers by them.

    Attributes:
        fd: Readable when there is something to `read`.
    """

    def __init__(self, ending: Collection[str] = ENDING) -> None:
        require_posix("a launch")
        self._ending: set[int] = {getattr(signal, name) for name in ending}
        self._previous: dict[int, object] = {}
        self._wakeup: int = -1
        # How long a further signal of an ending kind is the same one.
        self._same: dict[int, Deadline] = {}

    def __enter__(self) -> Self:
        self.fd, self._sender = os.pipe()
        set_blocking(self.fd, False)
        set_blocking(self._sender, False)
        if _is_main():
            # If SIGCHLD were ignored (inherited), the kernel would discard exit codes.
            self._previous[SIGCHLD] = signal.signal(SIGCHLD, _do_nothing)
            self._wakeup = signal.set_wakeup_fd(self._sender, warn_on_full_buffer=False)
            for signum in self._ending | {getattr(signal, name) for name in PASSED_ON}:
                if signal.getsignal(signum) is not signal.SIG_IGN:
                    self._previous[signum] = signal.signal(signum, _do_nothing)
            unblock(self._previous)
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

    def ending(self) -> int | None:
        """Read all signals; return the first that ends the launch, or None."""
        return next(filter(self.ends, self.read()), None)

    def wake(self) -> None:
        """Make `fd` readable, from any thread."""
        # If the pipe is full, it is readable already.
        with contextlib.suppress(BlockingIOError):
            os.write(self._sender, _WAKE)

    def read(self) -> list[int]:
        """Return the signals that came, oldest first, without SIGCHLD, wake-ups and repeats."""
        try:
            came = os.read(self.fd, 4096)
        except BlockingIOError:
            return []
        return [n for n in came if n not in (_WAKE[0], SIGCHLD) and not self._repeats(n)]

    def _repeats(self, signum: int) -> bool:
        """Return whether an ending signal is one that came just now."""
        if not self.ends(signum):
            return False
        same = self._same.get(signum)
        if same is not None and not same.expired():
            return True
        self._same[signum] = Deadline(_SAME_S)
        return False


def _do_nothing(signum: int, frame: object) -> None:
    """Handle a signal: without a handler, Python writes nothing to the descriptor."""


class _Deferred:
    """The handlers that `deferred` has taken away, by signal, and the signals that came since."""

    def __init__(self) -> None:
        self.handlers: dict[int, Callable[[int, Any], Any]] = {}
        self.came: list[int] = []


_deferred = _Deferred()


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Run the handlers of SIGINT and SIGTERM after the block, in which a child is started.

    Python ignores an exception in a hook of `os.fork`, such as that of `logging`, so a Ctrl-C there
    would be lost. Elsewhere in the block it would leave a child that no process stops.
    """
    if not _is_main() or _deferred.handlers:
        yield
        return
    found = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    with blocked(found):
        for signum, handler in found.items():
            if callable(handler):
                _deferred.handlers[signum] = handler
                signal.signal(signum, lambda signum, frame: _deferred.came.append(signum))
    try:
        yield
    finally:
        run_deferred()


def run_deferred() -> None:
    """Put the handlers back, and run those of the signals that came; a forked child calls it."""
    if not _is_main():
        return
    handlers = _deferred.handlers
    with blocked(handlers):
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
        came, _deferred.came, _deferred.handlers = _deferred.came, [], {}
    for signum in came:
        handlers[signum](signum, None)


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()
