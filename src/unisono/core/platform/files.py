"""Locks of files, and terminals."""

from __future__ import annotations

import contextlib
import sys
from typing import IO, Any


def lock(file: int | IO[Any]) -> None:
    """Lock an open file until it is closed, without waiting.

    Raises:
        BlockingIOError: Another process has locked it.
        OSError: Its file system, or this system, has no locks.
    """
    if sys.platform == "win32":
        raise OSError("this system has no flock")
    import fcntl

    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def open_terminal(prefix_columns: int) -> tuple[IO[bytes], int]:
    """Open a terminal of the size of standard output; return the end to read, and the other.

    Args:
        prefix_columns: By how much it is narrower.

    Raises:
        OSError: The system has no terminals, or no further one.
    """
    if sys.platform == "win32":
        raise OSError("this system has no terminals")
    import pty
    import termios
    import tty

    ours, theirs = pty.openpty()
    # Otherwise the terminal would change the lines, for example "\n" to "\r\n".
    tty.setraw(theirs)
    with contextlib.suppress(OSError):
        lines, columns = termios.tcgetwinsize(sys.stdout.fileno())
        termios.tcsetwinsize(theirs, (lines, max(columns - prefix_columns, 0)))
    return open(ours, "rb", buffering=0), theirs
