"""How process groups end: in order, because of an error, or because the program drops them.

`ProcessGroup.close` is for a normal end. It first waits for the calls that were made, each of which
ends within its time-out, because the other ranks may wait in them. After an error that wait would
only delay the report of the error, so the calls are cancelled, and the other ranks get the reason.
"""

from __future__ import annotations

import _thread
import atexit
import itertools
import os
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NamedTuple, Protocol

from unisono.core.backends import DeviceBackend
from unisono.core.operations.work import Future, Work


class Closable(Protocol):
    """A process group as the end of the process sees it."""

    def end(self, cancel: str = "") -> None:
        """Close the group; cancel its calls if there is a reason."""

    def is_in_call(self) -> bool:
        """Whether the calling thread is in a collective call of the group."""


IN_CALL = "inside a call of the same thread"
"""Why a signal handler does not wait: the call that it has interrupted cannot end meanwhile."""

_HANDLED = "_unisono_handled"
"""Attribute of an error: the number of the first group that was made where it was handled."""

AT_EXIT = "at the exit of the process"
"""Why calls are cancelled if `sys.exit()` in a signal handler interrupts the wait for them."""

# By number, the groups that are not closed.
_open: weakref.WeakValueDictionary[int, Closable] = weakref.WeakValueDictionary()
_numbers = itertools.count()


class Ending:
    """Decides how one group ends, and closes the group if the program drops it.

    If the group is dropped without `close`, a thread closes its backends. The collector may run
    anywhere, also in a thread that holds a lock. So the finalizer itself takes no lock.

    Args:
        group: The group; not kept alive.
        backends: Its backends. They must not refer to the group.
    """

    def __init__(self, group: Closable, backends: Iterable[DeviceBackend]) -> None:
        self._pid = os.getpid()
        self._number = next(_numbers)
        # The group may be made and closed where an earlier error is handled: it is no reason then.
        # The error gets the mark, because its identity may be that of a later error.
        if (handled := sys.exception()) is not None and not hasattr(handled, _HANDLED):
            with suppress(Exception):  # of the user's class
                setattr(handled, _HANDLED, self._number)
        self._finalizer = weakref.finalize(group, _close_later, self._pid, list(backends))
        self._finalizer.atexit = False
        # What ends with the group, such as its windows.
        self.parts: weakref.WeakSet[Any] = weakref.WeakSet()
        _open[self._number] = group

    def begin(self) -> bool:
        """Begin to close the group, which then needs no finalizer; return whether this is new."""
        _open.pop(self._number, None)
        for part in list(self.parts):
            part.close()
        return self._finalizer.detach() is not None

    def reason_to_cancel(self) -> str:
        """Return why calls must not be waited for; "" if this is a normal end."""
        if self._pid != os.getpid():
            return "in the child of a fork"
        error = sys.exception()
        if error is None or getattr(error, _HANDLED, self._number + 1) <= self._number:
            error = _uncaught()
        return "" if error is None else reason_of_error(error)


_WAITS = {Work.wait_on_host.__code__, Future.wait.__code__}


def waits_here() -> bool:
    """Whether the calling thread is in a wait for a call: in a signal handler, or in a callback."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code in _WAITS:
            return True
        frame = frame.f_back
    return False


def reason_of_error(error: BaseException) -> str:
    """Return why an error ends calls; "" for `sys.exit()`, which is a normal end."""
    if isinstance(error, SystemExit) and not error.code:
        return ""
    line = "".join(traceback.format_exception_only(error)).strip().partition("\n")[0]
    return f"because of {line}"


def close_backends(backends: Iterable[DeviceBackend], cancel: str = "") -> None:
    """Wait for the calls of a group, or cancel them for this reason; then close the backends."""
    backends = list(backends)
    try:
        for backend in backends:
            backend.end_calls(cancel)
    except BaseException as error:
        for backend in backends:
            backend.end_calls(reason_of_error(error) or AT_EXIT)
        raise
    finally:
        for backend in backends:
            backend.close()


def close_groups(groups: Iterable[Closable], cancel: str = "") -> None:
    """Close groups, the last one first; after Ctrl-C cancel the calls of the groups left."""
    left = list(groups)
    if any(group.is_in_call() for group in left):
        cancel = cancel or IN_CALL
    while left:
        try:
            left.pop().end(cancel)
        except BaseException as error:
            close_groups(left, reason_of_error(error) or AT_EXIT)
            raise


class _Dropped(NamedTuple):
    """A dropped group: its backends, and whether they have been closed."""

    backends: list[DeviceBackend]
    closed: threading.Event


# The dropped groups that are not closed, by the identity of the tuple.
_dropped: dict[int, _Dropped] = {}
if hasattr(os, "register_at_fork"):
    # The threads that close them are in the parent.
    os.register_at_fork(after_in_child=_dropped.clear)


def _close_later(pid: int, backends: list[DeviceBackend]) -> None:
    """Close the backends of a dropped group on a new thread; the finalizer of the group."""
    if pid != os.getpid():
        return
    dropped = _Dropped(backends, threading.Event())
    key = id(dropped)
    _dropped[key] = dropped
    # `Thread.start` takes locks, which this thread may hold already. So a raw thread starts it.
    _try_to_start(key, lambda: _thread.start_new_thread(_start_closer, (key,)))


def _start_closer(key: int) -> None:
    # Only the key: this thread may end late, and would keep the memory of the group meanwhile.
    thread = threading.Thread(target=_close, args=(key,), name="unisono-closer", daemon=True)
    _try_to_start(key, thread.start)


def _try_to_start(key: int, start: Callable[[], object]) -> None:
    """Start a thread; without one the backends stay open until the process ends."""
    try:
        start()
    except RuntimeError:
        _dropped.pop(key, None)


def _close(key: int) -> None:
    dropped = _dropped[key]
    try:
        close_backends(dropped.backends)
    finally:
        _dropped.pop(key, None)
        dropped.closed.set()


_exits = False


def _uncaught() -> BaseException | None:
    """Return the exception that ends this process, or None."""
    return getattr(sys, "last_value", None) if _exits else None


@contextmanager
def process_exit() -> Iterator[None]:
    """Take an uncaught exception, if there was one, for the reason of what is closed inside."""
    global _exits
    # An interactive session has survived its exceptions.
    _exits = not hasattr(sys, "ps1")
    try:
        yield
    finally:
        _exits = False


@atexit.register
def close_open_groups() -> None:
    """Close the groups that are open when the process ends, the newest first."""
    with process_exit():
        close_groups([group for _, group in sorted(_open.items())])
        error = _uncaught()
    for dropped in list(_dropped.values()):
        if error is not None:
            for backend in dropped.backends:
                backend.end_calls(reason_of_error(error))
        dropped.closed.wait()
