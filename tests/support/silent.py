"""A server that says nothing, not even that it is there: what lies behind a strict firewall."""

import socket
import struct

from unisono.core.base.deadline import Deadline

_SOON_S = 60.0


def unacceptable(host, port):
    """Return a server whose queue is full, so that calls to it get no answer, and who fills it."""
    server = socket.socket()
    server.bind((host, port))
    server.listen(0)
    caller = socket.create_connection((host, port), timeout=_SOON_S)
    patience = Deadline(_SOON_S)
    waiting = most = 0
    while waiting <= most:
        assert not patience.expired()
        told = server.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 32)
        # tcpi_unacked and tcpi_sacked: of a listening socket, the queue's length and its limit
        waiting, most = struct.unpack_from("II", told, 24)
    return server, caller
