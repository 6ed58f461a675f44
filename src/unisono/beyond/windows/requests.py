"""Requests to parts of a window that are not in this host's memory, and the answers.

A request is one message of the group. The thread that receives the messages of the target handles
it, so the target makes no call. The requests of a rank to another are handled in their order: a
signal comes after what was put before it.
"""

from __future__ import annotations

import itertools
import struct
from collections import Counter
from enum import IntEnum
from functools import partial
from typing import Any

import numpy as np

from unisono.beyond.windows.part import Elements
from unisono.core.base.buffers import as_bytes
from unisono.core.base.deadline import Deadline
from unisono.core.engines import Communicator
from unisono.core.transports import Key, Transfer
from unisono.core.transports.messages import Failure, LinkDown, Purpose
from unisono.core.transports.transfers import ANYTHING
from unisono.errors import UsageError

CLOSED = "it closed the window"
"""Reason of the `LinkDown` of a rank that has closed its part."""

# kind, reduce op, number of the answer (0: none), offset, count. 32 bytes, so that the elements
# behind them are aligned.
_HEAD = struct.Struct("<iiQqq")

# Elements of one message. More memory on both sides for larger ones, more messages for smaller.
_PART_BYTES = 4 << 20

# A target that handles requests slowly must not fill its memory with those of this rank.
_MOST_BYTES = 32 << 20

# Tags of the library that objects (from 2**62 + 2**61) do not use. A window has 2**32 of them.
_FIRST_TAG = 1 << 62
_TAGS = 1 << 32


class Kind(IntEnum):
    """What a request asks for."""

    PUT = 0
    GET = 1
    APPLY = 2
    SWAP = 3
    SIGNAL = 4
    FLUSH = 5
    CLOSE = 6


