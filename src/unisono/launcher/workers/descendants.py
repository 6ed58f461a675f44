"""Find all descendants of this process by descent, and kill them.

A process that adopts orphans (Linux: child subreaper) becomes the parent of every descendant whose
own parent has ended. The module therefore finds a daemon that a worker started, even with its own
session and an empty environment. No other process can become a descendant.

Without /proc no process is found.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Collection

from unisono.core.base.deadline import Deadline
from unisono.core.base.grouping import grouped
from unisono.core.platform.processes import (
    IS_LINUX,
    adopt_orphans,
    all_pids,
    children,
    entry_of,
    kill,
)

_PAUSE_S = 0.005


class Descendants:
    """The descendants of this process, without the children that it has now and their descendants.

    The present children are called `excluded` below.
    """

    def __init__(self) -> None:
        self._excluded = children()
        self._exiting = threading.Event()

    def adopt(self) -> None:
        """Become the parent of descendants whose parent ends.

        Do nothing if there are excluded children: their orphans would then be killed, too.
        """
        if not self._excluded:
            adopt_orphans()

    def reap(self, known: Collection[int]) -> None:
        """Remove adopted processes that have ended from the process table.

        Args:
            known: Children for which other code waits. Only the thread that starts processes
                has an exact list, so that thread must call this method.
        """
        if not IS_LINUX:
            return
        for pid in children() - self._excluded - set(known):
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)

    def kill(self, timeout_s: float, spared: Collection[int] = ()) -> bool:
        """Kill all but `spared` and their descendants; return whether all ended in time.

        The processes stay in the process table until `reap`, or until their parent reaps them.
        """
        deadline = Deadline(timeout_s)
        empty = 0
        # Reading the table takes time: a process that changes its parent meanwhile can be missed.
        while empty < 2 and not deadline.expired():
            found = self._running(spared)
            empty = 0 if found else empty + 1
            for pid, started in found.items():
                kill(pid, started)
            if found:
                time.sleep(_PAUSE_S)
        return empty == 2

    def kill_before_exit(self, timeout_s: float) -> None:
        """Kill all descendants, from any thread, before this process exits."""
        self._exiting.set()
        self.kill(timeout_s)

    def wait_if_exiting(self, timeout_s: float) -> None:
        """Block this thread if `kill_before_exit` was called, so that it reports no failure.

        Call this after a child's end was detected and before it is reported.
        """
        if self._exiting.is_set():
            time.sleep(timeout_s)

    def _running(self, spared: Collection[int]) -> dict[int, str]:
        """Return the processes to kill, each with its start time."""
        table = {pid: entry for pid in all_pids() if (entry := entry_of(pid)) is not None}
        families = grouped((entry.parent, pid) for pid, entry in table.items())
        found: dict[int, str] = {}
        ahead = [os.getpid()]
        while ahead:
            pids = set(families.get(ahead.pop(), ())) - self._excluded - set(spared)
            ahead += pids
            found |= {pid: table[pid].started for pid in pids if table[pid].running}
        return found
