"""Properties of this process: its start, the text of its errors."""

from __future__ import annotations

import errno
import math
import sys

from unisono.core.platform.machine import most_descriptors

GUARD_HINT = (
    "a process that multiprocessing starts runs the parent's script to find the function; put code "
    'that it must not run again below `if __name__ == "__main__":`'
)


def is_importing_main() -> bool:
    """Return whether this is a child of multiprocessing that still runs its parent's script."""
    process = sys.modules.get("multiprocessing.process")
    # multiprocessing reads the same attribute to refuse children of such a child.
    return process is not None and hasattr(process.current_process(), "_inheriting")


def reason_of(error: BaseException) -> str:
    """Return the text of an error in one line; for an OSError without the number."""
    if isinstance(error, OSError) and error.strerror:
        if error.errno == errno.EMFILE and (most := most_descriptors()) < math.inf:
            return f"{error.strerror}: this process may have {most} (ulimit -n)"
        return error.strerror
    return str(error).partition("\n")[0] or type(error).__name__
