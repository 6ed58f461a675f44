"""From what a transport reports to the errors that users read.

Engines and point-to-point calls end here, so that the same event reads the same everywhere.
"""

from __future__ import annotations

import time
from typing import Any

from unisono.base.deadline import Deadline
from unisono.engines.api import Call, Communicator, name_ranks
from unisono.errors import (
    CollectiveAbortedError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    InternalError,
    PeerFailedError,
    PeerLostError,
    UnisonoError,
)
from unisono.transports import LinkDown
from unisono.transports.api import Question
from unisono.transports.messages import CallStatus, Failure, Unreached

__all__ = [
    "LATE_S",
    "Expired",
    "already_broken_error",
    "break_group",
    "broken_group_error",
    "mismatch_error",
    "to_failure",
]

LATE_S = 2.0
"""How long before its deadline a call that still waits asks the others how far they are.

A busy but healthy process must answer within it, or it is blamed for nothing: it may have to accept
a connection first, on a machine with more processes than cores, or on one that stands still.
"""

# How long the others have at least, for a time-out may be shorter than that.
_ANSWER_S = 0.45

# How much of that is after the deadline in any case: where they are by then, they say again.
_GRACE_S = 0.1

_CLASSES: dict[str, type[UnisonoError]] = {
    "timeout": CollectiveTimeoutError,
    "lost": PeerLostError,
    "failed": PeerFailedError,
    "memory": PeerFailedError,
    "aborted": CollectiveAbortedError,
}

_HINTS = {
    "timeout": "see what those ranks do (py-spy dump); give a longer timeout if they are only slow",
    "lost": "look at the end of that rank's own log: it died, or left the group early",
    "memory": "see what the processes of that rank's host use, and what its container may use",
}


class Expired(Exception):
    """A wait inside a collective reached the deadline of the call.

    Args:
        asked: The question that was put to the others when the deadline came near.
    """

    def __init__(self, asked: Question | None = None) -> None:
        super().__init__()
        self.asked = asked


def to_failure(error: BaseException, comm: Communicator, call: Call, deadline: Deadline) -> Failure:
    """Return what broke a collective, in words for all ranks."""
    me = comm.transport.rank
    if isinstance(error, Failure):
        return error
    if isinstance(error, LinkDown):
        reason = f"{name_ranks([error.peer])} was lost: {error.reason}"
        return Failure("lost", reason, [error.peer], me, _table_of_lost(error.peer, comm, call))
    if isinstance(error, Expired):
        return _who_is_late(comm, call, deadline, error.asked)
    reason = f"{type(error).__name__} on rank {me}: {error}"
    return Failure("memory" if isinstance(error, MemoryError) else "failed", reason, [me], me)


def _who_is_late(
    comm: Communicator, call: Call, deadline: Deadline, asked: Question | None
) -> Failure:
    """Ask every other rank how far it is; blame those that are behind or silent.

    An earlier answer says where a rank was. If it was not in the call it may have come since; if it
    was, or has left, then it is blamed only if nobody else is.
    """
    transport = comm.transport
    waited_s = 0.0 if asked is None else time.monotonic() - asked.asked_s
    grace = Deadline(max(_GRACE_S, _ANSWER_S - waited_s))
    now = transport.ask(comm.context, call.seq, comm.others, grace)
    before, ago = {}, ""
    if asked is not None:
        transport.close_question(asked)
        before = {rank: status for rank, status in asked.answers.items() if rank not in now}
        ago = f"{time.monotonic() - asked.asked_s:.1f} s ago"
    if (known := transport.failure(comm.context)) is not None:
        # Somebody else found out while we asked; one story is better than two.
        return known
    behind = sorted(rank for rank, status in now.items() if status.seq < call.seq)
    quiet = [rank for rank in comm.others if rank not in now]
    gone = [rank for rank in quiet if transport.mailbox.down(rank) is not None]
    came = sorted(rank for rank in before.keys() - set(gone) if before[rank].seq >= call.seq)
    missed = sorted(before.keys() - {*gone, *came})
    silent = [rank for rank in quiet if rank not in before and rank not in gone]
    if behind or missed or silent:
        # Whom they wait for, too.
        came = gone = []
    said = [
        (behind, "never entered it"),
        (missed, f"had not entered it {ago} and did not answer again"),
        (came, "entered it but did not answer again"),
        (gone, "left or died"),
        (silent, "did not answer"),
    ]
    reasons = [f"{name_ranks(ranks)} {what}" for ranks, what in said if ranks]
    told = ", ".join(reasons) or "every rank entered it, but the data did not arrive in time"
    reason = f"timed out after {deadline}: {told}"
    blamed = sorted(behind + missed + came + gone + silent)
    table = _table(transport.rank, transport.unreached(), before | now) if quiet else []
    return Failure("timeout", reason, blamed, transport.rank, table)


