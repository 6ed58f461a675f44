"""Passes the workers' output on in whole lines, and remembers the last of it.

A thread of its own does it: when the terminal or the pipe behind it stands still, only this
thread waits, and the agent can still see a worker die or a signal arrive.
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

from unisono.base.deadline import Deadline
from unisono.base.log import get_logger

__all__ = ["TRACEBACK", "Sink", "Stream", "Tee"]

_log = get_logger("elastic.tee")

TRACEBACK = b"Traceback (most recent call last):"
"""From here on, what comes without a pause within a second is passed on together."""

_CONTROL = re.compile(rb"\x1b\[[0-?]*[ -/]*[@-~]")
_READ_BYTES = 64 * 1024
_TAIL_BYTES = 64 * 1024
_IDLE_S = 0.2
_TRACEBACK_S = 1.0
_STOP_S = 0.2


class Sink(Protocol):
    """Where lines go: a binary file, or a console that decorates them."""

    def write(self, data: bytes, /) -> object:
        """Take whole lines, a whole traceback, or a beginning that stays unfinished for long."""

    def flush(self) -> object:
        """See to it that what was written can be seen."""


class Stream:
    """One pipe of a worker.

    Attributes:
        ended: Set when everything has been read.
    """

    def __init__(
        self,
        source: IO[bytes],
        sinks: Sequence[Sink],
        *,
        files: Sequence[IO[bytes]] = (),
        keep_tail: bool = False,
        complain: Callable[[OSError], None] = lambda error: None,
    ) -> None:
        self.source = source
        self.ended = threading.Event()
        self._files = files
        self._sinks = [*sinks, *files]
        self._keep_tail = keep_tail
        self._complain = complain
        self._tail = b""
        self._partial = b""
        self._partial_since_s = 0.0
        self._traceback_since_s: float | None = None

    def tail(self) -> str:
        """Return the last 64 KiB of what came through."""
        return self._tail.decode("utf-8", errors="replace")

    def pump(self) -> bool:
        """Read what there is and pass on the complete lines; False at the end of file."""
        try:
            data = os.read(self.source.fileno(), _READ_BYTES)
        except OSError:
            # That is how Linux reports the end of a terminal.
            data = b""
        if self._keep_tail:
            self._tail = (self._tail + data)[-_TAIL_BYTES:]
        pending = self._partial + data
        # A carriage return ends a line as well, or progress bars would never show.
        end = max(pending.rfind(b"\n"), pending.rfind(b"\r")) + 1
        # Several ranks often print one at the same time: after Ctrl-C, or all for the same reason.
        # What a program that goes on writes after one shall not wait with it for long.
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
        """Pass on an unfinished line, such as a prompt, if nothing was added to it for a while.

        Returns:
            In how many seconds to try again; None if nothing is left.
        """
        if not self._partial:
            return None
        if idle_s and not _CONTROL.sub(b"", self._partial):
            # It shows nothing yet, such as the sequence that makes a cursor visible.
            return None
        left_s = self._partial_since_s + idle_s - time.monotonic()
        if left_s > 0:
            return left_s
        self._write(self._partial)
        self._partial = b""
        self._traceback_since_s = None
        return None

    def drop(self) -> bool:
        """Take a little of what can be read, and forget it; False at the end of file."""
        try:
            return bool(os.read(self.source.fileno(), 1))
        except OSError:
            return False

    def finish(self) -> None:
        """Pass on what is left and close the pipe and the stream's own files."""
        if TRACEBACK in self._partial and not self._partial.endswith(b"\n"):
            # It was killed while it wrote; what others say next begins a line.
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
                # Whoever read our output has left (`| head`); the workers go on.
                continue
            except OSError as error:
                self._complain(error)


