"""Passes the workers' output on in whole lines, and keeps the last 64 KiB of a stream.

A separate thread does this. If the terminal or the pipe is not read, only this thread blocks. The
agent can still detect the end of a worker or a signal.
"""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import IO, Protocol

from unisono.core.base.deadline import Deadline
from unisono.core.base.log import get_logger
from unisono.core.platform.posix import set_blocking
from unisono.core.platform.processes import IS_LINUX

_log = get_logger("launcher.output")

TRACEBACK = b"Traceback (most recent call last):"
"""Begin of a traceback. It is passed on together with all that follows it without a pause within a
second, so that tracebacks of several ranks do not mix."""

CONTROL = re.compile(rb"\x1b\[[0-?]*[ -/]*[@-~]")
"""Control sequences, such as colours."""

_READ_BYTES = 64 * 1024
_TAIL_BYTES = 64 * 1024
_IDLE_S = 0.2
_TRACEBACK_S = 1.0
_STOP_S = 0.2


class Sink(Protocol):
    """Destination of lines: a binary file, or a console that decorates the lines."""

    def write(self, data: bytes, /) -> object:
        """Take whole lines, a whole traceback, or a line that stays unfinished for `_IDLE_S`."""

    def flush(self) -> object:
        """Pass on all that was written."""


class WorkerStream:
    """The launcher's end of one pipe or terminal of a worker.

    Attributes:
        source: The pipe or terminal.
        ended: Event that is set when the stream has been read to its end.
    """

    def __init__(
        self,
        source: IO[bytes],
        sinks: Sequence[Sink],
        *,
        files: Sequence[IO[bytes]] = (),
        keep_tail: bool = False,
        on_loss: Callable[[OSError], None] = lambda error: None,
    ) -> None:
        self.source = source
        self.ended = threading.Event()
        self._files = files
        self._sinks = [*sinks, *files]
        self._keep_tail = keep_tail
        self._on_loss = on_loss
        self._tail = b""
        self._partial = b""
        self._partial_since_s = 0.0
        self._traceback_since_s: float | None = None

    def tail(self) -> str:
        """Return the last 64 KiB of the stream without colours, which hide names of errors."""
        return CONTROL.sub(b"", self._tail).decode("utf-8", errors="replace")

    def pump(self) -> bool:
        """Read once and pass on the complete lines; return False at the end of file."""
        try:
            data = os.read(self.source.fileno(), _READ_BYTES)
        except OSError:
            # Linux reports the end of a terminal by EIO.
            data = b""
        if self._keep_tail:
            self._tail = (self._tail + data)[-_TAIL_BYTES:]
        pending = self._partial + data
        # A carriage return ends a line, too: otherwise progress bars would not be shown.
        end = max(pending.rfind(b"\n"), pending.rfind(b"\r")) + 1
        # Several ranks often print a traceback at the same time, so hold it until it is complete.
        # The limit of a second keeps later output of a program that continues from being delayed.
        if (traceback := pending.find(TRACEBACK)) >= 0 and self._is_recent_traceback():
            end = pending.rfind(b"\n", 0, traceback) + 1
        else:
            self._traceback_since_s = None
        if not data or len(pending) - end >= _READ_BYTES:
            end = len(pending)
        self._partial = pending[end:]
        self._partial_since_s = time.monotonic()
        self._write(pending[:end])
        return bool(data)

    def _is_recent_traceback(self) -> bool:
        now_s = time.monotonic()
        if self._traceback_since_s is None:
            self._traceback_since_s = now_s
        return now_s - self._traceback_since_s < _TRACEBACK_S

    def flush_partial(self, idle_s: float = 0.0) -> float | None:
        """Pass on an unfinished line, such as a prompt, if nothing was added to it for `idle_s`.

        Returns:
            Seconds after which to call again; None if nothing is left.
        """
        if not self._partial:
            return None
        if idle_s and not CONTROL.sub(b"", self._partial):
            # The line has only control sequences, for example to show the cursor. They belong to
            # the text that follows.
            return None
        left_s = self._partial_since_s + idle_s - time.monotonic()
        if left_s > 0:
            return left_s
        self._write(self._partial)
        self._partial = b""
        self._traceback_since_s = None
        return None

    def drop(self) -> bool:
        """Discard one byte; return False at the end of file."""
        try:
            return bool(os.read(self.source.fileno(), 1))
        except OSError:
            return False

    def finish(self) -> None:
        """Pass on the rest, and close the pipe and the stream's files."""
        if TRACEBACK in self._partial and not self._partial.endswith(b"\n"):
            # The worker was killed while it wrote. Output of other ranks must begin on a new line.
            self._partial += b"\n"
        self.flush_partial()
        self.source.close()
        for file in self._files:
            with contextlib.suppress(OSError):
                file.close()
        self.ended.set()

    def _write(self, data: bytes) -> None:
        for sink in self._sinks if data else ():
            try:
                sink.write(data)
                sink.flush()
            except (BrokenPipeError, ValueError):
                # The reader of the output has left (`| head`). The workers continue.
                continue
            except OSError as error:
                self._on_loss(error)


class _Wakeup:
    """A pipe by which other threads wake the thread that selects on it.

    Attributes:
        fd: Readable after `set`, until `clear`.
    """

    def __init__(self) -> None:
        self.fd, self._sender = os.pipe()
        set_blocking(self._sender, False)

    def set(self) -> None:
        # If the pipe is full, it is readable already.
        with contextlib.suppress(BlockingIOError):
            os.write(self._sender, b"+")

    def clear(self) -> None:
        os.read(self.fd, _READ_BYTES)

    def close(self) -> None:
        os.close(self.fd)
        os.close(self._sender)


