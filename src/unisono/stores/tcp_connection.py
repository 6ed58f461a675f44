"""Connections of a TCPStore client: requests, waits, and a pool for threads and forks."""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from unisono.base.deadline import Deadline
from unisono.errors import (
    ClosedError,
    HandshakeError,
    StoreConnectionError,
    StoreTimeoutError,
)
from unisono.stores.addresses import connect, format_address
from unisono.stores.wire import (
    MAGIC,
    NO_REPLY,
    STOP_WAITING,
    WAIT_CANCELED,
    Op,
    ReplyDecoder,
    WireError,
    encode_request,
)

__all__ = ["Connection", "ConnectionPool"]

_READ_BYTES = 256 * 1024
_MAX_IDLE = 4
_RETRY_S = 0.01
# What a live server needs to answer a cancelled wait; a stopped one is not waited for longer.
_CANCEL_GRACE_S = 0.2
# settimeout() refuses infinity and anything beyond the C time type.
_MAX_WAIT_S = 1e6
_LOST_HINT = "the process that runs the store's server ended, or refused the request (see its log)"

_Ask = tuple[Any, ...]


class Connection:
    """One TCP connection, used by one thread at a time.

    After an exception it is in an unknown state and must be closed.
    """

    def __init__(self, sock: socket.socket, address: str) -> None:
        self._sock = sock
        self._address = address
        self._decoder = ReplyDecoder()
        self._replies: list[Any] = []

    def handshake(self, deadline: Deadline) -> None:
        """Introduce this client and make sure that a TCPStore server answers.

        Raises:
            HandshakeError: Something else answered.
        """
        nonce = random.getrandbits(32)
        self._send(
            encode_request(Op.VALIDATE, MAGIC) + encode_request(Op.PING, nonce), deadline, "PING"
        )
        self._decoder.expect(Op.PING)
        try:
            answer = self._receive(deadline, "PING")
        except StoreConnectionError as error:
            if not isinstance(error.__cause__, WireError):
                raise
            answer = None
        if answer != nonce:
            raise HandshakeError(
                f"what listens at {self._address} is not a TCPStore server",
                hint="another program has the port; choose another one, or 0 for any free port",
            )

    def ask(self, deadline: Deadline, op: Op, *args: Any) -> Any:
        """Do one request and return its result; None if it has none.

        Raises:
            StoreConnectionError: The server went away.
            StoreTimeoutError: It does not answer.
        """
        return self.ask_all(deadline, [(op, *args)])[0]

    def ask_all(self, deadline: Deadline, requests: Sequence[_Ask]) -> list[Any]:
        """Do several requests in one round trip and return their results."""
        data = []
        for op, *args in requests:
            data.append(encode_request(op, *args))
            if op in NO_REPLY:
                # So that a write is done, and visible to every other connection, on return.
                data.append(encode_request(Op.PING, 0))
        operation = requests[0][0].name if requests else ""
        for op, *args in requests:
            self._decoder.expect(
                Op.PING if op in NO_REPLY else op, len(args[0]) if op is Op.MULTI_GET else 0
            )
        self._send(b"".join(data), deadline, operation)
        answers = [self._receive(deadline, operation) for _ in requests]
        return [
            None if request[0] in NO_REPLY else answer
            for request, answer in zip(requests, answers, strict=True)
        ]

    def wait(self, deadline: Deadline, op: Op, *args: Any) -> bool:
        """Do a WAIT or BARRIER; False if the time is over, and the server knows we left.

        Raises:
            StoreConnectionError: The server went away.
            StoreTimeoutError: It is connected, but does not answer.
        """
        self._send(encode_request(op, *args), deadline, op.name)
        self._decoder.expect(op)
        try:
            return bool(self._receive(deadline, op.name) == STOP_WAITING)
        except StoreTimeoutError:
            grace = Deadline(_CANCEL_GRACE_S)
            self._send(encode_request(Op.CANCEL_WAIT), grace, op.name)
        # The reply expected above is either the late end of the wait or its cancellation.
        if self._receive(grace, op.name) == WAIT_CANCELED:
            return False
        self._decoder.expect(Op.CANCEL_WAIT)
        self._receive(grace, op.name)
        return True

    def close(self) -> None:
        """Close the socket."""
        self._sock.close()

    def interrupt(self) -> None:
        """Wake the thread that waits on this connection."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            return

    def _send(self, data: bytes, deadline: Deadline, operation: str) -> None:
        self._sock.settimeout(min(max(deadline.remaining(), 0.001), _MAX_WAIT_S))
        try:
            self._sock.sendall(data)
        except TimeoutError:
            raise self._silent(deadline, operation) from None
        except OSError as error:
            raise self._lost(operation, error) from error

    def _receive(self, deadline: Deadline, operation: str) -> Any:
        while not self._replies:
            self._sock.settimeout(min(max(deadline.remaining(), 0.001), _MAX_WAIT_S))
            try:
                chunk = self._sock.recv(_READ_BYTES)
                if not chunk:
                    raise ConnectionResetError("the server closed the connection")
                self._replies += self._decoder.feed(chunk)
            except TimeoutError:
                if deadline.expired():
                    raise self._silent(deadline, operation) from None
            except WireError as error:
                raise StoreConnectionError(
                    f"{operation} on the store at {self._address}: bad reply: {error.what}"
                ) from error
            except OSError as error:
                raise self._lost(operation, error) from error
        return self._replies.pop(0)

    def _lost(self, operation: str, error: OSError) -> StoreConnectionError:
        return StoreConnectionError(
            f"{operation} failed: lost the connection to the store at {self._address} ({error})",
            hint=_LOST_HINT,
        )

    def _silent(self, deadline: Deadline, operation: str) -> StoreTimeoutError:
        return StoreTimeoutError(
            f"{operation} timed out: the store server at {self._address} is connected but did "
            f"not answer within {deadline.timeout_s:g} s",
            hint="the process that runs the server is stopped or overloaded",
        )


class ConnectionPool:
    """Connections to one server: as many as requests are in flight, a few kept when idle."""

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port
        self._address = format_address(host, port)
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._idle: list[Connection] = []
        self._busy: set[Connection] = set()
        self._closed = False

    def open_first(self, deadline: Deadline) -> None:
        """Connect, waiting for a server that is not up yet."""
        while True:
            try:
                connection = self._open(deadline, retry=True)
                break
            except StoreConnectionError:
                # A server that is just going down accepts and hangs up; the next one may come.
                if deadline.expired():
                    raise
                time.sleep(min(_RETRY_S, deadline.remaining()))
        self._idle.append(connection)

    @contextmanager
    def lease(self, deadline: Deadline) -> Iterator[Connection]:
        """Lend a connection to this thread; it is kept for the next one unless the body fails."""
        connection = self._take() or self._open(deadline, retry=False)
        with self._lock:
            self._busy.add(connection)
            closed = self._closed
        try:
            if closed:
                raise ClosedError(f"the store at {self._address} is closed")
            yield connection
        except BaseException as error:
            connection.close()
            if self._closed and isinstance(error, StoreConnectionError):
                raise ClosedError(
                    f"the store at {self._address} was closed while a thread waited on it"
                ) from None
            raise
        else:
            with self._lock:
                keep = not self._closed and len(self._idle) < _MAX_IDLE
                if keep:
                    self._idle.append(connection)
            if not keep:
                connection.close()
        finally:
            self._busy.discard(connection)

    def close(self) -> None:
        """Close idle connections and wake the threads that wait on busy ones."""
        if self._pid != os.getpid():
            self._drop_parents()
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            busy = list(self._busy)
        for connection in idle:
            connection.close()
        for connection in busy:
            connection.interrupt()

    def _take(self) -> Connection | None:
        if self._pid != os.getpid():
            self._drop_parents()
        with self._lock:
            return self._idle.pop() if self._idle else None

    def _drop_parents(self) -> None:
        """Close the copies that a fork made; two processes on one connection mix their bytes."""
        # Close only: a shutdown would end the parent's connection, too. The lock is replaced
        # because another thread of the parent may have held it at the fork.
        for connection in [*self._idle, *self._busy]:
            connection.close()
        self._reset()

    def _open(self, deadline: Deadline, retry: bool) -> Connection:
        sock = connect(self._host, self._port, deadline, retry=retry)
        connection = Connection(sock, self._address)
        try:
            # Some time also for a caller whose own is over: the server did accept.
            connection.handshake(Deadline(max(deadline.remaining(), _CANCEL_GRACE_S)))
        except BaseException:
            connection.close()
            raise
        return connection
