"""What this machine offers to a process, and how the process came about."""

from __future__ import annotations

import os
import sys

__all__ = ["GUARD_HINT", "is_importing_main", "usable_cores"]

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
