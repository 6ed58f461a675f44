"""The handshake of a TCP connection: `Dial` connects, `Greetings` serve accepted connections.

Both live on the I/O thread, until the connection becomes a link or ends.
"""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Callable

from unisono.core.base.host import reason_of
from unisono.core.base.log import LogLimit, get_logger
from unisono.core.base.net.silence import limit_start
from unisono.core.base.net.sockets import CONNECT_S, STAGGER_S, begin_call, why_not
from unisono.core.base.net.tls import TlsPolicy
from unisono.core.transports.tcp.address import TCPAddress
from unisono.core.transports.tcp.io_loop import READ, WRITE, IOLoop
from unisono.core.transports.tcp.wire import ACCEPT, HELLO, Hello
from unisono.errors import HandshakeError

_log = get_logger("transports.tcp")

# Limit of the wait for a hello. Ranks send it at once; other clients may send nothing.
_HELLO_S = 30.0

# How many connections may be without a hello, and for how long each of them is kept if they are
# more. So clients that send nothing do not take all file descriptors.
_MOST_GREETINGS = 256
_LEAST_S = 1.0


class _ConnectionAttempt:
    """A connection attempt to one address; ends with `ended(attempt, reason)`, "": connected."""

    def __init__(
        self, loop: IOLoop, host: str, port: int, ended: Callable[[_ConnectionAttempt, str], None]
    ) -> None:
        self.host = host
        self.at = f"{host}:{port}"
        self.sock: socket.socket | None = None
        self._loop = loop
        self._port = port
        self._ended = ended

    def start(self, *, limited: bool) -> None:
        """Connect; `limited` to CONNECT_S, otherwise to what a host may be silent."""
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        try:
            self.sock = begin_call(family, (self.host, self._port))
            limit_start(self.sock)
        except OSError as error:
            self._ended(self, reason_of(error))
            return
        self._loop.watch(self.sock, WRITE, self._connected)
        if limited:
            self._loop.start_timer(self._too_slow, CONNECT_S)

    def leave(self) -> socket.socket | None:
        """Stop watching the connection and return it."""
        self._loop.stop_timer(self._too_slow)
        if self.sock is not None:
            self._loop.unwatch(self.sock)
        return self.sock

    def close(self) -> None:
        """Stop the attempt."""
        if (sock := self.leave()) is not None:
            sock.close()

    def _connected(self, events: int) -> None:
        assert self.sock is not None
        self._ended(self, why_not(self.sock))

    def _too_slow(self) -> None:
        self._ended(self, f"no connection after {CONNECT_S:g} s")


class Dial:
    """An outgoing connection until the peer has answered; tries all addresses of the peer.

    If an address fails or takes long, the next address is tried in parallel. The first connection
    is used. If it leads to another process, the remaining addresses are tried again.

    The wait for the answer has no limit, because a stopped or busy peer has not refused. The calls
    that wait for the connection have deadlines.

    Args:
        loop: Of the I/O thread.
        hello: Sent first.
        address: Where the peer listens.
        tls: Whether and how to encrypt.
        done: Receives the connected socket and "", or None and the reasons. If the peer's own
            connection is to be used, receives that socket and the reasons.

    Source: RFC 8305, "Happy Eyeballs", for the overlap of attempts.
    """

    def __init__(
        self,
        loop: IOLoop,
        hello: Hello,
        address: TCPAddress,
        tls: TlsPolicy,
        done: Callable[[socket.socket | None, str], None],
    ) -> None:
        self._loop = loop
        self._tls = tls
        self._hello = hello.pack()
        self._left = b""
        self._hosts = deque(address.hosts)
        self._port = address.port
        self._done = done
        self._errors: list[str] = []
        self._attempts: list[_ConnectionAttempt] = []
        self._at = ""
        self._sock: socket.socket | None = None  # on which the hello was sent
        self._spare: socket.socket | None = None

    def start(self) -> None:
        """Try the next address. After the last one, use the peer's own connection, or fail."""
        self._loop.stop_timer(self.start)
        if self._hosts:
            attempt = _ConnectionAttempt(self._loop, self._hosts.popleft(), self._port, self._ended)
            self._attempts.append(attempt)
            if self._hosts:
                self._loop.start_timer(self.start, STAGGER_S)
            attempt.start(limited=bool(self._hosts))
        elif not self._attempts:
            spare, self._spare = self._spare, None
            self._done(spare, "; ".join(self._errors))

    @property
    def said_hello(self) -> bool:
        """Whether the hello is sent and not answered, so that the peer may have accepted."""
        return self._sock is not None

    def unreached(self) -> list[str]:
        """Return the addresses without a connection so far, each with the reason."""
        return [*self._errors, *(f"{attempt.at}: no answer yet" for attempt in self._attempts)]

    def park(self, sock: socket.socket) -> None:
        """Keep the peer's own connection, unanswered, in case this dial fails.

        If two ranks dial each other, the lower rank does this, so that a single connection stays.
        """
        self.close_spare()
        self._spare = sock

    def close_spare(self) -> None:
        """Close the parked connection, if there is one."""
        if self._spare is not None:
            self._spare.close()
            self._spare = None

    def cancel(self) -> None:
        """Stop; the peer's own connection was accepted, or the transport ends."""
        self._put_back()
        self._hang_up()
        self.close_spare()

    def _ended(self, attempt: _ConnectionAttempt, reason: str) -> None:
        self._attempts.remove(attempt)
        self._at = attempt.at
        if reason:
            attempt.close()
            self._failed(reason)
            return
        self._sock = sock = attempt.leave()
        assert sock is not None
        self._put_back()
        try:
            self._sock = sock = self._tls.call(sock, attempt.host)
        except OSError as error:
            self._failed(reason_of(error))
            return
        self._left = self._hello
        self._loop.watch(sock, READ, self._answered)
        self._answered(WRITE)

    def _put_back(self) -> None:
        """Stop the other attempts, and keep their addresses for a later attempt."""
        self._loop.stop_timer(self.start)
        for attempt in reversed(self._attempts):
            attempt.close()
            self._hosts.appendleft(attempt.host)
        self._attempts.clear()

    def _answered(self, events: int) -> None:
        sock = self._sock
        assert sock is not None
        try:
            if self._left:  # the TLS handshake comes before it
                self._left = self._left[sock.send(self._left) :]
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
        limit_start(sock, 0)
        self.close_spare()
        self._done(sock, "")

    def _failed(self, reason: str) -> None:
        self._errors.append(f"{self._at}: {reason}")
        self._hang_up()
        self.start()

    def _hang_up(self) -> None:
        if self._sock is not None:
            self._loop.unwatch(self._sock)
            self._sock.close()
            self._sock = None


