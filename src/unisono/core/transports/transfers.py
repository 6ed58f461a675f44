"""One send or receive under way, and the contract between a transport and its messages."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy as np

from unisono.core.base.deadline import Deadline
from unisono.core.base.threads.completion import Pending
from unisono.core.base.types import PARTIAL, RAW
from unisono.core.transports.messages import ANY_TAG, Arrival, Failure, Key, LinkDown, Purpose

Tag = tuple[Purpose, int]

Address = tuple[int, int, bytes, int]
"""Process id of a rank on this host (else 0), descriptor, nonce; connections to another host."""

ANYTHING = memoryview(b"")
"""In place of memory: a receive of a message of any size and type word, into new memory."""

NOTHING = memoryview(b"")
"""In place of memory: a probe, which ends when there is such a message, and does not take it."""

ANY = (Purpose.P2P, ANY_TAG)
"""The tag of a receive of any tag. A message with it is the last one: its sender has closed the
group."""

_FIRST_INNER_TAG = 1 << 62


def is_of_user(tag: Tag) -> bool:
    """Whether a receive of any tag is for a message with this tag."""
    return tag[0] == Purpose.P2P and tag[1] < _FIRST_INNER_TAG


Outcome = tuple[int, int, int, int, int, int, Any]
"""(number, code, source, nbytes, info, tag, message or None) of a send or receive in C++."""


class Transfer(Pending):
    """One send or receive under way.

    If C++ moves it, a thread that waits for it moves its bytes, and another thread does only after
    `watch`.

    Attributes:
        peer: The other rank. None for a receive from any source until a message matches.
        tag: Kind and tag of the message. ANY_TAG until a message matches.
        into: The memory; see `ANYTHING` and `NOTHING`, too.
        nbytes: Size of the message of a receive that has ended.
        among: For a receive from any source: the ranks that may send.
        _messages: The messages that a thread enters to wait for it; None for a send in Python.
        _receives: 0 for a send, 1 for a receive, 2 for one that ends without a waiting thread.
        _number: Number in C++; 0: it has ended at once.
        _outcomes: Holds the outcome in C++ as soon as it is known.
        _cause: The error of a cancelled one; None: `Cancelled`.
    """

    __slots__ = (
        *("_cause", "_messages", "_number", "_outcomes", "_receives"),
        *("among", "context", "info", "into", "nbytes", "peer"),
    )

    _cause: BaseException | None

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
        self._messages: Any = None

    def _move_by(self, messages: Any, *, receives: bool) -> None:
        """Belong to these messages, which start it now."""
        self._messages, self._receives = messages, int(receives)
        self._number, self._cause = 0, None
        self._outcomes: list[Outcome] = []

    def done(self) -> bool:
        """Return whether it is done, with or without an error."""
        # A thread that took the outcome may have been interrupted before it called `finish`.
        if not self._done and self._messages is not None and self._outcomes:
            self._messages.finish(self)
        return self._done

    def wait_until(self, deadline: Deadline | None) -> bool:
        """Block until done or expired; return whether it is done."""
        if self._messages is None:
            return super().wait_until(deadline)
        return Transfer.done(self) or bool(self._messages.wait(self, deadline))

    def matches(self, source: int, tag: Tag) -> bool:
        """Whether this receive is for a message from `source` with this tag."""
        if self.peer is not None and self.peer != source:
            return False
        return self.tag == tag or (self.tag == ANY and is_of_user(tag))

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
        if self.info == RAW:
            self.info = info | PARTIAL
        if self.info & PARTIAL and self.info & ~PARTIAL == info and nbytes < self.into.nbytes:
            self.into = self.into[:nbytes]
        return self.into.nbytes == nbytes and self.info & ~PARTIAL == info

    def watch(self) -> None:
        """Make sure that the transfer ends without a waiting thread."""
        if self._messages is not None and self._receives == 1 and not Transfer.done(self):
            self._messages.watch(self)


class LinkView(Protocol):
    """The transport as messages see it: frames to other ranks, and the state of these ranks."""

    rank: int
    world_size: int
    closed: bool
    wires: Wires | None

    def transmit(self, peer: int, key: Key, transfer: Transfer) -> None:
        """Move `transfer.into` to the messages of another rank and finish the transfer."""

    def cancel_frames(self, unwanted: Callable[[Transfer], bool], error: BaseException) -> None:
        """End the transfers under way that `unwanted` selects, and stop using their memory."""

    def down(self, peer: int) -> LinkDown | None:
        """Return why a rank is gone, or None."""

    def failure(self, context: int) -> Failure | None:
        """Return why a context is broken, or None."""

    def notice_end(self, peer: int, context: int = 0) -> None:
        """Make sure that the end of a rank, or of its context, is detected without a message."""

    def knock(self, peer: int) -> None:
        """Make a rank receive messages for which none of its threads waits."""


class Wires(Protocol):
    """Makes the connections whose sockets C++ takes over.

    Attributes:
        take: Set by the messages in C++: receives (peer, channel, connected socket).
    """

    take: Callable[[int, int, socket.socket], None] | None

    def make(self, peer: int, channel: int) -> None:
        """Connect to a rank and hand the socket over, unless that rank does so."""

    def ended(self, peer: int, *, changed: bool = False) -> None:
        """Find out why a wire has ended; perhaps its bytes were changed on the way."""

    def read_to_end(self, sock: socket.socket) -> None:
        """Read a socket that is closed for writing until its peer closes it, too."""


class AnyMessages(Protocol):
    """Carries the messages of one rank, and matches them to receives.

    Attributes:
        native: The object in C++, if there is one.
        addresses: How C++ reaches the ranks, by rank; empty without C++.
        team: The threads in C++ that share the loops of large calls; None: only the caller's.
        matching: Held while a message is matched. A thread that claims a receive takes it before
            its own locks: a signal handler may cancel, and take those, inside a matching.
    """

    native: Any = None

    matching: AbstractContextManager[object] = nullcontext()

    addresses: Sequence[Address] = ()
    team: Any = None

    def send(self, transfer: Transfer) -> None:
        """Start sending."""

    def recv(self, transfer: Transfer) -> None:
        """Start receiving, from `peer` or, if it is None, from any of `among`."""

    def cancel(self, transfer: Transfer) -> None:
        """End a transfer with `Cancelled` unless it has ended."""

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

    # Messages in Python come over links.

    def claim(self, source: int, key: Key) -> Transfer | None:
        """Remove and return the receive into which the next message can be read, or None.

        Raises:
            ValueError: No message may come over a link, because C++ moves all of them.
        """
        raise ValueError("it sent data over a connection for control messages")

    def deliver(self, key: Key, arrival: Arrival) -> None:
        """Match a message that came over a link; no other code may change its data.

        A receive that was posted after `claim` returned None takes the message at once.
        """

    # Messages in C++ can do more.

    def plain(self, context: int, ranks: Sequence[int], codes: Mapping[str, int]) -> Any:
        """Return an object in C++ that carries plain messages of a group, or None.

        Plain messages are contiguous NumPy arrays; see `backends.p2p.Port`.

        Args:
            context: Number of the group's context.
            ranks: Global ranks of its members.
            codes: The `info` of a message, by the buffer format of the array.
        """
        return None

    def has_left(self, peer: int) -> bool:
        """Whether a rank has closed its end in shared memory."""
        return False

    def is_server(self) -> bool:
        """Whether the calling thread is the server of transfers without a waiting thread."""
        return False

    def attend(self) -> None:
        """Receive messages for which no thread of this rank waits."""
        return

    def before_fork(self) -> None:
        """Permit no change until `after_fork`."""
        return

    def after_fork(self) -> None:
        """Permit changes again, in the parent and in the child."""
        return

    def close_in_child(self) -> None:
        """Close a forked child's copies of descriptors."""
        return
