"""Choose for hosts that are far apart: by the delays and bytes of each schedule between them.

    T = D * delays + B * bytes + R * rounds

D is half of the round trip. `delays` is the largest number of messages between hosts that follow
from one another. `bytes` are those of the busiest host, summed over the rounds; pipelines overlap
theirs. Small messages of the first round travel with the agreement on the call and cost no delay.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from unisono.schedules.ir import ROOTED, IntArray, Op, Schedule
from unisono.schedules.pipeline import BYTES_PER_US, depth_of
from unisono.schedules.registry import available, build, entry

NEAR_US = 250
"""The class of round trips inside a data centre."""

MOST_RANKS = 128
"""Above this, schedules take too long to count, and early data too much memory."""

# TCP's wait for the acknowledgement of lost bytes.
_LOST_US = 200_000.0

# As in native/messages/delivery.hpp: what a rank sends before the agreement is complete.
EARLY_BYTES = 1024 * 1024

# The work on a round: breaks ties, and keeps many ranks from many rounds.
_ROUND_US = 10.0

_SENDS = (Op.SEND, Op.POST)
_RECEIVES = (Op.RECV, Op.RECV_REDUCE, Op.READ, Op.READ_REDUCE)


class _Passed(NamedTuple):
    """The chunks between hosts; a `burst` leaves a host in many messages at once."""

    delays: int
    summed: int
    most: int
    burst: int
    first: int


def far_apart(world_size: int, round_trip_us: int) -> bool:
    """Return whether a delay between hosts costs more than all other work on a message."""
    return round_trip_us > NEAR_US and world_size <= MOST_RANKS


def overflows(messages: int, nbytes: int) -> bool:
    """Return whether a switch may lose data that a host sends at once, or gets at once.

    TCP then waits 200 ms. With a switch that keeps 1 MiB, linear all_to_all took 235 ms for 1 MiB
    of 4 hosts with 2 ranks, and pairwise 25 ms. Up to 3 messages at once lost nothing.
    """
    return messages > 3 and nbytes > 768 * 1024


def round_trip_class(round_trip_us: float) -> int:
    """Return the power of 4 of 250 us that is nearest to a round trip, at least 250 us.

    Two measurements of one network mostly have the same class.
    """
    found = NEAR_US
    while round_trip_us > 2 * found:
        found *= 4
    return found


def fastest(
    collective: str, nbytes: int, world_size: int, local: int, round_trip_us: int
) -> tuple[str, ...]:
    """Return the algorithms, the fastest first; equal on all ranks.

    Args:
        collective: "all_reduce", "broadcast", ...
        nbytes: Bytes of the whole data.
        world_size: Number of ranks.
        local: Ranks per host.
        round_trip_us: Between two hosts.
    """
    # A power of two, so that calls of many sizes count few schedules.
    return _fastest(collective, (nbytes - 1).bit_length(), world_size, local, round_trip_us)


@lru_cache(maxsize=1024)
def _fastest(collective: str, log2: int, p: int, local: int, round_trip_us: int) -> tuple[str, ...]:
    names = [
        name for name in available(collective, p, local=local)
        if not entry(collective, name).registered
    ]  # fmt: skip
    times = {name: _time_us(collective, name, 1 << log2, p, local, round_trip_us) for name in names}
    return tuple(sorted(names, key=times.__getitem__))


def _time_us(
    collective: str, name: str, nbytes: int, p: int, local: int, round_trip_us: int
) -> float:
    pipelined = entry(collective, name).pipelined
    depth = depth_of(name, nbytes, p, round_trip_us) if pipelined else 1
    schedule = build(collective, name, p, 0 if collective in ROOTED else -1, depth, local)
    passed = _passed(schedule, local)
    chunk = nbytes / schedule.work_chunks
    delays = passed.delays - (0 < passed.first * chunk <= EARLY_BYTES)
    moved = (passed.most if pipelined else passed.summed) * chunk
    waits_us = delays * round_trip_us / 2 + schedule.rounds * _ROUND_US
    # `burst` has more than 3 messages. A pipeline sends it over time.
    lost_us = _LOST_US if depth == 1 and overflows(4, int(passed.burst * chunk)) else 0.0
    return waits_us + moved / BYTES_PER_US + lost_us


def _passed(schedule: Schedule, local: int) -> _Passed:
    """Count what passes between hosts."""
    p = schedule.world_size
    summed = burst = 0
    totals = np.zeros((2, -(-p // local)), np.int64)
    delays = np.zeros(p, np.int64)
    for k in range(schedule.rounds):
        rows = schedule.steps(k, np.arange(p))
        both = [_crossing(rows, ops, p, local) for ops in (_SENDS, _RECEIVES)]
        messages, chunks = np.stack(both, axis=1)
        totals += chunks
        summed += int(chunks.max())
        burst = max(burst, int(chunks[messages > 3].max(initial=0)))
        # A rank sends before it receives, so the messages of a round do not wait for one another.
        into, source = rows[np.isin(rows[:, 1], _RECEIVES)][:, [0, 2]].T
        arrived = delays[source] + (into // local != source // local)
        np.maximum.at(delays, into, arrived)
    return _Passed(int(delays.max()), summed, int(totals.max()), burst, _first(schedule, local))


def _crossing(rows: IntArray, ops: tuple[Op, ...], p: int, local: int) -> IntArray:
    """Return the messages and the chunks that pass each host's interface by these steps, [2, H]."""
    rows = rows[np.isin(rows[:, 1], ops)]
    host, peer = rows[:, 0] // local, rows[:, 2]
    messages = np.where(peer < 0, p - local, host != peer // local)
    counts = [np.bincount(host, n, -(-p // local)) for n in (messages, messages * rows[:, 7])]
    return np.stack(counts).astype(np.int64)


def _first(schedule: Schedule, local: int) -> int:
    """Return the most chunks that a rank sends in the first round.

    0 if none of them passes between hosts, or they must be copied first.
    """
    p = schedule.world_size
    rows = schedule.steps(0, np.arange(p))
    sends = rows[np.isin(rows[:, 1], _SENDS)]
    copied = rows[rows[:, 1] == Op.COPY][:, 5]
    away = np.where(sends[:, 2] < 0, local < p, sends[:, 0] // local != sends[:, 2] // local)
    if not away.any() or np.isin(sends[:, 3], copied).any():
        return 0
    copies = np.where(sends[:, 2] < 0, p - 1, 1)
    return int(np.bincount(sends[:, 0], sends[:, 7] * copies, p).max())
