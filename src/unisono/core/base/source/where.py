"""The place of a thread or process: the user's line, or the state that the kernel reports.

Frames of unisono, of the standard library and of installed packages are left out, so that the
line of the user stands first.
"""

from __future__ import annotations

import functools
import os
import re
import sys
import threading
import time
from collections.abc import Iterable
from types import FrameType

from unisono.core.platform.processes import stat_fields, wait_channel

_OURS = os.path.abspath(os.path.join(os.path.dirname(__file__), "../../..")) + os.sep
_STANDARD = os.path.dirname(os.__file__) + os.sep
_INSTALLED = re.compile(r"[/\\](?:site|dist)-packages[/\\]")

# How many frames of a stack are shown. Without a limit, the stack of a deep recursion would occupy
# the interpreter, and so the rank, for a second.
_MOST_FRAMES = 1000

# Number of the field of `stat_fields`, counted from the state.
_MAJOR_FAULTS = 9

# For how long page faults are counted, and how many of them make a process slow. A process that
# only loads a library has some, too.
_FAULTS_S = 0.05
_FAULTS = 5

_STATES = {
    "T": "is stopped",
    "t": "is stopped by a debugger",
    "Z": "has ended",
    "X": "has ended",
    "R": "is running and does not answer: C code holds its interpreter lock, or its cores are busy",
    "D": "sleeps in the kernel{wait} and does not answer",
    "S": "sleeps{wait} and does not answer",
}


FrameRow = tuple[str, int, str, bool]
"""File, line, function and whether it is the user's, of a frame."""


def place_of_thread(thread: int) -> str:
    """Return where a thread of this process is.

    Args:
        thread: Its identity. If there is no such thread, the main thread is meant.
    """
    frames = sys._current_frames()
    return place_of(stack_of(frames.get(thread) or frames.get(threading.main_thread().ident or 0)))


def place_of(rows: list[FrameRow]) -> str:
    """Return where a stack is: "in load (data.py:57), called from train.py:112".

    Args:
        rows: Of `stack_of`.
    """
    lines = [row for row in rows if row[3]][:2] or rows[:1]
    if not lines:
        return ""
    caller = f", called from {_line(lines[1])}" if len(lines) > 1 else ""
    return _place(lines[0]) + caller


def states_of(pids: Iterable[int]) -> dict[int, str]:
    """Return what the kernel reports of processes of this host that do not answer, by process id.

    Source: proc_pid_stat(5), proc_pid_wchan(5).
    """
    before = {pid: stat_fields(pid) for pid in pids}
    if any(fields[:1] in (["R"], ["D"]) for fields in before.values()):
        time.sleep(_FAULTS_S)
    return {pid: _state(pid, fields) for pid, fields in before.items()}


def _state(pid: int, before: list[str]) -> str:
    """Return the state of a process with these fields some time ago."""
    fields = stat_fields(pid)
    if not (before and fields):
        return "has ended"
    faults = int(fields[_MAJOR_FAULTS]) - int(before[_MAJOR_FAULTS])
    if faults >= _FAULTS:
        return f"reads its memory from disk ({faults / _FAULTS_S:.0f} page faults a second)"
    wait = f" ({channel})" if (channel := wait_channel(pid)) else ""
    return _STATES.get(fields[0], "does not answer").format(wait=wait)


@functools.lru_cache(1024)
def is_of_user(path: str) -> bool:
    """Whether a file is the user's: no part of unisono, Python or an installed package."""
    return not (path.startswith((_OURS, _STANDARD, "<frozen")) or _INSTALLED.search(path))


def _place(row: FrameRow) -> str:
    name = row[2]
    return f"at {_line(row)}" if name == "<module>" else f"in {name} ({_line(row)})"


def _line(row: FrameRow) -> str:
    return f"{os.path.basename(row[0])}:{row[1]}"


def stack_of(frame: FrameType | None) -> list[FrameRow]:
    """Return the frames, innermost first.

    Outer frames of a very deep stack are left out.
    """
    rows: list[FrameRow] = []
    while frame is not None and len(rows) < _MOST_FRAMES:
        code = frame.f_code
        path = code.co_filename
        rows.append((path, frame.f_lineno or 0, code.co_name, is_of_user(path)))
        frame = frame.f_back
    return rows
