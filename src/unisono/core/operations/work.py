"""The handle of a submitted operation, its future, and waiting for several operations at once."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator, Sequence
from contextvars import Context, copy_context
from typing import Any, Protocol

from unisono.core.backends import Pending
from unisono.core.base.deadline import Deadline, Timeout, to_seconds
from unisono.core.base.log import get_logger, log_raised, must_pass
from unisono.core.base.threads.completion import Completion
from unisono.core.base.threads.streams import explicit_stream
from unisono.core.operations.table import OPS
from unisono.errors import (
    ArgumentTypeError,
    CollectiveTimeoutError,
    InvalidArgumentError,
    UnsupportedError,
    UsageError,
)

_log = get_logger("groups.work")


_OP_TYPES = [
    *("broadcast", "allreduce", "allreduce_coalesced", "reduce", "allgather", "_allgather_base"),
    *("allgather_coalesced", "gather", "scatter", "reduce_scatter", "alltoall_base", "alltoall"),
    *("send", "recv", "recv_any_source", "barrier", "_reduce_scatter_base", "coalesced"),
    *("_allreduce_sparse", "reduce_scatter_tensor_coalesced"),
]
"""Their places are the values of c10d's OpType."""


class _Queued(Protocol):
    """A call that C++ has queued, or a message."""

    def wait_well(self) -> bool:
        """Wait for the end; False if the call has not ended well, or `pending` must wait."""

    def pending(self, output: Any) -> Pending:
        """Return the end, with the result `output`."""

    def on_end(self, callback: Callable[[], object]) -> bool:
        """Call `callback()` at the end, on another thread; False: `pending` must have it."""

    def has_ended_well(self) -> bool:
        """Return whether the call has ended well; False: `pending` knows."""


