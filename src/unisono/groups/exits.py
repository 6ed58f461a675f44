"""What a process says to the others of its group when it ends."""

from __future__ import annotations

import atexit
import sys
import traceback
from collections.abc import Callable
from types import TracebackType

from unisono.errors import UnisonoError

__all__ = ["at_exit"]


def at_exit(tell: Callable[[str], object], leave: Callable[[], object]) -> Callable[[], None]:
    """See to it that the other ranks hear of an uncaught exception, and of the exit.

    Args:
        tell: Called with the text of an uncaught exception; tells the other ranks.
        leave: Called at the exit; closing what is closed already must be fine.

    Returns:
        A function that takes all this back.
    """
    previous = sys.excepthook
    # What came after us may keep `hook` for ever, as torch's own hook does; it must not keep a
    # group that is closed.
    told = [tell]

    def say(error: BaseException | None) -> None:
        # A rank that failed because another one did has nothing new to tell.
        if error is not None and not isinstance(error, (UnisonoError, SystemExit)):
            for listener in told:
                listener("".join(traceback.format_exception_only(error)).strip())

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        previous(kind, error, trace)
        say(error)

    def end_child() -> None:
        # Its exception never comes to sys.excepthook, but is on its way just now.
        say(sys.exception())
        leave()

    sys.excepthook = hook
    atexit.register(leave)
    # A child of multiprocessing ends without atexit, and would lose what isend has not sent yet.
    util = sys.modules.get("multiprocessing.util")
    finalizer = None if util is None else util.Finalize(None, end_child, exitpriority=0)

    def uninstall() -> None:
        told.clear()
        if sys.excepthook is hook:
            sys.excepthook = previous
        atexit.unregister(leave)
        if finalizer is not None:
            finalizer.cancel()

    return uninstall
