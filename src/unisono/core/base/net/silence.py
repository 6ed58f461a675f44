"""Whether the host at the other end of a connection still answers, as the kernel sees it.

A host that vanishes (power, cable, virtual machine) closes no connection. The kernel of a living
host acknowledges what is sent to it, even if the process is stopped or busy. So an idle connection
carries probes (keepalive), and a host is silent if nothing came from it although it owes an answer.

TCP_USER_TIMEOUT would be simpler, but it also ends the connection to a stopped process whose
receive buffer is full.

Source: tcp(7), SO_KEEPALIVE and TCP_INFO; the layout is that of linux/tcp.h.
"""

from __future__ import annotations

import contextlib
import math
import socket

from unisono.core.base import config
from unisono.core.base.net.sockets import is_local
from unisono.core.platform.network import tcp_info
from unisono.errors import InvalidArgumentError

LOOK_S = 1.0
"""Pause between two looks at a connection; a longer one delays the error of a lost host."""

HOST_FAILED = "so the host or the network has failed"
"""The end of the text about a silent host."""

# Probes of an idle connection begin after this part of the limit.
_IDLE_PART = 0.3

# The shortest round trip before the first one was measured.
_UNMEASURED_US = 0xFFFFFFFF


def host_timeout_s() -> float:
    """Return how long a host may be silent; infinity: for ever.

    Raises:
        InvalidArgumentError: The variable is no number, or less than 1 and not 0.
    """
    limit_s = config.get_float("UNISONO_HOST_TIMEOUT")
    if limit_s == 0 or limit_s >= 1:
        return limit_s or math.inf
    # A shorter time is less than the pause between two packets that are sent again.
    raise InvalidArgumentError(
        f"environment variable UNISONO_HOST_TIMEOUT={limit_s:g} is neither 0 nor at least 1"
    )


def keep_alive(sock: socket.socket) -> bool:
    """Let the kernel probe the host at the other end; return whether it may be lost at all.

    The host of this process cannot be lost.
    """
    limit_s = host_timeout_s()
    if is_local(sock) or limit_s == math.inf:
        return False
    idle_s = max(1, int(limit_s * _IDLE_PART))
    # Where the system does not report silence, the last probe ends the connection.
    interval_s = max(1, int(limit_s / 20))
    count = math.ceil(1.5 * limit_s / interval_s)
    options = {"KEEPIDLE": idle_s, "KEEPALIVE": idle_s, "KEEPINTVL": interval_s, "KEEPCNT": count}
    with contextlib.suppress(OSError):  # the connection has ended already
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in options.items():
            if (option := getattr(socket, f"TCP_{name}", None)) is not None:
                sock.setsockopt(socket.IPPROTO_TCP, option, value)
    return True


def limit_start(sock: socket.socket, limit_s: float | None = None) -> None:
    """Limit how long a connection may take to be made and to carry its first bytes; 0: for ever.

    Only before large messages: see the beginning of this file.
    """
    if limit_s is None:
        limit_s = host_timeout_s()
    if (option := getattr(socket, "TCP_USER_TIMEOUT", None)) is not None and limit_s < math.inf:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, option, int(1000 * limit_s))


def silent_s(sock: socket.socket) -> float:
    """Return for how long the other host has been silent although it owes an answer.

    One look may come just after a probe, before its answer can be here; two in a row may not.
    """
    state = tcp_info(sock)
    return state.heard_s if state is not None and state.is_owed else 0.0


def round_trip_us(sock: socket.socket) -> int | None:
    """Return the shortest round trip of a connection, 0 inside a host, or None if it is unknown.

    The kernel measures it, so that a busy or stopped process does not count.
    """
    if is_local(sock):
        return 0
    state = tcp_info(sock)
    if state is None or state.round_trip_us == _UNMEASURED_US:
        return None
    return state.round_trip_us


def silence_on(sock: socket.socket) -> str:
    """Return whether the host at the other end of a connection acknowledges what was sent to it.

    "" if the connection has ended, or the system does not report it.
    """
    try:
        host = sock.getpeername()[0]
    except OSError:
        return ""
    state = tcp_info(sock)
    if state is None or (state.unacknowledged and not state.retransmits):
        return ""  # unknown, or too early to know
    if state.unacknowledged:
        return f"does not answer: its {has_vanished(host, state.acknowledged_ms / 1000)}"
    return f"does not answer, but its host {host} does: the process is stopped or busy"


def has_vanished(host: str, silent_s: float) -> str:
    """Return the text about a host that acknowledges nothing."""
    silent = f"host {host} has acknowledged nothing for {silent_s:.1f} s"
    return f"{silent}, {HOST_FAILED}"
