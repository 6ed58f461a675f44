"""The calls of a group that wait for a stream.

As on a GPU, a call made in a stream begins when the stream has done its earlier work. The host does
not wait for that. The host's order of calls is the group's order. So every call that follows
a waiting call queues behind it, also if it was made in another stream.

    compute stream   ... fill x  | event          wait for end event | use x ...
    stream queue                   wait for event | all_reduce(x) | end event
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from unisono.core.backends import CallOptions, Pending
from unisono.core.base.deadline import Deadline
from unisono.core.base.text import shown
from unisono.core.base.threads.completion import Completion
from unisono.core.base.threads.streams import Stream, current_stream
from unisono.core.operations.participation import number_of
from unisono.core.operations.protocols import GroupView
from unisono.errors import ClosedError, CollectiveTimeoutError, Context, UsageError

P2P = ("send", "recv", "recv_any_source", "recv_array", "probe")
"""The operations in which not all ranks of the group take part."""


class StreamCall(Pending):
    """The end of a call that begins when its stream has done its earlier work.

    Attributes:
        gate: Done when the call may begin. It has an error if the call will never begin.
        stream: Does the earlier work.
    """

    __slots__ = ("_awaited", "_begun", "_real", "gate", "stream")

    def __init__(
        self, deadline: Deadline, runs_here: Callable[[StreamCall], bool], stream: Stream
    ) -> None:
        super().__init__((), deadline, lambda: runs_here(self))
        self.stream = stream
        self.gate = Completion()
        self._begun = Completion()
        self._real: Pending | None = None
        # Whether a caller waits that has only a callback.
        self._awaited = False

    def begin(self, real: Pending) -> None:
        """End when `real`, the call that has begun, ends."""
        self._real = real
        self.outputs, self.recorded = real.outputs, real.recorded
        if self._awaited:
            real._note_wait()
        self._begun.finish()
        real.add_callback(self._ended)

    def fail(self, error: BaseException) -> None:
        """End with an error; the call did not begin."""
        self._begun.finish()
        self.finish(error)

    def wait_until_begun(self) -> None:
        """Block until the call has begun, or has ended without a begin."""
        self._begun.wait_until(None)

    def expire(self) -> None:
        if self._real is not None:
            self._real.expire()

    def _note_wait(self) -> None:
        # First, because another thread may just begin the call.
        self._awaited = True
        if self._real is not None:
            self._real._note_wait()

    def wait_or_expire(self, limit: Deadline | None) -> bool:
        if not self._done:
            self.require_other_thread()
        if not self._begun.wait_until(limit):
            return False
        if self._real is not None and not self._real.wait_or_expire(limit):
            return False
        return self.wait_until(limit)

    def _ended(self, real: Pending) -> None:
        # A message of unknown size has its array only now.
        self.outputs = real.outputs
        if real.source is not None:
            self.source, self.tag, self.count = real.source, real.tag, real.count
        self.finish(real.error)


class StreamQueue:
    """The calls of one group that wait for their streams, in the order in which they were made."""

    def __init__(self, group: GroupView) -> None:
        self._group = group
        self._stream = Stream(f"communication-{group.name}")
        self._waiting: deque[StreamCall] = deque()
        self._closed = False

    def waiting(self) -> bool:
        """Whether calls have not begun, so that a new call must queue behind them."""
        return bool(self._waiting)

    def add(
        self,
        op: str,
        device: str,
        begin: Callable[[CallOptions], Pending],
        options: CallOptions,
    ) -> StreamCall:
        """Queue a call that begins when the current stream has done its present work.

        Args:
            op: Name of the function, for errors.
            device: Device type of its arrays.
            begin: Makes the call.
            options: The call's own.
        """
        backend = self._group.backends.get(device)

        def runs_here(call: StreamCall) -> bool:
            here = self._stream.runs_here() or self.waits_for_this_thread(call)
            return here or (backend is not None and backend.runs_here())

        if not options.async_op and self.waits_for_this_thread():
            error = UsageError(
                f"{op} in group '{self._group.name}' would wait for itself: an earlier call waits "
                "for the stream whose function makes this call",
                hint="call it with async_op=True, or make it outside of that stream",
            )
            error.misplaced = True
            raise error
        stream = current_stream()
        call = StreamCall(options.deadline, runs_here, stream)
        self._waiting.append(call)
        stream.record_event().on_reached(call.gate.finish)
        self._stream.submit(self._begin, call, op, begin, options)
        return call

    def add_refusal(self, op: str, refuse: Callable[..., None], deadline: Deadline) -> None:
        """Queue the refusal of a call behind the calls that wait."""

        def begin(_: CallOptions) -> Pending:
            refuse(wait=False)
            return Pending(done=True)

        self.add(op, "", begin, CallOptions(async_op=True, deadline=deadline))

    def runs_here(self) -> bool:
        """Return whether the calling thread begins the calls."""
        return self._stream.runs_here()

    def waits_for_this_thread(self, last: StreamCall | None = None) -> bool:
        """Return whether the calling thread runs a stream for which a call waits.

        Args:
            last: Only this call and the calls before it; all calls if None.
        """
        waiting = list(self._waiting)
        if last is not None:
            waiting = waiting[: waiting.index(last) + 1] if last in waiting else []
        return any(not each.gate.done() and each.stream.runs_here() for each in waiting)

    def drain(self) -> None:
        """Wait until all calls have begun, or have ended because their deadline has passed."""
        for call in list(self._waiting):
            call.wait_until_begun()

    def close(self) -> bool:
        """End the calls that have not begun with ClosedError; return whether there are any."""
        self._closed = True
        waiting = list(self._waiting)
        for call in waiting:
            call.gate.finish()
        return bool(waiting)

    def _begin(
        self,
        call: StreamCall,
        op: str,
        begin: Callable[[CallOptions], Pending],
        options: CallOptions,
    ) -> None:
        group, made = self._group, -1
        try:
            self._wait_for_gate(call, op, options.deadline)
            made = number_of(group.backends)
            call.begin(begin(options._replace(async_op=True)))
        except BaseException as error:
            # Also one that is no Exception, such as CancelledError: otherwise the call would not
            # end, because this thread has no caller.
            if op not in P2P and made == number_of(group.backends):
                group.refuse(op, error, async_op=True)
            call.fail(error)
        finally:
            # Last: a thread that finds the queue empty calls the engine, and must not overtake.
            self._waiting.popleft()

    def _wait_for_gate(self, call: StreamCall, op: str, deadline: Deadline) -> None:
        """Wait for the gate; if the call cannot begin, abort the group's calls, and raise."""
        group = self._group
        if not call.gate.wait_until(deadline):
            waited = f"waited {deadline.timeout_s:g} s for the stream that it was called in"
            if op not in P2P:
                group.abort(f"{op} {waited}")
            rank = group.ranks[group.rank()]
            context = Context(rank=rank, group=group.name, group_key=group.group_name, op=op)
            raise CollectiveTimeoutError(
                f"{op} in group '{group.name}' did not begin: it waited {deadline.timeout_s:g} s "
                "for the stream that it was called in",
                context=context,
            )
        if self._closed:
            raise ClosedError(f"group '{group.name}' was destroyed before this {op} began")
        if (error := call.gate.error) is not None:
            if op not in P2P:
                what = shown(error, str)
                group.abort(f"{type(error).__name__} in the stream before {op} ({what})")
            raise error
