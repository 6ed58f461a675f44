"""The translator from a status to the error that a user reads.

A status comes from a transport, from the C++ engine or from the C++ messages. The
statuses of collectives, sends and receives are worded only here, so an event has one text.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from unisono.core.base.deadline import Deadline
from unisono.core.base.grouping import grouped
from unisono.core.base.net.silence import HOST_FAILED
from unisono.core.base.seam import cpp as _engine
from unisono.core.base.text import by_rank, name_ranks
from unisono.core.base.types import dtype_of_code
from unisono.core.engines.api import REFUSED, Call, Communicator
from unisono.core.engines.places import called_at, places_of
from unisono.core.transports import Cancelled, LinkDown, MessageMismatch
from unisono.core.transports.control import Question
from unisono.core.transports.messages import ANY_TAG, CLOSED, CallStatus, Failure, Unreached
from unisono.errors import (
    ClosedError,
    CollectiveAbortedError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    Context,
    InternalError,
    PeerFailedError,
    PeerLostError,
    UnisonoError,
    UnsupportedError,
    UsageError,
)

LATE_S = 2.0
"""How long before its deadline a waiting call asks the other ranks for their last call.

A busy but healthy process must answer within this time, or it is blamed. It may have to accept a
connection first, on a machine with more processes than cores.
"""

# The least time that the other ranks have for an answer; a time-out may be shorter than LATE_S.
_ANSWER_S = 0.45

# The part of that time that always lies after the deadline. The ranks are asked again then.
_GRACE_S = 0.1

_CLASSES: dict[str, type[UnisonoError]] = {
    "timeout": CollectiveTimeoutError,
    "lost": PeerLostError,
    "failed": PeerFailedError,
    "internal": PeerFailedError,
    "memory": PeerFailedError,
    "aborted": CollectiveAbortedError,
    "skipped": CollectiveMismatchError,
}
# On the rank to blame. The program of a "failed" rank has raised an error and reported it.
_OWN = _CLASSES | {
    "failed": CollectiveAbortedError,
    "internal": InternalError,
    "memory": InternalError,
}

_TABLE_HEAD = "failed connections:"

_HINTS = {
    "timeout": "see what those ranks do (unisono stacks); give a longer timeout if they are only "
    "slow",
    "lost": "look at the end of that rank's own log: it died, or left the group early",
    "unreached": "unless that rank has ended (see its log), its address or port is closed to the "
    "others: check with unisono doctor, and see UNISONO_HOST, UNISONO_PORTS and UNISONO_PUBLISH",
    "skipped": "a rank has left out a call, and no later call can match; make a new group",
    "host": "see whether that host runs and its network is up (unisono doctor)",
    "memory": "see what the processes of that rank's host use, and what its container may use",
}

# Codes of the C++ engine for a rank that takes no part any more.
_GONE = {"LOST": "its process ended", "LEFT": CLOSED, "UNREACHABLE": "it cannot be reached"}


class DeadlinePassed(Exception):
    """A wait inside a collective reached the deadline of the call.

    Args:
        asked: The question that was sent to the other ranks when the deadline came near.
        note: More for the caller to know if all ranks were in the call; part of the first line.
    """

    def __init__(self, asked: Question | None = None, note: str = "") -> None:
        super().__init__()
        self.asked = asked
        self.note = note


def nested_call_error(comm: Communicator, op: str) -> UsageError:
    """Return the error of a call by a thread that is inside a call of the group; names that call.

    Args:
        comm: The group.
        op: The second call.
    """
    records = [] if comm.trace is None else comm.trace.records(only_open=True)
    outer = next((each for each in records if not each.is_message), None)
    under_way = "a call"
    if outer is not None:
        at = f" at {outer.file}:{outer.line}" if outer.file else ""
        under_way = f"{outer.op} #{outer.seq}{at}"
    error = UsageError(
        f"{op} on group '{comm.name}' cannot begin: this thread is inside {under_way}, and would "
        "wait for itself",
        context=Context(rank=comm.transport.rank, group=comm.name, op=op, usable=True),
        hint="a signal handler may run inside a call. Set a flag there, and call the group when "
        "that call has ended; abort() works in a handler",
    )
    error.misplaced = True
    return error


# ---- from a code of the C++ engine to a status ------------------------------------------------


def takes_no_part(code: int) -> bool:
    """Whether a code of the C++ engine means that a rank is gone, or has aborted the group."""
    return _why_gone(code) is not None or code == _engine.ABORTED


def _why_gone(code: int) -> str | None:
    return next((why for name, why in _GONE.items() if getattr(_engine, name) == code), None)


def status_of_code(
    comm: Communicator,
    call: Call,
    code: int,
    peer: int,
    *,
    asked: Question | None,
    shares_memory: bool,
) -> Exception:
    """Return the exception that the reference engine would raise in place of this code.

    Args:
        comm: The group.
        call: The call that ended.
        code: Not OK, MISMATCH or UNEVEN, which are no failures of the group.
        peer: The rank in the group that the code is about.
        asked: The question that was sent to the other ranks when the deadline came near.
        shares_memory: Whether the ranks share memory.
    """
    transport = comm.transport
    if (gone := _why_gone(code)) is not None:
        rank, left = comm.ranks[peer], code == _engine.LEFT
        down = transport.down(rank)
        if down is not None and down.left and code == _engine.LOST and shares_memory:
            # Without a link to it, the transport takes a rank that was killed for one that left.
            down = None
        return down or LinkDown(rank, gone, left=left)
    if code == _engine.TIMEOUT:
        return DeadlinePassed(asked)
    known = transport.failure(comm.context)
    if code == _engine.ABORTED:
        blamed = comm.ranks[peer]
        return known or Failure("aborted", "it aborted the group", [blamed], blamed)
    # A group on MPI takes no call after one that did not end.
    if code == _engine.CLOSED and known is not None:
        return known
    if code == _engine.NO_MEMORY:
        return MemoryError(f"{call.text} needs more than there is")
    return InternalError(f"the native engine ended with status {code}, peer {peer}")


# ---- from a status to a failure, for all ranks ------------------------------------------------


def to_failure(error: BaseException, comm: Communicator, call: Call, deadline: Deadline) -> Failure:
    """Return the failure that broke a collective, worded for all ranks."""
    me = comm.transport.rank
    if isinstance(error, Failure):
        return error
    if isinstance(error, LinkDown):
        cause = comm.transport.explain(error, comm.made_s, comm.ranks)
        table = cause.table or _table_of_lost(error.peer, comm, call)
        return Failure(cause.kind, cause.reason, cause.peers, me, table)
    if isinstance(error, DeadlinePassed):
        return _time_out(comm, call, deadline, error)
    reason = f"{type(error).__name__} on rank {me}: {error}"
    return Failure("memory" if isinstance(error, MemoryError) else "internal", reason, [me], me)


def _time_out(
    comm: Communicator, call: Call, deadline: Deadline, expired: DeadlinePassed
) -> Failure:
    """Ask every other rank for its last call; blame the ranks that are behind or silent.

    An earlier answer counts for a rank that does not answer again. If this rank was not in the
    call then, it may have entered it since. If it was in the call, or has left, it is blamed only
    if no other rank is.
    """
    transport, asked = comm.transport, expired.asked
    waited_s = 0.0 if asked is None else time.monotonic() - asked.asked_s
    grace = Deadline(max(_GRACE_S, _ANSWER_S - waited_s))
    now = transport.ask(comm.context, call.seq, comm.others, grace, places=True)
    before, ago = {}, ""
    if asked is not None:
        transport.close_question(asked)
        before = {rank: status for rank, status in asked.answers.items() if rank not in now}
        ago = f"{time.monotonic() - asked.asked_s:.1f} s ago"
    if (known := transport.failure(comm.context)) is not None:
        # Another rank has reported a failure meanwhile. All ranks must report the same failure.
        return known
    behind = sorted(rank for rank, status in now.items() if status.seq < call.seq)
    quiet = [rank for rank in comm.others if rank not in now]
    gone = [rank for rank in quiet if transport.down(rank) is not None]
    came = sorted(rank for rank in before.keys() - set(gone) if before[rank].seq >= call.seq)
    missed = sorted(before.keys() - {*gone, *came})
    silent = [rank for rank in quiet if rank not in before and rank not in gone]
    if behind or missed or silent:
        # These ranks wait for the others, too.
        came = gone = []
    groups = [
        (behind, "never entered it"),
        (missed, f"had not entered it {ago} and did not answer again"),
        (came, "entered it but did not answer again"),
        (gone, "left or died"),
        (silent, "did not answer"),
    ]
    reasons = [f"{name_ranks(ranks)} {what}" for ranks, what in groups if ranks]
    details = ", ".join(reasons) or "every rank entered it, but the data did not arrive in time"
    if not reasons and (ahead := sorted(rank for rank in now if now[rank].seq > call.seq)):
        numbers = sorted({now[rank].seq for rank in ahead})
        details += f"; {name_ranks(ahead)} made call {', '.join(f'#{n}' for n in numbers)} already"
    details += expired.note
    reason = f"timed out after {deadline}: {details}"
    blamed = sorted(behind + missed + came + gone + silent)
    lines = places_of(comm, blamed or comm.others, before | now, call.seq)
    if quiet:
        lines += _table(transport.rank, transport.unreached(), before | now)
    return Failure("timeout", reason, blamed, transport.rank, lines)


def _table_of_lost(peer: int, comm: Communicator, call: Call) -> list[str]:
    """Return the links that could not be made, if a rank is lost because of that."""
    transport = comm.transport
    if peer not in (mine := transport.unreached()):
        return []
    others = [rank for rank in comm.others if rank != peer]
    answers = transport.ask(comm.context, call.seq, others, Deadline(_GRACE_S))
    return _table(transport.rank, mine, answers)


def _table(me: int, mine: Unreached, answers: dict[int, CallStatus]) -> list[str]:
    """Return a line with the reason for each address at which a rank could not reach a rank."""
    rows_of = {me: mine} | {rank: status.unreached for rank, status in answers.items()}
    lines = [
        f"rank {rank} -> rank {peer} at {row}"
        for rank, unreached in sorted(rows_of.items())
        for peer, rows in sorted(unreached.items())
        for row in rows
    ]
    return [_TABLE_HEAD, *lines] if lines else []


def closed_text(rank: int, group: str, why: str) -> str:
    """Return the reason of a failure: a rank has closed a group before its calls had ended."""
    return f"rank {rank} closed group '{group}' {why}".rstrip()


# ---- from a failure to the error of this rank -------------------------------------------------


def broken_group_error(
    failure: Failure,
    comm: Communicator,
    what: str,
    seq: int | None = None,
    nbytes: int | None = None,
) -> UnisonoError:
    """Return the error of a call that broke its group, or during which the group broke."""
    me = comm.transport.rank
    # A rank that reports its own failure has not found it.
    found = "" if failure.by in (me, *failure.peers) else f" (found by rank {failure.by})"
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
        text = "\n    ".join([text, *failure.table])
    return _of_class(failure, comm, text, op=what, seq=seq, nbytes=nbytes)


def already_broken_error(failure: Failure, comm: Communicator, what: str) -> UnisonoError:
    """Return the error of a call on a group that broke before."""
    text = (
        f"{what} in group '{comm.name}' cannot run on {comm.here}: the group is "
        f"broken: {failure.reason}"
    )
    return _of_class(failure, comm, text, op=what)


def _of_class(failure: Failure, comm: Communicator, text: str, **where: Any) -> UnisonoError:
    # Not `by`: a rank that reports the failure of another rank has detected it.
    cls = (_OWN if failure.peers == (comm.transport.rank,) else _CLASSES)[failure.kind]
    context = comm.where(peers=failure.peers, usable=False, **where)
    kind = "host" if failure.reason.endswith(HOST_FAILED) else failure.kind
    rows = failure.table if kind in ("lost", "timeout") and _TABLE_HEAD in failure.table else ()
    if any(f"-> rank {peer} at " in row for row in rows for peer in failure.peers):
        kind = "unreached"
    return cls(text, context=context, hint=_HINTS.get(kind))


def out_of_step(comm: Communicator, answers: dict[int, CallStatus]) -> Failure | None:
    """Return the failure of ranks that have counted their calls differently, or None.

    The answers are those of `mismatch_error`.

    The number of a call is a part of the agreement. If a rank is in a call of another number, it
    has left out a call, and no later call of the group can match.
    """
    at = {rank: status for rank, status in answers.items() if status.seq}
    numbers = sorted(status.seq for status in at.values())
    most = max(numbers, key=numbers.count)
    if most == numbers[0] == numbers[-1]:
        return None
    calls = grouped((at[rank][:2], rank) for rank in sorted(at))
    places = [
        f"{name_ranks(ranks)} {'is' if len(ranks) == 1 else 'are'} in call #{seq}, "
        f"{called_at(text, (at[rank].site for rank in ranks))}"
        for (seq, text), ranks in calls.items()
    ]
    reason = f"ranks have counted their calls differently: {'; '.join(places)}"
    blamed = sorted(rank for rank, status in at.items() if status.seq != most)
    return Failure("skipped", reason, blamed, comm.transport.rank)


def mismatch_error(
    comm: Communicator, call: Call, answers: dict[int, CallStatus]
) -> CollectiveMismatchError:
    """Return the error of ranks that made different calls; it lists the ranks of each call.

    Args:
        comm: The group.
        call: The call of this rank.
        answers: The calls of all ranks, by global rank, as far as they answered.
    """
    me = comm.transport.rank
    variants = grouped((answers[rank].text, rank) for rank in [me, *sorted({*answers} - {me})])
    if silent := [rank for rank in comm.others if rank not in answers]:
        variants["(no answer)"] = silent
    calls = [
        f"{name_ranks(sorted(ranks))} called "
        f"{called_at(text, (answers[rank].site for rank in ranks if rank in answers))}"
        for text, ranks in variants.items()
    ]
    text = (
        f"{call.op} #{call.seq} in group '{comm.name}' does not match on {comm.here}: "
        f"{'; '.join(calls)}"
    )
    hint = "all ranks must make the same calls in the same order"
    if any(text.startswith(f"{call.op}{REFUSED}") for text in variants):
        hint = "the call is wrong on the rank that refused it"
    others = tuple(sorted(rank for ranks in list(variants.values())[1:] for rank in ranks))
    return CollectiveMismatchError(
        text,
        context=comm.where(op=call.op, seq=call.seq, peers=others, nbytes=call.nbytes, usable=True),
        hint=f"{hint}; nothing was sent or changed",
    )


def engines_error(comm: Communicator, call: Call, engines: Sequence[str]) -> UnsupportedError:
    """Return the error of a group whose ranks have several engines; `engines` has each rank's."""
    named = list(zip(comm.ranks, engines, strict=True))
    shown = by_rank(named)
    peers = tuple(rank for rank, engine in named if engine != engines[comm.rank]) or comm.others
    return UnsupportedError(
        f"{call.op} #{call.seq} in group '{comm.name}' cannot run on {comm.here}: its ranks must "
        f"have one engine, but they have {shown}",
        context=comm.where(op=call.op, seq=call.seq, peers=peers, usable=True),
        hint="give all its ranks the same engine in pg_options",
    )


