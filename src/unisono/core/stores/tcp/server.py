"""The TCPStore server in Python, used if the C++ server is not built: one thread, one selector.

Rule: only the server's thread touches the table and the connections. `close` wakes the thread
through a socket pair and joins it.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from unisono.core.base import config
from unisono.core.base.deadline import Deadline
from unisono.core.base.log import LogLimit, get_logger
from unisono.core.base.net.sockets import format_address, is_foreign, is_local
from unisono.core.base.net.tls import (
    TlsPolicy,
    TlsRefusal,
    has_unread,
    has_unsent,
    is_secured,
    session_of,
    uses_certificates,
)
from unisono.core.platform.posix import after_fork
from unisono.core.stores.table import StoreTable, Watch
from unisono.core.stores.tcp.token import REFUSAL_KEY, REFUSED_KEY, Answer, Gate, Refused
from unisono.core.stores.tcp.wire import (
    MAX_REPLY_BYTES,
    MAX_VALUE_BYTES,
    NOT_READY,
    READY,
    STOP_WAITING,
    WAIT_CANCELED,
    Request,
    RequestDecoder,
    RequestOp,
    WireError,
    encode_reply,
)
from unisono.errors import InvalidArgumentError, StoreKeyError

_LOG = get_logger("stores.tcp_server")
_READ_BYTES = 64 * 1024
# In the first message of a client that encrypts: the name of the secret, see `secret_of`.
_TLS_IDENTITY = b"\0\5store"
# Reads of one encrypted client before the others have their turn.
_ROUNDS = 16
# The server stops reading from a client with this many bytes of unread replies.
_UNSENT_BYTES = 1024 * 1024
# Seconds for a client to finish its handshake. Without free file descriptors it is the second
# number, so that silent clients do not keep out the job's own clients.
_GREETING_S = 30.0
_HURRY_S = 1.0
_REST_S = 0.1
CLOSE_S = 5.0
"""Seconds for which `close` waits for a server's thread."""

_SERVERS: weakref.WeakSet[StoreServer] = weakref.WeakSet()


@dataclass(eq=False, slots=True)
class _ServedClient:
    """One client: its incomplete request, its unread replies, and its wait."""

    sock: socket.socket
    peer: str
    gate: Gate | None
    is_sniffed: bool = False
    decoder: RequestDecoder = field(default_factory=RequestDecoder)
    pending: list[Request] = field(default_factory=list)
    unsent: bytearray = field(default_factory=bytearray)
    watch: Watch | None = None
    barrier: str | None = None
    promised: str | None = None


class _Listeners:
    """Listening sockets in a selector; a socket that cannot accept is paused for a moment.

    `log` is for lines that a stranger can cause.
    """

    def __init__(
        self,
        sockets: list[socket.socket],
        selector: selectors.BaseSelector,
        accept: Callable[[socket.socket], None],
        log: LogLimit,
    ) -> None:
        self.sockets = sockets
        self.log = log
        self.paused: list[socket.socket] = []
        self._selector = selector
        self._accept = accept
        self._pause = Deadline(_REST_S)
        for listener in sockets:
            listener.setblocking(False)
            self._register(listener)

    def _register(self, listener: socket.socket) -> None:
        self._selector.register(listener, selectors.EVENT_READ, self._accept)

    def pause(self, listener: socket.socket) -> None:
        """Stop polling a listener that has no free file descriptor to accept with.

        Its connections stay queued, so select would return at once, again and again.
        """
        self._selector.unregister(listener)
        self.paused.append(listener)
        self._pause = Deadline(_REST_S)

    def resume(self) -> float | None:
        """Poll again after the pause; return its remaining seconds, None if none is paused."""
        if self.paused and self._pause.expired():
            for listener in self.paused:
                self._register(listener)
            self.paused.clear()
        return self._pause.remaining() if self.paused else None


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """The clients that a store server serves, and its limits.

    Attributes:
        token: Of the job; empty if there is none.
        serves_strangers: Whether clients without a token may be of other machines and users;
            if not given, only with UNISONO_INSECURE=1.
        max_reply_bytes: A larger multi_get is refused.
        max_greetings: A client whose handshake is not finished is closed after this number of
            later connections.
        log_window_s: Within this time a few lines are logged; the others are summed up.
    """

    token: bytes = b""
    serves_strangers: bool = field(default_factory=lambda: config.get("UNISONO_INSECURE") == "1")
    max_reply_bytes: int = MAX_REPLY_BYTES
    max_greetings: int = 4096
    log_window_s: float = 60.0

    @cached_property
    def tls(self) -> TlsPolicy:
        """Which clients must encrypt, and the keys."""
        return TlsPolicy.of(self.token, "store")


