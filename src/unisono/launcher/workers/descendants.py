"""The processes that this one has started, and theirs: found by descent, whatever they do.

A process that adopts (Linux: child subreaper) becomes the parent of every descendant whose own
parent has ended. So a daemon that a worker made, with a session of its own and an empty
environment, is still found. Nothing else can become a descendant, so nothing else is killed.

Where there is no /proc, no process is found.
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

__all__ = ["Family"]

_PR_SET_CHILD_SUBREAPER = 36
_PAUSE_S = 0.005


class _Entry(NamedTuple):
    """One line of the process table."""

    parent: int
    running: bool
    started: str


class Family:
    """The descendants of this process, without the children that it has now and theirs."""

    def __init__(self) -> None:
        self._strangers = _children()
        self._doomed = threading.Event()

    def adopt(self) -> None:
        """Become the parent of descendants that lose theirs.

        Not if there are strangers: what they leave behind could not be told from what is ours.
        """
        if sys.platform == "linux" and not self._strangers:
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def reap(self, known: Collection[int]) -> None:
        """Take those adopted ones that have ended off the process table.

        Args:
            known: Children that somebody else waits for. Only the thread that starts processes
                can tell, so call it there.
        """
        for pid in _children() - self._strangers - set(known):
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)

    def end(self, timeout_s: float, spared: Collection[int] = ()) -> bool:
        """Kill all but `spared` and their descendants; return whether all were gone in time.

        They stay in the process table until somebody waits for them.
        """
        deadline = Deadline(timeout_s)
        empty = 0
        # The table is no snapshot: what changes its parent while it is read can be missed once.
        while empty < 2 and not deadline.expired():
            found = self._running(spared)
            empty = 0 if found else empty + 1
            for pid, started in found.items():
                _kill(pid, started)
            if found:
                time.sleep(_PAUSE_S)
        return empty == 2

    def doom(self, timeout_s: float) -> None:
        """Kill all of them, from whatever thread, before this process ends too."""
        self._doomed.set()
        self.end(timeout_s)

    def look_away(self, timeout_s: float) -> None:
        """Do nothing more in this thread if `doom` was called: no failure shall be told.

        Ask after a child's end was seen, and before anybody is told.
        """
        if self._doomed.is_set():
            time.sleep(timeout_s)

    def _running(self, spared: Collection[int]) -> dict[int, str]:
        """Return when each process started that is to be killed."""
        table = _table()
        children: dict[int, list[int]] = {}
        for pid, entry in table.items():
            children.setdefault(entry.parent, []).append(pid)
        found: dict[int, str] = {}
        ahead = [os.getpid()]
        while ahead:
            pids = set(children.get(ahead.pop(), ())) - self._strangers - set(spared)
            ahead += pids
            found |= {pid: table[pid].started for pid in pids if table[pid].running}
        return found


def _children() -> set[int]:
    """Return the children of this process, which costs less than to read the whole table."""
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
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat:
            # The command name before ")" may contain anything; after it come fields 3, 4, ...
            fields = stat.read().rpartition(")")[2].split()
    except OSError:
        return None
    # The main thread may have ended before the others: then it is a zombie, but not alone.
    running = fields[0] not in "ZX" or int(fields[17]) > 1
    return _Entry(parent=int(fields[1]), running=running, started=fields[19])


def _kill(pid: int, started: str) -> None:
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return
    try:
        # Looked at again after the handle is open: the number may have changed hands.
        entry = _entry(pid)
        if entry is not None and entry.started == started:
            signal.pidfd_send_signal(handle, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass
    finally:
        os.close(handle)
