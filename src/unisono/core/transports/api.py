"""The contract of every transport, and what is made of it for all: messages, control frames.

A new transport has the six methods of `Carrier`, and `Transport` adds all else.

Rule 1: a transport reports small status exceptions (`LinkDown`, `MessageMismatch`, `Failure`).
`engines.errors` writes the text for users, because the names are known there.
Rule 2: a send never waits for its receive. Every rank always receives arriving messages, so two
ranks that both send first do not deadlock.

Ranks here are ranks of the transport, that is, of the world that made it. Several process groups
share one transport. Each has a `context`, a 64-bit number that separates their messages.
"""

from __future__ import annotations

import json
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Self

from unisono.core.base.deadline import Deadline
from unisono.core.base.source.where import place_of_thread
from unisono.core.stores import Store
from unisono.core.transports.control import CallLog, Failures, Question, Questions
from unisono.core.transports.mailbox import Messages, deliver_copy
from unisono.core.transports.messages import (
    CLOSED,
    Arrival,
    CallStatus,
    Failure,
    Key,
    LastCall,
    LinkDown,
    Purpose,
    Unreached,
    failure_of,
)
from unisono.core.transports.transfers import ANY, ANYTHING, NOTHING, AnyMessages, Transfer, Wires
from unisono.errors import InvalidArgumentError

_NO_CONTEXT = -1

# How long a rank that detects a failure waits until the other ranks are informed. A connection to
# them may have to be made first. Without a limit, a stopped rank would keep the error back.
_INFORM_S = 0.5


class Carrier(ABC):
    """The contract: what each transport does in its own way. It carries frames between ranks.

    A sub-class of `Transport` has these six methods. It passes the frames of a rank to `arrive`, in
    the order in which they were sent, and then calls `ended`. It connects when it first has to,
    because the addresses of other ranks are not known before.

    Attributes:
        address: Where other ranks find this rank, in one line; published in the store.
        allows_cpp: Whether C++ may carry the messages instead, over `wires` and through memory that
            ranks of a host share. The transport then only carries what is beside the messages.
        delivers_at_once: Whether `transmit` itself calls `arrive` of the other rank. The rank that
            detects a failure then informs all ranks, and none passes it on: each would do that
            inside the call of the one before.
    """

    address: str
    allows_cpp = False
    delivers_at_once = False

    @property
    @abstractmethod
    def name(self) -> str:
        """Return the name of this kind of transport: "inproc", "tcp"."""

    @property
    def protection(self) -> str:
        """What the ranks of a world must agree on about encryption; "" for none."""
        return ""

    def protections(self) -> dict[int, str]:
        """Return, for each rank with a connection to this rank, what protects it, in words."""
        return {}

    @abstractmethod
    def transmit(self, peer: int, key: Key, transfer: Transfer) -> None:
        """Move `transfer.into` to the messages of another rank and finish the transfer.

        Never wait for that rank. `key` may be that of a control message, whose transfer belongs to
        no context. Key and `transfer.info` arrive with the bytes.
        """

    @abstractmethod
    def cancel_frames(self, unwanted: Callable[[Transfer], bool], error: BaseException) -> None:
        """End the transfers under way that `unwanted` selects, and stop using their memory."""

    @abstractmethod
    def watch(self, peer: int) -> None:
        """Make sure that the end of `peer` is detected although nothing is sent to it."""

    @abstractmethod
    def linked(self) -> list[int]:
        """Return the ranks with a working link."""

    @abstractmethod
    def shut(self) -> None:
        """Send what is under way and a `good_bye` to the linked ranks; close sockets and threads.

        Called once, and by any thread.
        """


