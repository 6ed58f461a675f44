"""Ranks as forks of a test: they start at once, and a test sees how each ends."""

import os
import signal
import traceback
import warnings


def forked(body, *args):
    """Return the process id of a child that ends with 0 if `body` returns."""
    with warnings.catch_warnings():
        # Python warns of locks that other threads hold; the child uses none of the parent's.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        body(*args)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def all_ended(pids, ended):
    """Note in `ended` how children have ended; return whether all have."""
    for each in set(pids) - set(ended):
        pid, status = os.waitpid(each, os.WNOHANG)
        if pid:
            ended[pid] = status
    return len(ended) == len(pids)


def end_all(pids, ended):
    """Kill the children that have not ended; a test reports them by what `ended` lacks."""
    for pid in set(pids) - set(ended):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
