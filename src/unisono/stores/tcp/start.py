"""Which server a TCPStore gets: the C++ one where it is built, else the one in Python."""

from __future__ import annotations

import socket
from typing import Protocol

from unisono.errors import InvalidArgumentError
from unisono.stores.tcp.native_server import NativeServer, engine
from unisono.stores.tcp.python_server import PythonServer, ServerOptions

__all__ = ["StoreServer", "start_server"]


class StoreServer(Protocol):
    """A running server of torch's TCPStore protocol."""

    port: int

    @property
    def clients(self) -> int:
        """Number of connections."""

    def close(self) -> None:
        """Stop serving and close every socket; clients that wait see the connection end."""


def start_server(
    listeners: list[socket.socket], options: ServerOptions | None = None
) -> StoreServer:
    """Serve a new, empty store on listening sockets, which are taken over.

    Answers torch clients and unisono clients alike. Differences to torch's own server: a
    failed compare_set wakes nobody; a wait for several keys ends when all are there at once; a
    caller that gives up a barrier is not counted; a woken queue waiter that dies passes its
    turn on; `barrier` leaves no key behind.

    Clients prove that they know the token. Those that have none (torch's) are served if they are
    processes of this user on this machine, others only if it serves strangers.

    Args:
        listeners: All on the same port.
        options: Whom it serves, and what it refuses; no token if None.

    Raises:
        InvalidArgumentError: No listening socket was given.
    """
    if not listeners:
        raise InvalidArgumentError("a store server needs at least one listening socket")
    kind = PythonServer if engine() is None else NativeServer
    return kind(listeners, options or ServerOptions())
