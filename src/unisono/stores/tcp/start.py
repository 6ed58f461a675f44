"""Start the server of a TCPStore: in C++ if that is built, else in Python."""

from __future__ import annotations

import socket
from typing import Protocol

from unisono.base.seam import is_wanted
from unisono.errors import InvalidArgumentError
from unisono.stores.tcp.native_server import NativeServer
from unisono.stores.tcp.python_server import PythonServer, ServerOptions


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

    The server answers torch's clients and unisono's. Differences from torch's own server:

    - A failed compare_set wakes no waiter.
    - A wait for several keys ends when all of them exist at the same time.
    - A caller that leaves a barrier does not count.
    - If a woken queue waiter dies, the next waiter gets the value.
    - `barrier` leaves no key.

    Clients prove that they know the token. A client without a token (torch's) is served if it is
    a process of this user on this machine, or if the server serves strangers.

    Args:
        listeners: All on the same port.
        options: The clients it serves, and its limits; no token if None.

    Raises:
        InvalidArgumentError: No listening socket was given.
    """
    if not listeners:
        raise InvalidArgumentError("a store server needs at least one listening socket")
    kind = NativeServer if is_wanted() else PythonServer
    return kind(listeners, options or ServerOptions())
