"""The contract of every transport: messages between ranks, and a control plane beside them.

Rule 1: a transport reports small status exceptions (`LinkDown`, `MessageMismatch`, `Failure`).
`engines.errors` writes the text for users, because the names are known there.
Rule 2: a send never waits for its receive. Every rank always receives arriving messages, so two
ranks that both send first do not deadlock.

Ranks here are ranks of the transport, that is, of the world that made it. Several process groups
share one transport. Each has a `context`, a 64-bit number that separates their messages.
"""

from __future__ import annotations

import json
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable
from typing import Any, Self

from unisono.base.deadline import Deadline
from unisono.errors import ClosedError, InvalidArgumentError
from unisono.transports.control import CallLog, Failures, Question, Questions
from unisono.transports.mailbox import Mailbox
from unisono.transports.messages import (
    LEFT,
    CallStatus,
    Cancelled,
    Failure,
    Key,
    Kind,
    LinkDown,
    Unreached,
)
from unisono.transports.transfers import ANYTHING, NOTHING, Messages, Transfer

# How long `cancel` waits for a copy that is running. Without a limit it would wait for ever if a
# callback, on the thread that copies, cancels the next transfer of that thread.
_COPY_S = 5.0

_NO_CONTEXT = -1


class Transport(ABC):
    """One rank's end of the links to all other ranks.

    Sub-classes move frames (`_transmit`) and pass arriving frames to `mailbox` or `on_control`.

    Attributes:
        address: Where other ranks find this rank; published in the store.
        world_number: Number of this world among the worlds that have used the same store.
    """

    address: str
    world_number = 1

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        # The host id that each rank published; "" without the C++ engine.
        self.hosts: tuple[str, ...] = ("",) * world_size
        self.mailbox = Mailbox()
        # Carries messages in C++; None: this transport carries them.
        self.messages: Messages | None = None
        self._lock = threading.Lock()
        self._calls = CallLog()
        self._failures = Failures()
        self._questions = Questions()
        self._users = 1
        self._closed = False

    # ---- messages -------------------------------------------------------------------------

    def send(self, peer: int, key: Key, data: memoryview, info: int = 0) -> Transfer:
        """Start sending; done when `data` may be changed again.

        Args:
            peer: Receiving rank; may be this rank itself.
            key: Address of the message.
            data: Bytes (format "B"); must stay untouched until the transfer is done.
            info: A number that the receiver compares with its own, such as a dtype code.
        """
        _require_bytes(data)
        if self.messages is not None:
            sent = self.messages.send(peer, key, data, info)
            if sent is not None:
                return sent
        transfer = Transfer(peer, key.context, key[1:], data, info)
        failure = self._failures.get(key.context)
        if self._closed:
            transfer.finish(ClosedError("the transport is closed"))
        elif failure is not None and failure.ends(*key[1:]):
            transfer.finish(failure)
        elif peer == self.rank:
            self.mailbox.deliver(peer, key.context, key[1:], data, info)
            transfer.finish()
        elif (down := self.mailbox.down(peer)) is not None:
            transfer.finish(down)
        else:
            self._transmit(peer, key, transfer)
            # The context may have broken after the check above, before this transfer was queued.
            failure = self._failures.get(key.context)
            if not transfer.done() and failure is not None and failure.ends(*key[1:]):
                self._cancel(lambda other: other is transfer, failure)
        return transfer

    def recv(
        self,
        peer: int | None,
        key: Key,
        into: memoryview,
        info: int = 0,
        among: Collection[int] | None = None,
    ) -> Transfer:
        """Post a receive; done when `into` is filled.

        With C++ messages the transfer may not become done before a thread waits for it, or calls
        `watch`.

        Args:
            peer: Sending rank; None takes any source.
            key: Address of the message.
            into: Bytes (format "B"), writable; also `ANYTHING`, and `NOTHING` for a probe.
            info: The number that the sender must give.
            among: With any source: the ranks that may send, by default all other ranks. If one of
                them crashes, or all of them leave, the receive fails.

        Raises:
            InvalidArgumentError: `into` is read-only or not of bytes.
        """
        _require_bytes(into)
        if into.readonly and into is not ANYTHING and into is not NOTHING:
            raise InvalidArgumentError("cannot receive into read-only memory")
        sources: frozenset[int] = frozenset()
        if peer is None:
            sources = frozenset(range(self.world_size) if among is None else among) - {self.rank}
        if self.messages is not None:
            return self.messages.recv(peer, key, into, info, sources)
        transfer = Transfer(peer, key.context, key[1:], into, info, sources)
        if self._closed:
            transfer.finish(ClosedError("the transport is closed"))
            return transfer
        self.mailbox.post(transfer)
        for source in sources if peer is None else (peer,):
            if source != self.rank and not transfer.done():
                self._watch(source)
        return transfer

    def cancel(self, transfer: Transfer) -> None:
        """End a transfer with `Cancelled` if it is not done.

        Its memory is not touched any more after the return.
        """
        if transfer.in_messages:
            if not transfer.done() and self.messages is not None:
                self.messages.cancel(transfer)
        elif self.mailbox.cancel(transfer):
            transfer.finish(Cancelled())
        elif not transfer.done():
            self._cancel(lambda other: other is transfer, Cancelled())
            transfer.wait_until(Deadline(_COPY_S))

    def may_wait(self) -> bool:
        """Whether the calling thread may wait for a transfer; False if it moves the transfers."""
        return self.messages is None or not self.messages.is_server()

    def use_messages(self, messages: Messages) -> None:
        """Let `messages` carry all messages. Must be called before the first message."""
        self.messages = self.mailbox.messages = messages

    def notice_end(self, peer: int) -> None:
        """Make sure that the end of a rank is detected although nothing is sent to it."""
        if peer != self.rank:
            self._watch(peer)

    def knock(self, peer: int) -> None:
        """Make a rank receive messages for which none of its threads waits."""
        if peer != self.rank and self.mailbox.down(peer) is None:
            self._control(peer, 0, Kind.KNOCK, {})

    # ---- control plane --------------------------------------------------------------------

    def enter(self, context: int, seq: int, text: str) -> None:
        """Record that this rank has begun call `seq`; other ranks can ask for it."""
        self._calls.add(context, CallStatus(seq, text))

    def watch_calls(self, context: int, last: Callable[[], CallStatus | None]) -> None:
        """Consult `last()` for the last call of a context, too: for calls that do not `enter`."""
        self._calls.consult(context, last)

    def ask(
        self, context: int, seq: int, peers: Iterable[int], deadline: Deadline
    ) -> dict[int, CallStatus]:
        """Ask peers for their last calls; return the answers that came in time.

        Each answer holds the peer's last call, or call `seq` if the peer still keeps it. A peer
        that is stopped, gone or unreachable is missing from the result. If the context is broken
        on the peer, it is broken here before the answer counts.
        """
        question = self.inquire(context, seq, peers)
        question.wait_until(deadline)
        self.close_question(question)
        return question.answers

    def inquire(self, context: int, seq: int, peers: Iterable[int]) -> Question:
        """Ask as `ask` does, but return at once; answers are added until `close_question`.

        With `seq` 0 each answer holds the peer's last call.
        """
        asked = sorted(set(peers) - {self.rank})
        question = self._questions.new(set(asked))
        for peer in asked:
            if self.mailbox.down(peer) is None:
                self._control(peer, context, Kind.ASK, {"number": question.number, "seq": seq})
            else:
                question.drop(peer)
        question.drop(self.rank)
        return question

    def close_question(self, question: Question) -> None:
        """Take no more answers."""
        self._questions.close(question)

    def fail(self, context: int, failure: Failure, peers: Iterable[int]) -> None:
        """Break a context here and on all peers that can be reached."""
        if self._break(context, failure):
            for peer in peers:
                if peer != self.rank and self.mailbox.down(peer) is None:
                    self._control(peer, context, Kind.FAIL, {"failure": failure.words})

    def failure(self, context: int) -> Failure | None:
        """Return why a context is broken, or None."""
        return self._failures.get(context)

    def on_failure(self, context: int, callback: Callable[[Failure], None]) -> None:
        """Call `callback` when this context breaks; at once if it is broken already."""
        self._failures.watch(context, callback)

    def forget(self, context: int, error: BaseException) -> None:
        """Release everything that a destroyed context holds; `error` ends its receives."""
        self._calls.forget(context)
        self._failures.forget(context)
        self.mailbox.forget_context(context, error)

    def on_control(self, peer: int, context: int, kind: Kind, body: bytes) -> None:
        """Handle a control frame; called by the sub-class on the thread that received it.

        Raises:
            ValueError: The frame makes no sense.
        """
        try:
            self._handle(peer, context, kind, json.loads(body))
        except (LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"it sent a control message that makes no sense: {error!r}") from None

    def _handle(self, peer: int, context: int, kind: Kind, words: dict[str, Any]) -> None:
        if kind is Kind.ASK:
            self._control(peer, context, Kind.ANSWER, self._answer(context, words))
        elif kind is Kind.ANSWER:
            if words["failure"] is not None:
                self._break(context, Failure(*words["failure"]))
            unreached = {int(rank): rows for rank, rows in words["unreached"].items()}
            status = CallStatus(words["at"], words["text"], unreached)
            self._questions.answer(words["number"], peer, status)
        elif kind is Kind.FAIL:
            self._break(context, Failure(*words["failure"]))
        elif kind is Kind.GOODBYE:
            self.mark_down(LinkDown(peer, LEFT, left=True))
        elif kind is Kind.KNOCK and self.messages is not None:
            self.messages.attend()
        elif kind is Kind.LOST and words["peer"] not in self._linked():
            # If this rank had a link to that rank, it would detect the end itself.
            self.spread(LinkDown(words["peer"], words["reason"]))

    def mark_down(self, error: LinkDown) -> bool:
        """Record that a rank cannot be reached any more, and end the transfers with it.

        Returns:
            Whether this was unknown. The crash of a rank that seemed to have left counts as
            unknown: without a link to the rank, the two look alike.
        """
        known = self.mailbox.down(error.peer)
        if self._closed or (known is not None and (error.left or not known.left)):
            return False
        self.mailbox.link_down(error)
        self._questions.drop(error.peer)
        return True

    def end_of(self, peer: int, reason: str, left: bool) -> LinkDown:
        """Return the status of a broken link; the rank may have left by way of shared memory."""
        return (
            LinkDown(peer, LEFT, left=True) if self.has_left(peer) else LinkDown(peer, reason, left)
        )

    def has_left(self, peer: int) -> bool:
        """Whether a rank has left by way of shared memory; False if this is unknown."""
        return self.messages is not None and self.messages.has_left(peer)

    def spread(self, error: LinkDown) -> None:
        """Record that a rank crashed, and send this to all linked ranks, which do the same.

        So a rank learns of a crash although it was never linked to the crashed rank.
        """
        if self.mark_down(error):
            for peer in self._linked():
                if peer != error.peer and self.mailbox.down(peer) is None:
                    words = {"peer": error.peer, "reason": error.reason}
                    self._control(peer, 0, Kind.LOST, words)

    def watch_neighbours(self) -> None:
        """Watch the ranks 1, 2, 4, ... further on.

        The graph of all links is then connected, and stays so when some ranks crash. So some rank
        detects each crash and can send it to the others.
        """
        distance = 1
        while distance < self.world_size:
            self._watch((self.rank + distance) % self.world_size)
            distance *= 2

    # ---- life -----------------------------------------------------------------------------

    def retain(self) -> Self:
        """Count one more user (a sub-group). Each user calls `close` once."""
        with self._lock:
            self._users += 1
        return self

    def close(self) -> None:
        """Remove one user; the last user closes the links and ends the waiting receives."""
        with self._lock:
            self._users -= 1
            if self._users > 0 or self._closed:
                return
            self._closed = True
        self.mailbox.close(ClosedError("the transport was closed"))
        self._shut()

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    @abstractmethod
    def name(self) -> str:
        """Return the name of this kind of transport: "inproc", "tcp"."""

    @abstractmethod
    def _transmit(self, peer: int, key: Key, transfer: Transfer) -> None:
        """Move `transfer.into` to the mailbox of another rank and finish the transfer.

        `key` may be that of a control message, whose transfer belongs to no context.
        """

    def unreached(self) -> Unreached:
        """Return the ranks that could not be reached so far."""
        return {}

    makes_wires = False
    """Whether the transport can make connections for C++ messages."""

    def make_wire(self, peer: int, channel: int) -> None:
        """Give the C++ messages a connection to a rank, soon, unless that rank does so."""
        raise NotImplementedError

    def wire_ended(self, peer: int, reason: str) -> None:
        """Find out why a wire has ended. If the link does not show it, the reason is `reason`."""
        raise NotImplementedError

    def read_to_end(self, sock: socket.socket) -> None:
        """Read a socket that is closed for writing until its peer closes it, too."""
        raise NotImplementedError

    def _linked(self) -> list[int]:
        """Return the ranks with a working link."""
        return []

    @abstractmethod
    def _watch(self, peer: int) -> None:
        """Make sure that the end of `peer` is detected although nothing is sent to it."""

    @abstractmethod
    def _cancel(self, unwanted: Callable[[Transfer], bool], error: BaseException) -> None:
        """End the transfers under way that `unwanted` selects, and stop using their memory."""

    @abstractmethod
    def _shut(self) -> None:
        """Send a good-bye and close sockets and threads."""

    def _control(self, peer: int, context: int, kind: Kind, words: dict[str, Any]) -> None:
        body = memoryview(json.dumps(words).encode())
        key = Key(context, kind, 0)
        # No context: the failure of a context must not cancel the frames that report it.
        self._transmit(peer, key, Transfer(peer, _NO_CONTEXT, key[1:], body))

    def _answer(self, context: int, words: dict[str, Any]) -> dict[str, Any]:
        status = self._calls.find(context, words["seq"])
        failure = self._failures.get(context)
        return {
            "failure": None if failure is None else failure.words,
            "number": words["number"],
            "at": status.seq,
            "text": status.text,
            "unreached": self.unreached(),
        }

    def _break(self, context: int, failure: Failure) -> bool:
        if not self._failures.add(context, failure):
            return False
        self.mailbox.fail_context(context, failure)
        self._cancel(lambda each: each.context == context and failure.ends(*each.tag), failure)
        return True


def _require_bytes(data: memoryview) -> None:
    if data.format != "B" or data.ndim != 1:
        raise InvalidArgumentError(
            f"a transport moves flat bytes, got format {data.format!r} of {data.ndim} dimensions",
            hint='use memoryview.cast("B")',
        )
