"""Ranks that are threads of one process: a message is one copy into the receiver's memory."""

from __future__ import annotations

import uuid
import weakref
from collections.abc import Callable
from typing import ClassVar

from unisono.core.transports.api import Transport
from unisono.core.transports.messages import CLOSED, Key, LinkDown
from unisono.core.transports.transfers import Transfer


class InprocTransport(Transport):
    """Links between threads, found by a name that travels through the store.

    Args:
        rank: This rank.
        world_size: Number of ranks.
        find: Returns the `address` that another rank published; called once per peer.
    """

    allows_cpp = True
    delivers_at_once = True

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
        link.arrive(self.rank, key, transfer.info, transfer.into)
        transfer.finish()

    def watch(self, peer: int) -> None:
        self._link(peer)

    def cancel_frames(self, unwanted: Callable[[Transfer], bool], error: BaseException) -> None:
        """Do nothing: a message is delivered in one step, so no transfer is under way."""

    def linked(self) -> list[int]:
        return [peer for peer, link in list(self._peers.items()) if not link.closed]

    def shut(self) -> None:
        for peer in self.linked():
            self.good_bye(peer)
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
                self.mark_down(LinkDown(peer, CLOSED, left=True))
                return None
            self._peers[peer] = link
            # The other rank can answer at once, although it may not know any address yet.
            link._peers[self.rank] = self
        if link.closed:
            self.mark_down(LinkDown(peer, CLOSED, left=True))
            return None
        return link
