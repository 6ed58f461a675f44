"""Ranks that are threads of one process: a message is one copy into the receiver's memory."""

from __future__ import annotations

import uuid
import weakref
from collections.abc import Callable
from typing import ClassVar

from unisono.transports.api import Transport
from unisono.transports.mailbox import deliver_copy
from unisono.transports.messages import LEFT, Arrival, Key, Kind, LinkDown
from unisono.transports.transfers import Transfer


class InprocTransport(Transport):
    """Links between threads, found by a name that travels through the store.

    Args:
        rank: This rank.
        world_size: Number of ranks.
        find: Returns the `address` that another rank published; called once per peer.
    """

    # All transports of this process, by name. Weak, so that it keeps no transport alive.
    _by_address: ClassVar[weakref.WeakValueDictionary[str, InprocTransport]] = (
        weakref.WeakValueDictionary()
    )

    def __init__(self, rank: int, world_size: int, find: Callable[[int], str]) -> None:
        super().__init__(rank, world_size)
        self.address = f"inproc:{uuid.uuid4().hex}"
        self._find = find
        # Also holds ranks that have sent to this rank or waited for it: they may wait again.
        self._peers: dict[int, InprocTransport] = {}
        InprocTransport._by_address[self.address] = self

    @property
    def name(self) -> str:
        return "inproc"

    def transmit(self, peer: int, key: Key, transfer: Transfer) -> None:
        link = self._link(peer)
        if link is None:
            transfer.finish(self.down(peer))
            return
        if key.kind in (Kind.COLLECTIVE, Kind.P2P):
            deliver_copy(link.messages, key, Arrival(self.rank, transfer.into, transfer.info))
        else:
            link.on_control(self.rank, key.context, key.kind, bytes(transfer.into))
        transfer.finish()

    def _watch(self, peer: int) -> None:
        self._link(peer)

    def cancel_frames(self, unwanted: Callable[[Transfer], bool], error: BaseException) -> None:
        """Do nothing: a message is delivered in one step, so no transfer is under way."""

    def _shut(self) -> None:
        for link in list(self._peers.values()):
            if not link.closed:
                link.mark_down(LinkDown(self.rank, LEFT, left=True))
        self._peers.clear()

    def vanish(self, reason: str) -> None:
        """Close without a good-bye, as a killed process does (for fault injection)."""
        for peer in range(self.world_size):
            link = self._lookup(peer) if peer != self.rank else None
            if link is not None:
                link.mark_down(LinkDown(self.rank, reason))
        self.closed = True
        self.messages.close()

    def _lookup(self, peer: int) -> InprocTransport | None:
        return InprocTransport._by_address.get(self._find(peer))

    def _link(self, peer: int) -> InprocTransport | None:
        link = self._peers.get(peer)
        if link is None:
            link = self._lookup(peer)
            if link is None or link.closed:
                self.mark_down(LinkDown(peer, LEFT, left=True))
                return None
            self._peers[peer] = link
            # The other rank can answer at once, although it may not know any address yet.
            link._peers[self.rank] = self
        if link.closed:
            self.mark_down(LinkDown(peer, LEFT, left=True))
            return None
        return link
