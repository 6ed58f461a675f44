"""A loop that also detects that the host at the other end of a connection has vanished."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable

from unisono.core.base.net.silence import (
    LOOK_S,
    has_vanished,
    host_timeout_s,
    keep_alive,
    silent_s,
)
from unisono.core.transports.tcp.io_loop import IOLoop


class HostWatch(IOLoop):
    """The loop of an I/O thread; it looks at the connections to other hosts once a second."""

    def __init__(self) -> None:
        super().__init__()
        self._limit_s = host_timeout_s()
        self._to_hosts: dict[socket.socket, Callable[[str], object]] = {}
        self._suspects: set[socket.socket] = set()

    def watch_host(self, sock: socket.socket, lost: Callable[[str], object]) -> None:
        """Call `lost(reason)` if the other host is silent for too long, until `sock` is closed."""
        if keep_alive(sock):
            if not self._to_hosts:
                self.start_timer(self._look, LOOK_S)
            self._to_hosts[sock] = lost

    def hears(self, sock: socket.socket) -> bool:
        """Whether the other host has answered lately, or owes no answer."""
        return silent_s(sock) < self._limit_s / 2

    def _look(self) -> None:
        self._to_hosts = {sock: lost for sock, lost in self._to_hosts.items() if sock.fileno() >= 0}
        silent = {sock: silent_s(sock) for sock in self._to_hosts}
        suspects = {sock for sock, seconds in silent.items() if seconds >= self._limit_s}
        before, self._suspects = self._suspects, suspects
        if self._to_hosts:
            self.start_timer(self._look, LOOK_S)
        for sock in before & suspects:
            host, lost = "", self._to_hosts.pop(sock)
            # The loss of another connection to this host may have closed it already.
            with contextlib.suppress(OSError):
                host = str(sock.getpeername()[0])
            if host:
                lost(has_vanished(host, silent[sock]))
