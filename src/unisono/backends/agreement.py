"""Calls that move nothing: what all ranks must agree on, and what one rank cannot take part in."""

from __future__ import annotations

import numpy as np

from unisono.backends.api import Pending
from unisono.base.deadline import Deadline
from unisono.base.types import ReduceOp, dtype_named
from unisono.engines import Call, Engine, Task
from unisono.schedules import Program

__all__ = ["agree", "refuse"]

# A rank whose call is refused often ends with that error. The other ranks may be a little later,
# and should still hear the reason, not that it has gone.
_STAY_S = 1.0

_NO_STEPS = Program(np.empty((0, 7), np.int64), 0)


def agree(engine: Engine, text: str, deadline: Deadline, *, inline: bool) -> Pending:
    """Make a call that fails on all ranks unless all say the same.

    Args:
        engine: Of the group.
        text: The call with its arguments, which must be equal on all ranks.
        deadline: Of the call.
        inline: Return when it has ended.
    """
    call = Call.of(text.partition("(")[0], text, ("agree", text))
    return _submitted(engine, call, deadline, inline=inline)


def refuse(engine: Engine, op: str, why: str, deadline: Deadline, *, wait: bool) -> None:
    """Take part in the agreement with a fingerprint that no call has, and run no step.

    If all ranks refuse, all agree, and nothing else happens.

    Args:
        engine: Of the group.
        op: What was called here.
        why: The first line of the error that its caller gets.
        deadline: Of the call.
        wait: Wait for the agreement, but not for long.
    """
    call = Call.of(op, f"{op}, but refused it: {why}", ("refused",))
    pending = _submitted(engine, call, deadline, inline=False)
    if wait and not engine.runs_here():
        pending.wait_until(Deadline(min(_STAY_S, deadline.remaining())))


def _submitted(engine: Engine, call: Call, deadline: Deadline, *, inline: bool) -> Pending:
    task = Task(call, _NO_STEPS, None, None, dtype_named("uint8"), ReduceOp.SUM, deadline)
    pending = Pending(runs_here=engine.runs_here)
    engine.submit(task, pending, inline=inline)
    return pending
