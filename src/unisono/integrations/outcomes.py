"""The caller of the ranks: collect their results, and find the first cause of a failure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Any, NoReturn, Protocol

from unisono.base.deadline import Deadline
from unisono.errors import Context, PeerLostError, RendezvousError, UnisonoError, WorkerFailedError
from unisono.integrations.meeting import Meeting
from unisono.integrations.member import Outcome
from unisono.launcher.report import is_consequence

POLL_S = 0.5
"""How often the caller looks for lost ranks. Less costs the framework's scheduler time."""

SETTLE_S = 2.0
"""How long the caller waits for other ranks after the first failure. They often know more: a
survivor names the operation in which a rank was lost."""


class Ranks(Protocol):
    """One call on all ranks, in a framework.

    Attributes:
        meeting: The store and the size of the group.
        names: What the framework calls the place of each rank.
    """

    meeting: Meeting
    names: Sequence[str]

    def poll(self, timeout_s: float) -> Iterable[Outcome]:
        """Wait for at least one outcome, at most for a time; return each outcome once."""

    def started(self) -> set[int]:
        """Return the ranks that have reached the store."""

    def fail(self) -> None:
        """End waits of other ranks, because a rank has failed."""


def collect(ranks: Ranks, start: Deadline | None = None, *, hint: str = "") -> list[Any]:
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
    outcomes: dict[int, Outcome] = {}
    settle: Deadline | None = None
    while len(outcomes) < size and not (settle and settle.expired()):
        for outcome in ranks.poll(min(POLL_S, settle.remaining()) if settle else POLL_S):
            outcomes.setdefault(outcome.rank, outcome)
        if settle is None and any(outcome.failed for outcome in outcomes.values()):
            ranks.fail()
            settle = Deadline(SETTLE_S)
        if settle is None and start is not None and start.expired():
            missing = sorted(set(range(size)) - ranks.started() - set(outcomes))
            if missing:
                ranks.fail()
                raise _not_started(ranks, missing, hint)
            start = None
    if any(outcome.failed for outcome in outcomes.values()):
        _raise_first_cause(ranks, outcomes)
    return [outcomes[rank].value for rank in range(size)]


def _not_started(ranks: Ranks, missing: list[int], hint: str) -> RendezvousError:
    size, timeout_s = ranks.meeting.size, ranks.meeting.timeout_s
    places = ", ".join(f"rank {rank} ({ranks.names[rank]})" for rank in missing[:8])
    return RendezvousError(
        f"{len(missing)} of {size} ranks had not started after {timeout_s:g} s: {places}"
        + (", ..." if len(missing) > 8 else ""),
        context=Context(world_size=size, peers=tuple(missing)),
        hint=hint,
    )


def _raise_first_cause(ranks: Ranks, outcomes: dict[int, Outcome]) -> NoReturn:
    """Raise the first error that is no consequence of another rank's end.

    If there is none, a rank was lost. The error of a survivor is better than the framework's,
    because it names the operation.
    """
    size = ranks.meeting.size
    lost = {outcome.rank: outcome.lost for outcome in outcomes.values() if outcome.lost}
    failed = [outcome for outcome in outcomes.values() if outcome.text]
    errors = {outcome.rank: _load(ranks.meeting, outcome) for outcome in failed}
    original = [outcome for outcome in failed if not is_consequence(outcome.text)]
    blaming = [
        outcome
        for outcome in failed
        if isinstance(error := errors[outcome.rank], UnisonoError)
        and not lost.keys().isdisjoint(error.context.peers)
    ]
    notes = [f"rank {rank} ({ranks.names[rank]}) was lost: {why}" for rank, why in lost.items()]
    if running := sorted(set(range(size)) - set(outcomes)):
        notes.append(f"ranks {running} had not ended {SETTLE_S:g} s later")
    found = next(iter([*original, *blaming, *(failed if not lost else [])]), None)
    if found is None:
        rank = next(iter(lost))
        error: BaseException = PeerLostError(
            f"rank {rank} of {size} ({ranks.names[rank]}) was lost: {lost[rank]}",
            context=Context(world_size=size, peers=(rank,), usable=False),
        )
        cause = None
        notes = notes[1:]
    else:
        place = f"rank {found.rank} of {size} ({ranks.names[found.rank]}, {found.place})"
        error = errors[found.rank]
        cause = WorkerFailedError(f"{place} raised an error\n{found.text}")
        notes.insert(0, f"raised on {place}")
    for note in notes:
        error.add_note(note)
    raise error from cause


def _load(meeting: Meeting, outcome: Outcome) -> BaseException:
    """Return the error of a rank; a WorkerFailedError if it cannot be pickled."""
    try:
        error = import_module(meeting.pickler).loads(outcome.error)
    except Exception:
        error = None
    if isinstance(error, BaseException):
        return error
    return WorkerFailedError(
        f"rank {outcome.rank} of {meeting.size} raised an error that cannot be pickled\n"
        f"{outcome.text}"
    )
