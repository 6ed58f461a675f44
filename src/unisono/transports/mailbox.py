"""Match messages to receives: posted receives and unexpected messages.

The k-th message from a rank under a key meets the k-th receive for that rank and key. A receive
from any source or of any tag takes the oldest message that it may take. A probe takes no message.

Theory of operation: for one key and source, either receives wait or messages wait, never both.
A message that finds a posted receive is written straight into the receiver's memory. A message
that finds none is kept in memory of its own.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from unisono.transports.messages import Arrival, Failure, Key, LinkDown, MessageMismatch
from unisono.transports.transfers import NOTHING, Messages, Tag, Transfer


class _Entry:
    """The receives and the messages that wait in one context, both in order."""

    __slots__ = ("arrivals", "posted")

    def __init__(self) -> None:
        self.posted: deque[Transfer] = deque()
        self.arrivals: deque[tuple[Tag, Arrival]] = deque()


class Mailbox:
    """Posted receives and unexpected messages of one rank; safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[int, _Entry] = {}
        self._down: dict[int, LinkDown] = {}
        self._failed: dict[int, Failure] = {}
        self._closed: BaseException | None = None
        # If set, it carries all messages, and gets all calls that end them.
        self.messages: Messages | None = None

    def post(self, transfer: Transfer) -> None:
        """Queue a receive, or complete it with a message that has arrived already."""
        with self._lock:
            arrival = self._take_arrival(transfer)
            if arrival is None:
                failed = self._failure_for(transfer.context, transfer.tag)
                error = self._closed or failed or self._down_for(transfer)
                if error is None:
                    self._entries.setdefault(transfer.context, _Entry()).posted.append(transfer)
                    return
        if arrival is None:
            transfer.finish(error)
        else:
            _fill(transfer, arrival)

    def deliver(self, source: int, context: int, tag: Tag, data: memoryview, info: int) -> None:
        """Match a complete message; copies `data` unless a receive takes it at once."""
        transfer = self.claim(source, context, tag)
        if transfer is not None:
            _fill(transfer, Arrival(source, data, info))
        else:
            self.keep(context, tag, Arrival(source, memoryview(bytes(data)), info))

    def claim(self, source: int, context: int, tag: Tag) -> Transfer | None:
        """Remove and return the receive of the next message from `source`, or None."""
        with self._lock:
            return self._claim(source, context, tag)

    def keep(self, context: int, tag: Tag, arrival: Arrival) -> None:
        """Store a message that found no receive; no other code may change its data.

        A receive that was posted after `claim` returned None takes the message at once.
        """
        if self.messages is not None:
            self.messages.deliver(context, *tag, arrival)
            return
        with self._lock:
            transfer = self._claim(arrival.source, context, tag)
            ended = [] if transfer is None else [transfer]
            is_open = self._closed is None and self._failure_for(context, tag) is None
            if transfer is None and is_open:
                while (probe := self._claim(arrival.source, context, tag, probes=True)) is not None:
                    ended.append(probe)
                self._entries.setdefault(context, _Entry()).arrivals.append((tag, arrival))
        for each in ended:
            _fill(each, arrival)

    def has_receive(self, peer: int, key: Key) -> bool:
        """Whether a receive from this rank waits."""
        if self.messages is not None:
            return self.messages.has_receive(peer, key)
        with self._lock:
            entry = self._entries.get(key.context)
            return entry is not None and any(
                each.peer == peer and each.into is not NOTHING and each.matches(peer, key[1:])
                for each in entry.posted
            )

    def cancel(self, transfer: Transfer) -> bool:
        """Remove a posted receive; return False if a message has matched it already."""
        with self._lock:
            entry = self._entries.get(transfer.context)
            if entry is None or transfer not in entry.posted:
                return False
            entry.posted.remove(transfer)
            self._drop_if_empty(transfer.context, entry)
        return True

    def link_down(self, error: LinkDown) -> None:
        """End every receive that waits for this rank with `error`, now and later.

        A receive from any source ends as well if the rank crashed, because its sender may be the
        crashed rank. An error is better than a wait that may never end. Ranks that left end such a
        receive only when no rank is left that could send.
        """
        with self._lock:
            self._down[error.peer] = error
            failed = self._take_posted(
                lambda t: (
                    error.peer in ((t.peer,) if t.peer is not None else t.among)
                    and self._down_for(t) is not None
                )
            )
        for transfer in failed:
            transfer.finish(error)
        if self.messages is not None:
            self.messages.peer_down(error)

    def fail_context(self, context: int, error: Failure) -> None:
        """End the receives of one context that `error` ends, now and later.

        Messages that have come are kept: a receive that is posted later takes them.
        """
        with self._lock:
            known = self._failed.get(context)
            # Two threads may report two failures, in either order.
            if known is None or error.after < known.after:
                self._failed[context] = error
            failed = self._take_posted(
                lambda each: self._failure_for(each.context, each.tag) is not None
            )
        for transfer in failed:
            transfer.finish(error)
        if self.messages is not None:
            self.messages.fail(context, error)

    def forget_context(self, context: int, error: BaseException) -> None:
        """Release everything that a destroyed context holds; `error` ends its receives."""
        with self._lock:
            self._failed.pop(context, None)
            failed = self._clear_context(context)
        for transfer in failed:
            transfer.finish(error)
        if self.messages is not None:
            self.messages.forget(context, error)

    def close(self, error: BaseException) -> None:
        """End every receive, now and later, and drop all messages."""
        with self._lock:
            self._closed = error
            failed = self._take_posted(lambda transfer: True)
            self._entries.clear()
        for transfer in failed:
            transfer.finish(error)
        if self.messages is not None:
            self.messages.close()

    def down(self, peer: int) -> LinkDown | None:
        """Return why there is no link to `peer`, or None."""
        return self._down.get(peer)

    def _failure_for(self, context: int, tag: Tag) -> Failure | None:
        failure = self._failed.get(context)
        return failure if failure is not None and failure.ends(*tag) else None

    def _down_for(self, transfer: Transfer) -> LinkDown | None:
        if transfer.peer is not None:
            return self._down.get(transfer.peer)
        if not self._down:
            return None
        gone = [self._down[peer] for peer in transfer.among if peer in self._down]
        crashed = next((error for error in gone if not error.left), None)
        return gone[-1] if gone and len(gone) == len(transfer.among) else crashed

    def _claim(
        self, source: int, context: int, tag: Tag, *, probes: bool = False
    ) -> Transfer | None:
        entry = self._entries.get(context)
        if entry is None:
            return None
        for transfer in entry.posted:
            if (transfer.into is NOTHING) is probes and transfer.matches(source, tag):
                entry.posted.remove(transfer)
                self._drop_if_empty(context, entry)
                transfer.peer, transfer.tag = source, tag
                return transfer
        return None

    def _take_arrival(self, transfer: Transfer) -> Arrival | None:
        entry = self._entries.get(transfer.context)
        if entry is None:
            return None
        for at, (tag, arrival) in enumerate(entry.arrivals):
            if transfer.matches(arrival.source, tag):
                if transfer.into is not NOTHING:
                    # Not remove(), because it compares values, that is, the bytes of messages.
                    del entry.arrivals[at]
                    self._drop_if_empty(transfer.context, entry)
                transfer.peer, transfer.tag = arrival.source, tag
                return arrival
        return None

    def _take_posted(self, wanted: Callable[[Transfer], bool]) -> list[Transfer]:
        taken: list[Transfer] = []
        for context, entry in list(self._entries.items()):
            hits = [transfer for transfer in entry.posted if wanted(transfer)]
            if hits:
                entry.posted = deque(t for t in entry.posted if not wanted(t))
                self._drop_if_empty(context, entry)
                taken += hits
        return taken

    def _clear_context(self, context: int) -> list[Transfer]:
        failed = self._take_posted(lambda transfer: transfer.context == context)
        self._entries.pop(context, None)
        return failed

    def _drop_if_empty(self, context: int, entry: _Entry) -> None:
        if not entry.posted and not entry.arrivals:
            self._entries.pop(context, None)


def _fill(transfer: Transfer, arrival: Arrival) -> None:
    """Copy a message into the memory of its receive and complete it."""
    if not transfer.fits(arrival.data.nbytes, arrival.info):
        transfer.finish(MessageMismatch(arrival.source, arrival.data.nbytes, arrival.info))
        return
    if transfer.into is not NOTHING:
        transfer.into[:] = arrival.data
    transfer.finish()
