"""Requests out, results in, over one connection: in C++ if that is built, else in Python."""

from __future__ import annotations

import errno
import math
import os
import socket
from collections.abc import Callable
from typing import Any, TypeVar

from unisono.core.base.deadline import Deadline
from unisono.core.base.net.silence import LOOK_S, host_timeout_s, keep_alive, silent_s
from unisono.core.base.net.tls import session_of
from unisono.core.base.seam import cpp, is_wanted
from unisono.core.stores.tcp.wire import (
    NO_REPLY,
    WAIT_CANCELED,
    ReplyDecoder,
    RequestOp,
    WireError,
    encode_request,
)

_READ_BYTES = 256 * 1024

T = TypeVar("T")

RawRequest = tuple[Any, ...]
"""An Op and its arguments."""


def open_link(sock: socket.socket) -> StoreLink:
    """Return a link over a connected socket, which the caller keeps."""
    limit_s = host_timeout_s() if keep_alive(sock) else math.inf
    if is_wanted():
        sock.settimeout(None)
        link: StoreLink = cpp.StoreLink(sock.fileno(), limit_s, session_of(sock))
        return link
    return StoreLink(sock, limit_s)


class StoreLink:
    """One end of a connection, used by one thread at a time; unusable after an exception.

    Both calls raise TimeoutError, or another OSError if the connection is lost. A malformed reply
    raises ValueError. A request beyond the limits raises OverflowError or InvalidArgumentError.

    Args:
        sock: The connection.
        limit_s: How long the host of the server may be silent.
    """

    def __init__(self, sock: socket.socket, limit_s: float = math.inf) -> None:
        self._sock = sock
        self._limit_s = limit_s
        self._decoder = ReplyDecoder()
        self._replies: list[Any] = []

    def exchange(self, timeout_s: float, requests: tuple[RawRequest, ...]) -> list[Any]:
        """Make requests in one round trip and return their results; None for a write."""
        deadline = Deadline(timeout_s)
        data = []
        for op, *args in requests:
            data.append(encode_request(op, *args))
            if op in NO_REPLY:
                # So that a write is done, and visible to every other connection, on return.
                data.append(encode_request(RequestOp.PING, 0))
        answered = [request for request in requests if request[:2] != (RequestOp.MULTI_GET, [])]
        for op, *args in answered:
            self._decoder.expect(
                RequestOp.PING if op in NO_REPLY else op,
                len(args[0]) if op is RequestOp.MULTI_GET else 0,
            )
        self._send(b"".join(data), deadline)
        answers = iter([self._receive(deadline) for _ in answered])
        results = [next(answers) if request in answered else [] for request in requests]
        return [
            None if request[0] in NO_REPLY else result
            for request, result in zip(requests, results, strict=True)
        ]

    def cancel(self, timeout_s: float) -> bool:
        """Cancel a WAIT or BARRIER that timed out; return whether it had ended before."""
        deadline = Deadline(timeout_s)
        self._send(encode_request(RequestOp.CANCEL_WAIT), deadline)
        # The reply still expected is either the late end of the wait or its cancellation. If it is
        # the end, the answer to this request follows. Each has 1 byte.
        if self._receive(deadline, 1) == WAIT_CANCELED:
            return False
        self._decoder.expect(RequestOp.CANCEL_WAIT)
        self._receive(deadline)
        return True

    def _send(self, data: bytes, deadline: Deadline) -> None:
        view, sent = memoryview(data), 0
        while sent < len(view):
            sent += self._in_turns(lambda at: self._sock.send(view[at:]), sent, deadline)

    def _receive(self, deadline: Deadline, most_bytes: int = _READ_BYTES) -> Any:
        while not self._replies:
            chunk = self._in_turns(self._sock.recv, most_bytes, deadline)
            if not chunk:
                raise ConnectionResetError("the server closed the connection")
            try:
                self._replies += self._decoder.feed(chunk)
            except WireError as error:
                raise ValueError(error.what) from error
            if not self._replies and deadline.expired():
                raise TimeoutError("the reply came in parts, too slowly")
        return self._replies.pop(0)

    def _in_turns(self, call: Callable[[int], T], number: int, deadline: Deadline) -> T:
        """Make a call of the socket; look from time to time whether the server's host is lost."""
        was_silent = False
        while True:
            self._sock.settimeout(min(max(deadline.remaining(), 0.001), LOOK_S))
            try:
                return call(number)
            except TimeoutError:
                if deadline.expired():
                    raise
            is_silent = silent_s(self._sock) >= self._limit_s
            if is_silent and was_silent:
                raise OSError(errno.EHOSTDOWN, os.strerror(errno.EHOSTDOWN))
            was_silent = is_silent
