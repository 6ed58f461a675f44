"""`should_stop`: a signal on one rank becomes a decision of all, at the same step.

Batch systems announce the end of a job by a signal, to one node or to all, at slightly different
times. A rank that saved its state and left on its own would make the others fail in their next
collective; so the ranks have to agree first.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np

from unisono.base.deadline import Timeout
from unisono.base.types import ReduceOp
from unisono.groups.world import member_group

__all__ = ["should_stop"]

_SIGNALS = ("SIGTERM", "SIGUSR1")

_asked = threading.Event()
_watching = threading.Event()


def should_stop(group: Any = None, *, timeout: Timeout | None = None) -> bool:
    """Return whether any rank of the group has been asked to stop; the same on all ranks.

    A collective: every rank calls it at the same place, for example once per training step.
    True when SIGTERM or SIGUSR1 came to any rank since its first call. From then on these
    signals no longer end the process, so a script that asks must also stop:

        for step in range(first, steps):
            train(step)
            if dist.should_stop():
                save(step)
                break

    A process that never calls it keeps the default behaviour: SIGTERM ends it. A handler that
    the script installed before is still called. `unisono run` passes SIGTERM on to its workers
    and kills them after `--grace` seconds; SIGUSR1 and SIGUSR2 it only passes on.

    Formula: max over ranks of (a signal came).

    Args:
        group: The default group if None. On a rank that is no member: warns, returns False.
        timeout: Of this call; the group's if None.

    Raises:
        CollectiveMismatchError: Ranks called different things here.
        PeerLostError: A rank left without asking.
    """
    _watch()
    pg = member_group(group, "should_stop")
    if pg is None:
        return False
    flag = np.array([_asked.is_set()], dtype=np.int32)
    pg.all_reduce(flag, ReduceOp.MAX, timeout=timeout).wait_on_host()
    return bool(flag[0])


def _watch() -> None:
    """Catch the signals from now on; only the main thread can, and only it needs to."""
    if _watching.is_set() or threading.current_thread() is not threading.main_thread():
        return
    _watching.set()
    for name in _SIGNALS:
        if (signum := getattr(signal, name, None)) is not None:
            signal.signal(signum, _handler(signal.getsignal(signum)))


def _handler(previous: Any) -> Callable[[int, FrameType | None], None]:
    def on_signal(signum: int, frame: FrameType | None) -> None:
        _asked.set()
        if callable(previous):
            previous(signum, frame)

    return on_signal
