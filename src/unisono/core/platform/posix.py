"""Calls of POSIX that Windows lacks: an equivalent there, or an UnsupportedError."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NoReturn

from unisono.errors import UnsupportedError

BINARY: int = getattr(os, "O_BINARY", 0)
"""Flag of os.open: move bytes as they are. Without it Windows changes line ends."""

NONBLOCK: int = getattr(os, "O_NONBLOCK", 0)
"""Flag of os.open: do not wait for the other end of a named pipe."""

SIGKILL: int = getattr(signal, "SIGKILL", 9)
"""A signal that ends a process; on Windows os.kill ends one by any number above 1."""

SIGCHLD: int = getattr(signal, "SIGCHLD", -1)
"""The signal at the end of a child; on Windows the number of none."""

if sys.platform == "win32":
    import threading

    _moving = threading.Lock()

    def require_posix(what: str) -> NoReturn:
        """Raise UnsupportedError."""
        raise UnsupportedError(f"{what} needs a POSIX system, such as Linux or macOS")

    def set_blocking(fd: int, blocking: bool) -> None:
        """Raise UnsupportedError, because no call waits for pipes."""
        require_posix("a pipe to wait for")

    def pread(fd: int, count: int, at: int) -> bytes:
        """Read from a byte of a file on; move the file's position."""
        with _moving:
            os.lseek(fd, at, os.SEEK_SET)
            return os.read(fd, count)

    def pwrite(fd: int, data: Any, at: int) -> int:
        """Write from a byte of a file on, and move the file's position; return the count."""
        with _moving:
            os.lseek(fd, at, os.SEEK_SET)
            return os.write(fd, data)

    def read_into(fd: int, part: memoryview, at: int) -> int:
        """Read bytes from a byte of a file on into memory; return their number."""
        data = pread(fd, len(part), at)
        part[: len(data)] = data
        return len(data)

    def sendmsg(sock: socket.socket, parts: Sequence[memoryview]) -> int:
        """Send the first part that has bytes, or the beginning of it; return the count."""
        return sock.send(next(filter(len, parts), b""))

    def _nothing(*args: object) -> None:
        """Do nothing: no process forks, and no signal can be blocked."""

    after_fork = unblock = _nothing
    blocked = contextlib.nullcontext

    def effective_user() -> int:
        """Return 0, the owner that os.stat reports of every file."""
        return 0

else:
    # Bound once: a call costs what that of `os` does.
    pread, pwrite, set_blocking = os.pread, os.pwrite, os.set_blocking

    def sendmsg(sock: socket.socket, parts: Sequence[memoryview]) -> int:
        """Send parts one after another; return the count."""
        return sock.sendmsg(parts)

    def require_posix(what: str) -> None:
        """Do nothing; on Windows raise UnsupportedError, which mypy knows."""

    def read_into(fd: int, part: memoryview, at: int) -> int:
        """Read bytes from a byte of a file on into memory; return their number."""
        return os.preadv(fd, [part], at)

    def after_fork(hook: Callable[[], None]) -> None:
        """Call a function in each child that this process forks."""
        os.register_at_fork(after_in_child=hook)

    @contextlib.contextmanager
    def blocked(signals: Collection[int]) -> Iterator[None]:
        """Keep signals pending in the block."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def unblock(signals: Collection[int]) -> None:
        """Let signals come, pending signals first."""
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)

    def effective_user() -> int:
        """Return the user that owns the files of this process."""
        return os.geteuid()
