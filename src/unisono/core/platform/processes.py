"""Processes of this host: what the kernel knows of them, their families and their ends.

Without /proc no other process is found.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import IO, NamedTuple

from unisono.core.platform.machine import page_bytes
from unisono.core.platform.proc import read_text

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
IS_LINUX = sys.platform == "linux"
"""Whether descendants can be listed and adopted, and stacks of other processes read."""


# --- what the kernel knows ---------------------------------------------------------------------


def stat_fields(pid: int | str) -> list[str]:
    """Return the fields of a process in /proc from the third on, its state; empty if it has ended.

    Args:
        pid: A process, or "PID/task/TID", a thread.

    Source: proc_pid_stat(5).
    """
    # The name of the program, in parentheses, may contain any character.
    return read_text(f"/proc/{pid}/stat").rpartition(")")[2].split()


class ProcessEntry(NamedTuple):
    """One line of the process table."""

    parent: int
    running: bool
    started: str


def entry_of(pid: int) -> ProcessEntry | None:
    """Return the line of a process; None if there is none."""
    # Of its main thread: under qemu-user, a process reads an invented line about itself elsewhere.
    fields = stat_fields(f"{pid}/task/{pid}")
    if not fields:
        return None
    # If the main thread ended before other threads, the state is Z but the process runs.
    running = fields[0] not in "ZX" or int(fields[17]) > 1
    return ProcessEntry(parent=int(fields[1]), running=running, started=fields[19])


def all_pids() -> list[int]:
    """Return the numbers of all processes that are seen here."""
    with contextlib.suppress(FileNotFoundError):
        return [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    return []


def children() -> set[int]:
    """Return the children of this process; cheaper than reading the whole table."""
    found: set[int] = set()
    try:
        for thread in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{thread}/children") as file:
                found |= set(map(int, file.read().split()))
    except OSError:
        # A kernel without these files, or a thread that has just ended.
        me = os.getpid()
        found = {pid for pid in all_pids() if (entry := entry_of(pid)) and entry.parent == me}
    return found


def is_of_this_user(pid: int) -> bool:
    """Whether the effective user of a process is that of this process."""
    try:
        return IS_LINUX and os.stat(f"/proc/{pid}").st_uid == os.geteuid()
    except OSError:
        return False


def resident_bytes(pid: int) -> int | None:
    """Return the memory of a process; None if it is unknown."""
    pages = read_text(f"/proc/{pid}/statm").split()
    return int(pages[1]) * page_bytes() if pages else None


def wait_channel(pid: int) -> str:
    """Return the function of the kernel in which a process sleeps; "" if that is unknown."""
    return read_text(f"/proc/{pid}/wchan").strip("0 \n")


def initial_environment(pid: int) -> list[str]:
    """Return the variables with which a process started, as "NAME=value"; empty if not allowed."""
    return read_text(f"/proc/{pid}/environ").split("\0")


def loaded_files(pid: int | str = "self") -> list[str]:
    """Return the paths of the files that a process has mapped; empty if not allowed."""
    lines = read_text(f"/proc/{pid}/maps").splitlines()
    return [line[line.find("/") :] for line in lines if "/" in line]


def catches(pid: int, signum: int) -> bool:
    """Whether a process handles a signal."""
    caught = re.search(r"^SigCgt:\s*(\w+)", read_text(f"/proc/{pid}/status"), re.M)
    return caught is not None and bool(int(caught[1], 16) >> (signum - 1) & 1)


def thread_names(pid: int) -> list[str]:
    """Return the names of the threads of a process; empty if it has ended."""
    with contextlib.suppress(OSError):
        folder = f"/proc/{pid}/task"
        return [read_text(f"{folder}/{each}/comm").strip() for each in os.listdir(folder)]
    return []


def name_thread(name: str) -> None:
    """Give the calling thread a name of at most 15 bytes, which `thread_names` returns."""
    with contextlib.suppress(OSError), open("/proc/thread-self/comm", "w") as file:
        file.write(name)


def open_files(pid: int) -> dict[int, str]:
    """Return the path of each descriptor of a process.

    Raises:
        OSError: It has ended, or is another user's.
    """
    found = {}
    for fd in map(int, os.listdir(f"/proc/{pid}/fd")):
        with contextlib.suppress(OSError):
            found[fd] = os.readlink(f"/proc/{pid}/fd/{fd}")
    return found


def open_file_of(pid: int, fd: int) -> IO[bytes]:
    """Open the file of a descriptor of another process, to read and to write.

    Raises:
        OSError: The process has ended or is another user's, or the file is gone.
    """
    return open(f"/proc/{pid}/fd/{fd}", "rb+", buffering=0)


# --- families and ends -------------------------------------------------------------------------


def adopt_orphans() -> None:
    """Become the parent of each descendant whose own parent ends, if the system can do that."""
    if IS_LINUX:
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def parent_death_hook() -> Callable[[], bool]:
    """Return a function for a new child that makes the kernel kill it when its parent dies.

    The function returns True on success; only Linux can do this. "Parent" means the thread that
    made the child, so that thread must live as long as the child.
    """
    if not IS_LINUX:
        return lambda: False
    # Load the library in the parent: a child must not do so between fork and exec.
    prctl = ctypes.CDLL(None).prctl

    def hook() -> bool:
        return bool(prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) == 0)

    return hook


def open_exit_fd(pid: int) -> int | None:
    """Return a descriptor that becomes readable when a process ends; None if there is no such."""
    if sys.platform == "linux" and hasattr(os, "pidfd_open"):
        with contextlib.suppress(OSError):
            return os.pidfd_open(pid)
    return None


def exit_code_of(process: subprocess.Popen[bytes]) -> int | None:
    """Return the exit code of a child, and leave it in the process table if the system can.

    None while it runs; minus the signal's number if a signal killed it.
    """
    if sys.platform == "win32" or not hasattr(os, "waitid"):
        return process.poll()
    info = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if info is None:
        return None
    code: int = info.si_status
    return code if info.si_code == os.CLD_EXITED else -code


def kill(pid: int, started: str) -> None:
    """Kill the process with this number and start time, and never another with that number."""
    if sys.platform != "linux":
        return
    if (handle := open_exit_fd(pid)) is None:
        return
    try:
        # Check again after opening the handle: the kernel may have reused the number.
        entry = entry_of(pid)
        if entry is not None and entry.started == started:
            signal.pidfd_send_signal(handle, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass
    finally:
        os.close(handle)
