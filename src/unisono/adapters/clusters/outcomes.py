"""The caller of the ranks: collect their results, and find the first cause of a failure."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any, NoReturn, TypeVar

from unisono.adapters.clusters.meeting import STARTED, Meeting, close_meeting, end_start, posts
from unisono.adapters.clusters.member import RankOutcome
from unisono.core.base.deadline import Deadline
from unisono.core.base.text import name_ranks
from unisono.errors import Context, PeerLostError, RendezvousError, UnisonoError, WorkerFailedError
from unisono.launcher.traceback_text import exception_line, is_consequence

T = TypeVar("T")

OUTSIDE = "outside of the function"
"""The place of an error that the framework raised, for instance when it unpickled the arguments."""

POLL_S = 0.5
"""How often the caller looks for lost ranks. Less costs the framework's scheduler time."""

SETTLE_S = 2.0
"""How long the caller waits for other ranks after the first failure. They often know more: a
survivor names the operation in which a rank was lost."""


class CallOnRanks:
    """One call on all ranks of a group, in a framework.

    Args:
        meeting: The store and the size of the group.
        names: The place of each rank in the words of the framework.

    Attributes:
        over: Whether the framework has ended all ranks, so that no outcome is to come.
    """

    over = False

    def __init__(self, meeting: Meeting, names: Sequence[str]) -> None:
        self.meeting = meeting
        self.names = names

    def poll(self, timeout_s: float) -> Iterable[RankOutcome]:
        """Wait for at least one outcome, at most for a time; return each outcome once."""
        raise NotImplementedError

    def at_store(self, fn: Callable[..., T], *args: Any) -> T:
        """Call `fn(meeting, *args)` in the process that serves the store."""
        return fn(self.meeting, *args)


def collect(ranks: CallOnRanks, start: Deadline | None = None, *, hint: str = "") -> list[Any]:
    """Return the results of all ranks, by rank.

    Args:
        ranks: The call.
        start: When all ranks must have reached the store; None if they have.
        hint: Advice if a rank has not started.

    Raises:
        RendezvousError: Ranks have not started in time; names them.
        PeerLostError: A rank was lost, and no rank failed before.
        Exception: The error of the rank that failed first, with a WorkerFailedError as its cause.
    """
    size = ranks.meeting.size
    outcomes: dict[int, RankOutcome] = {}
    settle: Deadline | None = None
    while len(outcomes) < size and not (settle and (ranks.over or settle.expired())):
        for outcome in ranks.poll(min(POLL_S, settle.remaining()) if settle else POLL_S):
            outcomes.setdefault(outcome.rank, outcome)
        if settle is None and any(outcome.failed for outcome in outcomes.values()):
            ranks.at_store(end_start)
            settle = Deadline(SETTLE_S)
        if settle is None and start is not None and start.expired():
            started = ranks.at_store(posts, STARTED)
            if missing := sorted(set(range(size)) - started.keys() - outcomes.keys()):
                ranks.at_store(close_meeting)
                raise _not_started(ranks, missing, hint)
            start = None
    if any(outcome.failed for outcome in outcomes.values()):
        _raise_first_cause(ranks, outcomes)
    return [outcomes[rank].value for rank in range(size)]


def _not_started(ranks: CallOnRanks, missing: list[int], hint: str) -> RendezvousError:
    size, timeout_s = ranks.meeting.size, ranks.meeting.timeout_s
    places = ", ".join(f"rank {rank} ({ranks.names[rank]})" for rank in missing[:8])
    return RendezvousError(
        f"{len(missing)} of {size} ranks had not started after {timeout_s:g} s: {places}"
        + (", ..." if len(missing) > 8 else ""),
        context=Context(world_size=size, peers=tuple(missing)),
        hint=hint,
    )


def _raise_first_cause(ranks: CallOnRanks, outcomes: dict[int, RankOutcome]) -> NoReturn:
    """Raise the first error that is no consequence of another rank's end.

    If there is none, a rank was lost. The error of a survivor is better than the framework's,
    because it names the operation.
    """
    size = ranks.meeting.size
    lost = {outcome.rank: outcome.lost for outcome in outcomes.values() if outcome.lost}
    errors = {rank: _load(ranks.meeting, each) for rank, each in outcomes.items() if each.text}
    original = [rank for rank in errors if not is_consequence(outcomes[rank].text)]
    blaming = [rank for rank in errors if not lost.keys().isdisjoint(_peers(errors[rank]))]
    notes = [f"rank {rank} ({ranks.names[rank]}) was lost: {why}" for rank, why in lost.items()]
    if not ranks.over and (running := sorted(set(range(size)) - outcomes.keys())):
        notes.append(f"ranks {running} had not ended {SETTLE_S:g} s later")
    if found := original or blaming or ([] if lost else list(errors)):
        first = found[0]
        error, text = errors[first], outcomes[first].text
        place = f"rank {first} of {size} ({ranks.names[first]}, {outcomes[first].place})"
        notes.insert(0, f"raised on {place}")
        cause = WorkerFailedError(f"{place} raised an error\n{text}")
    else:
        gone = tuple(sorted(lost))
        names = ", ".join(ranks.names[rank] for rank in gone[:8])
        were = "was" if len(gone) == 1 else "were"
        why = next(iter(lost.values()))
        what = f"{name_ranks(gone)} of {size} ({names}) {were} lost: {why}"
        context = Context(world_size=size, peers=gone, usable=False)
        error, cause = PeerLostError(what, context=context), None
        del notes[0]
    if isinstance(error, PeerLostError):
        # A rank is named by the call that needed it. Others of its host may have ended with it.
        peers = tuple(sorted({*error.context.peers, *lost}))
        error.context = replace(error.context, peers=peers)
    for note in notes:
        error.add_note(note)
    raise error from cause


def _peers(error: BaseException) -> tuple[int, ...]:
    return error.context.peers if isinstance(error, UnisonoError) else ()


def _load(meeting: Meeting, outcome: RankOutcome) -> Exception:
    """Return the error of a rank; a WorkerFailedError if it cannot be unpickled here.

    Also if it is no Exception: a SystemExit would end the caller, perhaps with the exit code 0.
    """
    with contextlib.suppress(Exception):
        error = import_module(meeting.pickler).loads(outcome.error)
        if isinstance(error, Exception):
            return error
    line = exception_line(outcome.text)
    return WorkerFailedError(f"rank {outcome.rank} of {meeting.size} raised {line}\n{outcome.text}")
