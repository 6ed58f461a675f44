"""Connections whose sockets C++ takes over, and the sockets that C++ gives back at the end.

Channel n of a wire is channel n + 1 of a connection, because the link has channel 0.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable

from unisono.core.transports.messages import LinkDown
from unisono.core.transports.tcp.dials import Dials
from unisono.core.transports.tcp.io_loop import READ, IOLoop
from unisono.core.transports.tcp.wire import ACCEPT

# How long the link has to show why a wire has ended. A rank that ends or leaves ends both.
_EXPLAIN_S = 1.0


class WireMaker:
    """The wires of one rank.

    Args:
        loop: Of the I/O thread.
        dials: Of the transport.
        down: Returns why a rank is gone, or None.
        link: Makes sure that there is a link to a rank.
        lost: Called with a rank and a reason if its wires have failed.
    """

    def __init__(
        self,
        loop: IOLoop,
        dials: Dials,
        down: Callable[[int], LinkDown | None],
        link: Callable[[int], object],
        lost: Callable[[int, str], None],
    ) -> None:
        self.take: Callable[[int, int, socket.socket], None] | None = None
        self._loop = loop
        self._dials = dials
        self._down = down
        self._link = link
        self._lost = lost
        self._made: set[tuple[int, int]] = set()
        self._ending: set[socket.socket] = set()

    # ---- called from any thread -----------------------------------------------------------

    def make(self, peer: int, channel: int) -> None:
        """Connect to a rank and hand the socket over, unless that rank does so."""
        # The link dials first, so a useless address is detected before the wire dials.
        self._link(peer)
        self._loop.later(lambda: self._dial(peer, channel + 1))

    def ended(self, peer: int, *, changed: bool = False) -> None:
        """Find out why a wire has ended. The rank is lost unless its link gives a reason.

        Args:
            peer: The rank.
            changed: Whether the bytes were not those that the rank has sent.
        """

        def declare_lost() -> None:
            self._lost(peer, "a data connection to it was closed")

        if changed:
            reason = "on a data connection to it a TLS record was changed, lost or repeated"
            self._loop.later(lambda: self._lost(peer, reason))
            return

        self._loop.later(lambda: self._loop.start_timer(declare_lost, _EXPLAIN_S))

    def read_to_end(self, sock: socket.socket) -> None:
        """Read a socket that is closed for writing until its peer closes it, too."""
        sock.setblocking(False)

        def begin() -> None:
            self._ending.add(sock)
            self._loop.watch(sock, READ, lambda events: self._read_out(sock))

        self._loop.later(begin)

    # ---- the I/O thread -------------------------------------------------------------------

    def has(self, peer: int, channel: int) -> bool:
        """Whether such a connection exists, or is not wanted."""
        return (peer, channel) in self._made or self.take is None

    def accept(self, peer: int, channel: int, sock: socket.socket) -> None:
        """Use the connection of a rank."""
        with contextlib.suppress(OSError):  # C++ will detect it
            sock.send(ACCEPT)
        self._link(peer)
        self._hand_over(peer, channel, sock)

    def are_ending(self) -> bool:
        """Whether sockets are being read to their end."""
        return bool(self._ending)

    def _dial(self, peer: int, channel: int) -> None:
        if (peer, channel) in self._made or self._down(peer) is not None:
            return

        def done(sock: socket.socket | None, reason: str) -> None:
            def declare_lost() -> None:
                if (peer, channel) not in self._made:  # nor has the peer made it
                    self._lost(peer, f"data connection {channel} to it was not made: {reason}")

            if sock is None:
                self._dials.remove(peer, channel)
                self._loop.start_timer(declare_lost, _EXPLAIN_S)
            elif reason:
                self.accept(peer, channel, sock)
            else:
                self._hand_over(peer, channel, sock)

        with contextlib.suppress(Exception):
            self._dials.make(peer, channel, done).start()

    def _hand_over(self, peer: int, channel: int, sock: socket.socket) -> None:
        self._dials.remove(peer, channel)
        self._made.add((peer, channel))
        assert self.take is not None
        self.take(peer, channel - 1, sock)

    def _read_out(self, sock: socket.socket) -> None:
        try:
            if sock.recv_into(self._loop.chunk):
                return
        except BlockingIOError:
            return
        except OSError:
            pass
        self._loop.unwatch(sock)
        self._ending.discard(sock)
        sock.close()
