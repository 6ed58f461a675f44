"""The connections that a rank is making, by peer and channel. Belongs to the I/O thread."""

from __future__ import annotations

import socket
from collections.abc import Callable
from functools import partial

from unisono.core.base.net.tls import TlsPolicy
from unisono.core.transports.tcp.address import TCPAddress, is_loopback
from unisono.core.transports.tcp.handshake import Dial
from unisono.core.transports.tcp.io_loop import IOLoop
from unisono.core.transports.tcp.wire import Hello

# The channel of the link in a hello; wires have the channels from 1 on.
LINK = 0


class Dials:
    """The dials under way, and the failed dials of links.

    Args:
        rank: This rank.
        world_size: Number of ranks.
        find: Returns the `address` that another rank published.
        loop: Of the I/O thread.
        tls: Returns whether and how to encrypt connections to an address.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        find: Callable[[int], str],
        loop: IOLoop,
        tls: Callable[[TCPAddress], TlsPolicy],
    ) -> None:
        self._rank = rank
        self._world_size = world_size
        self._find = find
        self._loop = loop
        self._tls = tls
        self._open: dict[tuple[int, int], Dial] = {}
        self._failed: dict[int, Dial] = {}

    def make(
        self, peer: int, channel: int, done: Callable[[socket.socket | None, str], None]
    ) -> Dial:
        """Return a dial to a rank, to be started. It stays in the table until `remove`.

        Raises:
            ValueError: The rank's address is of no use.
        """
        mine = TCPAddress.unpack(self._find(self._rank))
        address = TCPAddress.unpack(self._find(peer)).seen_from(mine)
        hello = Hello(self._world_size, self._rank, peer, channel, address.token)
        if all(map(is_loopback, address.hosts)) and not all(map(is_loopback, mine.hosts)):
            done = partial(_done_near, done)
        dial = self._open[peer, channel] = Dial(
            self._loop, hello, address, self._tls(address), done
        )
        return dial

    def addresses(self) -> list[str]:
        """Return the addresses of all ranks, with their tokens."""
        return [self._find(rank) for rank in range(self._world_size)]

    def beside(self, peer: int) -> list[int]:
        """Return the ranks that published the same addresses as a rank, the rank included."""
        hosts = TCPAddress.unpack(self._find(peer)).hosts
        ranks = range(self._world_size)
        return [rank for rank in ranks if TCPAddress.unpack(self._find(rank)).hosts == hosts]

    def find(self, peer: int, channel: int) -> Dial | None:
        """Return the dial under way, or None."""
        return self._open.get((peer, channel))

    def remove(self, peer: int, channel: int, *, failed: bool = False) -> None:
        """Remove a dial that has ended; keep its reasons if it failed."""
        dial = self._open.pop((peer, channel), None)
        if failed and dial is not None:
            self._failed[peer] = dial

    def cancel(self, peer: int) -> None:
        """Stop all dials to a rank."""
        for key in [key for key in self._open if key[0] == peer]:
            self._open.pop(key).cancel()

    def cancel_all(self) -> None:
        """Stop all dials."""
        for dial in self._open.values():
            dial.cancel()

    def close_spares(self) -> None:
        """Close the parked connections."""
        for dial in self._open.values():
            dial.close_spare()

    def are_unanswered(self) -> bool:
        """Whether a rank may have accepted a link without an answer so far."""
        return any(dial.said_hello for (_, channel), dial in self._open.items() if channel == LINK)

    def unreached(self) -> dict[int, list[str]]:
        """Return the addresses that could not be reached; may be called from any thread."""
        # Copies, because the I/O thread changes them. A rank with a link has been reached.
        dials = self._failed.copy()
        dials |= {peer: dial for (peer, channel), dial in self._open.copy().items() if not channel}
        return {peer: rows for peer, dial in dials.items() if (rows := dial.unreached())}


def _done_near(
    done: Callable[[socket.socket | None, str], None], sock: socket.socket | None, reason: str
) -> None:
    """Report the end of a dial to a rank that published loopback addresses, unlike this rank."""
    why = "that rank published loopback only, because its store is at localhost"
    remedy = "set UNISONO_TOKEN on all ranks, or UNISONO_HOST there"
    done(sock, reason and f"{reason} ({why}; {remedy})")