class OutputReader:
    """The thread that reads all streams of a launch and passes their lines on.

    Args:
        tick: Function that the thread calls after each round; it returns the seconds after which
            it must be called again, or None.
        last: Function that the thread calls when all streams have ended.
    """

    def __init__(
        self,
        tick: Callable[[], float | None] = lambda: None,
        last: Callable[[], None] = lambda: None,
    ) -> None:
        self._tick = tick
        self._last = last
        # Epoll may miss what was just written to a terminal, and `close` would leave it unread.
        made = getattr(selectors, "PollSelector" if IS_LINUX else "DefaultSelector")
        self._selector: selectors.BaseSelector = made()
        self._streams: set[WorkerStream] = set()
        # Only the thread uses the selector. Other threads put functions here and wake it.
        self._tasks: deque[Callable[[], object]] = deque()
        self._wakeup = _Wakeup()
        self._selector.register(self._wakeup.fd, selectors.EVENT_READ)
        self._close_by: Deadline | None = None
        self._discarded = False
        self._logged: set[int | None] = set()
        self._lock = threading.Lock()
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="unisono-output", daemon=True)

    def add(
        self,
        source: IO[bytes],
        *sinks: Sink,
        files: Sequence[IO[bytes]] = (),
        keep_tail: bool = False,
    ) -> WorkerStream:
        """Begin to copy `source` to the sinks, and to files that are closed at its end."""
        stream = WorkerStream(
            source, sinks, files=files, keep_tail=keep_tail, on_loss=self._log_loss
        )
        self.do(lambda: self._register(stream))
        return stream

    def do(self, task: Callable[[], object]) -> None:
        """Call a function that may wait for a reader: in the thread, or here after `close`."""
        with self._lock:
            if not self._is_over:
                self._tasks.append(task)
                self._wake()
                return
        task()

    @property
    def is_running(self) -> bool:
        """Whether the thread runs. After `close` this means that it waits for a reader."""
        return self._thread.is_alive()

    def begin_close(self, timeout_s: float) -> None:
        """Begin to `close`, without waiting."""
        with self._lock:
            self._close_by = Deadline(timeout_s)
            self._is_over = self._is_over or self._thread.ident is None
            if not self._is_over:
                self._wake()

    def close(self, timeout_s: float, canceled: Callable[[], bool] = lambda: False) -> None:
        """Pass on the content of the pipes, for at most `timeout_s`, and close them.

        The method does not wait for the end of file: a process that left its worker's group may
        hold the pipe open without a limit.

        Args:
            timeout_s: Time-out.
            canceled: Function that returns whether to give up earlier; called repeatedly.
        """
        self.begin_close(timeout_s)
        begun = Deadline(timeout_s)
        if self._thread.ident is None:
            self._selector.close()
        else:
            self._thread.join(_IDLE_S)
            while self._thread.is_alive() and not (begun.expired() or canceled()):
                self._thread.join(min(_IDLE_S, begun.remaining()))
            waited_s = timeout_s - begun.remaining()
            # A source with endless output keeps the thread busy, unless its time is over.
            self._close_by = Deadline(0.0)
            self._thread.join(_STOP_S)
            if self._thread.is_alive():
                _log.warning(
                    "the rest of the workers' output is lost: it was not read for %.1f s", waited_s
                )
                return
            if self._discarded:
                _log.warning(
                    "the rest of the workers' output is lost: after %.1f s there was still more",
                    waited_s,
                )
        self._wakeup.close()

    def _wake(self) -> None:
        if self._thread.ident is None:
            self._thread.start()
        self._wakeup.set()

    def _log_loss(self, error: OSError) -> None:
        if error.errno not in self._logged:
            self._logged.add(error.errno)
            _log.warning("workers' output is lost, as it cannot be written: %s", error.strerror)

    # The methods below run on the thread.

    def _run(self) -> None:
        while True:
            close_by = self._close_by
            ready = self._wait(0.0 if close_by is not None else self._timeout())
            if close_by is not None and (not ready or close_by.expired()):
                self._discarded = any(stream.drop() for stream in ready)
                break
            for stream in ready:
                if not stream.pump():
                    self._finish(stream)
        for stream in list(self._streams):
            self._finish(stream)
        self._last()
        self._selector.close()
        with self._lock:
            self._is_over = True
        self._do_tasks()

    def _timeout(self) -> float | None:
        waits = [stream.flush_partial(_IDLE_S) for stream in self._streams]
        waits.append(self._tick())
        return min((wait_s for wait_s in waits if wait_s is not None), default=None)

    def _wait(self, timeout_s: float | None) -> list[WorkerStream]:
        """Return the streams that can be read, after `timeout_s` at the latest."""
        self._do_tasks()
        found = [key for key, _ in self._selector.select(timeout_s)]
        if any(key.fd == self._wakeup.fd for key in found):
            self._wakeup.clear()
            self._do_tasks()
            # A stream that was just added may be readable, and `close` must not miss its content.
            found = [key for key, _ in self._selector.select(0.0)]
        return [key.data for key in found if key.data is not None]

    def _do_tasks(self) -> None:
        while self._tasks:
            # A task fails if its reader has left; the thread continues, as with workers' lines.
            with contextlib.suppress(OSError, ValueError):
                self._tasks.popleft()()

    def _register(self, stream: WorkerStream) -> None:
        try:
            self._selector.register(stream.source, selectors.EVENT_READ, stream)
        except (OSError, ValueError) as error:
            _log.warning("cannot read the output of a worker: %s", error)
            stream.finish()
            return
        self._streams.add(stream)

    def _finish(self, stream: WorkerStream) -> None:
        self._selector.unregister(stream.source)
        self._streams.discard(stream)
        stream.finish()
