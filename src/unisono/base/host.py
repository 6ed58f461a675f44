"""What this machine offers to a process or refuses it, and how the process came about."""

from __future__ import annotations

import errno
import os
import resource
import sys

__all__ = ["GUARD_HINT", "is_importing_main", "reason_of", "usable_cores"]

GUARD_HINT = (
    "a process that multiprocessing starts runs the parent's script to find the function; put what "
    'it must not do again below `if __name__ == "__main__":`'
)


def usable_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def is_importing_main() -> bool:
    """Whether this is a child of multiprocessing that still runs its parent's script."""
    process = sys.modules.get("multiprocessing.process")
    # multiprocessing looks at the same attribute, to refuse children of such a child.
    return process is not None and hasattr(process.current_process(), "_inheriting")


def reason_of(error: BaseException) -> str:
    """Return what an error says, in one line; the operating system's words without a number."""
    if isinstance(error, OSError) and error.strerror:
        if error.errno == errno.EMFILE:
            most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            return f"{error.strerror}: this process may have {most} (ulimit -n)"
        return error.strerror
    return str(error).partition("\n")[0] or type(error).__name__
