"""The error of two threads that call a group at the same time.

All ranks must see the calls of a group in one order. Two calls that overlap in time have no order,
and another rank may order them otherwise. The ranks would then wait for one another, or reduce one
thread's array with another thread's array. So the second call raises UsageError. A correct call
costs one comparison. The call sites are looked up for the error only.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from types import FrameType

from unisono.core.base.log import get_logger, log_once
from unisono.core.base.source.tracebacks import is_own, own_folders
from unisono.core.base.source.where import is_of_user
from unisono.core.operations.protocols import GroupView
from unisono.core.operations.table import OPS
from unisono.errors import Context, UsageError

_log = get_logger("groups.threads")

_HINT = (
    "ranks must see the calls of a group in one order. Give each thread a group of its own "
    "(new_group), or let one stream make the calls."
)
_HINT_OF_TORCH = " checkpoint.async_save: pass process_group=dist.new_group()."


def concurrent_call_error(group: GroupView, op: str, other_thread: int) -> UsageError:
    """Return the error of a call that overlaps a call of another thread; names both call sites.

    It is logged, too, if this is not the main thread: a future may keep the error for ever.

    Args:
        group: The group that both threads have called.
        op: Operation that this thread called.
        other_thread: Identity of the thread whose call has not ended.
    """
    here, called = _call_site(group, sys._getframe(), op)
    there, other_op = _call_site(group, sys._current_frames().get(other_thread), "a call")
    threads = {thread.ident: thread.name for thread in threading.enumerate()}
    this, other = threading.current_thread().name, threads.get(other_thread, "?")
    error = UsageError(
        f"{called} on group '{group.name}' at {here} (thread '{this}') overlaps {other_op} at "
        f"{there} (thread '{other}')",
        context=Context(rank=group.ranks[group.rank()], group=group.name, op=op, usable=True),
        hint=_HINT + _HINT_OF_TORCH * (len(own_folders) > 1),
    )
    error.misplaced = True
    if threading.current_thread() is not threading.main_thread():
        log_once(_log, logging.WARNING, "%s", str(error))
    return error


def _call_site(group: GroupView, frame: FrameType | None, op: str) -> tuple[str, str]:
    """Return "file:line" of the code that called the group, and the name of the function.

    Args:
        group: The group.
        frame: Innermost frame of the thread.
        op: The name if no frame has one.
    """
    top, own = frame, None
    while frame is not None and not _is_call(frame, group):
        frame = frame.f_back
    called = op
    if frame is None:
        # C++ runs the call, so there is no frame of ours below the user's code.
        frame = top
        last = None if group.calls is None else group.calls.last()
        if last is not None:
            called = last[1].call.op
    while frame is not None and is_own(frame.f_code.co_filename):
        called, own = _name_of(frame) or called, frame
        frame = frame.f_back
    while frame is not None and not is_of_user(frame.f_code.co_filename):
        frame = frame.f_back
    # A thread of torch has no frame of the user.
    frame = frame or own
    if frame is None:
        return "?", called
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}", called


def _is_call(frame: FrameType, group: GroupView) -> bool:
    """Whether a frame is a method of the group, or a function of ours with the group as `pg`."""
    names = frame.f_locals
    return names.get("self") is group or (names.get("pg") is group and _is_ours(frame))


def _name_of(frame: FrameType) -> str:
    """Return the public name of a function; "" if it is within one, as a decorator's is.

    Of torch's functions only operations count: what calls them, as `backward` does, is no call of
    a group.
    """
    names, code = frame.f_locals, frame.f_code
    decorated = names.get("schema", names.get("function", names.get("func")))
    name = str(getattr(decorated, "name", getattr(decorated, "__name__", "")))
    if not name and "<locals>" not in code.co_qualname:
        name = code.co_name
    return name if _is_ours(frame) or name in OPS or "_object" in name else ""


def _is_ours(frame: FrameType) -> bool:
    module = str(frame.f_globals.get("__name__", ""))
    return module == "unisono" or module.startswith("unisono.")