class Work:
    """A submitted operation. Dropping the handle is safe: the operation goes on.

    Args:
        end: The end of the operation, or a call that C++ has queued and that has it.
        op: Its name, for errors.
        group: The group, which stays open as long as the handle of a message is kept.
        output: The memory of the result of a call that C++ has queued.

    Source: torch.distributed.Work (2.13).
    """

    # C++ makes the work of a repeated call, without `__init__`.
    __slots__ = ("__dict__", "__weakref__", "_end", "_group", "_op", "_output")

    def __init__(
        self, end: Pending | _Queued, op: str, group: object = None, output: Any = None
    ) -> None:
        self._end = end
        self._op = op
        self._output = output
        self._group = group

    @property
    def _pending(self) -> Pending:
        if not isinstance(end := self._end, Pending):
            end = self._end = end.pending(self._output)
        return end

    def wait(self, timeout: Timeout | None = None) -> bool:
        """Block until the operation is done; return True, or raise its error.

        For an array of a GPU the call does not block: the GPU's current stream waits. An error of
        the operation then comes with a later call.

        In a stream (`with unisono.stream(s)`) the call does not block. Instead the stream does
        nothing more until the operation is done, and gets its error. With a `timeout` the call
        blocks in a stream too.

        Args:
            timeout: Seconds or timedelta; None or zero for no limit but the operation's own.

        Raises:
            CollectiveTimeoutError: `timeout` passed first. The operation goes on and can be
                waited for again. (With Gloo the group is lost then.)
        """
        end, stream = self._end, explicit_stream()
        if timeout is None and stream is None and not isinstance(end, Pending) and end.wait_well():
            return True
        limit = None if timeout is None or to_seconds(timeout) == 0 else Deadline(timeout)
        if stream is None or limit is not None:
            if limit is None and self._pending.enqueue_wait():
                return True
            return self.wait_on_host(limit)
        stream.submit(self.wait_on_host)
        return True

    def wait_on_host(self, limit: Deadline | None = None) -> bool:
        """Block the calling thread, in a stream too; otherwise as `wait`."""
        pending = self._pending
        if not pending.wait_or_expire(limit):
            assert limit is not None
            raise CollectiveTimeoutError(
                f"{self._op} was not done after {limit.timeout_s:g} s of waiting; it goes on"
            )
        if pending.error is not None:
            raise pending.error
        return True

    def cancel(self) -> None:
        """End a message that is not done with CollectiveTimeoutError.

        A cancelled receive takes no later message. A collective goes on, and so does a message that
        waits in a stream.
        """
        self._pending.expire()

    def is_completed(self) -> bool:
        """Whether the operation has ended, with or without an error; never blocks."""
        return self._pending.done()

    def is_success(self) -> bool:
        """Whether the operation has ended without an error."""
        return self._pending.done() and self._pending.error is None

    def exception(self) -> BaseException | None:
        """Return the operation's error, or None."""
        if not isinstance(end := self._end, Pending) and end.has_ended_well():
            return None
        return self._pending.error if self._pending.done() else None

    def result(self) -> list[Any]:
        """Return the arrays that hold the result, which is complete when the operation is done."""
        return self._pending.outputs

    def source_rank(self) -> int:
        """Return the global rank that sent the message of a receive, -1 if not known."""
        return -1 if self._pending.source is None else self._pending.source

    _source_rank = source_rank

    def tag(self) -> int:
        """Return the tag of the message of a receive, -1 if not known."""
        pending = self._pending
        tag = None if pending.source is None else pending.tag
        return -1 if tag is None else tag[1] if isinstance(tag, tuple) else tag

    def _received(self) -> int:
        """Return the number of elements that a receive got, -1 if not known."""
        return -1 if self._pending.count is None else self._pending.count

    def _get_op_type(self) -> int:
        """Return the value of c10d's OpType for the operation; 100 if it has none."""
        schema = OPS.get(self._op.removeprefix("i"))
        name = schema.c10d_op.removesuffix("_") if schema else ""
        return _OP_TYPES.index(name) if name in _OP_TYPES else 100

    def _get_duration(self) -> float:
        """Return how long a collective took from its turn to its end, in milliseconds.

        Raises:
            UnsupportedError: A message, an operation that has not ended, or no record of it.
        """
        trace, number = self._pending.recorded
        for record in [] if trace is None else trace.records()[::-1]:
            if record.number == number and record.ended_ns is not None:
                return float(record.ended_ns - record.started_ns) / 1e6
        raise UnsupportedError(
            f"{self._op} has no duration: it is no collective, has not ended, or has no record",
            hint="wait for it, in a group of unisono; UNISONO_TRACE=0 keeps no records",
        )

    def synchronize(self) -> None:
        """Make the current stream wait for the operation; the default stream is the thread."""
        self.wait()

    block_current_stream = synchronize

    def get_future(self) -> Future:
        """Return a future of the result arrays."""
        calls: Any = (self,)
        future = Future(calls, self._op)
        self.on_end(future._end)
        return future

    def on_end(self, callback: Callable[[], object]) -> None:
        """Call `callback()` on the thread that ends the operation; at once if it has ended."""
        if isinstance(end := self._end, Pending) or not end.on_end(callback):
            self._pending.add_callback(lambda _: callback())

    def __await__(self) -> Generator[Any, None, bool]:
        # Imported here: asyncio would double the import time of unisono, and few programs await.
        import asyncio

        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def end() -> None:
            if not done.done():
                done.set_result(None)

        def wake(completion: Completion) -> None:
            # The loop is closed if no task waits any more, as after asyncio.wait_for.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(end)

        self._pending._note_wait()
        self._pending.add_callback(wake)
        own = self._pending.deadline
        watch = None
        if own is not None and own.timeout_s <= threading.TIMEOUT_MAX:
            watch = loop.call_later(own.remaining(), self._pending.expire)
        try:
            yield from done.__await__()
        finally:
            if watch is not None:
                watch.cancel()
        return self.wait_on_host()

    def __repr__(self) -> str:
        if not self._pending.done():
            return f"<Work {self._op} pending>"
        return f"<Work {self._op} {'done' if self.is_success() else 'failed'}>"


