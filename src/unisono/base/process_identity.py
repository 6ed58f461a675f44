"""Who uses a store file: names of processes by which others can tell whether they still live."""

from __future__ import annotations

import enum
import functools
import os
import platform
import uuid

__all__ = ["Life", "describe", "is_dead", "life_of", "new_user"]

_FIELDS = 5
# A name is also part of a file's name, and its fields are joined with this.
_JOINT = "~"


class Life(enum.Enum):
    """What this process can know of another one."""

    ALIVE = enum.auto()
    DEAD = enum.auto()
    UNKNOWN = enum.auto()


def new_user() -> str:
    """Return a unique name for one use of a file by this process; it ends in the process id."""
    pid = os.getpid()
    host = platform.node().replace("/", "_").replace(_JOINT, "_")
    return _JOINT.join([host, _machine(), uuid.uuid4().hex[:16], _own_start(pid), str(pid)])


def life_of(user: str) -> Life:
    """Return whether that process lives; unknown on another machine, or in another container."""
    fields = user.split(_JOINT)
    if len(fields) != _FIELDS or fields[1] != _machine():
        return Life.UNKNOWN
    started, pid = fields[3], int(fields[4])
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return Life.DEAD
    except PermissionError:
        return Life.ALIVE
    # The id may belong to a new process by now.
    return Life.ALIVE if started == _started(pid) else Life.DEAD


def is_dead(user: str) -> bool:
    """Return whether that process is certainly gone."""
    return life_of(user) is Life.DEAD


def describe(user: str) -> str:
    """Return a user in words: "process 12 on host a"."""
    fields = user.split(_JOINT)
    return f"process {fields[-1]} on host {fields[0]}"


@functools.cache
def _machine() -> str:
    """Name this boot of this machine, and the process id namespace: a container has its own."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        return f"{boot}-{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return platform.node().replace("/", "_").replace(_JOINT, "_")


@functools.cache
def _own_start(pid: int) -> str:
    return _started(pid)


def _started(pid: int) -> str:
    """Return when a process was started, in clock ticks since boot; "?" if unknown."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            # The name of the program, in parentheses, may contain spaces. A zombie is gone.
            fields = file.read().rpartition(")")[2].split()
    except (OSError, IndexError):
        return "?"
    return "zombie" if fields[0] == "Z" else fields[19]
