"""Who uses a store file: names of processes by which others can tell that they died."""

from __future__ import annotations

import os
import platform
import uuid

__all__ = ["is_dead", "new_user"]


def new_user() -> str:
    """Return a unique name for one use of a file by this process; it ends in the process id."""
    pid = os.getpid()
    return f"{_machine()} {uuid.uuid4().hex} {_started(pid)} {pid}"


def is_dead(user: str) -> bool:
    """Return whether that process is certainly gone; one on another machine never is."""
    machine, _, started, pid = user.rsplit(" ", 3)
    if machine != _machine():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    # The id may belong to a new process by now.
    return started != _started(int(pid))


def _machine() -> str:
    """Name this boot of this machine, and the process id namespace: a container has its own."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return platform.node().replace(" ", "_")


def _started(pid: int) -> str:
    """Return when a process was started, in clock ticks since boot; "?" if unknown."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            # The name of the program, in parentheses, may contain spaces.
            return file.read().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return "?"
