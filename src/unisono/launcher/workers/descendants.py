"""Find all descendants of this process by descent, and kill them.

A process that adopts orphans (Linux: child subreaper) becomes the parent of every descendant whose
own parent has ended. The module therefore finds a daemon that a worker started, even with its own
session and an empty environment. No other process can become a descendant.

Without /proc no process is found.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Collection
from typing import NamedTuple

from unisono.base.deadline import Deadline
from unisono.base.host import stat_fields

_PR_SET_CHILD_SUBREAPER = 36
_PAUSE_S = 0.005


class _Entry(NamedTuple):
    """One line of the process table."""

    parent: int
    running: bool
    started: str


class Descendants:
    """The descendants of this process, without the children that it has now and their descendants.

    The present children are called `excluded` below.
    """

    def __init__(self) -> None:
        self._excluded = _children()
        self._exiting = threading.Event()

    def adopt(self) -> None:
        """Become the parent of descendants whose parent ends.

        Do nothing if there are excluded children: their orphans would then be killed, too.
        """
        if sys.platform == "linux" and not self._excluded:
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def reap(self, known: Collection[int]) -> None:
        """Remove adopted processes that have ended from the process table.

        Args:
            known: Children for which other code waits. Only the thread that starts processes
                has an exact list, so that thread must call this method.
        """
        for pid in _children() - self._excluded - set(known):
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
                _kill(pid, started)
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
        table = _table()
        children: dict[int, list[int]] = {}
        for pid, entry in table.items():
            children.setdefault(entry.parent, []).append(pid)
        found: dict[int, str] = {}
        ahead = [os.getpid()]
        while ahead:
            pids = set(children.get(ahead.pop(), ())) - self._excluded - set(spared)
            ahead += pids
            found |= {pid: table[pid].started for pid in pids if table[pid].running}
        return found


def _children() -> set[int]:
    """Return the children of this process; cheaper than reading the whole table."""
    found: set[int] = set()
    try:
        for thread in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{thread}/children") as children:
                found |= set(map(int, children.read().split()))
    except OSError:
        # A kernel without these files, or a thread that has just ended.
        me = os.getpid()
        found = {pid for pid, entry in _table().items() if entry.parent == me}
    return found


def _table() -> dict[int, _Entry]:
    table = {}
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir("/proc"):
            if name.isdecimal() and (entry := _entry(int(name))) is not None:
                table[int(name)] = entry
    return table


def _entry(pid: int) -> _Entry | None:
    fields = stat_fields(pid)
    if not fields:
        return None
    # If the main thread ended before other threads, the state is Z but the process runs.
    running = fields[0] not in "ZX" or int(fields[17]) > 1
    return _Entry(parent=int(fields[1]), running=running, started=fields[19])


def _kill(pid: int, started: str) -> None:
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return
    try:
        # Check again after opening the handle: the kernel may have reused the number.
        entry = _entry(pid)
        if entry is not None and entry.started == started:
            signal.pidfd_send_signal(handle, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass
    finally:
        os.close(handle)
