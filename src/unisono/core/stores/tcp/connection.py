"""Connections of a TCPStore client: requests, waits, and a pool for threads and forks."""

from __future__ import annotations

import errno
import math
import socket
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from unisono.core.base.deadline import Deadline
from unisono.core.base.net.silence import (
    LOOK_S,
    host_timeout_s,
    keep_alive,
    limit_start,
    round_trip_us,
)
from unisono.core.base.net.sockets import connect, format_address
from unisono.core.base.net.tls import TlsPolicy, TlsRule
from unisono.core.platform.posix import after_fork
from unisono.core.stores.tcp.handshake import asks_for_tls, shake_hands
from unisono.core.stores.tcp.link import RawRequest, open_link
from unisono.core.stores.tcp.wire import STOP_WAITING, RequestOp, encode_request
from unisono.errors import (
    ClosedError,
    HandshakeError,
    InvalidArgumentError,
    StoreConnectionError,
    StoreTimeoutError,
)

_MAX_IDLE = 4
_RETRY_S, _LAST_RETRY_S = 0.01, 1.0
# A live server answers a cancelled wait within this time. Longer, and a stopped server would hold
# up a wait that has timed out.
_CANCEL_GRACE_S = 0.2
# Errors of a host that answers nothing any more, at other times than at the deadline of a call.
_VANISHED = (errno.EHOSTDOWN, errno.ETIMEDOUT)
_VANISHED_HINT = "the host of the store's server, or the network to it, has failed"
_LOST_HINT = "the process that runs the store's server ended, or refused the request (see its log)"


class Connection:
    """One TCP connection, used by one thread at a time.

    After an exception the connection is in an unknown state and must be closed.
    """

    def __init__(self, sock: socket.socket, address: str) -> None:
        self._sock = sock
        self._address = address
        self._link = open_link(sock)

    def ask(self, timeout_s: float, requests: tuple[RawRequest, ...]) -> list[Any]:
        """Make requests in one round trip and return their results; None for a write.

        Raises:
            StoreConnectionError: The server went away.
            StoreTimeoutError: The server does not answer.
        """
        try:
            return self._link.exchange(timeout_s, requests)
        except (OSError, OverflowError, ValueError) as error:
            raise self._failure(error, timeout_s, requests) from error

    def wait(self, timeout_s: float, op: RequestOp, *args: Any) -> bool:
        """Make a WAIT or BARRIER; return False at the time-out, after the server has cancelled it.

        Raises:
            StoreConnectionError: The server went away.
            StoreTimeoutError: The server is connected, but does not answer.
        """
        requests = ((op, *args),)
        try:
            answer = self._link.exchange(max(timeout_s, 0.001), requests)[0]
        except (OSError, OverflowError, ValueError) as error:
            if not _has_timed_out(error):
                raise self._failure(error, timeout_s, requests) from error
        else:
            return bool(answer == STOP_WAITING)
        try:
            return self._link.cancel(_CANCEL_GRACE_S)
        except (OSError, ValueError) as error:
            raise self._failure(error, timeout_s + _CANCEL_GRACE_S, requests) from error

    def close(self) -> None:
        """Close the socket."""
        self._sock.close()

    def interrupt(self) -> None:
        """Wake the thread that waits on this connection."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            return

    def _failure(
        self, error: Exception, timeout_s: float, requests: tuple[RawRequest, ...]
    ) -> Exception:
        """Return the error for a link's exception."""
        operation = RequestOp(requests[0][0]).name
        if isinstance(error, InvalidArgumentError):
            return error
        if isinstance(error, OverflowError):
            # The native link reports only that a request is too large; encoding it here raises an
            # error that names the part.
            for request in requests:
                encode_request(*request)
            return error
        if _has_timed_out(error):
            waited = Deadline(timeout_s)
            return StoreTimeoutError(
                f"{operation} timed out: the store server at {self._address} is connected but "
                f"did not answer within {waited}",
                hint="the process that runs the server is stopped or overloaded",
            )
        if isinstance(error, OSError):
            return StoreConnectionError(
                f"{operation} failed: lost the connection to the store at {self._address} "
                f"({error})",
                hint=_VANISHED_HINT if error.errno in _VANISHED else _LOST_HINT,
            )
        return StoreConnectionError(
            f"{operation} on the store at {self._address}: bad reply: {error}"
        )


def _has_timed_out(error: Exception) -> bool:
    """Whether a call has reached its deadline; the kernel's time-out of a connection has a code."""
    return isinstance(error, TimeoutError) and error.errno is None


