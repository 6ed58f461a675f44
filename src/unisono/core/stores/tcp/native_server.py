"""The TCPStore server in C++: a thread of its own that never waits for Python.

Rank 0 may compute for minutes without letting other Python threads run; its store still answers.
The server writes its log lines to a pipe, and a Python thread logs them.
"""

from __future__ import annotations

import errno
import os
import socket
import threading
from typing import Any

from unisono.core.base.log import get_logger
from unisono.core.base.net.tls import context
from unisono.core.base.seam import cpp, is_wanted
from unisono.core.platform.posix import set_blocking
from unisono.core.stores.tcp.server import CLOSE_S, ServerOptions, StoreServer
from unisono.errors import InvalidArgumentError

# The same logger as the server in Python has.
_LOG = get_logger("stores.tcp_server")


class NativeServer:
    """Serves torch's TCPStore protocol on listening sockets that it takes over.

    In the child of a fork its sockets are closed, and the server does nothing.

    Args:
        listeners: Listening sockets, all on the same port.
        options: The clients it serves, and its limits.
    """

    def __init__(self, listeners: list[socket.socket], options: ServerOptions) -> None:
        self.port: int = listeners[0].getsockname()[1]
        self._pid = os.getpid()
        tls = options.tls
        shared = context() if tls.rule else None
        lines, log_fd = os.pipe()
        set_blocking(log_fd, False)
        sockets = [listener.detach() for listener in listeners]
        try:
            self._server = cpp.StoreServer(
                sockets,
                log_fd,
                options.token,
                options.serves_strangers,
                options.max_reply_bytes,
                options.max_greetings,
                int(options.log_window_s * 1e9),
                (int(tls.rule), shared, tls.secrets),
            )
        except RuntimeError as error:
            os.close(lines)
            raise OSError(errno.EMFILE, str(error)) from error
        self._logger = threading.Thread(
            target=_log_lines, args=(lines, self.port), name=f"unisono-store-{self.port}-log"
        )
        self._logger.daemon = True
        self._logger.start()

    @property
    def clients(self) -> int:
        """Number of connections."""
        return int(self._server.clients)

    def close(self) -> None:
        """Stop the thread and close every socket; clients that wait see the connection end."""
        if os.getpid() != self._pid:
            return
        self._server.stop()
        if threading.current_thread() is not self._logger:
            # It waits as long as no process reads the log, such as standard error at a full pipe.
            self._logger.join(CLOSE_S)

    def __repr__(self) -> str:
        return f"<NativeServer port={self.port} clients={self.clients}>"


def _log_lines(fd: int, port: int) -> None:
    """Log the server's lines until the server has closed its end of the pipe."""
    with open(fd, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            _LOG.warning("port %d: %s", port, line.rstrip())


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
    kind: Any = NativeServer if is_wanted() else StoreServer
    try:
        server: StoreServer = kind(listeners, options or ServerOptions())
    except Exception:
        for listener in listeners:
            listener.close()
        raise
    return server
