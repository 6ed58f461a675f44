"""One worker process.

It leads a session and process group of its own, so a Ctrl-C on the terminal reaches
the launcher only, and the worker's own children can be found and ended with it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import IO, AnyStr, Literal

from unisono.base.host import reason_of
from unisono.errors import LaunchError

__all__ = ["Stdout", "Worker", "opened", "parent_death_hook"]

Stdout = Literal["inherited", "pipe", "terminal"]

_PR_SET_PDEATHSIG = 1
_REAP_TIMEOUT_S = 10.0
_PREFIX_COLUMNS = 12


def opened(pipe: IO[AnyStr] | None) -> IO[AnyStr]:
    """Return a stream of a process that was started with a pipe for it."""
    assert pipe is not None
    return pipe


def parent_death_hook() -> Callable[[], bool]:
    """Return a function for a new child: the kernel shall kill it when its parent dies.

    The function returns False where there is no such thing (only Linux has it). "Parent"
    means the thread that made the child, so that thread must live as long as the child.
    """
    if sys.platform != "linux":
        return lambda: False
    import ctypes

    # Looked up here, in the parent: between fork and exec a child may not load libraries.
    prctl = ctypes.CDLL(None).prctl

    def hook() -> bool:
        return bool(prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) == 0)

    return hook


def _before_exec(cpus: Collection[int]) -> Callable[[], None]:
    set_death_signal = parent_death_hook()
    parent = os.getpid()

    def in_child() -> None:
        set_death_signal()
        if cpus:
            os.sched_setaffinity(0, cpus)
        if os.getppid() != parent:
            # The parent died before the signal was asked for; nobody would send it.
            os.kill(os.getpid(), signal.SIGKILL)

    return in_child


class Worker:
    """One worker process, not waited for until `reap`.

    Until then it stays in the process table, dead or alive, so that neither its number nor
    its group's can pass to a stranger, and signals sent to them hit nobody else.

    Args:
        rank: Its rank.
        command: Program and arguments.
        env: Its whole environment.
        stdout: Where standard output goes: to `stdout` here through a pipe, or through a
            terminal of its own, so that the program does what it does on a terminal; or it is
            inherited from the launcher.
        cpus: CPUs that it may run on; all that the launcher may if empty.
        pass_fds: Descriptors that it inherits.

    Attributes:
        exit_fd: Becomes readable when the process ends; None where the system lacks that.
        exit_code: None while it runs; minus the signal's number if a signal killed it.
        stopped: Whether the launcher told it to end before it ended by itself.
    """

    def __init__(
        self,
        rank: int,
        command: Sequence[str],
        env: Mapping[str, str],
        *,
        stdout: Stdout,
        cpus: Collection[int] = (),
        pass_fds: Sequence[int] = (),
    ) -> None:
        self._terminal: IO[bytes] | None = None
        try:
            with contextlib.ExitStack() as stack:
                target: int | None = subprocess.PIPE if stdout == "pipe" else None
                if stdout == "terminal":
                    self._terminal, target = _open_terminal()
                    stack.callback(os.close, target)
                self._popen = subprocess.Popen(
                    command,
                    env=env,
                    stdout=target,
                    stderr=subprocess.PIPE,
                    start_new_session=True,
                    pass_fds=pass_fds,
                    preexec_fn=_before_exec(cpus),
                )
        except (OSError, subprocess.SubprocessError) as error:
            if self._terminal is not None:
                self._terminal.close()
            raise LaunchError(
                f"cannot start rank {rank} ({command[0]}): {reason_of(error)}"
            ) from error
        self.rank = rank
        self.pid = self._popen.pid
        self.exit_code: int | None = None
        self.stopped = False
        self.exit_fd = _open_exit_fd(self.pid)

    @property
    def stdout(self) -> IO[bytes] | None:
        """The worker's standard output, unless it is inherited."""
        return self._terminal or self._popen.stdout

    @property
    def stderr(self) -> IO[bytes]:
        """The worker's standard error."""
        return opened(self._popen.stderr)

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs."""
        if self.exit_code is None:
            if hasattr(os, "waitid"):
                flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
                info = os.waitid(os.P_PID, self.pid, flags)
                if info is not None:
                    exited = info.si_code == os.CLD_EXITED
                    self.exit_code = info.si_status if exited else -info.si_status
            else:
                self.exit_code = self._popen.poll()
        return self.exit_code

    def send(self, signum: int) -> None:
        """Send a signal to the worker alone; no-op if it has ended."""
        if self.poll() is None:
            os.kill(self.pid, signum)

    def stop(self, signum: int) -> None:
        """Send a signal to the worker alone, not to its children; no-op if it has ended."""
        self.stopped = self.stopped or self.poll() is None
        self.send(signum)

    def kill_group(self) -> None:
        """Kill the worker and what it left in its process group."""
        self.stopped = self.stopped or self.poll() is None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def reap(self) -> None:
        """Wait for a killed or ended worker and give its number back.

        Raises:
            LaunchError: The kernel holds on to the process (uninterruptible I/O).
        """
        try:
            self._popen.wait(_REAP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise LaunchError(
                f"rank {self.rank} (pid {self.pid}) did not end within {_REAP_TIMEOUT_S:g} s "
                "of SIGKILL",
                hint="it probably hangs in the kernel; see /proc/<pid>/stack",
            ) from None
        finally:
            if self.exit_fd is not None:
                os.close(self.exit_fd)
                self.exit_fd = None
        if self.exit_code is None:
            self.exit_code = self._popen.returncode


def _open_terminal() -> tuple[IO[bytes], int]:
    """Open a terminal of the launcher's size; return what to read, and its other side."""
    import pty
    import termios
    import tty

    ours, theirs = pty.openpty()
    # Lines shall arrive as they were written.
    tty.setraw(theirs)
    with contextlib.suppress(OSError):
        lines, columns = termios.tcgetwinsize(sys.stdout.fileno())
        # The launcher puts a prefix before each line.
        termios.tcsetwinsize(theirs, (lines, max(columns - _PREFIX_COLUMNS, 0)))
    return open(ours, "rb", buffering=0), theirs


def _open_exit_fd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None