class Tee:
    """The thread that serves all streams of a launch.

    Args:
        tick: Called in the thread after each round; returns when it wants to be called again,
            in seconds, or None.
        last: Called in the thread when all streams have ended.
    """

    def __init__(
        self,
        tick: Callable[[], float | None] = lambda: None,
        last: Callable[[], None] = lambda: None,
    ) -> None:
        self._tick = tick
        self._last = last
        self._selector = selectors.DefaultSelector()
        self._streams: set[Stream] = set()
        # Only the thread touches the selector; others leave streams and orders, and wake it.
        self._new: deque[Stream] = deque()
        self._woken, self._waker = os.pipe()
        os.set_blocking(self._waker, False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._orders: deque[Callable[[], object]] = deque()
        self._give_up: Deadline | None = None
        self._dropped = False
        self._told: set[int | None] = set()
        self._lock = threading.Lock()
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="unisono-tee", daemon=True)

    def add(
        self,
        source: IO[bytes],
        *sinks: Sink,
        files: Sequence[IO[bytes]] = (),
        keep_tail: bool = False,
    ) -> Stream:
        """Begin to copy `source` to the sinks, and to files that are closed at its end."""
        stream = Stream(
            source, sinks, files=files, keep_tail=keep_tail, complain=self._output_is_lost
        )
        self._new.append(stream)
        with self._lock:
            self._wake()
        return stream

    def do(self, order: Callable[[], object]) -> None:
        """Call a function in the thread, or here if the tee is closed: it may wait for a reader."""
        with self._lock:
            if not self._is_over:
                self._orders.append(order)
                self._wake()
                return
        order()

    @property
    def is_running(self) -> bool:
        """Whether the thread runs; after `close`, it waits for a reader."""
        return self._thread.is_alive()

    def end(self, timeout_s: float) -> None:
        """Begin to `close`."""
        with self._lock:
            self._give_up = Deadline(timeout_s)
            self._is_over = self._is_over or self._thread.ident is None
            if not self._is_over:
                self._wake()

    def close(self, timeout_s: float, canceled: Callable[[], bool] = lambda: False) -> None:
        """Pass on what the pipes still hold, for at most `timeout_s`, and close them.

        Does not wait for the end of file: a process that left its worker's group may hold
        the pipe open for as long as it likes.

        Args:
            timeout_s: How long.
            canceled: Asked again and again whether to give up before that.
        """
        self.end(timeout_s)
        begun = Deadline(timeout_s)
        if self._thread.ident is None:
            self._selector.close()
        else:
            self._thread.join(_IDLE_S)
            while self._thread.is_alive() and not (begun.expired() or canceled()):
                self._thread.join(min(_IDLE_S, begun.remaining()))
            waited_s = timeout_s - begun.remaining()
            # A source that never runs dry keeps the thread at work until it is told to stop.
            self._give_up = Deadline(0.0)
            self._thread.join(_STOP_S)
            if self._thread.is_alive():
                _log.warning(
                    "the rest of the workers' output is lost: nobody took it for %.1f s", waited_s
                )
                return
            if self._dropped:
                _log.warning(
                    "the rest of the workers' output is lost: after %.1f s there was still more",
                    waited_s,
                )
        os.close(self._woken)
        os.close(self._waker)

    def _wake(self) -> None:
        if self._thread.ident is None:
            self._thread.start()
        # Full: then it is readable anyway.
        with contextlib.suppress(BlockingIOError):
            os.write(self._waker, b"+")

    def _output_is_lost(self, error: OSError) -> None:
        if error.errno not in self._told:
            self._told.add(error.errno)
            _log.warning("workers' output is lost, as it cannot be written: %s", error.strerror)

    def _run(self) -> None:
        while True:
            closing = self._give_up
            ready = self._wait(0.0 if closing is not None else self._timeout())
            if closing is not None and (not ready or closing.expired()):
                self._dropped = any(stream.drop() for stream in ready)
                break
            for stream in ready:
                if not stream.pump():
                    self._end(stream)
        for stream in list(self._streams):
            self._end(stream)
        self._last()
        self._selector.close()
        with self._lock:
            self._is_over = True
        self._obey()

    def _timeout(self) -> float | None:
        waits = [stream.flush_partial(_IDLE_S) for stream in self._streams]
        waits.append(self._tick())
        return min((wait_s for wait_s in waits if wait_s is not None), default=None)

    def _wait(self, timeout_s: float | None) -> list[Stream]:
        """Return the streams that can be read, after `timeout_s` at the latest."""
        self._adopt()
        found = [key for key, _ in self._selector.select(timeout_s)]
        if any(key.fd == self._woken for key in found):
            os.read(self._woken, _READ_BYTES)
            self._adopt()
            # What was woken for may be readable by now, and a closing tee must not miss it.
            found = [key for key, _ in self._selector.select(0.0)]
        return [key.data for key in found if key.data is not None]

    def _adopt(self) -> None:
        while self._new:
            stream = self._new.popleft()
            self._streams.add(stream)
            self._selector.register(stream.source, selectors.EVENT_READ, stream)
        self._obey()

    def _obey(self) -> None:
        while self._orders:
            # Nobody reads any more: as with the workers' lines.
            with contextlib.suppress(OSError, ValueError):
                self._orders.popleft()()

    def _end(self, stream: Stream) -> None:
        self._selector.unregister(stream.source)
        self._streams.discard(stream)
        stream.finish()
