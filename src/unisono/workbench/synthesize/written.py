"""A schedule as a file of Python: its rows, round by round."""

from __future__ import annotations

import keyword

import numpy as np

from unisono.core.schedules.ir import ROOTED, Schedule
from unisono.errors import InvalidArgumentError

# 100 MB of text. Larger files take minutes to read.
_MOST_ROWS = 2_000_000

# Names that the file uses.
_TAKEN = ("np", "Schedule", "ROUNDS", "STEPS", "ValueError")

_TEXT = '''\
"""{about}

Written by `unisono synthesize`, which proved it. unisono.lowlevel has the meaning of a row:
rank, step, peer, source buffer and chunk, target buffer and chunk, chunks.
"""

import numpy as np

from unisono.lowlevel import Schedule

ROUNDS = {rounds}
STEPS = [np.array(rows, np.int64).reshape(-1, 8) for rows in ROUNDS]


def {name}({parameters}):
    """Return the schedule for {ranks} ranks."""
    if {condition}:
        raise ValueError("this schedule is for {ranks} ranks{with_root}")

    def exchange(k, ranks):
        yield STEPS[k][np.isin(STEPS[k][:, 0], ranks)]

    return Schedule(
        "{collective}", "{name}", {ranks}, {stages}, exchange, {root},
        input_chunks={inputs}, output_chunks={outputs}, scratch_chunks={scratch},
        uneven_ok={uneven},
    )
'''


def name_of(stem: str) -> str:
    """Return the name of the function for a file."""
    is_free = stem.isidentifier() and not keyword.iskeyword(stem) and stem not in _TAKEN
    return stem if is_free else "synthesized"


def to_python(schedule: Schedule, name: str, about: str) -> str:
    """Return the text of a module with a function that returns the schedule.

    Raises:
        InvalidArgumentError: The schedule has too many rows.
    """
    p, rooted = schedule.world_size, schedule.collective in ROOTED
    steps = [schedule.steps(k, np.arange(p)) for k in range(schedule.stages)]
    if (rows := sum(map(len, steps))) > _MOST_ROWS:
        raise InvalidArgumentError(
            f"{schedule.collective} on {p} ranks has {rows:,} rows, and a file at most "
            f"{_MOST_ROWS:,}"
        )
    rounds = [
        "[\n" + "".join(f"        {row},\n" for row in each.tolist()) + "    ]" for each in steps
    ]
    return _TEXT.format(
        about=about, name=name, ranks=p, collective=schedule.collective, stages=schedule.stages,
        rounds="[\n    " + ",\n    ".join(rounds) + ",\n]", root=schedule.root,
        parameters=f"p, root={schedule.root}" if rooted else "p",
        condition=f"(p, root) != ({p}, {schedule.root})" if rooted else f"p != {p}",
        with_root=f" with root {schedule.root}" if rooted else "",
        inputs=schedule.input_chunks, outputs=schedule.output_chunks,
        scratch=schedule.scratch_chunks, uneven=schedule.uneven_ok,
    )  # fmt: skip
