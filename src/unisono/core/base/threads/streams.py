"""CPU streams and events, with the semantics of CUDA's.

A `Stream` is an ordered queue of functions, which a separate thread runs one after another. The
thread that submits them does not wait. An `Event` marks a place in a stream. A stream can wait for
an event of another stream. The host waits only if the program calls `synchronize`.

Without `with stream(...)` the current stream is the default stream: the calling thread itself,
which runs each function at once. A program that uses no stream need not know about streams.

After an error a stream skips the later functions until `synchronize` has raised the error. Later
events pass the error on to the threads and streams that wait for them.

Source: torch.cuda.Stream, torch.cuda.Event (2.13).
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from unisono.core.base.deadline import Deadline, Timeout
from unisono.core.base.log import get_logger
from unisono.core.base.text import shown
from unisono.core.base.threads.completion import Completion
from unisono.core.base.threads.reentry import has_lock
from unisono.core.base.threads.worker import WorkerThread
from unisono.errors import ClosedError, CollectiveTimeoutError, UsageError

P = ParamSpec("P")
R = TypeVar("R")

_log = get_logger("base.streams")

# An idle stream's thread ends after this time, so no caller has to close a stream. To start a new
# thread takes 0.1 ms.
_IDLE_S = 0.1


class _Mark(Completion):
    """One recording of an event, done when the stream has reached it."""

    __slots__ = ("stream", "time_s")

    def __init__(self, stream: Stream) -> None:
        super().__init__()
        self.stream = stream
        self.time_s = 0.0

    def reach(self, error: BaseException | None) -> None:
        """Finish the mark, because the stream has reached it."""
        self.time_s = time.monotonic()
        self.finish(error)


class Event:
    """A place in a stream. An event that was never recorded counts as reached.

    Args:
        enable_timing: Whether `elapsed_time` may be called.
    """

    def __init__(self, enable_timing: bool = False) -> None:
        self.enable_timing = enable_timing
        self._mark: _Mark | None = None

    def record(self, stream: Stream | None = None) -> None:
        """Mark the current end of the queue of `stream`, by default of the current stream."""
        stream = stream or current_stream()
        mark = self._mark = _Mark(stream)
        stream._reach(mark)

    def wait(self, stream: Stream | None = None, timeout: Timeout | None = None) -> None:
        """Make a stream, by default the current stream, wait until the event is reached.

        Args:
            stream: The stream that waits. The default stream is the calling thread, which blocks.
            timeout: Seconds or timedelta, from now; None for no limit.

        Raises:
            CollectiveTimeoutError: The calling thread waited, and the time-out has passed. Another
                stream that waits too long fails with this error.
        """
        (stream or current_stream()).wait_event(self, timeout)

    def query(self) -> bool:
        """Return whether the event is reached; never block."""
        return self._mark is None or self._mark.done()

    def synchronize(self, timeout: Timeout | None = None) -> None:
        """Block the calling thread until the event is reached.

        Raises:
            CollectiveTimeoutError: The event was not reached in time.
            BaseException: The error of an earlier function in the event's stream.
        """
        if self._mark is not None:
            _wait_for(self._mark, None if timeout is None else Deadline(timeout))

    def on_reached(self, callback: Callable[[BaseException | None], object]) -> None:
        """Call `callback(error)` when the latest recording is reached, on any thread."""
        if self._mark is None:
            callback(None)
        else:
            self._mark.add_callback(lambda mark: callback(mark.error))

    def elapsed_time(self, end_event: Event) -> float:
        """Return the milliseconds from this event to a later one.

        Raises:
            UsageError: An event has no timing, was not recorded, or is not reached yet.
        """
        marks = []
        for event, which in ((self, "first"), (end_event, "second")):
            if not event.enable_timing:
                raise UsageError(f"the {which} event was made without enable_timing=True")
            if event._mark is None or not event._mark.done():
                state = "recorded" if event._mark is None else "reached"
                raise UsageError(f"the {which} event is not {state} yet")
            marks.append(event._mark)
        return (marks[1].time_s - marks[0].time_s) * 1e3


class Stream:
    """An ordered queue of functions, run by a thread that exists while the queue is in use.

    Args:
        name: For errors and for the thread's name.
    """

    def __init__(self, name: str = "stream") -> None:
        self.name = name
        self._changed = threading.Condition()
        self._queue: deque[tuple[Callable[[], object], bool]] = deque()
        self._worker = self._new_worker()
        self._error: BaseException | None = None
        self._pid = os.getpid()

    def submit(self, fn: Callable[..., object], *args: Any) -> None:
        """Call `fn(*args)` after all functions that were submitted before.

        It runs in the stream's thread. The current stream there is the default stream, so a
        collective call in `fn` blocks that thread, not the host.
        """
        self._put(lambda: fn(*args))

    def record_event(self, event: Event | None = None) -> Event:
        """Record an event, a new one if None, and return it."""
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event, timeout: Timeout | None = None) -> None:
        """Make this stream wait until the event's latest recording is reached; as `Event.wait`."""
        mark, limit = event._mark, None if timeout is None else Deadline(timeout)
        if mark is not None:
            self._put(lambda: _wait_for(mark, limit))

    def wait_stream(self, stream: Stream) -> None:
        """Make this stream wait for all functions that were submitted to another stream."""
        self.wait_event(stream.record_event())

    def query(self) -> bool:
        """Return whether all submitted functions are done; never block."""
        return not self._queue

    def synchronize(self, timeout: Timeout | None = None) -> None:
        """Block the calling thread until all submitted functions are done.

        Raises:
            CollectiveTimeoutError: They were not done in time; the stream goes on.
            BaseException: The error of a function. The stream runs later functions again.
        """
        mark = _Mark(self)
        self._reach(mark)
        try:
            _wait_for(mark, None if timeout is None else Deadline(timeout))
        finally:
            with self._changed:
                if mark.done() and self._error is mark.error:
                    self._error = None

    def runs_here(self) -> bool:
        """Return whether this stream cannot go on before the calling thread does."""
        return self._worker.is_here() or has_lock(self._changed)

    @contextlib.contextmanager
    def as_current(self) -> Iterator[None]:
        """Make this the current stream inside the block; see `stream`."""
        token = stream_variable.set(None if self is _default else self)
        try:
            yield
        finally:
            stream_variable.reset(token)

    def _new_worker(self) -> WorkerThread:
        return WorkerThread(f"unisono-stream-{self.name}")

    def _reach(self, mark: _Mark) -> None:
        self._put(lambda: mark.reach(self._error), always=True)

    def _put(self, work: Callable[[], object], *, always: bool = False) -> None:
        """Add a function to the queue; `always`: run it even after an error."""
        if self._pid != os.getpid():
            raise ClosedError(f"stream '{self.name}' belongs to the parent of this fork")
        with self._changed:
            self._queue.append((work, always))
            self._changed.notify_all()
            self._worker.start(self._run)

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._queue and not self._changed.wait_for(lambda: self._queue, _IDLE_S):
                    self._worker = self._new_worker()
                    return
                work, always = self._queue[0]
            if always or self._error is None:
                try:
                    work()
                except BaseException as error:
                    self._error = error
                    _log.error("stream '%s' skips what follows: %s", self.name, shown(error))
            # After the call, because query() must return False while the function runs.
            del work
            self._queue.popleft()

    def __repr__(self) -> str:
        return f"<Stream '{self.name}' {len(self._queue)} to do>"


