"""A rank's part in the collective calls of a group: one thread at a time, and in every call.

All ranks count the calls of a group. A call may end on one rank before it begins, for example
without memory or by Ctrl-C. It is still a call on the other ranks. If this rank left it out, it
would be one call behind for ever. So it refuses the call: it takes part in the agreement with a
fingerprint that no call has, and all ranks raise.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from threading import get_ident
from types import SimpleNamespace
from typing import Any

from unisono.core.backends import DeviceBackend
from unisono.core.base.deadline import Deadline
from unisono.core.operations.dispatch import backend_of
from unisono.core.operations.overlap import concurrent_call_error
from unisono.core.operations.protocols import GroupView
from unisono.errors import CommunicationError, UnisonoError, UsageError

# In the dictionary of an error: the group that has refused its call, and its place after that.
_REFUSED = "_unisono_refused"

_MESSAGES = ("send", "recv", "isend", "irecv", "probe", "batch_isend")
"""How the names of the calls begin in which not all ranks take part."""

CodePlace = tuple[int, int]
"""A place in the order of a group's calls; a later place is larger."""


class Participation:
    """Guards the collective calls of one group, and refuses a call that does not begin here.

    Its methods take the group, because a reference to it would be a circle.

    Attributes:
        guard: Its `caller` is the identity of the thread in a collective call, 0 if there is none.
        is_queued: Whether the stream queue has the call that is being made: it makes or refuses it.
    """

    def __init__(self) -> None:
        self.guard: Any = SimpleNamespace(caller=0)
        self.is_queued = False
        # The call in which this rank could not even refuse.
        self._missed = ""
        # Number of refusals that were left to the stream queue.
        self._late = 0
        # Marks the errors of calls that were refused in this group.
        self._mark = object()

    def take_guard(self, group: GroupView, op: str) -> int:
        """Refuse other threads' collective calls until `guard.caller` is the result again.

        Raises:
            UsageError: Another thread is in a collective call of the group.
        """
        guard, me = self.guard, get_ident()
        # No call between reading and setting the mark: another thread could run there.
        caller = guard.caller
        # A thread that does not exist here is one of the parent of a fork; the engine raises then.
        if caller != 0 and caller != me and caller in sys._current_frames():
            raise concurrent_call_error(group, op, caller)
        guard.caller = me
        return int(caller)

    def begin(
        self,
        group: GroupView,
        op: str,
        call: Callable[[], Any],
        arguments: Sequence[Any],
        *,
        wait: bool,
    ) -> Any:
        """Make a call; refuse it if it ends before this rank has taken part."""
        queue, self.is_queued = group.stream_queue, False
        # The stream queue makes calls on its own thread, and then this call is not made here.
        made = None if queue is not None and queue.waiting() else number_of(group.backends)
        try:
            if self._missed:
                group.abort(f"{self._missed} ended before it began, and could not be refused,")
            return call()
        except BaseException as error:
            has_part = self.is_queued or made not in (None, number_of(group.backends))
            if not has_part and not _is_broken(group):
                self.refuse(group, op, error, arguments, wait=wait)
            raise

    def refuse(
        self,
        group: GroupView,
        op: str,
        error: BaseException,
        arguments: Sequence[Any] = (),
        *,
        wait: bool,
    ) -> None:
        """Refuse a call because of an error; see `ProcessGroup.refuse`."""
        if not group.backends or group.size() == 1:
            return
        if isinstance(error, UsageError) and error.misplaced:
            return
        before = self._missed, group.calls
        made, queue = number_of(group.backends), group.stream_queue
        # The calls that wait for their streams come first in the order of calls.
        is_late = queue is not None and queue.waiting() and not queue.runs_here()
        try:
            backend, due = backend_of(group, arguments), Deadline(group.timeout_s)
            refuse = partial(backend.refuse, op, _described(op, error), due)
            if is_late:
                queue.add_refusal(op, refuse, due)
            else:
                refuse(wait=wait)
        except BaseException as second:
            # First of all, because what follows may fail as well, for example without memory. Then
            # C++ must make no call.
            self._missed, group.calls = op, None
            if isinstance(second, UsageError) and second.misplaced:
                # This thread is inside a call of the group, so the wrong call does not count.
                self._missed, group.calls = before
                raise
            if is_late or number_of(group.backends) == made:
                # The next call of this rank breaks the group.
                if isinstance(second, Exception):
                    return
                raise
            self._missed, group.calls = before
            self._settle(group, error, is_late=False)
            raise
        self._settle(group, error, is_late=is_late)

    @property
    def has_missed(self) -> bool:
        """Whether this rank could not even refuse a call. Then C++ must make no call."""
        return bool(self._missed)

    def place(self, group: GroupView) -> CodePlace:
        """Return how many calls of the group this rank has made or refused."""
        return number_of(group.backends), self._late

    def is_known_to_all(self, group: GroupView, error: BaseException, since: CodePlace) -> bool:
        """Return as `ProcessGroup.is_known_to_all`."""
        if _is_broken(group):
            return True
        context = error.context if isinstance(error, CommunicationError) else None
        # Two groups may have one name.
        if context is not None and context.group_key == group.group_name:
            # A message concerns two ranks only.
            is_message = (context.op or "").startswith(_MESSAGES)
            return not is_message and (context.seq is None or context.seq > since[0])
        # The identity of the error would not do: the next error may have that of a dead one. The
        # mark alone would not do: the program may raise the same error in two blocks.
        mark, place, is_late = vars(error).get(_REFUSED, (None, since, False))
        return mark is self._mark and place > since and (is_late or place == self.place(group))

    def _settle(self, group: GroupView, error: BaseException, *, is_late: bool) -> None:
        self._late += is_late
        vars(error)[_REFUSED] = self._mark, self.place(group), is_late
        if isinstance(error, UsageError):
            error.told = True


def number_of(backends: Mapping[str, DeviceBackend]) -> int:
    """Return the number of collective calls that this rank has made in a group."""
    number = 0
    for backend in backends.values():
        number = max(number, backend.last_number())
    return number


def _is_broken(group: GroupView) -> bool:
    """Whether the group takes no more calls, so that the other ranks have the reason."""
    return any(backend.broken() for backend in group.backends.values())


def _described(op: str, error: BaseException) -> str:
    """Return the first line of an error, for the other ranks."""
    if isinstance(error, UnisonoError):
        return error.what.removeprefix(f"{op}: ")
    try:
        text = str(error).partition("\n")[0]
    except Exception:  # of the user's class
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