class Transport(Carrier):
    """One rank's end of the links to all other ranks.

    `Carrier` has what a sub-class must do.

    Attributes:
        calls: The last calls of this rank in each group.
        hosts: The host id that each rank published; "" without the C++ engine.
        nodes: The number of each rank's node on its host, see `nodes_of`; empty if it is unknown.
        is_crowded: Whether more ranks may run on the cores of this rank than it has cores.
        messages: Carries the messages. May be replaced before the first message.
        wires: Makes connections for messages in C++. None: C++ reaches ranks of this host only.
        round_trip_us: Between hosts, equal on all ranks; a `round_trip_class`, 0 on one host.
        trips_us: The round trip from each rank to the store, None if unknown; empty on one host.
        words: The word that each rank published beside its address.
        world_number: Number of this world among the worlds that have used the same store.
    """

    wires: Wires | None = None
    world_number = 1
    words = tuple[str, ...]()
    nodes = tuple[int, ...]()
    is_crowded = False
    round_trip_us = 0
    trips_us = tuple[int | None, ...]()

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.hosts: tuple[str, ...] = ("",) * world_size
        self.messages: AnyMessages = Messages(self)
        self.closed = False
        self._lock = threading.RLock()
        self.calls = CallLog()
        self._failures = Failures()
        self._questions = Questions()
        self._users = 1
        self._is_parting = False

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
        transfer = Transfer(peer, key.context, key[1:], data, info)
        self.messages.send(transfer)
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
        transfer = Transfer(peer, key.context, key[1:], into, info, sources)
        self.messages.recv(transfer)
        return transfer

    def cancel(self, transfer: Transfer) -> None:
        """End a transfer with `Cancelled` if it is not done.

        Its memory is not touched any more after the return.
        """
        self.messages.cancel(transfer)

    def may_wait(self) -> bool:
        """Whether the calling thread may wait for a transfer; False if it moves the transfers."""
        return not self.messages.is_server()

    def notice_end(self, peer: int, context: int = 0) -> None:
        """Make sure that the end of a rank is detected although nothing is sent to it.

        If the rank has closed `context`, it sends a message of any tag: there are no more from it.
        """
        if peer == self.rank:
            return
        self.watch(peer)
        if context and self.down(peer) is None:
            # No question has this number.
            self._control(peer, context, Purpose.ASK, {"number": 0, "seq": 0, "places": False})

    def knock(self, peer: int) -> None:
        """Make a rank receive messages for which none of its threads waits."""
        if peer != self.rank and self.down(peer) is None:
            self._control(peer, 0, Purpose.KNOCK, {})

    # ---- control plane --------------------------------------------------------------------

    def enter(self, context: int, seq: int, text: str) -> None:
        """Record that this rank has begun call `seq`; other ranks can ask for it."""
        self.calls.add(context, CallStatus(seq, text))

    def ask(
        self,
        context: int,
        seq: int,
        peers: Iterable[int],
        deadline: Deadline,
        *,
        places: bool = False,
    ) -> dict[int, CallStatus]:
        """Ask peers for their last calls; return the answers that came in time.

        Each answer holds the peer's last call, or call `seq` if the peer still keeps it. With
        `places` it also holds the line of the program in which the peer is, and the caller and the
        age of the call. A peer that is stopped,
        gone or unreachable is missing from the result. If the context is broken on the peer, it is
        broken here before the answer counts.
        """
        question = self.inquire(context, seq, peers, places=places)
        question.wait_until(deadline)
        self.close_question(question)
        return question.answers

    def inquire(
        self, context: int, seq: int, peers: Iterable[int], *, places: bool = False
    ) -> Question:
        """Ask as `ask` does, but return at once; answers are added until `close_question`.

        With `seq` 0 each answer holds the peer's last call.
        """
        asked = sorted(set(peers) - {self.rank})
        words = {"seq": seq, "places": places}
        question = self._questions.new(set(asked))
        for peer in asked:
            if self.down(peer) is None:
                self._control(peer, context, Purpose.ASK, {"number": question.number, **words})
            else:
                question.drop(peer)
        question.drop(self.rank)
        return question

    def close_question(self, question: Question) -> None:
        """Take no more answers."""
        self._questions.close(question)

    def fail(self, context: int, failure: Failure, peers: Collection[int]) -> None:
        """Break a context here and on all peers that can be reached.

        The peers are informed first. Otherwise this rank could end before they are, and they would
        blame this rank.
        """
        if not self._failures.is_new(context, failure):
            return
        self._failures.first.add(failure)
        self._failures.defer(context, failure)
        try:
            # The end of this rank may concern ranks outside the group, too. They come first,
            # because a member may end as soon as it knows.
            order = [*{*self._informed(True)[0]}.difference(peers), *peers]
            sent = self._inform(context, failure, {*peers, self.rank}, order)
        finally:
            # After Ctrl-C, too, because this rank takes no other failure any more.
            self._break(context, failure)
        if self.may_wait():
            deadline = Deadline(_INFORM_S)
            for transfer in sent:
                if transfer.peer not in failure.peers:
                    transfer.wait_until(deadline)

    def _informed(self, by_itself: bool) -> tuple[Iterable[int], frozenset[int]]:
        """Return the ranks, of any group, to inform of a failure, and those that know it.

        Args:
            by_itself: Whether this rank has detected the failure; if not, it passes it on.
        """
        if not self.delivers_at_once:
            return self.linked(), frozenset()
        others = frozenset(range(self.world_size)) - {self.rank}
        return (others, frozenset()) if by_itself else ((), others)

    def _inform(
        self, context: int, failure: Failure, members: Collection[int], peers: Iterable[int]
    ) -> list[Transfer]:
        """Send a failure to ranks; the members among them break the context."""
        everyone = len(members) == self.world_size
        words = {
            "failure": failure.words,
            "members": None if everyone else sorted(members),
            "first": self._failures.first.words,
        }
        return [
            self._control(peer, context, Purpose.FAIL, words)
            for peer in peers
            if peer != self.rank and self.down(peer) is None
        ]

    def explain(self, error: LinkDown, since_s: float, members: Collection[int]) -> Failure:
        """Return the failure that led to the end of a rank, or that is this end.

        A call of this rank fails because of it, so this rank may end now. The linked ranks get the
        cause first.

        Args:
            error: The end of the rank.
            since_s: On the monotonic clock. Earlier failures are no cause.
            members: The ranks of the group. A failure of other ranks is a cause only if the ended
                rank had an error because of it.
        """
        causes, own = self._failures.first, failure_of(error, self.rank)
        known = self._failures.is_reported(own) or causes.find(since_s, error.peer, members)
        if error.left and self.may_wait() and not known:
            # The report of the failure for which it left may still be on its way here.
            asked = {*members} - {self.rank, error.peer}
            self.ask(0, 0, self._failures.to_ask(asked, self.linked()), Deadline(_INFORM_S))
        # A rank that has only closed a group or a window lives on, and is no cause of other ends.
        has_ended = not error.left or self.down(error.peer) is not None
        if has_ended and self._failures.report(own):
            for peer in self.linked():
                if peer != error.peer and self.down(peer) is None:
                    self._control(peer, 0, Purpose.CAUSE, {"first": causes.words})
        first = causes.find(since_s, error.peer, members)
        if first is None or (first.kind, first.peers) == (own.kind, own.peers):
            return own
        reason = first.reason
        if error.peer not in first.peers:
            reason = f"{reason} (then rank {error.peer} ended, too)"
        kind = first.kind if first.kind in ("failed", "internal", "memory", "aborted") else "lost"
        return Failure(kind, reason, first.peers, self.rank, first.table)

    def failure(self, context: int) -> Failure | None:
        """Return why a context is broken, or None."""
        return self._failures.get(context)

    def on_failure(self, context: int, callback: Callable[[Failure], None]) -> None:
        """Call `callback` when this context breaks; at once if it is broken already."""
        self._failures.watch(context, callback)

    def forget(self, context: int, error: BaseException, finished: int = 0) -> None:
        """Release everything that a destroyed context holds; `error` ends its receives.

        The other ranks can ask for its end. It fails their calls after `finished`.
        """
        self.calls.forget(context)
        end = failure_of(LinkDown(self.rank, CLOSED), self.rank)
        self._failures.forget(context, end.found_by(self.rank, finished))
        self.messages.forget(context, error)

    def arrive(self, peer: int, key: Key, info: int, data: memoryview) -> None:
        """Take a frame that has arrived from a rank; `data` may be reused after the return.

        Raises:
            ValueError: The frame makes no sense, so the link is of no use.
        """
        context, kind, tag = key[0], Purpose(key[1]), key[2]
        if kind in (Purpose.COLLECTIVE, Purpose.P2P):
            deliver_copy(self.messages, Key(context, kind, tag), Arrival(peer, data, info))
        else:
            self.on_control(peer, context, kind, bytes(data))

    def on_control(self, peer: int, context: int, kind: Purpose, body: bytes) -> None:
        """Handle a control frame; called by the sub-class on the thread that received it.

        Raises:
            ValueError: The frame makes no sense.
        """
        try:
            self._handle(peer, context, kind, json.loads(body))
        except (LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"it sent a control message that makes no sense: {error!r}") from None

    def _handle(self, peer: int, context: int, kind: Purpose, words: dict[str, Any]) -> None:
        self._failures.first.learn(words.get("first"))
        if kind in (Purpose.CAUSE, Purpose.FAIL):
            self._failures.first.add_follower(peer)
        if kind is Purpose.ASK:
            seq, number, places = words["seq"], words["number"], words["places"]
            self._after_all_arrivals(
                lambda: self._control(
                    peer,
                    context,
                    Purpose.ANSWER,
                    self._answer(context, seq, number, places),
                )
            )
            if not number and context in self._failures.closed:
                self.messages.send(Transfer(peer, context, ANY, memoryview(b"")))
        elif kind is Purpose.ANSWER:
            if words["failure"] is not None:
                self._break(context, Failure(*words["failure"]))
            unreached = {int(rank): rows for rank, rows in words["unreached"].items()}
            recorded = tuple(LastCall(*each) for each in words["recorded"])
            shown = unreached, words["place"], recorded, words["site"]
            status = CallStatus(words["at"], words["text"], *shown)
            self._questions.answer(words["number"], peer, status)
        elif kind is Purpose.FAIL:
            self._take_failure(peer, context, Failure(*words["failure"]), words["members"])
        elif kind is Purpose.GOODBYE:
            self.mark_down(LinkDown(peer, CLOSED, left=True))
        elif kind is Purpose.KNOCK:
            self.messages.attend()
        elif kind is Purpose.LOST and words["peer"] not in self.linked():
            # If this rank had a link to that rank, it would detect the end itself.
            error = LinkDown(words["peer"], words["reason"], peers=words["peers"])
            self._spread(error, self._informed(False)[0])

    def _take_failure(
        self, peer: int, context: int, failure: Failure, members: list[int] | None
    ) -> None:
        """Break a context that another rank has broken, and pass the failure on.

        If the failure was passed on, messages of the rank that detected it may still be under way.
        The context is then broken when the failure comes from that rank, or that rank ends.
        """
        self._failures.first.add(failure)
        among = range(self.world_size) if members is None else members
        unaware, aware = self._informed(False)
        for member in aware.intersection(among):
            # They have it, too, and do not report that.
            self._failures.first.add_follower(member)
        if self._failures.is_own(context, failure, self.rank):
            return
        is_new = self._failures.is_new(context, failure)
        if self.rank not in among or not is_new or failure.by == self.rank:
            return
        is_direct = peer == failure.by or self.down(failure.by) is not None
        if self._failures.defer(context, failure):
            # Also ranks that know it: in another group they would blame this rank for its end.
            self._inform(context, failure, among, unaware)
        if is_direct:
            self._break(context, failure)
        else:
            self.watch(failure.by)

    def mark_down(self, error: LinkDown) -> bool:
        """Record that a rank cannot be reached any more, and end the transfers with it.

        Returns:
            Whether this was unknown.
        """
        # A closed rank records it, too, or it would report another rank that leaves as crashed.
        if not self._failures.add_down(error) or self.closed:
            return False
        self.messages.peer_down(error)
        self._questions.drop(error.peer)
        for context, failure in self._failures.take_deferred(error.peer):
            self._break(context, failure)
        return True

    def down(self, peer: int) -> LinkDown | None:
        """Return why there is no link to a rank any more, or None."""
        return self._failures.down(peer)

    def ended(
        self, peer: int, reason: str, *, left: bool = False, spreads: bool = True
    ) -> LinkDown:
        """Record the end of a rank, after all that it sent has arrived; return its status.

        Args:
            peer: The rank.
            reason: Why, as the end of a sentence.
            left: Whether the rank may have left normally: there never was a link to it.
            spreads: Whether the linked ranks are informed of a crash.
        """
        if (error := self.down(peer)) is None:
            by_memory = self.messages.has_left(peer)
            error = LinkDown(peer, CLOSED if by_memory else reason, left or by_memory)
        # The other ranks answer a good-bye: they close their links, too.
        if spreads and not error.left and not self._is_parting:
            self.spread(error)
        else:
            self.mark_down(error)
        return error

    def good_bye(self, peer: int) -> None:
        """Send a rank that this rank leaves, as the last frame."""
        self._is_parting = True
        self._control(peer, 0, Purpose.GOODBYE, {})

    def spread(self, error: LinkDown) -> None:
        """Record that a rank crashed, and send this to all linked ranks, which do the same.

        So a rank learns of a crash although it was never linked to the crashed rank.
        """
        self._spread(error, self._informed(True)[0])

    def _spread(self, error: LinkDown, peers: Iterable[int]) -> None:
        """Record that a rank crashed, and send this to ranks."""
        known = self.down(error.peer)
        if known is None or known.left:
            self._failures.first.add(failure_of(error, self.rank))
            words = {
                "peer": error.peer,
                "reason": error.reason,
                "peers": error.peers,
                "first": self._failures.first.words,
            }
            for peer in peers:
                if peer != error.peer and self.down(peer) is None:
                    self._control(peer, 0, Purpose.LOST, words)
            # Last, because a call of this rank may fail now, and this rank may end.
            self.mark_down(error)

    def watch_neighbours(self) -> None:
        """Watch the ranks 1, 2, 4, ... further on.

        The graph of all links is then connected, and stays so when some ranks crash. So some rank
        detects each crash and can send it to the others.
        """
        distance = 1
        while distance < self.world_size:
            self.watch((self.rank + distance) % self.world_size)
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
            if self._users > 0 or self.closed:
                return
            self.closed = True
        self.messages.close()
        self.shut()

    # A transport may do more.

    def unreached(self) -> Unreached:
        """Return the ranks that could not be reached so far."""
        return {}

    def _show(self, store: Store, addresses: Sequence[str]) -> None:
        """Leave in the store what a viewer needs; called by rank 0 with the addresses of all."""

    def silence_of(self, peer: int) -> str:
        """Return what is known of a rank that does not answer over its link; "" if nothing is."""
        return ""

    def _after_all_arrivals(self, job: Callable[[], object]) -> None:
        """Run `job` when everything that has arrived until now has been handled."""
        job()

    def _control(self, peer: int, context: int, kind: Purpose, words: dict[str, Any]) -> Transfer:
        body = memoryview(json.dumps(words).encode())
        key = Key(context, kind, 0)
        # No context: the failure of a context must not cancel the frames that report it.
        transfer = Transfer(peer, _NO_CONTEXT, key[1:], body)
        self.transmit(peer, key, transfer)
        return transfer

    def _answer(self, context: int, seq: int, number: int, places: bool) -> dict[str, Any]:
        status = self.calls.find(context, seq)
        failure = self._failures.get(context)
        closed = self._failures.closed.get(context)
        # A receive asks with number 0: for it the plain end comes behind all messages.
        if failure is None and closed is not None and (number or closed.peers != (self.rank,)):
            failure = closed
        return {
            "number": number,
            "failure": None if failure is None else failure.words,
            "at": status.seq,
            "text": status.text,
            "unreached": self.unreached(),
            "place": place_of_thread(self.calls.thread) if places else "",
            "recorded": self.calls.recorded(context, messages=not seq) if places else (),
            "site": self.calls.site(context, status.seq) if places else "",
            "first": self._failures.first.words,
        }

    def _break(self, context: int, failure: Failure) -> bool:
        if not self._failures.add(context, failure):
            return False
        self.messages.fail(context, failure)
        self.cancel_frames(
            lambda each: each.context == context and failure.ends(*each.tag), failure
        )
        return True


def _require_bytes(data: memoryview) -> None:
    if data.format != "B" or data.ndim != 1:
        raise InvalidArgumentError(
            f"a transport moves flat bytes, got format {data.format!r} of {data.ndim} dimensions",
            hint='use memoryview.cast("B")',
        )


def has_ended(transport: Transport, peer: int) -> bool:
    """Return whether a rank has certainly ended: it left, or its link inside a host broke."""
    down, here = transport.down(peer), transport.hosts[transport.rank]
    # Without a host id it is unknown which ranks are on this host.
    near = bool(here) and transport.hosts[peer] == here
    return down is not None and (near or down.reason == CLOSED)


def on_one_host(hosts: Sequence[str], trips_us: Sequence[int | None]) -> bool:
    """Whether all ranks are known to have one host; see `Transport` for the arguments."""
    is_known = bool(hosts[0]) or 0 in trips_us
    return is_known and len(set(hosts)) == 1 and set(trips_us) <= {0, None}
