"""Detect whether the kernel killed a worker because memory ran out."""

from __future__ import annotations

import contextlib
import os
from typing import Self

from unisono.base.host import memory_cgroup, read_text

_RECORD_BYTES = 8192


class OomWatch:
    """Context manager that detects out-of-memory kills since its start.

    It reads the counters of the cgroup and of the host, and the kernel's log if it may.
    """

    def __enter__(self) -> Self:
        self._events, self._limit = _cgroup_files()
        self._before = self._counts()
        self._log = _open_end_of_kernel_log()
        self._log_text = ""
        return self

    def __exit__(self, *exc: object) -> None:
        if self._log is not None:
            os.close(self._log)

    def hint(self, pid: int) -> str:
        """Return a text about the end of a process that was killed by SIGKILL.

        The text is empty if a counter excludes the kernel as the sender of the signal.
        """
        self._read_log()
        if any(f"Killed process {pid}{end}" in self._log_text for end in (" ", ",")):
            return "out of memory: the kernel's log names this process"
        cgroup, host = (
            None if now is None or before is None else now - before
            for now, before in zip(self._counts(), self._before, strict=True)
        )
        if cgroup:
            limit = read_text(self._limit).strip() or "unknown"
            return f"out of memory: its cgroup's limit of {limit} bytes was reached"
        if host:
            return "probably out of memory: the kernel killed a process on this host for that"
        # Either counter rises before the kernel sends the signal.
        return "out of memory? see dmesg" if cgroup is None and host is None else ""

    def _counts(self) -> tuple[int | None, int | None]:
        return _field(self._events, "oom_kill"), _field("/proc/vmstat", "oom_kill")

    def _read_log(self) -> None:
        # Each read returns one record; at the end it fails with EAGAIN, an OSError.
        with contextlib.suppress(OSError):
            while self._log is not None:
                self._log_text += os.read(self._log, _RECORD_BYTES).decode(errors="replace")


def _open_end_of_kernel_log() -> int | None:
    """Open the kernel's log at its end, or return None if it may not be read."""
    try:
        fd = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    # An older record may name another process with the same number.
    os.lseek(fd, 0, os.SEEK_END)
    return fd


def _cgroup_files() -> tuple[str, str]:
    """Return the paths of the kill counter and the memory limit of this process's cgroup."""
    root, path = memory_cgroup()
    version_1 = root.endswith("/memory")
    names = ("oom_control", "limit_in_bytes") if version_1 else ("events", "max")
    events, limit = (f"{root}{path}/memory.{name}" for name in names)
    return events, limit


def _field(path: str, name: str) -> int | None:
    for line in read_text(path).splitlines():
        key, _, value = line.partition(" ")
        if key == name and value.strip().isdecimal():
            return int(value)
    return None
