"""The calls under way on a group's stream, and the thread that watches them.

A call has ended when its kernels have ended and the control group has compared it on all ranks. The
oldest call decides: kernels run in the order of the calls. Its comparison names ranks that differ,
are late or are lost. If the comparison is done and kernels still run, the watcher looks further:
for a rank that was lost since, an error of NCCL, the deadline.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from unisono.core.backends.api import Pending
from unisono.core.base.deadline import Deadline
from unisono.core.base.threads.worker import WorkerThread
from unisono.errors import UnisonoError

# The watcher's pause: short while calls end one after another, longer while one call runs.
_SHORT_S, _LONG_S = 0.0005, 0.01
_IDLE_S = 0.1


class GPUCall(Pending):
    """The end of one call on the stream.

    Args:
        text: The call, for errors.
        outputs: The arrays that hold the result.
        seen: The comparison of the call on all ranks.
        deadline: Of the call.
        kept: Memory that the kernels use.

    Attributes:
        end: Event after the kernels; None until they are enqueued.
        follow: Makes the current stream wait for `end`.
        late: The reason, if the kernels do not end in time.
        verify: Called when `seen` has ended; raises its error, or another that it shows.
    """

    __slots__ = ("calls", "end", "follow", "kept", "late", "limit", "seen", "text", "verify")

    def __init__(
        self,
        text: str,
        outputs: Sequence[Any],
        seen: Pending,
        deadline: Deadline,
        kept: list[Any],
    ) -> None:
        # A callback on the watcher's thread must not wait there for another call.
        super().__init__(outputs, runs_here=self._is_watched_here)
        self.text = text
        self.seen = seen
        self.limit = deadline
        self.kept = kept
        self.end: Any = None
        self.calls: OpenCalls | None = None
        self.follow: Callable[[], None] = lambda: None
        self.late = "every rank entered it, but the data did not arrive in time"
        self.verify: Callable[[], None] = self._raise_error

    def _raise_error(self) -> None:
        if self.seen.error is not None:
            raise self.seen.error

    def _is_watched_here(self) -> bool:
        return self.calls is not None and self.calls.runs_here()

    def done(self) -> bool:
        if not self._done and self.calls is not None:
            self.calls.look()
        return self._done

    def wait_until(self, deadline: Deadline | None) -> bool:
        pause_s = 2e-5
        while not self.done():
            if deadline is not None and deadline.expired():
                return False
            super().wait_until(Deadline(pause_s))
            pause_s = min(2 * pause_s, _SHORT_S)
        return True

    def enqueue_wait(self) -> bool:
        if self._done or self.end is None:
            return False
        self.follow()
        return True


class OpenCalls:
    """The calls of one group that have not ended, oldest first.

    Args:
        name: Of the group.
        require_progress: Raises the reason if the kernels of a call that all ranks have made
            cannot end; called as require_progress(call).
        stop: Stops all kernels because of an error; returns the error of the calls that ran.
    """

    def __init__(
        self,
        name: str,
        require_progress: Callable[[GPUCall], None],
        stop: Callable[[BaseException], BaseException],
    ) -> None:
        self._name = name
        self._require_progress = require_progress
        self._stop = stop
        self._queue: deque[GPUCall] = deque()
        self._changed = threading.Condition()
        self._final: BaseException | None = None
        # Reentrant, because a handler of a signal may look again.
        self._looking = threading.RLock()
        self._worker = WorkerThread(f"unisono-nccl-{name}")

    def add(self, call: GPUCall) -> None:
        """Watch a call whose kernels are enqueued."""
        call.calls = self
        with self._changed:
            if (final := self._final) is None:
                self._queue.append(call)
                self._changed.notify_all()
                self._worker.start(self._run)
        if final is not None:
            # Its kernels were enqueued while another thread stopped all: they end without a result.
            call.finish(final)

    def look(self) -> None:
        """End the calls that have ended; a broken call ends all."""
        if not self._looking.acquire(blocking=False):
            # Another thread looks, and may be in an abort.
            return
        ended: list[GPUCall] = []
        problem = None
        try:
            while self._queue and self.has_ended(self._queue[0]):
                ended.append(self._queue.popleft())
        except Exception as error:
            problem = error
        finally:
            self._looking.release()
        # Outside the lock, because callbacks make calls.
        for call in ended:
            call.kept.clear()
            call.finish()
        if problem is not None:
            self.fail(problem)

    def fail(self, error: BaseException) -> BaseException:
        """Stop the kernels, and end all calls with an error; return that error."""
        with self._looking:
            final = self._stop(error)
            with self._changed:
                self._final = final
                failed = list(self._queue)
                self._queue.clear()
        for call in failed:
            call.finish(final)
        return final

    def drain(self, limit: Deadline) -> bool:
        """Wait until all calls have ended; False at the limit."""
        while self._queue:
            self.look()
            if limit.expired():
                return False
            time.sleep(_SHORT_S)
        return True

    def runs_here(self) -> bool:
        """Return whether the calling thread is the watcher."""
        return self._worker.is_here()

    def join(self) -> None:
        """Wait until the watcher has ended; no call may be under way."""
        self._worker.join()

    def has_ended(self, call: GPUCall) -> bool:
        """Return whether a call has ended on the GPU and was compared on all ranks.

        Raises:
            UnisonoError: The call differs or cannot end; has the ranks to blame.
        """
        seen = call.seen
        if not seen.done():
            if seen.deadline is not None and seen.deadline.expired():
                seen.expire()
            return False
        call.verify()
        if call.end is not None and call.end.is_done:
            return True
        try:
            self._require_progress(call)
        except UnisonoError:
            # A rank may have ended this call and found the reason in a later one.
            for later in tuple(self._queue):
                if later.seen.done():
                    later.verify()
            raise
        return False

    def _run(self) -> None:
        pause_s = _SHORT_S
        while True:
            with self._changed:
                if not self._queue and not self._changed.wait_for(lambda: self._queue, _IDLE_S):
                    self._worker = WorkerThread(f"unisono-nccl-{self._name}")
                    return
                head = self._queue[0] if self._queue else None
            self.look()
            with self._changed:
                same = bool(self._queue) and self._queue[0] is head
                pause_s = min(2 * pause_s, _LONG_S) if same else _SHORT_S
                if same:
                    self._changed.wait(pause_s)
