"""The error of two threads that call a group at the same time.

All ranks must see the calls of a group in one order. Two calls that overlap in time have no order,
and another rank may order them otherwise. The ranks would then wait for one another, or reduce one
thread's array with another thread's array. So the second call raises UsageError. A correct call
costs one comparison. The call sites are looked up for the error only.
"""

from __future__ import annotations

import sys
import threading
from types import FrameType

from unisono.core.operations.protocols import GroupView
from unisono.errors import Context, UsageError


def concurrent_call_error(group: GroupView, op: str, other_thread: int) -> UsageError:
    """Return the error of a call that overlaps a call of another thread; names both call sites.

    Args:
        group: The group that both threads have called.
        op: Operation that this thread called.
        other_thread: Identity of the thread whose call has not ended.
    """
    here, called = _call_site(group, sys._getframe())
    there, other_op = _call_site(group, sys._current_frames().get(other_thread))
    threads = {thread.ident: thread.name for thread in threading.enumerate()}
    this, other = threading.current_thread().name, threads.get(other_thread, "?")
    error = UsageError(
        f"{called} on group '{group.name}' at {here} (thread '{this}') overlaps {other_op} at "
        f"{there} (thread '{other}')",
        context=Context(rank=group.ranks[group.rank()], group=group.name, op=op, usable=True),
        hint="ranks must see the calls of a group in one order. Give each thread a group of its "
        "own (new_group), or let one stream make the calls.",
    )
    error.misplaced = True
    return error


def _call_site(group: GroupView, frame: FrameType | None) -> tuple[str, str]:
    """Return "file:line" of the code that called the group, and the name of the function."""
    top = frame
    while frame is not None and not _is_call(frame, group):
        frame = frame.f_back
    called = "a call"
    if frame is None:
        # C++ runs the call, so there is no frame of ours below the user's code.
        frame = top
        last = None if group.calls is None else group.calls.last()
        if last is not None:
            called = last[1].call.op
    while frame is not None and _is_ours(frame):
        called = _name_of(frame)
        frame = frame.f_back
    place = "?" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
    return place, called


def _is_call(frame: FrameType, group: GroupView) -> bool:
    """Whether a frame is a method of the group, or a function of ours with the group as `pg`."""
    names = frame.f_locals
    return names.get("self") is group or (names.get("pg") is group and _is_ours(frame))


def _name_of(frame: FrameType) -> str:
    """Return the public name of a function; the code of a decorator's function has another."""
    decorated = frame.f_locals.get("schema", frame.f_locals.get("function"))
    return str(getattr(decorated, "name", getattr(decorated, "__name__", frame.f_code.co_name)))


def _is_ours(frame: FrameType) -> bool:
    module = str(frame.f_globals.get("__name__", ""))
    return module == "unisono" or module.startswith("unisono.")
