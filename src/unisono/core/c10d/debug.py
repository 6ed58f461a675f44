"""torch's functions for debugging: log level, names for parts of a program, a breakpoint.

Source: torch.distributed (2.13).
"""

from __future__ import annotations

import contextlib
import enum
import logging
import sys
from collections.abc import Iterator

from unisono.core.base import config
from unisono.core.base.deadline import Timeout, to_seconds
from unisono.core.base.integers import as_integer
from unisono.core.base.log import get_logger
from unisono.core.c10d.arguments import reporting_bad_arguments
from unisono.core.c10d.collectives import barrier
from unisono.core.c10d.queries import get_rank
from unisono.core.groups.world import current, require_group
from unisono.errors import InvalidArgumentError, UnisonoError

_log = get_logger("c10d.debug")


class DebugLevel(enum.IntEnum):
    """How much the library logs. Its checks are the same at every level."""

    OFF = 0
    INFO = 1
    DETAIL = 2


_LOG_LEVELS = {
    DebugLevel.OFF: logging.WARNING,
    DebugLevel.INFO: logging.INFO,
    DebugLevel.DETAIL: logging.DEBUG,
}


def get_debug_level() -> DebugLevel:
    """Return the level, as the logger "unisono" has it."""
    level = logging.getLogger("unisono").getEffectiveLevel()
    return max(debug for debug, needed in _LOG_LEVELS.items() if level <= needed or not debug)


def set_debug_level(level: DebugLevel) -> None:
    """Set the level of the logger "unisono": WARNING, INFO or DEBUG."""
    logging.getLogger("unisono").setLevel(_LOG_LEVELS[DebugLevel(level)])


def set_debug_level_from_env() -> None:
    """Set the level that TORCH_DISTRIBUTED_DEBUG names: OFF (also if unset), INFO or DETAIL.

    Raises:
        InvalidArgumentError: The variable has another value.
    """
    text = config.environ().get("TORCH_DISTRIBUTED_DEBUG", "OFF")
    if text.upper() not in DebugLevel.__members__:
        known = ", ".join(DebugLevel.__members__)
        raise InvalidArgumentError(f"TORCH_DISTRIBUTED_DEBUG={text!r} is none of {known}")
    set_debug_level(DebugLevel[text.upper()])


@contextlib.contextmanager
def record_comm(name: str) -> Iterator[None]:
    """Name a part of the program: errors of the collectives in the with block carry the name."""
    try:
        yield
    except UnisonoError as error:
        error.add_note(f"in record_comm({name!r})")
        raise


def breakpoint(rank: int = 0, skip: int = 0, timeout_s: Timeout | None = 3600) -> None:
    """Stop one rank in the debugger; all others wait for it in a barrier.

    Args:
        rank: Rank that stops; type "up" there to reach the caller's frame.
        skip: Number of calls that do not stop, counted for each place in the source.
        timeout_s: Time-out of all groups of this world from now on, so that no call times out
            meanwhile; None keeps the time-outs.
    """
    world = current()
    with reporting_bad_arguments(require_group(None), "breakpoint"):
        rank, skip = as_integer(rank, "rank"), as_integer(skip, "skip")
        timeout_s = None if timeout_s is None else to_seconds(timeout_s)
    caller = sys._getframe(1)
    place = f"{caller.f_code.co_filename}:{caller.f_lineno}"
    world.passed[place] += 1
    if world.passed[place] <= skip:
        _log.warning("breakpoint at %s skipped, pass %d", place, world.passed[place])
        return
    if timeout_s is not None:
        for group in world.groups.values():
            group.set_timeout(timeout_s)
    if get_rank() == rank:
        import pdb

        pdb.Pdb(nosigint=True).set_trace()
    barrier()
