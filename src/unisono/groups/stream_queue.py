"""A group's communication stream: calls made in a stream, and what they wait for.

As on a GPU, a call made in a stream does not begin before the stream has got to it, and the host
does not wait for that. The host's order of calls is the group's order, so all calls that follow one
that has not begun yet queue behind it, whatever stream they were made in.

    compute stream   ... fill x  | event          wait for end event | use x ...
    communication                  wait for event | all_reduce(x) | end event
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from unisono.backends import CallOptions, Pending
from unisono.base.completion import Completion
from unisono.base.deadline import Deadline
from unisono.base.streams import Stream, current_stream
from unisono.errors import ClosedError, CollectiveTimeoutError, Context
from unisono.groups.protocols import GroupView

__all__ = ["Communication", "StreamCall"]

_P2P = ("send", "recv", "recv_any_source")


class StreamCall(Pending):
    """The end of a call that begins when its stream gets to it.

    Attributes:
        gate: Done when it may begin, or never will: then with the error.
    """

    __slots__ = ("_begun", "_real", "gate")

    def __init__(self, deadline: Deadline, runs_here: Callable[[], bool]) -> None:
        super().__init__((), deadline, runs_here)
        self.gate = Completion()
        self._begun = Completion()
        self._real: Pending | None = None

    def begin(self, real: Pending) -> None:
        """Follow the call that has begun."""
        self._real = real
        self.outputs = real.outputs
        self._begun.finish()
        real.add_callback(self._ended)

    def fail(self, error: BaseException) -> None:
        """End without having begun."""
        self._begun.finish()
        self.finish(error)

    def expire(self) -> None:
        if self._real is not None:
            self._real.expire()

    def wait_or_expire(self, limit: Deadline | None) -> bool:
        self.require_other_thread()
        if not self._begun.wait_until(limit):
            return False
        if self._real is not None and not self._real.wait_or_expire(limit):
            return False
        return self.wait_until(limit)

    def _ended(self, real: Pending) -> None:
        if real.source is not None:
            self.source = real.source
        self.finish(real.error)


class Communication:
    """The calls of one group that wait for their streams, in the order in which they were made."""

    def __init__(self, group: GroupView) -> None:
        self._group = group
        self._stream = Stream(f"communication-{group.name}")
        self._waiting: deque[StreamCall] = deque()
        self._closed = False

    def waiting(self) -> bool:
        """Whether calls have not begun, so that a new one must queue behind them."""
        return bool(self._waiting)

    def call(
        self,
        op: str,
        device: str,
        begin: Callable[[CallOptions], Pending],
        options: CallOptions,
    ) -> StreamCall:
        """Queue a call that begins when the current stream has done all that it has to do now.

        Args:
            op: Name of the function, for errors.
            device: What it works on.
            begin: Makes the call.
            options: The call's own.
        """
        backend = self._group.backends.get(device)

        def runs_here() -> bool:
            return self._stream.runs_here() or (backend is not None and backend.runs_here())

        call = StreamCall(options.deadline, runs_here)
        self._waiting.append(call)
        current_stream().record_event().on_reached(call.gate.finish)
        self._stream.submit(self._begin, call, op, begin, options)
        return call

    def close(self) -> None:
        """End what has not begun."""
        self._closed = True
        for call in list(self._waiting):
            call.gate.finish()

    def _begin(
        self,
        call: StreamCall,
        op: str,
        begin: Callable[[CallOptions], Pending],
        options: CallOptions,
    ) -> None:
        group = self._group
        try:
            self._pass_gate(call, op, options.deadline)
            call.begin(begin(options._replace(async_op=True)))
        except Exception as error:
            if op not in _P2P:
                group.refuse(op, error, async_op=True)
            call.fail(error)
        finally:
            # Not before: who finds nothing waiting may call the engine directly.
            self._waiting.popleft()

    def _pass_gate(self, call: StreamCall, op: str, deadline: Deadline) -> None:
        """Wait for the gate; if the call cannot begin, tell the ranks that wait for it."""
        group = self._group
        if not call.gate.wait_until(deadline):
            waited = f"waited {deadline.timeout_s:g} s for the stream that it was called in"
            if op not in _P2P:
                group.abort(f"{op} {waited}")
            context = Context(rank=group.ranks[group.rank()], group=group.name, op=op)
            raise CollectiveTimeoutError(
                f"{op} in group '{group.name}' did not begin: it waited {deadline.timeout_s:g} s "
                "for the stream that it was called in",
                context=context,
            )
        if self._closed:
            raise ClosedError(f"group '{group.name}' was destroyed before this {op} began")
        if (error := call.gate.error) is not None:
            if op not in _P2P:
                group.abort(f"{type(error).__name__} in the stream before {op} ({error})")
            raise error