def _table_of_lost(peer: int, comm: Communicator, call: Call) -> list[str]:
    """Return who could not reach whom, if that is why a rank is lost."""
    transport = comm.transport
    if peer not in (mine := transport.unreached()):
        return []
    others = [rank for rank in comm.others if rank != peer]
    answers = transport.ask(comm.context, call.seq, others, Deadline(_GRACE_S))
    return _table(transport.rank, mine, answers)


def _table(me: int, mine: Unreached, answers: dict[int, CallStatus]) -> list[str]:
    """Return a line for each rank that could not reach another one at some address, and why."""
    told = {me: mine} | {rank: status.unreached for rank, status in answers.items()}
    return [
        f"rank {rank} -> rank {peer} at {row}"
        for rank, unreached in sorted(told.items())
        for peer, rows in sorted(unreached.items())
        for row in rows
    ]


def break_group(comm: Communicator, failure: Failure) -> None:
    """Tell every member, and fail whatever of this group runs or waits here."""
    comm.transport.fail(comm.context, failure, comm.others)


def broken_group_error(
    failure: Failure,
    comm: Communicator,
    what: str,
    seq: int | None = None,
    nbytes: int | None = None,
) -> UnisonoError:
    """Return the error of the call that broke a group, or during which it broke."""
    me = comm.transport.rank
    found = "" if failure.by == me else f" (found by rank {failure.by})"
    number = "" if seq is None else f" #{seq}"
    what_where = f"{what}{number} in group '{comm.name}'"
    on = f"on {comm.here}"
    if failure.kind == "timeout":
        head, _, tail = failure.reason.partition(": ")
        text = f"{what_where} {head} {on}: {tail}{found}"
    else:
        verb = "was aborted" if failure.kind == "aborted" else "failed"
        text = f"{what_where} {verb} {on}: {failure.reason}{found}"
    if failure.table:
        text = "\n    ".join([text, "who could not reach whom:", *failure.table])
    return _of_class(failure, comm, text, op=what, seq=seq, nbytes=nbytes)


def already_broken_error(failure: Failure, comm: Communicator, what: str) -> UnisonoError:
    """Return the error of a call on a group that broke before."""
    text = (
        f"{what} in group '{comm.name}' cannot run on {comm.here}: the group is "
        f"broken: {failure.reason}"
    )
    return _of_class(failure, comm, text, op=what)


def _of_class(failure: Failure, comm: Communicator, text: str, **where: Any) -> UnisonoError:
    ours = failure.kind in ("failed", "memory") and failure.by == comm.transport.rank
    cls = InternalError if ours else _CLASSES[failure.kind]
    context = comm.where(peers=failure.peers, usable=False, **where)
    return cls(text, context=context, hint=_HINTS.get(failure.kind))


def mismatch_error(
    comm: Communicator, call: Call, answers: dict[int, CallStatus]
) -> CollectiveMismatchError:
    """Return the error of ranks that made different calls: every variant with its ranks."""
    me = comm.transport.rank
    variants: dict[str, list[int]] = {call.text: [me]}
    for rank, status in sorted(answers.items()):
        text = status.text if status.seq == call.seq else f"call #{status.seq}: {status.text}"
        variants.setdefault(text, []).append(rank)
    if silent := [rank for rank in comm.others if rank not in answers]:
        variants["(no answer)"] = silent
    told = [f"{name_ranks(sorted(ranks))} called {text}" for text, ranks in variants.items()]
    text = (
        f"{call.op} #{call.seq} in group '{comm.name}' does not match on {comm.here}: "
        f"{'; '.join(told)}"
    )
    others = tuple(sorted(rank for ranks in list(variants.values())[1:] for rank in ranks))
    return CollectiveMismatchError(
        text,
        context=comm.where(op=call.op, seq=call.seq, peers=others, nbytes=call.nbytes, usable=True),
        hint="all ranks must make the same calls in the same order; nothing was sent or changed",
    )