class Greetings:
    """The accepted connections whose hellos are not complete.

    Args:
        loop: Of the I/O thread.
        tls: Which connections must be encrypted.
        done: Receives a connection and its hello.
    """

    def __init__(
        self, loop: IOLoop, tls: TlsPolicy, done: Callable[[socket.socket, Hello], None]
    ) -> None:
        self._loop = loop
        self.tls = tls
        self._done = done
        self._log = LogLimit(_log)
        # With the time of each, oldest first.
        self._open: dict[_Greeting, float] = {}

    def has_room(self) -> bool:
        """Whether one more may be accepted; if there are too many, the oldest ends."""
        if len(self._open) >= _MOST_GREETINGS:
            oldest, since_s = next(iter(self._open.items()))
            # The hello of a rank is under way.
            if time.monotonic() - since_s < _LEAST_S:
                return False
            oldest.end("too many callers without a hello")
        return True

    def add(self, sock: socket.socket) -> None:
        """Wait for the hello of a connection."""
        self._open[_Greeting(self._loop, sock, self.tls, self._ended)] = time.monotonic()

    def warn(self, line: str) -> None:
        """Log a line that a stranger can cause; many of them are summed up."""
        self._log.add(line)
        self._sum_up()

    def end(self) -> None:
        """Log the summary of the lines that were not logged."""
        self._log.sum_up(ends=True)

    def _sum_up(self) -> None:
        if (left_s := self._log.sum_up()) is not None:
            self._loop.start_timer(self._sum_up, left_s)

    def _ended(self, greeting: _Greeting, hello: Hello | None) -> None:
        del self._open[greeting]
        if hello is not None:
            self._done(greeting.sock, hello)


class _Greeting:
    """An accepted connection until its hello is complete; closed if no hello arrives in time."""

    def __init__(
        self,
        loop: IOLoop,
        sock: socket.socket,
        tls: TlsPolicy,
        ended: Callable[[_Greeting, Hello | None], None],
    ) -> None:
        self._loop = loop
        self.sock = sock
        self._tls: TlsPolicy | None = tls
        self._ended = ended
        self._data = b""
        loop.watch(sock, READ, self._read_hello)
        loop.start_timer(self._too_slow, _HELLO_S)

    def _read_hello(self, events: int) -> None:
        try:
            if self._tls is not None:
                plain, self.sock = self.sock, self._tls.answer(self.sock)
                self._tls = None
                if self.sock is not plain:
                    self._loop.unwatch(plain)
                    self._loop.watch(self.sock, READ, self._read_hello)
            received = self.sock.recv(HELLO.size - len(self._data))
            if not received:
                raise ConnectionResetError("it hung up")
            self._data += received
            if len(self._data) < HELLO.size:
                return
            hello = Hello.parse(self._data)
        except BlockingIOError:
            return
        except (OSError, HandshakeError) as error:
            self.end(reason_of(error))
            return
        self._loop.stop_timer(self._too_slow)
        self._loop.unwatch(self.sock)
        self._ended(self, hello)

    def _too_slow(self) -> None:
        self.end(f"no hello within {_HELLO_S:g} s")

    def end(self, reason: str) -> None:
        """Close the connection."""
        _log.info("a caller was dropped before its hello: %s", reason)
        self._loop.stop_timer(self._too_slow)
        self._loop.unwatch(self.sock)
        self.sock.close()
        self._ended(self, None)
