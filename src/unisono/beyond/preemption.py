"""`should_stop`: a signal on one rank stops all ranks at the same step.

Batch systems announce the end of a job by a signal, to one node or to all, at slightly different
times. If one rank saved its state and left, the other ranks would fail in their next collective. So
the ranks must agree first.
"""

from __future__ import annotations

import atexit
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np

from unisono.core.base.deadline import Timeout, to_seconds
from unisono.core.base.types import ReduceOp
from unisono.core.c10d.arguments import reporting_bad_arguments
from unisono.core.groups.world import Group, member_group

_SIGNALS = ("SIGTERM", "SIGUSR1")


class _StopState:
    """Whether this process was asked to stop, and whether it catches the signals.

    No events: a second signal may come while the handler of the first sets one, and would wait for
    its lock.
    """

    asked = False
    watching = False


def should_stop(group: Group = None, *, timeout: Timeout | None = None) -> bool:
    """Return whether any rank of the group has been asked to stop; the same on all ranks.

    A collective: every rank calls it at the same place, for example once per training step.
    True if any rank got SIGTERM or SIGUSR1 after its first call. From the first call on these
    signals no longer end the process, so the script must stop when the result is True:

        for step in range(first, steps):
            train(step)
            if dist.should_stop():
                save(step)
                break

    A process that never calls it keeps the default behaviour: SIGTERM ends it. A handler that
    the script installed before is still called. `unisono run` passes SIGTERM on to its workers
    and kills them after `--grace` seconds; SIGUSR1 and SIGUSR2 it only passes on.

    Formula: max over ranks of (a signal was received).

    Args:
        group: The default group if None. On a rank that is no member: warns, returns False.
        timeout: Of this call; the group's if None.

    Raises:
        CollectiveMismatchError: Another rank called another collective.
        PeerLostError: A rank ended without this call.
    """
    _watch()
    pg = member_group(group, "should_stop")
    if pg is None:
        return False
    with reporting_bad_arguments(pg, "should_stop"):
        timeout = None if timeout is None else to_seconds(timeout)
    flag = np.array([_StopState.asked], dtype=np.int32)
    pg.all_reduce(flag, ReduceOp.MAX, timeout=timeout).wait_on_host()
    return bool(flag[0])


def _watch() -> None:
    """Catch the signals from now on, if called on the main thread; Python allows it only there."""
    if _StopState.watching or threading.current_thread() is not threading.main_thread():
        return
    _StopState.watching = True
    for name in _SIGNALS:
        if (signum := getattr(signal, name, None)) is not None:
            handler = _handler(signal.getsignal(signum))
            signal.signal(signum, handler)
            atexit.register(_ignore_late, signum, handler)


def _ignore_late(signum: int, handler: object) -> None:
    # Python restores the default as it ends. A signal that reaches this rank after the others would
    # then end a process that has stopped in time.
    if signal.getsignal(signum) is handler:
        signal.signal(signum, signal.SIG_IGN)


def _handler(previous: Any) -> Callable[[int, FrameType | None], None]:
    def on_signal(signum: int, frame: FrameType | None) -> None:
        _StopState.asked = True
        if callable(previous):
            previous(signum, frame)

    return on_signal
