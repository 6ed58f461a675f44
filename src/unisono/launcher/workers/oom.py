"""Detect whether the kernel killed a worker because memory ran out."""

from __future__ import annotations

import os
from typing import Self

from unisono.core.platform.memory import (
    cgroup_limit,
    kills,
    open_end_of_kernel_log,
    rest_of_kernel_log,
)


class OomWatch:
    """Context manager that detects out-of-memory kills since its start.

    It reads the counters of the cgroup and of the host, and the kernel's log if it may.
    """

    def __enter__(self) -> Self:
        self._before = kills()
        self._log = open_end_of_kernel_log()
        self._log_text = ""
        return self

    def __exit__(self, *exc: object) -> None:
        if self._log is not None:
            os.close(self._log)

    def hint(self, pid: int) -> str:
        """Return a text about the end of a process that was killed by SIGKILL.

        The text is empty if a counter excludes the kernel as the sender of the signal.
        """
        if self._log is not None:
            self._log_text += rest_of_kernel_log(self._log)
        if any(f"Killed process {pid}{end}" in self._log_text for end in (" ", ",")):
            return "out of memory: the kernel's log names this process"
        cgroup, host = (
            None if now is None or before is None else now - before
            for now, before in zip(kills(), self._before, strict=True)
        )
        if cgroup:
            limit = cgroup_limit() or "unknown"
            return f"out of memory: its cgroup's limit of {limit} bytes was reached"
        if host:
            return "probably out of memory: the kernel killed a process on this host for that"
        # Either counter rises before the kernel sends the signal.
        return "out of memory? see dmesg" if cgroup is None and host is None else ""
