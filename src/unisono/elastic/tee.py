"""Passes the workers' output on in whole lines, and remembers the last of it.

A thread of its own does it: when the terminal or the pipe behind it stands still, only this
thread waits, and the agent can still see a worker die or a signal arrive.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import threading
from typing import IO

from unisono.base.deadline import Deadline

__all__ = ["Stream", "Tee"]

_READ_BYTES = 64 * 1024
_TAIL_BYTES = 64 * 1024
_IDLE_S = 0.2


class Stream:
    """One pipe of a worker.

    Attributes:
        ended: Set when everything has been read.
    """

    def __init__(self, source: IO[bytes], sink: IO[bytes], *, keep_tail: bool) -> None:
        self.source = source
        self.ended = threading.Event()
        self._sink = sink
        self._keep_tail = keep_tail
        self._tail = b""
        self._partial = b""

    def tail(self) -> str:
        """Return the last 64 KiB of what came through."""
        return self._tail.decode("utf-8", errors="replace")

    def pump(self) -> bool:
        """Read what there is and pass on the complete lines; False at the end of file."""
        data = os.read(self.source.fileno(), _READ_BYTES)
        if self._keep_tail:
            self._tail = (self._tail + data)[-_TAIL_BYTES:]
        pending = self._partial + data
        # A carriage return ends a line as well, or progress bars would never show.
        end = max(pending.rfind(b"\n"), pending.rfind(b"\r")) + 1
        if not data or len(pending) - end >= _READ_BYTES:
            end = len(pending)
        self._partial = pending[end:]
        self._write(pending[:end])
        return bool(data)

    def flush_partial(self) -> None:
        """Pass on an unfinished line, such as a prompt."""
        self._write(self._partial)
        self._partial = b""

    def finish(self) -> None:
        """Pass on what is left and close the pipe."""
        self.flush_partial()
        self.source.close()
        self.ended.set()

    def _write(self, data: bytes) -> None:
        if data:
            # Whoever read our output may have left (`| head`); the workers go on.
            with contextlib.suppress(OSError, ValueError):
                self._sink.write(data)
                self._sink.flush()


class Tee:
    """The thread that serves all streams of a launch."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._streams: set[Stream] = set()
        self._give_up: Deadline | None = None
        self._thread = threading.Thread(target=self._run, name="unisono-tee", daemon=True)

    def add(self, source: IO[bytes], sink: IO[bytes], *, keep_tail: bool = False) -> Stream:
        """Copy `source` to `sink`; only before `start`."""
        stream = Stream(source, sink, keep_tail=keep_tail)
        self._streams.add(stream)
        self._selector.register(source, selectors.EVENT_READ, stream)
        return stream

    def start(self) -> None:
        """Start copying."""
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        """Pass on what the pipes still hold, for at most `timeout_s`, and close them.

        Does not wait for the end of file: a process that left its worker's group may hold
        the pipe open for as long as it likes.
        """
        self._give_up = Deadline(timeout_s)
        if self._thread.ident is None:
            self._run()
        else:
            self._thread.join(timeout_s + _IDLE_S)

    def _run(self) -> None:
        while self._streams:
            timeout = _IDLE_S if self._give_up is None else 0.0
            ready = [key.data for key, _ in self._selector.select(timeout)]
            if self._give_up is not None and (not ready or self._give_up.expired()):
                break
            if not ready:
                for stream in self._streams:
                    stream.flush_partial()
            for stream in ready:
                if not stream.pump():
                    self._end(stream)
        for stream in list(self._streams):
            self._end(stream)
        self._selector.close()

    def _end(self, stream: Stream) -> None:
        self._selector.unregister(stream.source)
        self._streams.discard(stream)
        stream.finish()
