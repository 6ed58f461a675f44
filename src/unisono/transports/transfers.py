"""One send or receive under way, and the contract of what can carry messages."""

from __future__ import annotations

import socket
from collections.abc import Collection
from typing import Any, ClassVar, Protocol

import numpy as np

from unisono.base.completion import Completion
from unisono.base.types import PARTIAL
from unisono.transports.messages import ANY_TAG, Arrival, Failure, Key, Kind, LinkDown

Tag = tuple[Kind, int]

ANYTHING = memoryview(b"")
"""In place of memory: a receive of a message of any size and type word, into new memory."""

NOTHING = memoryview(b"")
"""In place of memory: a probe, which ends when there is such a message, and does not take it."""

_ANY = (Kind.P2P, ANY_TAG)
_FIRST_INNER_TAG = 1 << 62


def is_of_user(tag: Tag) -> bool:
    """Whether a receive of any tag is for a message with this tag."""
    return tag[0] == Kind.P2P and tag[1] < _FIRST_INNER_TAG


class Transfer(Completion):
    """One send or receive under way.

    Attributes:
        peer: The other rank. None for a receive from any source until a message matches.
        tag: Kind and tag of the message. ANY_TAG until a message matches.
        into: The memory; see `ANYTHING` and `NOTHING`, too.
        nbytes: Size of the message of a receive that has ended.
        among: For a receive from any source: the ranks that may send.
        in_messages: Whether `Messages` started the transfer, and must cancel it.
    """

    __slots__ = ("among", "context", "info", "into", "nbytes", "peer", "tag")

    in_messages: ClassVar[bool] = False

    def __init__(
        self,
        peer: int | None,
        context: int,
        tag: Tag,
        into: memoryview,
        info: int = 0,
        among: frozenset[int] = frozenset(),
    ) -> None:
        super().__init__()
        self.peer = peer
        self.context = context
        self.tag = tag
        self.into = into
        self.info = info
        self.among = among

    def matches(self, source: int, tag: Tag) -> bool:
        """Whether this receive is for a message from `source` with this tag."""
        if self.peer is not None and self.peer != source:
            return False
        return self.tag == tag or (self.tag == _ANY and is_of_user(tag))

    def fits(self, nbytes: int, info: int) -> bool:
        """Whether this receive takes such a message; it then has the size of the message."""
        self.nbytes = nbytes
        if self.into is NOTHING or self.into is ANYTHING:
            self.info = info
            try:
                self.into = self.into if self.into is NOTHING else np.empty(nbytes, np.uint8).data
            except (MemoryError, OverflowError, ValueError):
                return False
            return True
        if self.info & PARTIAL and self.info & ~PARTIAL == info and nbytes < self.into.nbytes:
            self.into = self.into[:nbytes]
        return self.into.nbytes == nbytes and self.info & ~PARTIAL == info

    def watch(self) -> None:
        """Make sure that the transfer ends without a waiting thread."""


class Messages(Protocol):
    """Carries the messages of one rank in place of its transport, and matches them to receives.

    Attributes:
        native: The object in C++.
    """

    native: Any

    def send(self, peer: int, key: Key, data: memoryview, info: int) -> Transfer | None:
        """Start sending; return None if `peer` cannot be reached this way."""

    def recv(
        self, peer: int | None, key: Key, into: memoryview, info: int, among: Collection[int]
    ) -> Transfer:
        """Start receiving, from `peer` or, if it is None, from any of `among`."""

    def cancel(self, transfer: Any) -> None:
        """End a transfer with `Cancelled` unless it has ended."""

    def deliver(self, context: int, kind: Kind, tag: int, arrival: Arrival) -> None:
        """Match a message that came through the transport."""

    def peer_down(self, error: LinkDown) -> None:
        """End the transfers with a lost rank, after everything that it sent is received."""

    def fail(self, context: int, failure: Failure) -> None:
        """End the transfers of a broken context that it `ends`, now and later."""

    def forget(self, context: int, error: BaseException) -> None:
        """Release everything that a destroyed context holds; `error` ends its receives."""

    def close(self) -> None:
        """End all transfers."""

    def has_receive(self, peer: int, key: Key) -> bool:
        """Whether a receive from this rank waits."""

    def has_left(self, peer: int) -> bool:
        """Whether a rank has closed its end in shared memory."""

    def attend(self) -> None:
        """Receive messages for which no thread of this rank waits."""

    def is_server(self) -> bool:
        """Whether the calling thread is the server of transfers without a waiting thread."""

    def add_wire(self, peer: int, channel: int, sock: socket.socket) -> None:
        """Use a connection for the messages of one rank."""
