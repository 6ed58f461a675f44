"""Choose for a host with several NUMA nodes: by the time that each schedule takes in its memory.

A core waits longer for a line of another node than for one of its own, so that it reads fewer of
them per microsecond. The cores of a node also share its links to others. An algorithm with two
levels moves data between nodes only once, at the price of more rounds.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from unisono.core.schedules.ir import ROOTED, Op
from unisono.core.schedules.lowering.shared import PIECE_BYTES
from unisono.core.schedules.registry import available, build, entry

# As in the network `two-socket` of the simulator, which has the sources: bytes per us that a core
# copies or reads inside its node, that it reads from another node, and that all cores of a node
# read from others; then a wait inside the node and for another one, and the work on a post or read.
NEAR_RATE, FAR_RATE, LINK_RATE = 10_000.0, 5800.0, 53_760.0
NEAR_US, FAR_US, STEP_US = 0.3, 0.5, 0.1

# An algorithm with levels must win by more than what the model leaves out.
_MARGIN = 0.95

# Above this, schedules take too long to count.
_MOST_RANKS = 128

_POSTS = (Op.SEND, Op.POST)
_READS = (Op.RECV, Op.RECV_REDUCE, Op.READ, Op.READ_REDUCE)


def over_nodes(
    collective: str, nbytes: int, world_size: int, local: int, flat: str
) -> tuple[str, ...]:
    """Return the algorithms in the order of preference; equal on all ranks.

    Args:
        collective: "all_reduce", "broadcast", ...
        nbytes: Bytes of the whole data.
        world_size: Number of ranks.
        local: Ranks per node.
        flat: The choice for a host with one node.
    """
    if world_size > _MOST_RANKS:
        return (flat,)
    known = available(collective, world_size, local=local)
    levels = [
        name for name in known
        if (found := entry(collective, name)).two_level and not found.registered
    ]  # fmt: skip
    # Against each of these: where one passes into the other is measured, and no matter here.
    others = {flat, *known} & {flat, "one_shot", "two_shot"}
    times = {
        name: time_us(collective, name, nbytes, world_size, local) for name in (*levels, *others)
    }
    best = min(levels, key=times.__getitem__, default=flat)
    wins = times[best] < _MARGIN * min(times[name] for name in others)
    return (best, flat) if wins else (flat,)


def time_us(collective: str, name: str, nbytes: int, world_size: int, local: int) -> float:
    """Return the time of a call if all ranks begin each round together.

    The arguments are those of `over_nodes`; `name` is an algorithm.
    """
    found = _count(collective, name, world_size, local)
    # The engine runs all rounds for each piece of the data.
    return nbytes * found.move_us + found.wait_us * max(1.0, nbytes * found.posted / PIECE_BYTES)


class _Counts(NamedTuple):
    """What a schedule costs.

    Attributes:
        move_us: Microseconds to copy and read, per byte of the whole data.
        wait_us: Microseconds of waits and of work on steps.
        posted: The most that a rank posts, divided by the whole data.
    """

    move_us: float
    wait_us: float
    posted: float


@lru_cache(maxsize=256)
def _count(collective: str, name: str, p: int, local: int) -> _Counts:
    schedule = build(collective, name, p, 0 if collective in ROOTED else -1, 1, local)
    everyone, part = np.arange(p), 1 / schedule.work_chunks
    move_us = wait_us = 0.0
    posted = np.zeros(p)
    for k in range(schedule.stages):
        rows = schedule.steps(k, everyone)
        # A post for several ranks is copied once.
        posts = np.unique(rows[np.isin(rows[:, 1], _POSTS)][:, [0, 3, 4, 7]], axis=0)
        reads = rows[np.isin(rows[:, 1], _READS)]
        away = reads[:, 0] // local != reads[:, 2] // local
        copied, near, far = (
            np.bincount(each[:, 0], each[:, -1] * part, p)
            for each in (posts, reads[~away, :8], reads[away, :8])
        )
        busy = (copied + near) / NEAR_RATE + far / FAR_RATE
        link = far.reshape(-1, local).sum(axis=1) / LINK_RATE
        move_us += max(float(busy.max()), float(link.max()))
        steps = np.bincount(np.append(posts[:, 0], reads[:, 0]), minlength=p)
        wait_us += (FAR_US if away.any() else NEAR_US) * (len(reads) > 0) + steps.max() * STEP_US
        posted += copied
    return _Counts(move_us, wait_us, float(posted.max()))