# ---- point-to-point calls ---------------------------------------------------------------------


class MessageCall(NamedTuple):
    """A point-to-point call, for its errors.

    Attributes:
        op: "send", "recv", "recv_array" or "probe".
        data: The array, as NumPy's or viewed; None for the last two.
        peer: Global rank; None for any source.
        tag: Of the message.
    """

    op: str
    data: Any
    peer: int | None
    tag: int

    def __str__(self) -> str:
        peer = "any" if self.peer is None else self.peer
        role = "dst" if self.op == "send" else "src"
        tag = "any" if self.tag == ANY_TAG else self.tag
        array = ""
        if self.data is not None:
            array = f"{self.data.dtype}[{', '.join(map(str, self.data.shape))}], "
        return f"{self.op}({array}{role}={peer}, tag={tag})"

    @property
    def nbytes(self) -> int:
        return 0 if self.data is None else self.data.nbytes

    @property
    def missed(self) -> str:
        """What the other rank has not done when the time is over."""
        return "did not match it"


def message_error(
    comm: Communicator,
    call: MessageCall,
    status: BaseException | None,
    deadline: Deadline | None,
) -> BaseException | None:
    """Return the error of a send or receive that ended with this status."""
    if status is None:
        return None
    op, nbytes = call.op, call.nbytes
    if isinstance(status, Failure):
        return broken_group_error(status, comm, op)
    if isinstance(status, LinkDown):
        cause = comm.transport.explain(status, comm.made_s, comm.ranks)
        return _CLASSES[cause.kind](
            f"{call} in group '{comm.name}' failed on {comm.here}: {cause.reason}",
            context=comm.where(op=op, peers=cause.peers, nbytes=nbytes),
            hint=_HINTS["unreached"] if status.peer in comm.transport.unreached() else None,
        )
    if isinstance(status, MessageMismatch):
        return _message_mismatch(comm, call, status)
    if isinstance(status, Cancelled):
        return _message_timeout(comm, call, deadline)
    if isinstance(status, ClosedError):
        return ClosedError(
            f"{call} in group '{comm.name}' ended on {comm.here}: the group was destroyed here",
            context=comm.where(op=op, nbytes=nbytes),
        )
    return status


