"""Messages in Python: posted receives and unexpected messages. Frames of links carry the bytes.

The k-th message from a rank under a key meets the k-th receive for that rank and key. A receive
from any source or of any tag takes the oldest message that it may take. A probe takes no message.

Theory of operation: for one key and source, either receives wait or messages wait, never both.
A message that finds a posted receive is written straight into the receiver's memory. A message
that finds none is kept in memory of its own.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from unisono.core.base.deadline import Deadline
from unisono.core.base.threads.completion import Completion
from unisono.core.transports.messages import (
    CLOSED,
    Arrival,
    Cancelled,
    Failure,
    Key,
    LinkDown,
    MessageMismatch,
)
from unisono.core.transports.transfers import ANY, NOTHING, AnyMessages, LinkView, Tag, Transfer
from unisono.errors import ClosedError

# How long `cancel` waits for a copy that is running. Without a limit it would wait for ever if a
# callback, on the thread that copies, cancels the next transfer of that thread.
_COPY_S = 5.0

# How often a waiting receive asks whether its sender has closed the group.
_ASK_S = 1.0

T = TypeVar("T")


class _Waiting:
    """A message that waits for its receive; equal only to itself."""

    __slots__ = ("arrival", "tag")

    def __init__(self, tag: Tag, arrival: Arrival) -> None:
        self.tag = tag
        self.arrival = arrival


class _ContextQueue:
    """The receives and the messages that wait in one context, both in order.

    Items are searched in a copy, and removed by one call that fails if they are gone. The reason is
    a signal handler, which may send or receive inside a method of its own thread.
    """

    __slots__ = ("arrivals", "asked_s", "closed", "posted")

    def __init__(self) -> None:
        self.posted: deque[Transfer] = deque()
        self.arrivals: deque[_Waiting] = deque()
        self.closed: dict[int, LinkDown] = {}  # by rank that has closed the context
        self.asked_s: dict[int | None, float] = {}  # by rank: when a poll last asked it for that


class Messages(AnyMessages):
    """Posted receives and unexpected messages of one rank; safe to use from any thread.

    Args:
        links: The transport, which moves the frames. It records the end of a rank or context before
            it calls `peer_down` or `fail`.
    """

    def __init__(self, links: LinkView) -> None:
        self._links = links
        self.matching = threading.RLock()
        self._entries: dict[int, _ContextQueue] = {}

    def send(self, transfer: Transfer) -> None:
        links, peer, key = self._links, transfer.peer, Key(transfer.context, *transfer.tag)
        assert peer is not None
        if (error := self._end_of(transfer)) is not None:
            transfer.finish(error)
        elif peer == links.rank:
            deliver_copy(self, key, Arrival(peer, transfer.into, transfer.info))
            transfer.finish()
        else:
            links.transmit(peer, key, transfer)
            # The context may have broken after the check above, before this transfer was queued.
            failure = self._failure_of(transfer)
            if failure is not None and not transfer.done():
                links.cancel_frames(lambda other: other is transfer, failure)

    def recv(self, transfer: Transfer) -> None:
        peer = transfer.peer
        transfer._move_by(self, receives=True)
        self._post(transfer)
        for source in transfer.among if peer is None else (peer,):
            if not transfer.done():
                self._links.notice_end(source)

    def wait(self, transfer: Transfer, deadline: Deadline | None) -> bool:
        """Wait for a receive, and ask at intervals whether its sender has closed the group."""
        limit = Deadline(math.inf) if deadline is None else deadline
        while not Completion.wait_until(transfer, limit.within(_ASK_S)):
            if not limit.remaining():
                return False
            self._ask(transfer)
        return True

    def watch(self, transfer: Transfer) -> None:
        """Ask for a receive that is polled; see `wait`."""
        if (entry := self._entries.get(transfer.context)) is None:
            return
        asked_s = entry.asked_s
        if time.monotonic() > asked_s.setdefault(transfer.peer, time.monotonic()) + _ASK_S:
            asked_s[transfer.peer] = time.monotonic()
            self._ask(transfer)

    def _ask(self, transfer: Transfer) -> None:
        for source in transfer.among if transfer.peer is None else (transfer.peer,):
            self._links.notice_end(source, transfer.context)

    def cancel(self, transfer: Transfer, error: BaseException | None = None) -> None:
        error = error or Cancelled()
        with self.matching:
            entry = self._entries.get(transfer.context)
            posted = entry is not None and _remove(entry.posted, transfer)
        if posted:
            transfer.finish(error)
        elif not transfer.done():
            self._links.cancel_frames(lambda other: other is transfer, error)
            transfer.wait_until(Deadline(_COPY_S))

    def claim(self, source: int, key: Key) -> Transfer | None:
        with self.matching:
            return self._claim(source, key)

    def deliver(self, key: Key, arrival: Arrival) -> None:
        context, tag = key.context, key[1:]
        if tag == ANY:
            self._close_context(arrival.source, context)
            return
        with self.matching:
            transfer = self._claim(arrival.source, key)
            ended = [] if transfer is None else [transfer]
            failure = self._links.failure(context)
            is_open = not self._links.closed and (failure is None or not failure.ends(*tag))
            if transfer is None and is_open:
                while (probe := self._claim(arrival.source, key, probes=True)) is not None:
                    ended.append(probe)
                entry = self._entries.setdefault(context, _ContextQueue())
                entry.arrivals.append(_Waiting(tag, arrival))
        for each in ended:
            _fill(each, arrival)

    def has_receive(self, peer: int, key: Key) -> bool:
        with self.matching:
            entry = self._entries.get(key.context)
            return entry is not None and any(
                each.peer == peer and each.into is not NOTHING and each.matches(peer, key[1:])
                for each in tuple(entry.posted)
            )

    def peer_down(self, error: LinkDown) -> None:
        """End every receive that waits for this rank.

        A receive from any source ends as well if the rank crashed, because its sender may be the
        crashed rank. An error is better than a wait that may never end. Ranks that left end such a
        receive only when no rank is left that could send.
        """
        self._end_posted(
            lambda each: (
                error.peer in ((each.peer,) if each.peer is not None else each.among)
                and self._down_for(each) is not None
            ),
            error,
        )

    def fail(self, context: int, failure: Failure) -> None:
        """End the receives of a broken context. Messages that have come are kept.

        A receive that is posted later takes them.
        """
        self._end_posted(
            lambda each: each.context == context and self._failure_of(each) is not None, failure
        )

    def forget(self, context: int, error: BaseException) -> None:
        self._end_posted(lambda each: each.context == context, error)
        with self.matching:
            self._entries.pop(context, None)

    def close(self) -> None:
        self._end_posted(lambda each: True, ClosedError("the transport was closed"))
        with self.matching:
            self._entries.clear()

    def _close_context(self, source: int, context: int) -> None:
        """End the receives that wait for a rank, all of whose messages in a context have come."""
        error = LinkDown(source, CLOSED, left=True)
        with self.matching:
            # Without a receive the context may be forgotten. A later receive asks again.
            if (entry := self._entries.get(context)) is None:
                return
            entry.closed[source] = error
        self._end_posted(
            lambda each: each.context == context and self._down_for(each) is not None, error
        )

    def _post(self, transfer: Transfer) -> None:
        """Queue a receive, or complete it with a message that has arrived already."""
        with self.matching:
            arrival = self._take_arrival(transfer)
            error = None if arrival is not None else self._end_of(transfer)
            if arrival is None and error is None:
                posted = self._entries.setdefault(transfer.context, _ContextQueue()).posted
                posted.append(transfer)
                # Again: a signal handler may have broken the context since, and found no receive.
                error = self._end_of(transfer)
                if error is None or not _remove(posted, transfer):
                    return
        if arrival is None:
            transfer.finish(error)
        else:
            _fill(transfer, arrival)

    def _end_of(self, transfer: Transfer) -> BaseException | None:
        """Return why a transfer cannot begin, or None."""
        if self._links.closed:
            return ClosedError("the transport is closed")
        return self._failure_of(transfer) or self._down_for(transfer)

    def _failure_of(self, transfer: Transfer) -> Failure | None:
        failure = self._links.failure(transfer.context)
        return failure if failure is not None and failure.ends(*transfer.tag) else None

    def _down_for(self, transfer: Transfer) -> LinkDown | None:
        entry = self._entries.get(transfer.context)
        closed = {} if entry is None else entry.closed
        among = transfer.among if transfer.peer is None else (transfer.peer,)
        found = [self._links.down(peer) or closed.get(peer) for peer in among]
        gone = [down for down in found if down is not None]
        crashed = next((error for error in gone if not error.left), None)
        return gone[-1] if gone and len(gone) == len(among) else crashed

    def _claim(self, source: int, key: Key, *, probes: bool = False) -> Transfer | None:
        entry = self._entries.get(key.context)
        if entry is None or key[1:] == ANY:
            return None
        for transfer in tuple(entry.posted):
            fits = (transfer.into is NOTHING) is probes and transfer.matches(source, key[1:])
            if fits and _remove(entry.posted, transfer):
                transfer.peer, transfer.tag = source, key[1:]
                return transfer
        return None

    def _take_arrival(self, transfer: Transfer) -> Arrival | None:
        entry = self._entries.get(transfer.context)
        if entry is None:
            return None
        for waiting in tuple(entry.arrivals):
            fits = transfer.matches(waiting.arrival.source, waiting.tag)
            if fits and (transfer.into is NOTHING or _remove(entry.arrivals, waiting)):
                transfer.peer, transfer.tag = waiting.arrival.source, waiting.tag
                return waiting.arrival
        return None

    def _end_posted(self, unwanted: Callable[[Transfer], bool], error: BaseException) -> None:
        ended: list[Transfer] = []
        with self.matching:
            for entry in list(self._entries.values()):
                hits = [transfer for transfer in tuple(entry.posted) if unwanted(transfer)]
                ended += [transfer for transfer in hits if _remove(entry.posted, transfer)]
        for transfer in ended:
            transfer.finish(error)


def _remove(queue: deque[T], item: T) -> bool:
    """Remove an item; return whether it was there."""
    try:
        queue.remove(item)
    except ValueError:
        return False
    return True


def deliver_copy(messages: AnyMessages, key: Key, arrival: Arrival) -> None:
    """Match a message whose memory belongs to the sender; copy it unless a receive takes it."""
    transfer = messages.claim(arrival.source, key)
    if transfer is not None:
        _fill(transfer, arrival)
    else:
        messages.deliver(key, arrival._replace(data=memoryview(bytes(arrival.data))))


def _fill(transfer: Transfer, arrival: Arrival) -> None:
    """Copy a message into the memory of its receive and complete it."""
    if not transfer.fits(arrival.data.nbytes, arrival.info):
        transfer.info = arrival.info
        transfer.finish(MessageMismatch(arrival.source, arrival.data.nbytes, arrival.info))
        return
    if transfer.into is not NOTHING:
        transfer.into[:] = arrival.data
    transfer.finish()
