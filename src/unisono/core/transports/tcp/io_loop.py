"""The event loop of an I/O thread: sockets to watch, jobs from other threads, timers."""

from __future__ import annotations

import contextlib
import math
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable

READ = selectors.EVENT_READ
WRITE = selectors.EVENT_WRITE

# How long a fork waits for a handler to end.
_HOLD_S = 1.0

SocketHandler = Callable[[int], None]
LaterCall = Callable[[], object]


# Small frames are read through a buffer of this size, several in one system call. Larger payloads
# are received straight into their place.
CHUNK_BYTES = 1 << 16


class IOLoop:
    """Calls the handlers of sockets that are ready; only `later` may be used by any thread.

    Attributes:
        chunk: [CHUNK_BYTES] buffer for handlers; holds no data between two handlers.
    """

    def __init__(self) -> None:
        self.chunk = memoryview(bytearray(CHUNK_BYTES))
        self._selector = selectors.DefaultSelector()
        self._todo: deque[LaterCall] = deque()
        self._timers: dict[LaterCall, float] = {}
        # Held while a handler runs: a socket may then be known to a local variable only.
        # Re-entrant, because a handler may fork.
        self._handling = threading.RLock()
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self.watch(self._wake_in, READ, self._woken)

    def later(self, job: LaterCall) -> None:
        """Run `job` on the loop's thread, soon."""
        self._todo.append(job)
        # A full pipe wakes the thread as well. If the pipe is closed, the thread has ended.
        with contextlib.suppress(OSError):
            self._wake_out.send(b"!")

    def start_timer(self, job: LaterCall, seconds: float) -> None:
        """Run `job` once, after `seconds`; a job has at most one timer."""
        self._timers[job] = time.monotonic() + seconds

    def stop_timer(self, job: LaterCall) -> None:
        """Remove the timer of `job`, if it has one."""
        self._timers.pop(job, None)

    def watch(self, sock: socket.socket, events: int, handler: SocketHandler) -> None:
        """Call `handler(events)` whenever one of `events` is possible on this socket."""
        self._selector.register(sock, events, handler)

    def want(self, sock: socket.socket, events: int) -> None:
        """Change the events that a watched socket is watched for."""
        key = self._selector.get_key(sock)
        if key.events != events:
            self._selector.modify(sock, events, key.data)

    def unwatch(self, sock: socket.socket) -> None:
        """Stop watching; no effect if the socket was not watched."""
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(sock)

    def turn(self) -> None:
        """Wait for ready sockets, jobs or timers, and run them."""
        timeout = None
        if self._timers:
            timeout = max(0.0, min(self._timers.values()) - time.monotonic())
        ready = self._selector.select(timeout)
        with self._handling:
            for key, events in ready:
                # An earlier handler of this batch may have closed the socket.
                if self._selector.get_map().get(key.fd) is key:
                    key.data(events)
            # Not the jobs that these jobs add: they run when the sockets have been looked at again.
            for _ in range(len(self._todo)):
                self._todo.popleft()()
            if self._timers:
                now = time.monotonic()
                for job in [job for job, at in self._timers.items() if at <= now]:
                    # An earlier job may have stopped the timer, or set it anew.
                    if self._timers.get(job, math.inf) <= now:
                        self.stop_timer(job)
                        job()

    def hold(self) -> bool:
        """Stop handlers until `release`; return False if a handler runs for too long.

        A handler may wait for a lock of the calling thread, so this wait has a limit.
        """
        return self._handling.acquire(timeout=_HOLD_S)

    def release(self) -> None:
        """Let handlers run again, on the thread that called `hold`."""
        self._handling.release()

    def close(self) -> None:
        """Close all watched sockets; later jobs never run.

        No socket is unregistered. In a forked child this would unregister the sockets of the
        parent, because both share the kernel's list of watched sockets.
        """
        for key in list((self._selector.get_map() or {}).values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._wake_out.close()
        self._selector.close()

    def _woken(self, events: int) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake_in.recv(4096)