class Requests:
    """This rank's end of the requests of one window.

    Args:
        comm: The group.
        number: Of the window in its group; the same on all ranks.
        part: This rank's part.
        data: [count] its elements.
        peers: The ranks in the group that this rank exchanges requests with.

    Attributes:
        ended: By rank in the group, why no request comes from it any more.
    """

    def __init__(
        self, comm: Communicator, number: int, part: Any, data: Elements, peers: list[int]
    ) -> None:
        self.ended: dict[int, BaseException] = {}
        self._comm, self._part, self._data, self._peers = comm, part, data, peers
        self._tag = _FIRST_TAG + number * _TAGS
        # By rank: the next number of a request, the last number up to which all are handled, and
        # the bytes since. C calls count, so that threads and signal handlers share no number.
        self._numbers = {peer: itertools.count(1) for peer in peers}
        self._handled: Counter[int] = Counter()
        self._unanswered: Counter[int] = Counter()
        self._receives: dict[int, Transfer] = {}
        self._answers: dict[int, set[Transfer]] = {peer: set() for peer in peers}
        self._is_closed = False
        for peer in peers:
            self._listen(peer)

    # ---- this rank asks -------------------------------------------------------------------

    def send(
        self,
        rank: int,
        kind: Kind,
        deadline: Deadline,
        offset: int = 0,
        data: Any = (),
        op: int = 0,
    ) -> None:
        """Send a request that is not answered; the elements may be changed again.

        Raises:
            BaseException: See `ask`; if the target has much to handle already.
        """
        data = np.asarray(data, self._data.dtype)
        step = max(1, _PART_BYTES // self._data.itemsize)
        for at in range(0, max(data.size, 1), step):
            part = data[at : at + step]
            self._post(rank, kind, op, 0, offset + at, part.size, part)
            next(self._numbers[rank])  # afterwards: an answer to a lower number says nothing of it
            self._unanswered[rank] += _HEAD.size + part.nbytes
            if self._unanswered[rank] > _MOST_BYTES:
                self.flush(rank, deadline)

    def flush(self, rank: int, deadline: Deadline) -> None:
        """Wait until a rank has handled all requests of this rank; see `ask`."""
        if not self.has_handled(rank):
            self.ask(rank, Kind.FLUSH, deadline, self._data[:0].copy())

    def late(self) -> set[int]:
        """Return the ranks that may not have handled all requests of this rank."""
        return {peer for peer in self._peers if not self.has_handled(peer)}

    def has_handled(self, rank: int) -> bool:
        """Return whether an answer has told that a rank has handled all requests of this rank."""
        number = next(self._numbers[rank])
        if number != self._handled[rank] + 1:
            return False
        self._handled[rank] = number
        return True

    def ask(
        self,
        rank: int,
        kind: Kind,
        deadline: Deadline,
        answer: Elements,
        offset: int = 0,
        data: Any = (),
        op: int = 0,
    ) -> None:
        """Send a request and wait for the answer, which fills `answer`.

        Raises:
            Cancelled: It did not come in time.
            LinkDown, Failure, ClosedError: It cannot come any more.
        """
        transport = self._comm.transport
        if not transport.may_wait():
            raise UsageError(
                f"{kind.name.lower()} of a window waits for the thread it runs on",
                hint="in a callback of a future, use a thread of your own",
            )
        sent = next(self._numbers[rank])
        number = sent % _TAGS or 1
        key = Key(self._comm.context, Purpose.P2P, self._tag + number)
        transfer = transport.recv(self._comm.ranks[rank], key, as_bytes(answer))
        self._answers[rank].add(transfer)
        try:
            data = np.asarray(data, self._data.dtype)
            self._post(rank, kind, op, number, offset, answer.size, data)
            arrived = transfer.wait_until(deadline)
        except BaseException:
            transport.cancel(transfer)
            raise
        finally:
            self._answers[rank].discard(transfer)
        if not arrived:
            transport.cancel(transfer)
        if transfer.error is not None:
            raise self.ended.get(rank, transfer.error)
        self._handled[rank], self._unanswered[rank] = sent, 0

    def _post(
        self,
        rank: int,
        kind: Kind,
        op: int,
        number: int,
        offset: int,
        count: int,
        data: Elements,
    ) -> None:
        if (end := self.ended.get(rank)) is not None:
            raise end
        body = np.empty(_HEAD.size + data.nbytes, np.uint8)
        _HEAD.pack_into(body.data, 0, kind, op, number, offset, count)
        body[_HEAD.size :] = data.view(np.uint8)
        self._transmit(rank, 0, body.data)

    def _transmit(self, rank: int, number: int, data: memoryview) -> None:
        comm = self._comm
        key = Key(comm.context, Purpose.P2P, self._tag + number)
        transfer = comm.transport.send(comm.ranks[rank], key, data)
        if transfer.done() and transfer.error is not None:
            self.ended.setdefault(rank, transfer.error)

    # ---- other ranks ask ------------------------------------------------------------------

    def _listen(self, rank: int) -> None:
        """Handle the requests of a rank that have come, and the later ones when they come."""
        comm = self._comm
        key = Key(comm.context, Purpose.P2P, self._tag)
        while rank not in self.ended and not self._is_closed:
            transfer = comm.transport.recv(comm.ranks[rank], key, ANYTHING)
            self._receives[rank] = transfer
            if not transfer.done():
                transfer.add_callback(partial(self._arrived, rank))
                if not transfer.done():
                    transfer.watch()
                return
            self._take(rank, transfer)

    def _arrived(self, rank: int, transfer: Transfer) -> None:
        self._take(rank, transfer)
        self._listen(rank)

    def _take(self, rank: int, transfer: Transfer) -> None:
        if transfer.error is not None:
            # The transport ends the answers of this rank, too.
            self.ended.setdefault(rank, transfer.error)
            return
        try:
            self._handle(rank, np.frombuffer(transfer.into, np.uint8))
        except Exception as error:
            # Not silent: the rank that has asked may wait for the answer.
            comm, me = self._comm, self._comm.transport.rank
            reason = f"a request of rank {comm.ranks[rank]} to a window of rank {me}: {error!r}"
            comm.transport.fail(
                comm.context, Failure("internal", reason, [comm.ranks[rank]], me), comm.others
            )

    def _handle(self, rank: int, body: Elements) -> None:
        kind, op, number, offset, count = _HEAD.unpack_from(body.data)
        part, data = self._part, body[_HEAD.size :].view(self._data.dtype)
        done, answer = True, data[:0]
        if kind == Kind.PUT:
            done = part.put(data, offset)
        elif kind == Kind.GET:
            answer = self._data[offset : offset + count]
            done = answer.size == count
        elif kind == Kind.APPLY:
            answer = np.empty(data.size if number else 0, data.dtype)
            done = part.apply(data, answer if number else None, offset, op)
        elif kind == Kind.SWAP:
            answer = data[:1].copy()
            done = part.compare_and_swap(answer, data[1:], offset)
        elif kind == Kind.SIGNAL:
            part.signal(rank)
        elif kind == Kind.CLOSE:
            end = LinkDown(self._comm.ranks[rank], CLOSED, left=True)
            self.ended.setdefault(rank, end)
            for transfer in list(self._answers[rank]):
                self._comm.transport.cancel(transfer)
        if part.is_closed():
            return  # what was asked for may not be done, and the other rank learns of the end
        if not done:
            raise ValueError(f"{count} elements at {offset} of {self._data.size}")
        if number:
            self._transmit(rank, number, as_bytes(answer))

    def close(self) -> None:
        """Tell the other ranks that this part takes no more requests, and take none."""
        self._is_closed = True
        for rank in self._peers:
            if rank not in self.ended:
                self._post(rank, Kind.CLOSE, 0, 0, 0, 0, self._data[:0])
        for transfer in self._receives.values():
            self._comm.transport.cancel(transfer)
