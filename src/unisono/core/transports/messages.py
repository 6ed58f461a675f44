"""The address of a message, and how a message, a link or a context can end. Pure.

A transport reports these small records and exceptions. `engines.errors` words them for users.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from numbers import Integral
from typing import NamedTuple

from unisono.core.base.text import name_ranks

CLOSED = "it left: the group was closed"
"""Reason of a `LinkDown` of a rank that sent a good-bye, or has closed a group and may live on."""

ANY_TAG = -1
"""The tag of a receive or probe of any tag. It takes tags below 2**62; the library has the rest."""

PROC_NULL = -2
"""The rank of no process, as `DeviceMesh.shift` returns it where a dimension ends.

A message to or from it is done at once and moves nothing: a receive leaves its array unchanged, and
its source is `PROC_NULL`, its tag `ANY_TAG`, its size 0. So a program needs no case for the edges
of a grid. Source: MPI_PROC_NULL (MPI 4.1, 3.10).
"""


def is_proc_null(rank: object) -> bool:
    """Whether the rank of a message is `PROC_NULL`; it may be no number at all."""
    return isinstance(rank, Integral) and rank == PROC_NULL


Unreached = dict[int, list[str]]
"""By rank, the addresses at which it could not be reached, each with the reason."""


class Purpose(IntEnum):
    """The purpose of a message."""

    COLLECTIVE = 0
    P2P = 1
    ASK = 2
    ANSWER = 3
    FAIL = 4
    GOODBYE = 5
    LOST = 6
    KNOCK = 7
    CAUSE = 8


class Key(NamedTuple):
    """The address of a message inside a rank: group, purpose, and tag or sequence number."""

    context: int
    kind: Purpose
    tag: int


class Arrival(NamedTuple):
    """A message that came before its receive."""

    source: int
    data: memoryview
    info: int


@dataclass(frozen=True)
class MessageInfo:
    """A message that a probe has found.

    Attributes:
        source: Global rank of the sender.
        tag: Of the message.
        dtype: Name of the dtype; None for dtypes that move as bytes, such as records and texts.
        count: Number of elements, of bytes if the dtype is None.
        nbytes: Size in bytes.
    """

    source: int
    tag: int
    dtype: str | None
    count: int
    nbytes: int


class LastCall(NamedTuple):
    """A call that a rank has recorded.

    Attributes:
        call: As "all_reduce #40".
        runs: Whether it has not ended.
        age_s: Since its end, or since its start if it runs; None if it is unknown.
    """

    call: str
    runs: bool
    age_s: float | None = None


class CallStatus(NamedTuple):
    """The last call that a rank has begun, or the call that another rank asked for.

    Attributes:
        seq: Sequence number of the call; 0 before the first one.
        text: The call with its arguments.
        unreached: Ranks that this rank could not reach.
        place: Where the rank is in its program; "" if that was not asked for.
        recorded: The last recorded call of the group, and a call of another group that runs, as far
            as they were asked for.
        site: File and line of the caller of this call; "" if it is unknown or not asked for.
    """

    seq: int
    text: str
    unreached: Unreached = {}  # noqa: RUF012  never changed
    place: str = ""
    recorded: tuple[LastCall, ...] = ()
    site: str = ""


class Cancelled(Exception):
    """Status of a transfer that was cancelled."""


class LinkDown(Exception):
    """Status of a transfer with a rank that cannot be reached.

    Attributes:
        peer: The rank.
        reason: Why, as the end of a sentence.
        left: Whether the rank closed its transport, or was never linked to this rank. False if
            the rank vanished.
        peers: All ranks that were lost by the same event, such as those of a host.
    """

    def __init__(
        self, peer: int, reason: str, left: bool = False, peers: Iterable[int] = ()
    ) -> None:
        super().__init__(peer, reason, left)
        self.peer = peer
        self.reason = reason
        self.left = left
        self.peers = tuple(peers) or (peer,)


class MessageMismatch(Exception):
    """Status of a receive whose message has another size or another type word.

    Attributes:
        source: Sending rank.
        nbytes: Size of the message.
        info: Type word of the message.
    """

    def __init__(self, source: int, nbytes: int, info: int) -> None:
        super().__init__(source, nbytes, info)
        self.source = source
        self.nbytes = nbytes
        self.info = info


class Failure(Exception):
    """Why a context is broken; equal on all ranks that the failure reached.

    Attributes:
        kind: "timeout", "lost", "failed" (reported by the rank's program), "internal" (an error
            inside a call), "memory", "skipped" (ranks are in calls of different numbers) or
            "aborted".
        reason: The cause, as the end of a sentence.
        peers: Ranks to blame.
        by: The rank that detected the failure.
        table: Lines with the places of ranks, and which rank could not reach which other rank.
        after: The last call that `by` has finished. On other ranks it goes on, because `by` has
            sent all its data, and all ranks have entered it. The C++ engine counts runs of
            programs instead of calls.
    """

    def __init__(
        self,
        kind: str,
        reason: str,
        peers: Iterable[int],
        by: int,
        table: Iterable[str] = (),
        after: int = 0,
    ) -> None:
        super().__init__(kind, reason, tuple(peers), by, tuple(table), after)
        self.kind = kind
        self.reason = reason
        self.peers = tuple(peers)
        self.by = by
        self.table = tuple(table)
        self.after = after

    def found_by(self, rank: int, after: int = 0) -> Failure:
        """Return the same failure, as a rank reports it that has finished call `after`."""
        return Failure(self.kind, self.reason, self.peers, rank, self.table, after)

    def ends(self, kind: Purpose, number: int) -> bool:
        """Whether it ends the messages with this tag."""
        return kind is not Purpose.COLLECTIVE or number > self.after

    @property
    def words(self) -> list[object]:
        """The arguments from which another rank makes an equal failure."""
        return list(self.args)


def failure_of(error: LinkDown, by: int) -> Failure:
    """Return the failure of a call that needs a lost rank; rank `by` has detected it."""
    were = "was" if len(error.peers) == 1 else "were"
    reason = f"{name_ranks(error.peers)} {were} lost: {error.reason}"
    return Failure("lost", reason, error.peers, by)
