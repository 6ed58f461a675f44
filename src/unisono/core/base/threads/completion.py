"""The completion of an operation on another thread: finished once, waited for by any thread."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from threading import TIMEOUT_MAX, Lock
from typing import Any, Protocol, Self

from unisono.core.base.deadline import Deadline
from unisono.core.base.log import get_logger, log_raised, must_pass
from unisono.errors import ClosedError, InternalError, UsageError

_log = get_logger("base.completion")

_forks = 0
"""Number of forks between the process that loaded this module and this process."""


def _count_fork() -> None:
    global _forks
    _forks += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_count_fork)


class Source(Protocol):
    """An operation, for example in C++, that does not finish its completion by itself."""

    def poll(self) -> object:
        """Finish the completion if the operation has ended."""

    def wait(self, deadline: Deadline | None) -> bool:
        """Block until the operation has ended; False if the deadline passed first.

        The completion is then finished, or another thread is about to finish it.
        """

    def watch(self) -> bool:
        """Let another thread finish the completion; False if the operation has ended already."""


class Completion:
    """The state of an operation, which becomes done exactly once, with or without an error.

    Transfers of a transport, tasks of an engine and the works of users are completions, so waiting,
    polling and chaining are written only here.

    Theory of operation: `_gate` is a lock that is held until the completion is done. A waiting
    thread acquires the lock and releases it for the next. An Event does the same, but takes several
    times as long, and a small message takes little longer than its completion.

    The completion of an operation in C++ has a source. No thread is woken to finish it, unless it
    has a callback. A thread that polls or waits looks at the source.

    No lock guards the state. A signal handler may finish the completion that its thread is just
    about to finish, and would wait for that lock for ever.

    Args:
        any_process: Whether the child of a fork may finish its copy. If not, a wait in the child
            raises ClosedError, because the thread that would finish it is in the parent.
        done: Whether it is done from the start.

    Attributes:
        recorded: The records of the group of a collective, and the number of its record; 0: none.
    """

    __slots__ = ("_callbacks", "_done", "_forks", "_gate", "_open", "_source", "error", "recorded")

    def __init__(self, *, any_process: bool = False, done: bool = False) -> None:
        # Deleted by the call that makes it done: signal handlers run before or after a deletion.
        self._open = True
        self._gate = Lock()
        if not done:
            self._gate.acquire()
        self._done = done
        self._forks = None if any_process else _forks
        self._callbacks: list[Callable[[Any], object]] = []
        self._source: Source | None = None
        self.error: BaseException | None = None
        self.recorded: tuple[Any, int] = (None, 0)

    def ends_with(self, source: Source) -> None:
        """Poll and wait on `source` until the completion is finished."""
        self._source = source

    def done(self) -> bool:
        """Return whether it is done, with or without an error."""
        if not self._done and (source := self._source) is not None:
            source.poll()
        return self._done

    def finish(self, error: BaseException | None = None) -> bool:
        """Make it done; only the first call has an effect and returns True.

        Callbacks run on the calling thread, in the order in which they were added. Their exceptions
        are logged, because other transfers may depend on this thread. Only Ctrl-C in the main
        thread is raised, when all callbacks have run.
        """
        try:
            # No call from here to the release, because a signal handler runs after a call. It could
            # raise, and the completion would never be done.
            del self._open
        except AttributeError:
            return False
        self.error = error
        self._done = True
        self._source = None
        try:
            self._gate.release()
        finally:
            if self._callbacks:
                self._call_all()
        return True

    def wait_until(self, deadline: Deadline | None) -> bool:
        """Block until done or expired; return whether it is done.

        Raises:
            ClosedError: Only the parent of this fork can finish it. No other error is raised.
        """
        if not self._done:
            source = self._source
            if source is not None and not source.wait(deadline):
                return self._done
            if self._forks not in (None, _forks):
                raise ClosedError(
                    "what the parent of this fork has begun can be waited for there only"
                )
            limit = None if deadline is None else deadline.remaining()
            if limit is None or limit > TIMEOUT_MAX:
                limit = -1
            if not self._gate.acquire(timeout=limit):
                return self._done
            self._gate.release()
        return True

    def add_callback(self, callback: Callable[[Self], object]) -> None:
        """Call `callback(self)` when it is done; at once if it is done already."""
        self._callbacks.append(callback)
        if not self._done:
            source = self._source
            if source is not None and not source.watch():
                self.finish()
            return
        try:
            self._callbacks.remove(callback)
        except ValueError:
            return  # the thread that has just finished it calls it
        if (interrupt := self._call(callback)) is not None:
            raise interrupt

    def _call_all(self) -> None:
        """Call and remove the callbacks; raise the first Ctrl-C afterwards."""
        raised: BaseException | None = None
        while self._callbacks:
            try:
                callback = self._callbacks.pop(0)
            except IndexError:
                break  # `add_callback` has removed it
            raised = self._call(callback) or raised
        if raised is not None:
            raise raised

    def _call(self, callback: Callable[[Any], object]) -> BaseException | None:
        """Call a callback; return an exception of it that must reach the program."""
        try:
            callback(self)
        except BaseException as error:
            if must_pass(error):
                return error
            log_raised(_log, "a callback raised")
        return None


class Pending(Completion):
    """The end of one call, and its result.

    Attributes:
        outputs: The arrays that hold the result.
        source: Global rank that sent the message of a receive or probe; None before its end, and
            for other calls.
        tag: Tag of that message; None as for `source`.
        count: Elements that a receive got; None as for `source`.
        deadline: When a waiting thread must call `expire`; None if the backend watches the time.
        prepared: Result of `Engine.prepare`, if the options ask for it.
    """

    __slots__ = ("_runs_here", "count", "deadline", "outputs", "prepared", "source", "tag")

    def __init__(
        self,
        outputs: Sequence[Any] = (),
        deadline: Deadline | None = None,
        runs_here: Callable[[], bool] = lambda: False,
        *,
        done: bool = False,
    ) -> None:
        """Make the end of a call.

        Args:
            outputs: The arrays that hold the result.
            deadline: See the class.
            runs_here: Returns whether the calling thread runs the call.
            done: Whether the call has ended.
        """
        super().__init__(done=done)
        self.outputs = list(outputs)
        self.deadline = deadline
        self.source: int | None = None
        # Of a `Transfer`, which is a Pending as well: kind and tag.
        self.tag: Any = None
        self.count: int | None = None
        self.prepared: Any = None
        self._runs_here = runs_here

    def expire(self) -> None:
        """End the call with an error because its deadline has passed."""

    def enqueue_wait(self) -> bool:
        """Make the current stream of the device wait for the end, not the host.

        Returns:
            False if there is no such stream: the caller must wait.
        """
        return False

    def _note_wait(self) -> None:
        """Record that a caller begins to wait now, if none has before."""
        trace, number = self.recorded
        if number:
            trace.recorder.note_wait(number)

    def wait_or_expire(self, limit: Deadline | None) -> bool:
        """Wait until done, at most until its own deadline; return False if `limit` comes first.

        Raises:
            UsageError: The calling thread runs the call, and would wait for itself for ever.
        """
        self._note_wait()
        if self._done:
            return True
        self.require_other_thread()
        own = self.deadline
        if own is not None and (limit is None or own.remaining() <= limit.remaining()):
            if not self.wait_until(own):
                self.expire()
                if not self._done:
                    raise InternalError("a call goes on although its deadline has passed")
            return True
        return self.wait_until(limit)

    def require_other_thread(self) -> None:
        """Check that the calling thread does not run the call.

        Raises:
            UsageError: It runs the call, and would wait for itself for ever.
        """
        if self._runs_here():
            raise UsageError(
                "wait() in a callback, on the thread that runs the operations of this group, "
                "would wait for itself",
                hint="in a callback, chain with then() instead of waiting; in a signal handler, "
                "set a flag",
            )
