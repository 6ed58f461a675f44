"""Servers that say nothing, as behind a strict firewall, and callers who say little."""

import contextlib
import errno
import socket
import struct
import threading

from unisono.core.base.deadline import Deadline
from unisono.core.base.net import tls

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


@contextlib.contextmanager
def dripping(address, greeting, count):
    """Callers who send a greeting but its last byte, one byte each in turn, and call again then.

    Yields a list that grows by an item with each turn.
    """
    turns, ended = [], threading.Event()
    callers = [[None, len(greeting)] for _ in range(count)]

    def drip(caller):
        sock, sent = caller
        if sent >= len(greeting) - 1:
            if sock is not None:
                sock.close()
            sock, sent = socket.socket(), 0
            sock.setblocking(False)
            sock.connect_ex(address)
        caller[:] = sock, sent
        try:
            sock.send(greeting[sent : sent + 1])
            caller[1] = sent + 1
        except BlockingIOError:
            pass
        except OSError as error:
            # Not yet connected, or hung up on.
            caller[1] = sent if error.errno == errno.ENOTCONN else len(greeting)

    def run():
        while not ended.is_set():
            for caller in callers:
                drip(caller)
            turns.append(None)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield turns
    finally:
        ended.set()
        thread.join()
        for sock, _ in callers:
            if sock is not None:
                sock.close()


def tls_greeting(secrets):
    """Return the first bytes of a caller who encrypts."""
    ours, theirs = socket.socketpair()
    with theirs, tls.SecuredSocket(ours, secrets) as caller:
        caller.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            caller.recv(1)
        return theirs.recv(4096)
