"""Names of processes, from which another process can detect whether a process is alive.

A *user* is such a name: one use of a file by a process.
"""

from __future__ import annotations

import enum
import functools
import os
import platform
import uuid

from unisono.core.platform.machine import boot_and_processes
from unisono.core.platform.processes import stat_fields

_FIELDS = 5
# Joins the fields of a name. It must be valid in file names, because a name is part of them.
_JOINT = "~"


class Life(enum.Enum):
    """The knowledge of this process about another process."""

    ALIVE = enum.auto()
    DEAD = enum.auto()
    UNKNOWN = enum.auto()


def new_user() -> str:
    """Return a unique name for one use of a file by this process; it ends in the process id."""
    pid = os.getpid()
    host = platform.node().replace("/", "_").replace(_JOINT, "_")
    return _JOINT.join([host, _machine(), uuid.uuid4().hex[:16], _own_start(pid), str(pid)])


def life_of(user: str) -> Life:
    """Return whether the process is alive; unknown on another machine or in another container."""
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
    """Return whether the process has certainly ended."""
    return life_of(user) is Life.DEAD


def host_of(user: str) -> str:
    """Return the name of the process's host."""
    return user.split(_JOINT)[0]


def describe(user: str) -> str:
    """Return the text for a user: "process 12 on host a"."""
    return f"process {user.split(_JOINT)[-1]} on host {host_of(user)}"


@functools.cache
def _machine() -> str:
    """Return the id of this boot and of the process id namespace, which differs per container."""
    if known := boot_and_processes():
        return "{}-{}".format(*known)
    return platform.node().replace("/", "_").replace(_JOINT, "_")


@functools.cache
def _own_start(pid: int) -> str:
    return _started(pid)


def _started(pid: int) -> str:
    """Return the start time of a process, in clock ticks since boot; "?" if unknown."""
    # Of its main thread: under qemu-user, a process reads an invented line about itself elsewhere.
    fields = stat_fields(f"{pid}/task/{pid}")
    if not fields:
        return "?"
    # A zombie has ended.
    return "zombie" if fields[0] == "Z" else fields[19]
