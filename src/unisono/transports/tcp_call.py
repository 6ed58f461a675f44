"""The handshake of a TCP connection: an outgoing call, and the greeting of a caller.

Both live on the I/O thread, until the connection becomes a link or ends.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket
from collections import deque
from collections.abc import Callable

from unisono.base.log import get_logger
from unisono.errors import HandshakeError
from unisono.transports.address import TCPAddress
from unisono.transports.io_loop import READ, WRITE, Loop
from unisono.transports.wire import ACCEPT, HELLO, Hello

__all__ = ["Call", "Greeting", "reason_of"]

_log = get_logger("transports.tcp")

# How long one address may take to connect while others are left to try. A host behind a
# firewall that drops packets would otherwise cost the kernel's two minutes.
_CONNECT_S = 3.0

# How long a caller may take to say who it is. Ranks do so at once; this is for strangers.
_HELLO_S = 30.0


class Call:
    """An outgoing connection until the peer has answered; tries one address after another.

    There is no limit on the answer: a peer that is stopped or busy has not refused, and whoever
    waits for it has a deadline.

    Args:
        loop: Of the I/O thread.
        hello: What to say.
        address: Where the peer listens.
        done: Gets the connected socket, or None and the reasons why there is none.
    """

    def __init__(
        self,
        loop: Loop,
        hello: Hello,
        address: TCPAddress,
        done: Callable[[socket.socket | None, str], None],
    ) -> None:
        self._loop = loop
        self._hello = hello
        self._hosts = deque(address.hosts)
        self._port = address.port
        self._done = done
        self._at = ""
        self._errors: list[str] = []
        self._sock: socket.socket | None = None
        self._connecting = False
        self._spare: socket.socket | None = None

    def start(self) -> None:
        """Call the next address; without one, take the peer's own call, or give it up."""
        if not self._hosts:
            spare, self._spare = self._spare, None
            self._done(spare, "; ".join(self._errors))
            return
        host = self._hosts.popleft()
        self._at = f"{host}:{self._port}"
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._connecting = True
        try:
            self._sock = sock = socket.socket(family, socket.SOCK_STREAM)
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with contextlib.suppress(BlockingIOError):
                sock.connect((host, self._port))
        except OSError as error:
            self._failed(reason_of(error))
            return
        self._loop.watch(sock, WRITE, self._connected)
        if self._hosts:
            self._loop.start_timer(self._too_slow, _CONNECT_S)

    @property
    def said_hello(self) -> bool:
        """Whether the peer may have accepted the call; its answer has not come yet."""
        return self._sock is not None and not self._connecting

    def unreached(self) -> list[str]:
        """Return the addresses that did not take the call so far, each with the reason."""
        waiting = [f"{self._at}: no answer yet"] if self._connecting else []
        return [*self._errors, *waiting]

    def park(self, sock: socket.socket) -> None:
        """Keep the peer's own call, unanswered, in case that this one fails.

        Of two ranks that call each other the lower one does this, so that one connection stays.
        """
        self.close_spare()
        self._spare = sock

    def close_spare(self) -> None:
        """Close the parked connection, if there is one."""
        if self._spare is not None:
            self._spare.close()
            self._spare = None

    def cancel(self) -> None:
        """Stop calling; the peer's own call was accepted, or the transport ends."""
        self._hang_up()
        self.close_spare()

    def _connected(self, events: int) -> None:
        sock = self._sock
        assert sock is not None
        self._loop.stop_timer(self._too_slow)
        if code := sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._failed(os.strerror(code))
            return
        try:
            sock.send(self._hello.pack())
        except OSError as error:
            self._failed(reason_of(error))
            return
        self._connecting = False
        self._loop.unwatch(sock)
        self._loop.watch(sock, READ, self._answered)

    def _answered(self, events: int) -> None:
        sock = self._sock
        assert sock is not None
        try:
            answer = sock.recv(1)
        except BlockingIOError:
            return
        except OSError as error:
            self._failed(reason_of(error))
            return
        if answer != ACCEPT:
            self._failed("refused this rank" if answer else "hung up during the handshake")
            return
        self._sock = None
        self._loop.unwatch(sock)
        self.close_spare()
        self._done(sock, "")

    def _too_slow(self) -> None:
        self._failed(f"no connection after {_CONNECT_S:g} s")

    def _failed(self, reason: str) -> None:
        self._connecting = False
        self._errors.append(f"{self._at}: {reason}")
        self._hang_up()
        self.start()

    def _hang_up(self) -> None:
        self._loop.stop_timer(self._too_slow)
        if self._sock is not None:
            self._loop.unwatch(self._sock)
            self._sock.close()
            self._sock = None


class Greeting:
    """An accepted connection until its hello is complete; a silent one is closed in time.

    Args:
        loop: Of the I/O thread.
        sock: The connection.
        done: Gets it with the hello.
    """

    def __init__(
        self, loop: Loop, sock: socket.socket, done: Callable[[socket.socket, Hello], None]
    ) -> None:
        self._loop = loop
        self._sock = sock
        self._done = done
        self._data = b""
        loop.watch(sock, READ, self._hear)
        loop.start_timer(self._too_slow, _HELLO_S)

    def _hear(self, events: int) -> None:
        try:
            received = self._sock.recv(HELLO.size - len(self._data))
            if not received:
                raise ConnectionResetError("it hung up")
            self._data += received
            if len(self._data) < HELLO.size:
                return
            hello = Hello.parse(self._data)
        except BlockingIOError:
            return
        except (OSError, HandshakeError) as error:
            self._end(reason_of(error))
            return
        self._loop.stop_timer(self._too_slow)
        self._loop.unwatch(self._sock)
        self._done(self._sock, hello)

    def _too_slow(self) -> None:
        self._end(f"it said nothing for {_HELLO_S:g} s")

    def _end(self, reason: str) -> None:
        _log.info("a caller was dropped before its hello: %s", reason)
        self._loop.stop_timer(self._too_slow)
        self._loop.unwatch(self._sock)
        self._sock.close()


def reason_of(error: BaseException) -> str:
    """Return what an error says, in one line; the operating system's words without a number."""
    if isinstance(error, OSError) and error.strerror:
        if error.errno == errno.EMFILE:
            most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            return f"{error.strerror}: this process may have {most} (ulimit -n)"
        return error.strerror
    return str(error).partition("\n")[0] or type(error).__name__