class Future:
    """A value that is set once, with the methods of torch.futures.Future.

    Callbacks run on the thread that ends the future, in the context (`contextvars`) in which they
    were added. If the future is done already, a callback runs at once.

    Args:
        calls: Calls that the value comes from. A thread that waits watches their deadlines.
        what: Name of the calls, for errors.

    Source: torch.futures.Future (2.13).
    """

    def __init__(self, calls: Sequence[Pending] = (), what: str = "") -> None:
        self._what = what
        self._completion = Completion(any_process=not calls)
        self._value: Any = None
        self._calls: tuple[Any, ...] = tuple(calls)
        # Taken by the thread that sets the value, and never released.
        self._claim = threading.Lock()

    def done(self) -> bool:
        """Whether the future has a value or an error."""
        return self._completion.done()

    def set_result(self, value: Any) -> None:
        """Set the value and run the callbacks.

        Raises:
            UsageError: The future is done already.
        """
        self._claim_once()
        self._value = value
        self._completion.finish()

    def set_exception(self, error: BaseException) -> None:
        """Set an error, which `wait` and `value` raise, and run the callbacks.

        Raises:
            UsageError: The future is done already.
        """
        self._claim_once()
        self._completion.finish(error)

    def wait(self, timeout: Timeout | None = None) -> Any:
        """Block until the future is done; return its value, or raise its error.

        Raises:
            CollectiveTimeoutError: Not done in time; the future itself goes on.
        """
        limit = None if timeout is None else Deadline(timeout)
        if done := self.done():
            for call in () if _runs_callback() else self._calls:
                _end_of(call)._note_wait()
        else:
            done = all(_end_of(call).wait_or_expire(limit) for call in self._calls)
        if not done or not self._completion.wait_until(limit):
            assert limit is not None
            of = f" of {self._what}" if self._what else ""
            raise CollectiveTimeoutError(
                f"the future{of} had no value after {limit.timeout_s:g} s; it goes on"
            )
        return self.value()

    def value(self) -> Any:
        """Return the value, or raise the error.

        Raises:
            UsageError: Not done yet.
        """
        if not self.done():
            raise UsageError("the future has no value yet", hint="call wait() first")
        if self._completion.error is not None:
            raise self._completion.error
        return self._value

    def exception(self) -> BaseException | None:
        """Return the error, or None if there is none (yet)."""
        return self._completion.error

    def add_done_callback(self, callback: Callable[[Future], object]) -> None:
        """Call `callback(self)` when the future is done.

        An exception in the callback, of any class, is logged and otherwise ignored, as in torch.
        Only Ctrl-C in the main thread is raised there.
        """
        context = copy_context()

        def run(completion: Completion) -> None:
            try:
                _called(context, callback, self)
            except BaseException as error:
                if must_pass(error):
                    raise
                log_raised(_log, "a done-callback raised")

        self._completion.add_callback(run)

    def then(self, callback: Callable[[Future], Any]) -> Future:
        """Return a future of `callback(self)`; an exception in it becomes that future's error.

        Also one that is no Exception, such as asyncio.CancelledError.
        """
        result = Future(self._calls, self._what)
        context = copy_context()

        def run(completion: Completion) -> None:
            try:
                value = _called(context, callback, self)
            except BaseException as error:
                result.set_exception(error)
                if must_pass(error):
                    raise
            else:
                result.set_result(value)

        self._completion.add_callback(run)
        return result

    def _end(self) -> None:
        """Set the result of the only call, which has ended."""
        call = self._calls[0]
        if (error := call.exception()) is not None:
            self.set_exception(error)
        else:
            self.set_result(call.result())

    def _claim_once(self) -> None:
        if not self._claim.acquire(blocking=False):
            raise UsageError("the future is done already")

    def __repr__(self) -> str:
        if not self.done():
            return "<Future pending>"
        error = self._completion.error
        return "<Future done>" if error is None else f"<Future failed: {error!r}>"


_here = threading.local()


def _runs_callback() -> bool:
    """Return whether this thread runs a done-callback, whose waits are not its caller's."""
    return getattr(_here, "runs_callback", False)


