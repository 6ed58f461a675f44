"""`Stream` and `Event` over streams of a GPU: those of torch and CuPy, or raw handles."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from unisono.adapters.nccl.arrays import loaded_libraries
from unisono.adapters.nccl.gpu import GPU
from unisono.adapters.nccl.library import load
from unisono.core.base.deadline import Deadline, Timeout
from unisono.core.base.integers import as_integer
from unisono.core.base.threads.streams import Event, Stream, device_stream
from unisono.errors import ArgumentTypeError, CollectiveTimeoutError, UsageError

_POLL_S = 0.0002


def _handle_of(stream: Any) -> int:
    """Return the handle of a stream of torch, CuPy or cuda-core, or of an integer."""
    for name in ("cuda_stream", "ptr"):
        if isinstance(getattr(stream, name, None), int):
            return int(getattr(stream, name))
    if hasattr(stream, "__cuda_stream__"):
        return int(stream.__cuda_stream__()[1])
    try:
        return as_integer(stream, "stream")
    except ArgumentTypeError:
        raise ArgumentTypeError(
            f"stream must be a stream of a GPU or its handle, got {stream!r}"
        ) from None


def _wait_until_done(event: Any, timeout: Timeout | None, what: str) -> None:
    limit = None if timeout is None else Deadline(timeout)
    while not event.is_done:
        if limit is not None and limit.expired():
            raise CollectiveTimeoutError(f"{what} was not done after {limit.timeout_s:g} s")
        time.sleep(_POLL_S)


class CUDAEvent(Event):
    """A place in a stream of a GPU; the methods are those of `unisono.Event`."""

    _event: Any = None

    def record(self, stream: Stream | None = None) -> None:
        """Mark the current end of a `CUDAStream`, by default of the current one."""
        self._event = _of_gpu(stream).raw.record()

    def wait(self, stream: Stream | None = None, timeout: Timeout | None = None) -> None:
        """Make a `CUDAStream` wait, by default the current one; never blocks the host."""
        _of_gpu(stream).wait_event(self, timeout)

    def query(self) -> bool:
        return self._event is None or bool(self._event.is_done)

    def synchronize(self, timeout: Timeout | None = None) -> None:
        if self._event is not None:
            _wait_until_done(self._event, timeout, "the event")

    def on_reached(self, callback: Callable[[BaseException | None], object]) -> None:
        """Not supported: a GPU calls no functions of the host."""
        raise UsageError("an event of a GPU has no callbacks", hint="use synchronize()")

    def elapsed_time(self, end_event: Event) -> float:
        """Not supported here; use the events of torch or CuPy."""
        raise UsageError("an event of unisono on a GPU has no time", hint="use torch.cuda.Event")


class CUDAStream(Stream):
    """A stream of a GPU with the methods of `unisono.Stream`; functions run at once and enqueue.

    Args:
        stream: A stream of torch, CuPy or cuda-core, or a handle. It must stay alive.
        device: Number of the GPU.
    """

    def __init__(self, stream: Any, device: int = 0) -> None:
        self._handle, self._index = _handle_of(stream), device
        super().__init__(f"cuda:{device}-{self._handle:#x}")
        self.raw = GPU(load(), device).stream_of(self._handle)

    @contextmanager
    def as_current(self) -> Iterator[None]:
        """Make it the current stream of torch and CuPy, as far as they are imported."""
        token = device_stream.set(self)
        try:
            with ExitStack() as stack:
                for library in loaded_libraries(sys.modules):
                    stack.enter_context(library.on(self._index, self._handle))
                yield
        finally:
            device_stream.reset(token)

    def submit(self, fn: Callable[..., object], *args: Any) -> None:
        """Call `fn(*args)` now, with this stream as the current stream."""
        with self.as_current():
            fn(*args)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or CUDAEvent()
        event.record(self)
        return event

    def wait_event(self, event: Event, timeout: Timeout | None = None) -> None:
        """Make this stream wait for an event of a GPU; the host does not wait."""
        if not isinstance(event, CUDAEvent):
            event.synchronize(timeout)
        elif event._event is not None:
            self.raw.wait(event._event)

    def query(self) -> bool:
        return bool(self.raw.record().is_done)

    def synchronize(self, timeout: Timeout | None = None) -> None:
        _wait_until_done(self.raw.record(), timeout, f"stream '{self.name}'")

    def _put(self, work: Callable[[], object], *, always: bool = False) -> None:
        raise UsageError(f"'{self.name}' takes events of a GPU only", hint="use record_event()")

    def __repr__(self) -> str:
        return f"<CUDAStream '{self.name}'>"


def _of_gpu(stream: Stream | None) -> CUDAStream:
    found = stream or device_stream.get()
    if not isinstance(found, CUDAStream):
        raise UsageError(f"an event of a GPU needs a CUDAStream, got {found!r}")
    return found
