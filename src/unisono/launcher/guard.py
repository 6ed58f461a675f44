"""Two processes for one launch: if one of them is killed, the other kills all that is left.

    guard            the process that the user started: forwards signals, waits, has no state
     └ launcher      the agent, in its own session: a signal to the guard's process group, such
        └ workers    as SIGKILL from timeout(1), does not reach it
           └ processes that the workers start

Both processes adopt orphans, so that all processes of the launch are found by descent: see
`unisono.launcher.workers.descendants`.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
from collections.abc import Collection

from unisono.core.platform.posix import require_posix
from unisono.core.platform.processes import IS_LINUX
from unisono.errors import LaunchError
from unisono.launcher.report import signal_name
from unisono.launcher.signals import PASSED_ON
from unisono.launcher.workers.descendants import Descendants

_KILL_TIMEOUT_S = 10.0
_NO_ENDS = {signum for signum in signal.Signals if signum.name in ("SIGCHLD", "SIGTSTP")}


def fork_launcher(ending: Collection[str]) -> Descendants:
    """Fork the launcher and return in it; the calling process becomes its guard.

    The guard waits for the launcher and ends with its exit code. If the guard is killed, the
    launcher kills its descendants and ends. Call the function while the process has one thread.
    In the launcher the awaited signals stay blocked until it has entered its `Signals`. Otherwise
    a KeyboardInterrupt could come where Python ignores exceptions, and the signal would be lost.

    Args:
        ending: Names of the signals that end the launch. The guard forwards them to the launcher,
            as well as SIGUSR1 and SIGUSR2. A signal that was ignored stays ignored.

    Returns:
        The processes that the launcher will start.

    Raises:
        LaunchError: The system allows no further process.
        UnsupportedError: The system is Windows.
    """
    require_posix("unisono run")
    descendants = Descendants()
    # If SIGCHLD were ignored (inherited), it would not come, and the kernel would discard the
    # exit code.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    names = (*ending, *PASSED_ON, "SIGCHLD", "SIGTSTP")
    awaited = {signum for name in names if not _is_ignored(signum := getattr(signal, name))}
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.flush()
    life, guards_end = os.pipe()
    # Blocked signals stay pending until the guard asks for them, so none is lost before the fork.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    try:
        launcher = os.fork()
    except OSError as error:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(life)
        os.close(guards_end)
        raise LaunchError(f"cannot start the launcher's second process: {error}") from error
    if launcher:
        os.close(life)
        os._exit(_guard(launcher, descendants, awaited))
    os.close(guards_end)
    os.setsid()
    descendants = Descendants()
    descendants.adopt()
    threading.Thread(
        target=_end_with_guard, args=(life, descendants), name="unisono-guard", daemon=True
    ).start()
    signal.pthread_sigmask(signal.SIG_SETMASK, before | awaited - _NO_ENDS)
    return descendants


def _is_ignored(signum: signal.Signals) -> bool:
    return signal.getsignal(signum) is signal.SIG_IGN


def _guard(launcher: int, descendants: Descendants, awaited: Collection[signal.Signals]) -> int:
    """Wait for the launcher; return the exit code."""
    require_posix("the guard")
    descendants.adopt()
    ended = 0
    while not ended:
        signum = signal.sigwait(awaited)
        if signum == signal.SIGCHLD:
            ended, status = os.waitpid(launcher, os.WNOHANG)
        elif signum == signal.SIGTSTP:
            # Ctrl-Z stops both processes, and `fg` continues both.
            os.kill(launcher, signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGSTOP)
            os.kill(launcher, signal.SIGCONT)
        else:
            os.kill(launcher, signum)
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return code
    descendants.kill(_KILL_TIMEOUT_S)
    text = (
        f"unisono run: the launcher was killed by {signal_name(-code)}, and all workers with it\n"
    )
    with contextlib.suppress(OSError):
        # The guard must end even if its standard error is not read.
        if select.select([], [2], [], 0.0)[1]:
            os.write(2, text.encode())
    return 128 - code


def _end_with_guard(life: int, descendants: Descendants) -> None:
    """Wait for the end of the guard, which alone has the other end of a pipe, and end too."""
    os.read(life, 1)
    if not IS_LINUX:
        # Descendants cannot be listed there, but the agent can stop its workers.
        os.kill(os.getpid(), signal.SIGTERM)
        return
    descendants.kill_before_exit(_KILL_TIMEOUT_S)
    os._exit(1)