def _message_timeout(
    comm: Communicator, call: MessageCall, deadline: Deadline | None
) -> UnisonoError:
    peer, hint = call.peer, None
    if peer is None:
        reason = "no rank sent a message that fits"
    elif rows := comm.transport.unreached().get(peer):
        hint = _HINTS["unreached"]
        reason = f"rank {peer} could not be reached ({'; '.join(rows)})"
    else:
        reason = f"rank {peer} {call.missed}"
    if comm.transport.may_wait():
        ranks = comm.others if peer is None else [peer]
        answers = comm.transport.ask(comm.context, 0, ranks, Deadline(_GRACE_S), places=True)
        reason = "\n    ".join([reason, *places_of(comm, ranks, answers)])
    return CollectiveTimeoutError(
        f"{call} in group '{comm.name}' timed out after {deadline} on {comm.here}: {reason}",
        context=comm.where(
            op=call.op,
            peers=() if peer is None else (peer,),
            nbytes=call.nbytes,
            usable=True,
        ),
        hint=hint,
    )


def _message_mismatch(comm: Communicator, call: MessageCall, status: MessageMismatch) -> Exception:
    dtype = dtype_of_code(status.info)
    if dtype is None:
        got = f"{status.nbytes} bytes of an unknown dtype"
    else:
        got = f"{dtype.name}[{status.nbytes // dtype.itemsize}]"
    if call.data is None:
        return MemoryError(
            f"{call} in group '{comm.name}' has no memory on {comm.here}: rank {status.source} "
            f"sent {got}, which was dropped"
        )
    return CollectiveMismatchError(
        f"{call} in group '{comm.name}' does not match on {comm.here}: "
        f"rank {status.source} sent {got}",
        context=comm.where(op="recv", peers=(status.source,), nbytes=call.nbytes, usable=True),
        hint="the message was dropped; the receiver's array is unchanged",
    )
