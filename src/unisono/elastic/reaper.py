"""Program that ends a launch's processes when its launcher is gone, however it went.

    python -I -S reaper.py <launch id>        standard input: a pipe from the launcher

The launcher writes a line per event:

    + <pid> <start time>    a worker started; its process group has the number <pid>
    forget                  these groups are over, their numbers may be reused
    quit                    all is well, end without killing anybody

End of file without `quit` means that the launcher died (SIGKILL included: the kernel closes
its end) or gave up. Then every registered process group is killed, and after that every
process whose environment carries the launch id: a grandchild that opened a session of its
own. The kernel's parent-death signal alone would leave those grandchildren running.

Nothing else is ever killed. The launcher reaps no worker before it has written `forget`, so
a registered number was ours until the launcher died. After that, a number can be reused only
by a process with another start time, which is what `_is_same_leader` looks at. A launch id
is 128 random bits, so only a descendant can carry it.

Runs without site-packages and imports nothing of unisono: it must cost next to nothing.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time

__all__ = ["main", "processes_of", "start_time"]

_SWEEPS = 100
_SWEEP_PAUSE_S = 0.01


def start_time(pid: int) -> str:
    """Return when a process started, in the kernel's ticks; "" if it is gone or unknown."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat:
            # The command name before ")" may contain blanks; field 22 is the 20th after it.
            return stat.read().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def processes_of(launch_id: str) -> list[int]:
    """Return the running processes whose initial environment carries a launch id."""
    marker = f"UNISONO_LAUNCH={launch_id}".encode()
    found = []
    with contextlib.suppress(FileNotFoundError):
        for entry in os.listdir("/proc"):
            if entry.isdigit() and _carries(int(entry), marker):
                found.append(int(entry))
    return found


def _carries(pid: int, marker: bytes) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as environ:
            return marker in environ.read().split(b"\0")
    except OSError:
        return False


def _is_same_leader(pid: int, started: str) -> bool:
    """Whether no other process has taken a leader's number since it was registered."""
    now = start_time(pid)
    # Without a leader the number belongs to the group's remaining members, which are ours:
    # the kernel gives a number to no new process while a group or session still bears it.
    return now in ("", started)


def _kill_groups(groups: dict[int, str]) -> None:
    for pid, started in groups.items():
        if _is_same_leader(pid, started):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)


def _kill_stray(pid: int, launch_id: str) -> None:
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return
    try:
        # Looked at again after the handle is open: the number may have changed hands.
        if _carries(pid, f"UNISONO_LAUNCH={launch_id}".encode()):
            signal.pidfd_send_signal(handle, signal.SIGKILL)
    except ProcessLookupError:
        pass
    finally:
        os.close(handle)


def main() -> None:
    """Follow the launcher's lines until its end of the pipe closes, then clean up."""
    launch_id = sys.argv[1]
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    groups: dict[int, str] = {}
    for line in sys.stdin:
        verb, *fields = line.split(" ")
        if verb == "+":
            groups[int(fields[0])] = fields[1].strip()
        elif verb == "forget\n":
            groups.clear()
        elif verb == "quit\n":
            return
    _kill_groups(groups)
    # Repeated, because a stray may fork while the table is being read.
    for _ in range(_SWEEPS):
        strays = processes_of(launch_id)
        if not strays:
            return
        for pid in strays:
            _kill_stray(pid, launch_id)
        time.sleep(_SWEEP_PAUSE_S)


if __name__ == "__main__":
    main()
