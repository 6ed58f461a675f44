"""One worker process: of a command line here, of a function in `unisono.launcher.spawn`.

A command leads its own session and process group. Ctrl-C on the terminal thus reaches the launcher
only, and the launcher can kill a worker with its children.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import IO, AnyStr, Literal

from unisono.core.base.host import reason_of
from unisono.core.platform.files import open_terminal
from unisono.core.platform.machine import bind
from unisono.core.platform.posix import SIGKILL, require_posix
from unisono.core.platform.processes import exit_code_of, open_exit_fd, parent_death_hook
from unisono.errors import LaunchError

Stdout = Literal["inherited", "pipe", "terminal"]

_REAP_TIMEOUT_S = 10.0
_PREFIX_COLUMNS = 12


def opened(pipe: IO[AnyStr] | None) -> IO[AnyStr]:
    """Return a stream of a process that was started with a pipe for it."""
    assert pipe is not None
    return pipe


def _before_exec(cpus: Collection[int]) -> Callable[[], None]:
    set_death_signal = parent_death_hook()
    parent = os.getpid()

    def in_child() -> None:
        set_death_signal()
        if cpus:
            bind(cpus)
        if os.getppid() != parent:
            # The parent died before `set_death_signal`, so the kernel will send no signal.
            os.kill(os.getpid(), SIGKILL)

    return in_child


class Worker(ABC):
    """One worker process.

    Args:
        rank: Rank of the worker.
        pid: Its process number.
        exit_fd: Descriptor that becomes readable when the process ends, and that the worker
            closes; None if there is none.

    Attributes:
        rank: Rank of the worker.
        pid: Its process number.
        exit: Object for `multiprocessing.connection.wait`, ready when the process ends; or None.
        exit_code: None while the process runs; minus the signal's number if a signal killed it.
        stopped: Whether the launcher stopped the worker before it ended by itself.
    """

    def __init__(self, rank: int, pid: int, exit_fd: int | None) -> None:
        self.rank = rank
        self.pid = pid
        self.exit_code: int | None = None
        self.stopped = False
        # It closes itself without `reap`, too.
        self.exit = None if exit_fd is None else Connection(exit_fd, writable=False)

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs."""
        if self.exit_code is None:
            self.exit_code = self._status()
        return self.exit_code

    def send_signal(self, signum: int) -> None:
        """Send a signal to the worker, not to its children; do nothing if it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signum)

    def stop(self, signum: int) -> None:
        """Ask the worker by a signal to end; do nothing if it has ended."""
        self.stopped = self.stopped or self.poll() is None
        self.send_signal(signum)

    def kill(self) -> None:
        """Kill the worker, and its process group if it leads one."""
        self.stopped = self.stopped or self.poll() is None
        self._kill()

    def reap(self) -> None:
        """Wait for a worker that ended or was killed, and release its process number.

        Raises:
            LaunchError: The process did not end in time: it is in uninterruptible I/O.
        """
        try:
            code = self._wait(_REAP_TIMEOUT_S)
        finally:
            self.close()
        if code is None:
            raise LaunchError(
                f"rank {self.rank} (pid {self.pid}) did not end within {_REAP_TIMEOUT_S:g} s "
                "of SIGKILL",
                hint="it probably hangs in the kernel; see /proc/<pid>/stack",
            )
        if self.exit_code is None:
            self.exit_code = code

    def close(self) -> None:
        """Close `exit`, and whatever else is open for this worker."""
        if self.exit is not None:
            self.exit.close()
            self.exit = None

    @abstractmethod
    def _status(self) -> int | None:
        """Return the exit code, or None while the process runs."""

    @abstractmethod
    def _kill(self) -> None:
        """Kill the process."""

    @abstractmethod
    def _wait(self, timeout_s: float) -> int | None:
        """Wait for the end, release the process number and return the exit code, or None."""


class CommandWorker(Worker):
    """A worker that runs a program; it stays in the process table until `reap`.

    Until then the kernel gives its process number and its group's number to no other process, so
    signals to these numbers cannot reach another process.

    Args:
        rank: Rank of the worker.
        command: Program and arguments.
        env: The whole environment.
        stdout: Kind of the worker's standard output. "pipe" leads to the launcher. "terminal" is
            a terminal of its own, so that the program behaves as on a terminal. "inherited" is
            the standard output of the launcher.
        cpus: CPUs on which the worker may run; if empty, those of the launcher.
        pass_fds: Descriptors that the worker inherits.
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
                    self._terminal, target = open_terminal(_PREFIX_COLUMNS)
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
        super().__init__(rank, self._popen.pid, open_exit_fd(self._popen.pid))

    @property
    def stdout(self) -> IO[bytes] | None:
        """The worker's standard output, or None if it is inherited."""
        return self._terminal or self._popen.stdout

    @property
    def stderr(self) -> IO[bytes]:
        """The worker's standard error."""
        return opened(self._popen.stderr)

    def _status(self) -> int | None:
        return exit_code_of(self._popen)

    def _kill(self) -> None:
        require_posix("a group of processes")
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, SIGKILL)

    def _wait(self, timeout_s: float) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._popen.wait(timeout_s)
        return None
