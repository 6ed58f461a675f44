"""Calls that move no data: an agreement of all ranks, and the refusal of a call by one rank."""

from __future__ import annotations

from unisono.core.backends.api import Pending
from unisono.core.base.deadline import Deadline
from unisono.core.base.types import dtype_named
from unisono.core.engines import Call, Engine, Prepared, Task
from unisono.core.engines.api import NO_STEPS, REFUSED

# A rank that refuses a call often ends with that error. It stays this long, so that slower ranks
# still receive the reason. Otherwise they would report a lost rank.
_STAY_S = 1.0


def agree(engine: Engine, text: str, deadline: Deadline, *, inline: bool) -> Pending:
    """Make a call that fails on all ranks unless `text` is equal on all of them.

    Args:
        engine: Of the group.
        text: The call with its arguments.
        deadline: Of the call.
        inline: Return after the call has ended.
    """
    call = Call.of(text.partition("(")[0], text, ("agree", text))
    return _submitted(engine, call, deadline, inline=inline)


def refuse(engine: Engine, op: str, why: str, deadline: Deadline, *, wait: bool) -> None:
    """Take part in the agreement with a fingerprint that no call has, and run no step.

    If all ranks refuse, all agree, and nothing else happens.

    Args:
        engine: Of the group.
        op: The function that was called here.
        why: The first line of the error that the caller gets.
        deadline: Of the call.
        wait: Wait for the agreement, at most _STAY_S.
    """
    call = Call.of(op, f"{op}{REFUSED}{why}", ("refused",))
    made = engine.last_number()
    try:
        pending = _submitted(engine, call, deadline, inline=False)
    except (MemoryError, RuntimeError):
        if engine.last_number() > made or engine.runs_here():
            raise
        # There is no memory for a progress thread. So this thread waits for the other ranks.
        _submitted(engine, call, deadline, inline=True)
        return
    if wait and not engine.runs_here():
        pending.wait_until(Deadline(min(_STAY_S, deadline.remaining())))


def _submitted(engine: Engine, call: Call, deadline: Deadline, *, inline: bool) -> Pending:
    task = Task(Prepared(call, NO_STEPS, dtype_named("uint8")), None, None, deadline)
    pending = Pending(runs_here=engine.runs_here)
    engine.submit(task, pending, inline=inline)
    return pending
