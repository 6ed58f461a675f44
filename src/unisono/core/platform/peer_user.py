"""Find the user id of the local peer of a connection (Linux sock_diag)."""

from __future__ import annotations

import socket
import struct
import sys

_SOCK_DIAG = 4
_REQUEST = 1
_BY_FAMILY = 20
_ERROR = 2
_ANY_COOKIE = 0xFFFFFFFF
_ALL_STATES = 0xFFFFFFFF
_MAPPED = "::ffff:"
# The answer: a header, the family, the state, the addresses and more, the user id.
_USER = struct.Struct("=16x x B 62x I")
_ERRNO = struct.Struct("=4x H 10x i")
_ENOENT = 2
_ESTABLISHED = 1


def user_of_peer(sock: socket.socket) -> int | None:
    """Return the user id of the other end of a local connection; None without sock_diag.

    -1 if this host has no such socket: it is gone, or the connection is not local. The kernel may
    then report a socket of any user that listens on the peer's port. The remains of a closed
    socket count as user 0. So only an established connection counts.

    Source: sock_diag(7); the layout is that of linux/inet_diag.h.
    """
    if sys.platform != "linux":
        return None
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _SOCK_DIAG) as kernel:
            kernel.settimeout(1.0)
            kernel.sendto(_question(sock), (0, 0))
            answer = kernel.recv(4096)
        kind, number = _ERRNO.unpack_from(answer)
        if kind == _ERROR:
            return -1 if number == -_ENOENT else None
        state, user = _USER.unpack_from(answer)
    except (OSError, struct.error):
        return None
    return int(user) if state == _ESTABLISHED else -1


def _question(sock: socket.socket) -> bytes:
    """Return the request for the peer's socket, which has the two addresses swapped."""
    here, there = sock.getsockname(), sock.getpeername()
    names = [str(name[0]).removeprefix(_MAPPED).partition("%")[0] for name in (there, here)]
    family = socket.AF_INET6 if ":" in names[0] else socket.AF_INET
    pair = b"".join(socket.inet_pton(family, name).ljust(16, b"\0") for name in names)
    body = struct.pack("=BBxxI", family, socket.IPPROTO_TCP, _ALL_STATES)
    body += struct.pack("!HH", there[1], here[1]) + pair
    body += struct.pack("=III", 0, _ANY_COOKIE, _ANY_COOKIE)
    return struct.pack("=IHHII", 16 + len(body), _BY_FAMILY, _REQUEST, 0, 0) + body
