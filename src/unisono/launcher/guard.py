"""Two processes for one launcher: if either is killed, the other ends whatever is left.

    guard            the process that the user started: passes signals on, waits, has no state
     └ launcher      all the rest, in a session of its own: a signal to the guard's whole process
        └ workers    group, such as SIGKILL from timeout(1), does not reach it
           └ whatever they start

Both adopt, so that all processes of the launch are found by descent: see
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

from unisono.errors import LaunchError
from unisono.launcher.report import signal_name
from unisono.launcher.signals import PASSED_ON
from unisono.launcher.workers.descendants import Family

__all__ = ["go_on_guarded"]

_END_S = 10.0


def go_on_guarded(ending: Collection[str]) -> Family:
    """Return in a child process; this one waits for it and ends with its exit code.

    Call it while there is one thread. If this process is killed, the child kills its family, and
    ends with it.

    Args:
        ending: Names of the signals that end the launch. They, and those that are passed on to
            workers, are sent on to the child; if they were ignored, they stay ignored.

    Returns:
        All that the child will start.

    Raises:
        LaunchError: There can be no further process.
    """
    family = Family()
    # Ignored (inherited), it would not come, and the kernel would throw the exit code away.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    names = (*ending, *PASSED_ON, "SIGCHLD", "SIGTSTP")
    awaited = {signum for name in names if not _is_ignored(signum := getattr(signal, name))}
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.flush()
    life, guards_end = os.pipe()
    # From here on they wait until somebody asks for them: none is lost before there is a child.
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
        os._exit(_guard(launcher, family, awaited))
    os.close(guards_end)
    os.setsid()
    family = Family()
    family.adopt()
    threading.Thread(
        target=_end_with, args=(life, family), name="unisono-guard", daemon=True
    ).start()
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return family


def _is_ignored(signum: signal.Signals) -> bool:
    return signal.getsignal(signum) is signal.SIG_IGN


def _guard(launcher: int, family: Family, awaited: Collection[signal.Signals]) -> int:
    """Wait for the launcher; return the exit code."""
    family.adopt()
    ended = 0
    while not ended:
        signum = signal.sigwait(awaited)
        if signum == signal.SIGCHLD:
            ended, status = os.waitpid(launcher, os.WNOHANG)
        elif signum == signal.SIGTSTP:
            # Ctrl-Z stops both, and `fg` both again.
            os.kill(launcher, signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGSTOP)
            os.kill(launcher, signal.SIGCONT)
        else:
            os.kill(launcher, signum)
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return code
    family.end(_END_S)
    text = (
        f"unisono run: the launcher was killed by {signal_name(-code)}, and all workers with it\n"
    )
    with contextlib.suppress(OSError):
        # Whoever ends the launch does not wait for a reader.
        if select.select([], [2], [], 0.0)[1]:
            os.write(2, text.encode())
    return 128 - code


def _end_with(life: int, family: Family) -> None:
    """Wait for the end of the guard, which alone has the other end of a pipe, and follow it."""
    os.read(life, 1)
    if sys.platform != "linux":
        # A family cannot be seen there; the agent knows its workers.
        os.kill(os.getpid(), signal.SIGTERM)
        return
    family.doom(_END_S)
    os._exit(1)