def _called(context: Context, callback: Callable[[Future], Any], future: Future) -> Any:
    outer = _runs_callback()
    _here.runs_callback = True
    try:
        return context.run(callback, future)
    finally:
        _here.runs_callback = outer


def _end_of(call: Pending | Work) -> Pending:
    """Return the end of a work, which is made only if a thread waits for it."""
    return call._pending if isinstance(call, Work) else call


def collect_all(futures: Sequence[Future]) -> Future:
    """Return a future of the list of futures, done when all are; it fails if one of them does.

    Source: torch.futures.collect_all (2.13).
    """
    waiting = list(futures)
    whats = dict.fromkeys(future._what for future in waiting if future._what)
    result = Future([call for future in waiting for call in future._calls], ", ".join(whats))
    left = Completion()

    def ended(future: Future) -> None:
        if all(f.done() for f in waiting) and left.finish():
            errors = [f.exception() for f in waiting]
            error = next((e for e in errors if e is not None), None)
            if error is None:
                result.set_result(list(waiting))
            else:
                result.set_exception(error)

    for future in waiting:
        future.add_done_callback(ended)
    if not waiting:
        result.set_result([])
    return result


def wait_all(works: Sequence[Work | None], timeout: Timeout | None = None) -> None:
    """Block until all works have ended; raise the first error in their order.

    Args:
        works: A None among them counts as done: a call returns it on ranks outside its group.
        timeout: Of the whole wait; None for no limit but the works' own.

    Raises:
        CollectiveTimeoutError: Not all ended in time; gives their number. They go on.
    """
    limit = None if timeout is None else Deadline(timeout)
    calls = [work._pending for work in _checked(works)]
    for call in calls:
        if not call.wait_or_expire(limit):
            left = sum(not other.done() for other in calls)
            assert limit is not None
            raise CollectiveTimeoutError(
                f"{left} of {len(calls)} works were not done after {limit.timeout_s:g} s of "
                "waiting; they go on"
            )
    error = next((call.error for call in calls if call.error is not None), None)
    if error is not None:
        raise error


def wait_any(works: Sequence[Work], timeout: Timeout | None = None) -> int:
    """Block until one of the works has ended; return its index, or raise its error.

    If several have ended, the first in the list counts. This includes works that ended before the
    call, so a loop must remove the works that it has handled from the list.

    Args:
        works: At least one work.
        timeout: None for no limit but the works' own.

    Raises:
        CollectiveTimeoutError: None ended in time. They go on.
        InvalidArgumentError: The list is empty.
    """
    limit = None if timeout is None else Deadline(timeout)
    calls = [work._pending for work in _checked(works)]
    if not calls:
        raise InvalidArgumentError("works is empty; expected at least one")
    one_ended = Completion()
    for call in calls:
        call.add_callback(lambda ended: one_ended.finish())
    # Works whose own time-out is watched only by a thread that waits for them.
    watched = [call for call in calls if call.deadline is not None]
    while not one_ended.done():
        for call in calls:
            call.require_other_thread()
        nearest = min(watched, key=lambda call: _left(call.deadline), default=None)
        if nearest is not None and _left(nearest.deadline) <= _left(limit):
            if not one_ended.wait_until(nearest.deadline):
                watched.remove(nearest)
                nearest.expire()
        elif not one_ended.wait_until(limit):
            assert limit is not None
            raise CollectiveTimeoutError(
                f"none of {len(calls)} works was done after {limit.timeout_s:g} s of waiting; "
                "they go on"
            )
    index = next(i for i, call in enumerate(calls) if call.done())
    # It has ended; this records that somebody waited for it.
    calls[index].wait_or_expire(None)
    error = calls[index].error
    if error is not None:
        raise error
    return index


def _left(deadline: Deadline | None) -> float:
    return float("inf") if deadline is None else deadline.remaining()


def _checked(works: Sequence[Work | None]) -> list[Work]:
    """Return the works of a list without the Nones."""
    if not isinstance(works, (list, tuple)) or not all(
        work is None or isinstance(work, Work) for work in works
    ):
        raise ArgumentTypeError("works must be a list of Work")
    return [work for work in works if work is not None]
