"""Exchanges between neighbours: the links of a grid or graph, and the program of one rank.

A link is one message of an exchange. All ranks have the same table of links, so each rank knows
which of its messages its peer expects, and in which order. The sizes of the messages may differ.
If a rank's sizes are not those of the other ranks, the ranks compare them before the exchange.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from unisono.core.backends.blocks import mismatch
from unisono.core.base.types import DType, dtype_of_code
from unisono.core.engines import Call, Communicator, Exchange
from unisono.core.engines.api import fingerprint_of
from unisono.core.schedules import Buf, Op, Program
from unisono.core.schedules.ir import IntArray

Linked = tuple[Sequence[int], Sequence[int]]

_SENDER, _GIVEN, _RECEIVER, _TAKEN, _KIND = range(5)


class NeighborMessages:
    """The messages of an exchange; their table is the same on all ranks.

    The messages from one rank to another arrive in the order of the table.

    Args:
        table: int64 [n, 5]: sender, place among the sender's inputs, receiver, place among the
            receiver's outputs, kind. Ranks are those of the group. Messages of one kind usually
            have one size.
        text: The grid or graph, for errors.
        linked: The places in this rank's lists that have a neighbour: of the inputs, of the
            outputs.

    Attributes:
        text: As given.
        linked: As given.
        digest: Differs if the tables of two ranks differ.
    """

    def __init__(self, table: IntArray, text: str, linked: Linked) -> None:
        self.text = text
        self.linked = linked
        self.table = np.ascontiguousarray(table, np.int64).reshape(-1, 5)
        self.digest = hashlib.blake2b(self.table.tobytes(), digest_size=8).hexdigest()
        self._kinds = len(np.unique(self.table[:, _KIND]))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NeighborMessages) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def sent_by(self, rank: int) -> IntArray:
        """Return the rows of the messages that a rank sends, in the order of its inputs."""
        return self._rows(rank, _SENDER, _GIVEN)

    def received_by(self, rank: int) -> IntArray:
        """Return the rows of the messages that a rank receives, in the order of its outputs."""
        return self._rows(rank, _RECEIVER, _TAKEN)

    def _rows(self, rank: int, by: int, place: int) -> IntArray:
        rows: IntArray = self.table[self.table[:, by] == rank]
        order = np.argsort(rows[:, place])
        return np.take(rows, order, axis=0)

    def sizes_by_kind(self, rank: int, sizes: MessageSizes) -> dict[int, int] | None:
        """Return the size of each kind of message; None unless this rank's sizes show all."""
        seen: dict[int, int] = {}
        for rows, counts in (
            (self.sent_by(rank), sizes.sent),
            (self.received_by(rank), sizes.received),
        ):
            for kind, count in zip(rows[:, _KIND].tolist(), counts, strict=True):
                if seen.setdefault(kind, count) != count:
                    return None
        return seen if len(seen) == self._kinds else None


class MessageSizes(NamedTuple):
    """The sizes of a rank's messages.

    Attributes:
        links: The messages.
        code: Of the dtype (`base.types.code_of`); 0 on a rank without messages.
        sent: Elements of each input.
        received: Elements of each output.
    """

    links: NeighborMessages
    code: int
    sent: tuple[int, ...]
    received: tuple[int, ...]

    @property
    def even(self) -> bool:
        """Whether all messages have one size."""
        return len({*self.sent, *self.received}) <= 1


def neighbor_exchange(comm: Communicator, sizes: MessageSizes, dtype: DType) -> Exchange:
    """Return the program of an exchange, with the sizes to compare."""
    links, code, sent, received = sizes
    known = links.sizes_by_kind(comm.rank, sizes)
    word = 0 if known is None else fingerprint_of(dtype.name, sorted(known.items()))
    places = links.table[:, [_GIVEN, _TAKEN]].max(initial=-1) + 1
    mine = np.zeros((2, 1 + places), np.int64)
    mine[:, 0] = code
    mine[0, 1 : 1 + len(sent)] = sent
    mine[1, 1 : 1 + len(received)] = received
    program = Program(_steps(comm.rank, sizes), 0)
    return Exchange(word, mine.ravel(), partial(_check, comm, links), program)


def _steps(rank: int, sizes: MessageSizes) -> IntArray:
    """Return the steps of one rank: sends, copies to itself, receives."""
    begin_in = np.cumsum((0, *sizes.sent)).tolist()
    begin_out = np.cumsum((0, *sizes.received)).tolist()
    table = sizes.links.table
    sends, copies, receives = [], [], []
    for sender, given, receiver, taken, _ in table.tolist():
        source = (int(Buf.INPUT), begin_in[given]) if sender == rank else (-1, -1)
        target = (int(Buf.OUTPUT), begin_out[taken]) if receiver == rank else (-1, -1)
        if sender == receiver == rank:
            copies.append((Op.COPY, -1, *source, *target, sizes.sent[given], 0))
        elif sender == rank:
            sends.append((Op.SEND, receiver, *source, *target, sizes.sent[given], 0))
        elif receiver == rank:
            receives.append((Op.RECV, sender, *source, *target, sizes.received[taken], 0))
    steps = np.array([*sends, *copies, *receives], np.int64).reshape(-1, 8)
    # Both ranks drop a message without elements.
    steps = steps[steps[:, 6] > 0]
    steps.flags.writeable = False
    return steps


def _check(comm: Communicator, links: NeighborMessages, call: Call, table: IntArray) -> None:
    """Check that each rank sends what the receiver expects.

    Args:
        comm: The group.
        links: The messages.
        call: The call, for the error.
        table: [p, 2 + 2k]: for each rank the code of its dtype and the sizes of its inputs, then
            the same for its outputs.

    Raises:
        CollectiveMismatchError: Names the first pairs that disagree; equal on every rank.
    """
    sizes = table.reshape(comm.size, 2, -1)
    rows = links.table
    sent = sizes[rows[:, _SENDER], 0][np.arange(len(rows)), 1 + rows[:, _GIVEN]]
    taken = sizes[rows[:, _RECEIVER], 1][np.arange(len(rows)), 1 + rows[:, _TAKEN]]
    codes = sizes[:, 0, 0]
    differ = codes[rows[:, _SENDER]] != codes[rows[:, _RECEIVER]]
    wrong = np.flatnonzero((sent != taken) | differ)
    if wrong.size:
        pairs = [
            (a, f"{sent[i]} {_name(codes[a])}", b, f"{taken[i]} {_name(codes[b])}")
            for i in wrong.tolist()
            for a, b in [rows[i, [_SENDER, _RECEIVER]].tolist()]
        ]
        raise mismatch(
            comm, call, pairs, "what a rank sends to a neighbour must fit the neighbour's output"
        )


def _name(code: int) -> str:
    dtype = dtype_of_code(int(code))
    return "elements" if dtype is None else dtype.name
