"""Where ranks are in their programs, as lines of the error of a call that timed out."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from unisono.core.base.source.where import states_of
from unisono.core.base.text import name_ranks
from unisono.core.engines.api import REFUSED, Communicator
from unisono.core.transports.messages import CallStatus, LastCall

# Most lines of an error that give the places of ranks; equal places share a line.
_MOST_PLACES = 12

# Most lines of code of equal calls.
_MOST_SITES = 3


def places_of(
    comm: Communicator, ranks: Sequence[int], answers: dict[int, CallStatus], seq: int = 0
) -> list[str]:
    """Return lines that give the place and the last call of each rank; equal ranks share a line.

    Args:
        comm: The group.
        ranks: Global ranks.
        answers: Their answers, as far as they came.
        seq: Number of the call that they should be in; 0 for messages.
    """
    pids = {rank: pid for rank, (pid, *_) in enumerate(comm.transport.messages.addresses) if pid}
    states = states_of(pids[rank] for rank in ranks if rank in pids and rank not in answers)
    calls = {rank: _calls(answers.get(rank), seq) for rank in ranks}
    equal: dict[tuple[str, tuple[tuple[str, bool], ...]], list[int]] = {}
    for rank in ranks:
        if rank in answers and answers[rank].place:
            text = f"BE {answers[rank].place}"
        elif (pid := pids.get(rank)) in states:
            text = f"(process {pid}) {states[pid]}{_ended(comm, seq)}"
        elif rank not in answers and (silence := comm.transport.silence_of(rank)):
            text = f"{silence}{_ended(comm, seq)}"
        else:
            continue
        key = text, tuple((each.call, each.runs) for each in calls[rank])
        equal.setdefault(key, []).append(rank)
    lines = []
    for (text, named), same in list(equal.items())[:_MOST_PLACES]:
        be, its = ("is", "its") if len(same) == 1 else ("are", "their")
        line = f"{name_ranks(same)} {text.replace('BE', be, 1)}"
        for at, (call, runs) in enumerate(named):
            ages = [each.age_s for rank in same if (each := calls[rank][at]).age_s is not None]
            line += f"; {its} {_worded(call, runs, ages)}"
        lines.append(line)
    return lines


def called_at(text: str, sites: Iterable[str]) -> str:
    """Return a call with the lines of its callers: "barrier() at train.py:7".

    Args:
        text: The call with its arguments.
        sites: Of the ranks that made it; "" if it is unknown.
    """
    known = sorted({site for site in sites if site})
    if len(known) > _MOST_SITES:
        known[_MOST_SITES:] = ["..."]
    call, refused, why = text.partition(REFUSED)
    return f"{call} at {', '.join(known)}{refused}{why}" if known else text


def _calls(status: CallStatus | None, seq: int) -> Sequence[LastCall]:
    """Return the recorded calls of a rank; without a record, the call in which it is behind."""
    if status is None or status.recorded or not 0 < status.seq < seq:
        return () if status is None else status.recorded
    return (LastCall(f"{status.text.partition('(')[0]} #{status.seq}", runs=False),)


def _worded(call: str, runs: bool, ages: Sequence[float]) -> str:
    """Return "last call was all_reduce #40, 12.1 to 12.3 s ago"; without ages, only the call."""
    shown = list(dict.fromkeys(f"{age_s:.1f}" for age_s in sorted(ages)))
    age = f"{' to '.join([*shown[:1], *shown[1:][-1:]])} s"
    if runs:
        return f"call {call} has run for {age}"
    return f"last call was {call}, {age} ago" if ages else f"last call was {call}"


def _ended(comm: Communicator, seq: int) -> str:
    """Return which collective before call `seq` has ended on this rank; "" if it is unknown."""
    for record in () if comm.trace is None else comm.trace.newest():
        if record.ended_ns is not None and not record.is_message and record.seq < seq:
            age_s = (time.time_ns() - record.ended_ns) / 1e9
            call = f"{record.op} #{record.seq}"
            return f"; {call} ended on rank {comm.transport.rank} {age_s:.1f} s ago"
    return ""