class ConnectionPool:
    """Connections to one server: as many as requests are in flight, a few kept when idle.

    Attributes:
        round_trip_us: To the server, 0 on its host; None: unknown.
    """

    def __init__(self, host: str, port: int, token: bytes) -> None:
        self._host = host
        self._port = port
        self._token = token
        self._tls = TlsPolicy.of(token, "store")
        self._address = format_address(host, port)
        self.round_trip_us: int | None = None
        # No lock: each change of these is one atomic call.
        self._idle: list[Connection] = []
        self._busy: set[Connection] = set()
        self._closed = False
        # Since when the server has left a request without an answer.
        self._silent_at_s = math.inf
        _POOLS.add(self)

    def open_first(self, deadline: Deadline) -> None:
        """Connect, waiting for a server that is not up yet.

        Raises:
            StoreConnectionError: There is none before the deadline.
            HandshakeError: It refuses this client, or is no server of a store.
        """
        pause_s = _RETRY_S
        while True:
            try:
                connection = self._open(deadline, retry=True)
                break
            except StoreConnectionError:
                # A server that is ending accepts and closes; another server may replace it. So does
                # a forwarder (`docker -p`) whose server is not up yet.
                if deadline.expired():
                    raise
                time.sleep(min(pause_s, deadline.remaining()))
                pause_s = min(2 * pause_s, _LAST_RETRY_S)
        self._idle.append(connection)

    def ask(self, timeout_s: float, *requests: RawRequest) -> list[Any]:
        """Make requests on a free connection; see Connection.ask."""
        connection = self._take(timeout_s)
        try:
            results = connection.ask(timeout_s, requests)
        except BaseException as error:
            self._discard(connection, error)
            raise
        self._give_back(connection)
        return results

    @contextmanager
    def lease(self, timeout_s: float) -> Iterator[Connection]:
        """Reserve a connection for this thread; it stays in the pool unless the body fails."""
        connection = self._take(timeout_s)
        try:
            yield connection
        except BaseException as error:
            self._discard(connection, error)
            raise
        self._give_back(connection)

    def close(self) -> None:
        """Close idle connections and wake the threads that wait on busy connections."""
        self._closed = True
        self._close_idle()
        for connection in list(self._busy):
            connection.interrupt()

    def _take(self, timeout_s: float) -> Connection:
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = self._open(Deadline(timeout_s), retry=False)
        self._busy.add(connection)
        if self._closed:
            self._busy.discard(connection)
            connection.close()
            raise ClosedError(f"the store at {self._address} is closed")
        return connection

    def _give_back(self, connection: Connection) -> None:
        self._busy.discard(connection)
        self._silent_at_s = math.inf
        if len(self._idle) < _MAX_IDLE:
            self._idle.append(connection)
        else:
            connection.close()
        # Another thread may have closed the pool since. Checked last, so that no connection stays
        # open.
        if self._closed:
            self._close_idle()

    def _discard(self, connection: Connection, error: BaseException) -> None:
        self._busy.discard(connection)
        connection.close()
        if isinstance(error, StoreTimeoutError):
            self._silent_at_s = min(self._silent_at_s, time.monotonic())
        if self._closed and isinstance(error, StoreConnectionError):
            raise ClosedError(
                f"the store at {self._address} was closed while a thread waited on it"
            ) from None

    def _close_idle(self) -> None:
        while True:
            try:
                self._idle.pop().close()
            except IndexError:
                return

    def drop_copies(self) -> None:
        """Close the copies that a fork made; two processes on one connection mix their bytes."""
        # Close only: a shutdown would end the parent's connection, too.
        for connection in [*self._idle, *self._busy]:
            connection.close()
        self._idle.clear()
        self._busy.clear()

    def _open(self, deadline: Deadline, retry: bool) -> Connection:
        # A stopped server's host answers, and the server itself within the deadline of the call.
        # A host that was silent before gets the rest of its time, and two packets.
        silent_s = max(0.0, time.monotonic() - self._silent_at_s)
        host_s = max(2 * LOOK_S, host_timeout_s() - silent_s)
        limit_s = deadline.remaining() if retry else min(deadline.remaining(), host_s)
        sock = connect(self._host, self._port, Deadline(limit_s), retry=retry)
        try:
            keep_alive(sock)
            limit_start(sock)
            # Some time also for a caller at its deadline, because the server did accept.
            patience = Deadline(max(deadline.remaining(), _CANCEL_GRACE_S))
            sock = self._tls.call(sock, self._host)
            shake_hands(sock, self._address, self._token, patience)
            limit_start(sock, 0)
            self.round_trip_us = round_trip_us(sock)
            return Connection(sock, self._address)
        except BaseException as error:
            sock.close()
            is_asked = isinstance(error, HandshakeError) and asks_for_tls(error)
            if not is_asked or self._tls.rule is not TlsRule.OTHER_HOSTS:
                raise
        # A forwarder of this host has called the server for this client, and the server knows the
        # forwarder's address only.
        self._tls = self._tls._replace(rule=TlsRule.ALL)
        return self._open(deadline, retry)


_POOLS: weakref.WeakSet[ConnectionPool] = weakref.WeakSet()


def _drop_copies_in_child() -> None:
    for pool in list(_POOLS):
        pool.drop_copies()


after_fork(_drop_copies_in_child)