class StoreServer:
    """Serves torch's TCPStore protocol on listening sockets that it takes over.

    Args:
        listeners: Listening sockets, all on the same port.
        options: The clients it serves, and its limits.
    """

    def __init__(self, listeners: list[socket.socket], options: ServerOptions) -> None:
        self._options = options
        options.tls  # noqa: B018  (what the environment says now)
        self._greetings: deque[tuple[float, _ServedClient]] = deque()
        self.port: int = listeners[0].getsockname()[1]
        self._table = StoreTable()
        self._connections: set[_ServedClient] = set()
        self._later: list[_ServedClient] = []  # have more to read, after the other clients
        self._selector = selectors.DefaultSelector()
        self._wake = socket.socketpair()  # written by `close`, and read by the thread
        self._wake[1].setblocking(False)
        self._stopping = False
        self._pid = os.getpid()
        log = LogLimit(_LOG, options.log_window_s)
        self._listeners = _Listeners(listeners, self._selector, self._accept, log)
        self._selector.register(self._wake[1], selectors.EVENT_READ, None)
        self._thread = threading.Thread(
            target=self._run, name=f"unisono-store-{self.port}", daemon=True
        )
        _SERVERS.add(self)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread and close every socket; clients that wait see the connection end."""
        if os.getpid() != self._pid or self._stopping:
            return
        self._stopping = True
        # The thread may have seen the flag already, and closed the other end.
        with contextlib.suppress(OSError):
            self._wake[0].send(b"x")
        if threading.current_thread() is not self._thread:
            # It waits as long as no process reads the log, such as standard error at a full pipe.
            self._thread.join(CLOSE_S)
        self._wake[0].close()

    @property
    def clients(self) -> int:
        """Number of connections."""
        return len(self._connections)

    def __repr__(self) -> str:
        return f"<StoreServer port={self.port} clients={self.clients}>"

    def _run(self) -> None:
        try:
            while not self._stopping:
                waits_s = [self._patience_s(), self._listeners.log.sum_up()]
                if self._later:
                    waits_s.append(0.0)
                limit_s = min((each for each in waits_s if each is not None), default=None)
                for key, events in self._selector.select(limit_s):
                    if key.data is None:
                        continue
                    if isinstance(key.data, _ServedClient):
                        self._serve(key.data, events)
                    else:
                        key.data(key.fileobj)
                later, self._later = self._later, []
                for connection in later:
                    if connection in self._connections:
                        self._serve(connection, selectors.EVENT_READ)
        except Exception:
            # Clients see their connections end at once instead of waiting for a dead thread.
            _LOG.exception("the store server on port %d failed", self.port)
        finally:
            self._listeners.log.sum_up(ends=True)
            self._close_sockets()

    def _close_sockets(self) -> None:
        self._selector.close()
        for sock in [
            *self._listeners.sockets,
            self._wake[1],
            *(c.sock for c in self._connections),
        ]:
            sock.close()
        self._connections.clear()

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, address = listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            if not self._listeners.paused:
                self._listeners.log.add(f"port {self.port}: accept failed: {error}")
            self._listeners.pause(listener)
            return
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = _ServedClient(sock, format_address(*address[:2]), None)
        connection.gate = Gate(
            self._options.token,
            self._options.serves_strangers,
            lambda: is_local(connection.sock),
            lambda: is_foreign(connection.sock),
            lambda has_token: self._options.tls.forbids(connection.sock, is_stranger=not has_token),
            lambda: is_secured(connection.sock) and uses_certificates(),
        )
        self._greetings.append((time.monotonic(), connection))
        self._connections.add(connection)
        self._selector.register(sock, selectors.EVENT_READ, connection)

    def _serve(self, connection: _ServedClient, events: int) -> None:
        try:
            for _ in range(_ROUNDS):
                if events & selectors.EVENT_READ and not self._receive(connection):
                    return
                self._answer(connection)
                if connection.pending or not has_unread(connection.sock):
                    return
                events = selectors.EVENT_READ
            self._later.append(connection)
        except BlockingIOError:
            return
        except Refused as error:
            if error.lacks_token:
                self._table.compare_set(REFUSED_KEY, b"", connection.peer.encode())
            if error.answer:  # else it speaks another protocol
                self._note_refusal(connection, error.why)
            connection.unsent += error.answer
            with contextlib.suppress(OSError):
                self._flush(connection)
            self._drop(connection, error.why)
        except (WireError, StoreKeyError, InvalidArgumentError) as error:
            # The protocol has no error reply; torch's server closes the connection as well.
            self._drop(connection, error.what)
        except OSError as error:
            if (session := session_of(connection.sock)) and session.is_other_secret:
                self._note_refusal(connection, str(error.strerror))
            self._drop(connection, str(error.strerror) if is_secured(connection.sock) else "")

    def _note_refusal(self, connection: _ServedClient, why: str) -> None:
        self._table.compare_set(REFUSAL_KEY, b"", f"{connection.peer}: {why}".encode())

    def _receive(self, connection: _ServedClient) -> bool:
        """Take what a client has sent; return whether it is still there."""
        if not connection.is_sniffed:
            self._sniff(connection)
        chunk = connection.sock.recv(_READ_BYTES)
        if not chunk:
            self._drop(connection)
            return False
        if connection.gate is not None:
            chunk = self._greet(connection, connection.gate, chunk)
        connection.pending += connection.decoder.feed(chunk)
        return True

    def _sniff(self, connection: _ServedClient) -> None:
        """Find out whether a client encrypts."""
        plain = connection.sock
        try:
            connection.sock = self._options.tls.answer(plain, refuses_plain=False)
        except TlsRefusal as error:
            has_token = bool(self._options.token)
            code = Answer.NO_TLS_HERE if has_token else Answer.NO_TOKEN_HERE
            # A port scan does not ask for the secret of stores.
            is_client = _TLS_IDENTITY in plain.recv(2048, socket.MSG_PEEK)
            lacks_token = is_client and not has_token and not is_local(plain)
            raise Refused(bytes([code]), str(error), lacks_token=lacks_token) from None
        connection.is_sniffed = True
        if connection.sock is not plain:
            self._selector.unregister(plain)
            self._selector.register(connection.sock, selectors.EVENT_READ, connection)

    def _greet(self, connection: _ServedClient, gate: Gate, chunk: bytes) -> bytes:
        """Do the handshake; return the bytes that follow it."""
        answer, rest = gate.feed(chunk)
        connection.unsent += answer
        if gate.is_open:
            connection.gate = None
        return rest

    def _patience_s(self) -> float | None:
        """Close clients whose handshake is late; return the seconds until the next check."""
        rest_s = self._listeners.resume()
        allowed_s = _GREETING_S if rest_s is None else _HURRY_S
        while self._greetings:
            came_s, connection = self._greetings[0]
            if connection.gate is not None and connection in self._connections:
                left_s = came_s + allowed_s - time.monotonic()
                if left_s > 0 and len(self._greetings) <= self._options.max_greetings:
                    return left_s if rest_s is None else min(left_s, rest_s)
                self._drop(connection, "it did not identify itself in time")
            self._greetings.popleft()
        return rest_s

    def _answer(self, connection: _ServedClient) -> None:
        """Handle received requests, as long as the client reads its replies."""
        done = 0
        for request in connection.pending:
            if len(connection.unsent) > _UNSENT_BYTES and not self._flush(connection):
                break
            self._handle(connection, request)
            done += 1
        del connection.pending[:done]
        self._flush(connection)
        self._watch_socket(connection)

    def _handle(self, connection: _ServedClient, request: Request) -> None:
        promised, connection.promised = connection.promised, None
        match request.op:
            case RequestOp.WAIT:
                self._wait(connection, request.args[0])
            case RequestOp.BARRIER:
                self._barrier(connection, *request.args)
            case RequestOp.CANCEL_WAIT:
                self._forget_wait(connection)
                connection.unsent += encode_reply(RequestOp.CANCEL_WAIT, WAIT_CANCELED)
            case _:
                result = self._apply(request)
                connection.unsent += encode_reply(request.op, result)
        if promised is not None:
            self._end_promise(promised)

    def _apply(self, request: Request) -> Any:
        """Execute a request that is answered at once, and return its result."""
        if request.op is RequestOp.MULTI_GET:
            return self._multi_get(*request.args)
        operation = _OPERATIONS.get(request.op)
        return None if operation is None else operation(self._table, *request.args)

    def _multi_get(self, keys: list[str]) -> list[bytes]:
        values = [self._table.values.get(key, b"") for key in keys]
        if (nbytes := sum(map(len, values))) > self._options.max_reply_bytes:
            raise InvalidArgumentError(
                f"multi_get of {len(keys)} keys has {nbytes} bytes; at most "
                f"{self._options.max_reply_bytes} are sent"
            )
        return values

    def _wait(self, connection: _ServedClient, keys: list[str]) -> None:
        self._forget_wait(connection)
        if self._table.ready(keys):
            self._promise(connection, keys)
            connection.unsent += encode_reply(RequestOp.WAIT, STOP_WAITING)
            return

        def notify() -> None:
            connection.watch = None
            self._promise(connection, keys)
            self._send_later(connection, encode_reply(RequestOp.WAIT, STOP_WAITING))

        connection.watch = self._table.watch(keys, notify)

    def _promise(self, connection: _ServedClient, keys: list[str]) -> None:
        """Reserve one value of a queue for a waiter, which fetches it by its next request."""
        if len(keys) == 1 and keys[0] not in self._table.values:
            connection.promised = keys[0]
            self._table.reserved[keys[0]] += 1

    def _end_promise(self, key: str) -> None:
        self._table.reserved[key] -= 1
        if not self._table.reserved[key]:
            del self._table.reserved[key]
        # If the waiter did not fetch the value, the next waiter gets it.
        self._table.changed(key)

    def _barrier(self, connection: _ServedClient, key: str, world_size: int) -> None:
        self._forget_wait(connection)

        def release() -> None:
            connection.barrier = None
            self._send_later(connection, encode_reply(RequestOp.BARRIER, STOP_WAITING))

        connection.barrier = key
        self._table.arrive(key, world_size, connection, release)

    def _forget_wait(self, connection: _ServedClient) -> None:
        if connection.watch is not None:
            self._table.unwatch(connection.watch)
            connection.watch = None
        if connection.barrier is not None:
            self._table.withdraw(connection.barrier, connection)
            connection.barrier = None

    def _send_later(self, connection: _ServedClient, data: bytes) -> None:
        """Queue bytes for a client that is not being served now."""
        connection.unsent += data
        self._watch_socket(connection)

    def _flush(self, connection: _ServedClient) -> bool:
        """Send what the socket accepts; return whether nothing is left."""
        while connection.unsent or has_unsent(connection.sock):
            try:
                sent = connection.sock.send(memoryview(connection.unsent)[: 1 << 20])
            except BlockingIOError:
                return False
            del connection.unsent[:sent]
        return True

    def _watch_socket(self, connection: _ServedClient) -> None:
        is_behind = connection.unsent or has_unsent(connection.sock)
        events = selectors.EVENT_WRITE if is_behind else 0
        if not connection.pending:
            events |= selectors.EVENT_READ
        if self._selector.get_key(connection.sock).events != events:
            self._selector.modify(connection.sock, events, connection)

    def _drop(self, connection: _ServedClient, why: str = "") -> None:
        if why:
            self._listeners.log.add(f"port {self.port}: closing {connection.peer}: {why}")
        self._connections.discard(connection)
        self._selector.unregister(connection.sock)
        connection.sock.close()
        self._forget_wait(connection)
        if connection.promised is not None:
            self._end_promise(connection.promised)


def _append(table: StoreTable, key: str, value: bytes) -> None:
    if len(table.values.get(key, b"")) + len(value) > MAX_VALUE_BYTES:
        raise InvalidArgumentError(f"append({key!r}): the value becomes too long")
    table.append(key, value)


def _multi_set(table: StoreTable, pairs: list[tuple[str, bytes]]) -> None:
    for key, value in pairs:
        table.set(key, value)


# The requests that are answered at once, except MULTI_GET, which the options limit.
_OPERATIONS: dict[RequestOp, Callable[..., Any]] = {
    RequestOp.SET: StoreTable.set,
    RequestOp.GET: lambda table, key: table.values.get(key, b""),
    RequestOp.ADD: StoreTable.add,
    RequestOp.CHECK: lambda table, keys: NOT_READY if table.missing(keys) else READY,
    RequestOp.COMPARE_SET: StoreTable.compare_set,
    RequestOp.APPEND: _append,
    RequestOp.DELETE_KEY: StoreTable.delete_key,
    # Strangers cause the note of a refusal, which is no key of the job.
    RequestOp.NUM_KEYS: lambda table: len(table.values) - (REFUSAL_KEY in table.values),
    RequestOp.LIST_KEYS: lambda table: list(table.values),
    RequestOp.MULTI_SET: _multi_set,
    RequestOp.QUEUE_PUSH: StoreTable.queue_push,
    RequestOp.QUEUE_POP: lambda table, key: (table.queue_len(key), table.queue_pop(key)),
    RequestOp.QUEUE_LEN: StoreTable.queue_len,
    RequestOp.PING: lambda table, nonce: nonce,
}


def _forget_servers_in_child() -> None:
    """Close the sockets that a fork copied.

    Otherwise the child would keep the port open without answering, and the clients of a
    killed parent would never see their connections end.
    """
    for server in list(_SERVERS):
        server._stopping = True
        server._wake[0].close()
        server._close_sockets()


after_fork(_forget_servers_in_child)