class _DefaultStream(Stream):
    """The calling thread, which runs each function at once."""

    def _put(self, work: Callable[[], object], *, always: bool = False) -> None:
        work()

    def __repr__(self) -> str:
        return "<Stream 'default': the calling thread>"


def _wait_for(mark: _Mark, limit: Deadline | None) -> None:
    stream = mark.stream
    if not mark.done() and stream.runs_here():
        raise UsageError(f"stream '{stream.name}' would wait for itself")
    if not mark.wait_until(limit):
        assert limit is not None
        raise CollectiveTimeoutError(
            f"stream '{stream.name}' was not done after {limit.timeout_s:g} s; it goes on"
        )
    if mark.error is not None:
        raise mark.error


_default = _DefaultStream("default")
stream_variable: ContextVar[Stream | None] = ContextVar("unisono_stream", default=None)
"""Holds the stream of the innermost `with stream(...)`, or None."""

device_stream: ContextVar[Stream | None] = ContextVar("unisono_device_stream", default=None)
"""Holds the stream of a GPU of the innermost `with stream(...)`, or None. Calls on CPU arrays do
not wait for it."""

explicit_stream = stream_variable.get
"""Return the stream of the innermost `with stream(...)`, or None; every call calls it."""


def default_stream() -> Stream:
    """Return the default stream: the calling thread."""
    return _default


def current_stream() -> Stream:
    """Return the stream of calls that are made here."""
    return stream_variable.get() or device_stream.get() or _default


@contextlib.contextmanager
def stream(stream: Stream | None) -> Iterator[None]:
    """Make a stream the current stream inside the with block; None changes nothing."""
    if stream is None:
        yield
        return
    with stream.as_current():
        yield


def on_host(call: Callable[P, R]) -> Callable[P, R]:
    """Return a function whose calls use the default stream, because it reads their results."""

    @wraps(call)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        if stream_variable.get() is None:
            return call(*args, **kwargs)
        with stream(_default):
            return call(*args, **kwargs)

    return wrapped
