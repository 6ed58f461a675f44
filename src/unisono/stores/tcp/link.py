"""Requests out, results in, over one connection: in C++ if that is built, else in Python."""

from __future__ import annotations

import socket
from typing import Any, Protocol

from unisono.base.deadline import Deadline
from unisono.stores.tcp.native_server import engine
from unisono.stores.tcp.wire import (
    NO_REPLY,
    WAIT_CANCELED,
    Op,
    ReplyDecoder,
    WireError,
    encode_request,
)

_READ_BYTES = 256 * 1024

Request = tuple[Any, ...]
"""An Op and its arguments."""


class Link(Protocol):
    """One end of a connection, used by one thread at a time; unusable after an exception.

    Both calls raise TimeoutError, or another OSError if the connection is lost. A malformed reply
    raises ValueError. A request beyond the limits raises OverflowError or InvalidArgumentError.
    """

    def exchange(self, timeout_s: float, requests: tuple[Request, ...]) -> list[Any]:
        """Make requests in one round trip and return their results; None for a write."""

    def cancel(self, timeout_s: float) -> bool:
        """Cancel a WAIT or BARRIER that timed out; return whether it had ended before."""


def open_link(sock: socket.socket) -> Link:
    """Return a link over a connected socket, which the caller keeps."""
    if engine() is not None:
        sock.settimeout(None)
        link: Link = engine().StoreLink(sock.fileno())
        return link
    return PythonLink(sock)


class PythonLink:
    """The link in Python."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._decoder = ReplyDecoder()
        self._replies: list[Any] = []

    def exchange(self, timeout_s: float, requests: tuple[Request, ...]) -> list[Any]:
        """Make requests in one round trip; see Link."""
        deadline = Deadline(timeout_s)
        data = []
        for op, *args in requests:
            data.append(encode_request(op, *args))
            if op in NO_REPLY:
                # So that a write is done, and visible to every other connection, on return.
                data.append(encode_request(Op.PING, 0))
        answered = [request for request in requests if request[:2] != (Op.MULTI_GET, [])]
        for op, *args in answered:
            self._decoder.expect(
                Op.PING if op in NO_REPLY else op, len(args[0]) if op is Op.MULTI_GET else 0
            )
        self._send(b"".join(data), deadline)
        answers = iter([self._receive(deadline) for _ in answered])
        results = [next(answers) if request in answered else [] for request in requests]
        return [
            None if request[0] in NO_REPLY else result
            for request, result in zip(requests, results, strict=True)
        ]

    def cancel(self, timeout_s: float) -> bool:
        """Cancel a wait; see Link."""
        deadline = Deadline(timeout_s)
        self._send(encode_request(Op.CANCEL_WAIT), deadline)
        # The reply still expected is either the late end of the wait or its cancellation. If it is
        # the end, the answer to this request follows. Each has 1 byte.
        if self._receive(deadline, 1) == WAIT_CANCELED:
            return False
        self._decoder.expect(Op.CANCEL_WAIT)
        self._receive(deadline)
        return True

    def _send(self, data: bytes, deadline: Deadline) -> None:
        # settimeout() refuses infinity and anything beyond the C time type.
        self._sock.settimeout(min(max(deadline.remaining(), 0.001), 1e6))
        self._sock.sendall(data)

    def _receive(self, deadline: Deadline, most_bytes: int = _READ_BYTES) -> Any:
        while not self._replies:
            self._sock.settimeout(min(max(deadline.remaining(), 0.001), 1e6))
            try:
                chunk = self._sock.recv(most_bytes)
            except TimeoutError:
                if deadline.expired():
                    raise
                continue
            if not chunk:
                raise ConnectionResetError("the server closed the connection")
            try:
                self._replies += self._decoder.feed(chunk)
            except WireError as error:
                raise ValueError(error.what) from error
            if not self._replies and deadline.expired():
                raise TimeoutError("the reply came in parts, too slowly")
        return self._replies.pop(0)
