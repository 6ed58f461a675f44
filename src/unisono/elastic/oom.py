"""Whether the kernel killed a worker for want of memory, as far as this host lets one see."""

from __future__ import annotations

import contextlib
import os

__all__ = ["OomWatch"]

_KMSG_BYTES = 8192
_KMSG_RECORDS = 20_000


class OomWatch:
    """Remembers the kernel's counts of memory kills, to see later whether they have grown."""

    def __init__(self) -> None:
        self._cgroup = _cgroup_folder()
        self._before = self._counts()

    def hint(self, pid: int) -> str:
        """Return what is known about the end of a process that SIGKILL ended, in brackets."""
        if _in_kernel_log(pid):
            return "out of memory: the kernel's log names this process"
        cgroup, host = (
            now - before for now, before in zip(self._counts(), self._before, strict=True)
        )
        if cgroup > 0:
            limit = _read(f"{self._cgroup}/memory.max").strip() or "unknown"
            return f"out of memory: its cgroup's limit of {limit} bytes was reached"
        if host > 0:
            return "probably out of memory: the kernel killed a process on this host for that"
        return "out of memory? see dmesg"

    def _counts(self) -> tuple[int, int]:
        return (
            _field(f"{self._cgroup}/memory.events", "oom_kill"),
            _field("/proc/vmstat", "oom_kill"),
        )


def _cgroup_folder() -> str:
    for line in _read("/proc/self/cgroup").splitlines():
        if line.startswith("0::"):
            return f"/sys/fs/cgroup{line[3:].rstrip('/')}"
    return "/sys/fs/cgroup"


def _field(path: str, name: str) -> int:
    for line in _read(path).splitlines():
        key, _, value = line.partition(" ")
        if key == name and value.strip().isdecimal():
            return int(value)
    return 0


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def _in_kernel_log(pid: int) -> bool:
    """Whether the kernel's log, where it may be read, says that it killed a process."""
    try:
        fd = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return False
    marks = (f"Killed process {pid} ", f"Killed process {pid},")
    try:
        # A record per read; EAGAIN (an OSError) at the end.
        with contextlib.suppress(OSError):
            for _ in range(_KMSG_RECORDS):
                record = os.read(fd, _KMSG_BYTES).decode(errors="replace")
                if any(mark in record for mark in marks):
                    return True
    finally:
        os.close(fd)
    return False
