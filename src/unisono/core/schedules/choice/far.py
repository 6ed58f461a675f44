"""Choose for hosts that are far apart: by the time that each schedule takes on their links.

A host's interface sends and receives one message after another. A message arrives after half of
the round trip. A rank sends in a round what it has received in the rounds before.
Small messages of the first round travel with the agreement on the call and cost no delay.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from unisono.core.schedules.ir import ROOTED, IntArray, Op, Schedule
from unisono.core.schedules.pipeline import BYTES_PER_US, depth_of
from unisono.core.schedules.registry import available, build, entry

NEAR_US = 250
"""The class of round trips inside a data centre."""

MOST_RANKS = 128
"""Above this, schedules take too long to count, and early data too much memory."""

# TCP's wait for the acknowledgement of lost bytes.
_LOST_US = 200_000.0

# As in native/messages/delivery.hpp: the most that a rank sends before the agreement is complete,
# and the most that all ranks send a root.
EARLY_BYTES, _KEPT_BYTES = 1024 * 1024, 32 * 1024 * 1024

# The work on a round: breaks ties, and keeps many ranks from many rounds.
_ROUND_US = 10.0

# Bytes per us in the memory of a host.
_MEMORY_RATE = 5000.0

FloatArray = np.ndarray[Any, np.dtype[np.float64]]
_SENDS = (Op.SEND, Op.POST)
_RECEIVES = (Op.RECV, Op.RECV_REDUCE, Op.READ, Op.READ_REDUCE)


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
    times = {name: time_us(collective, name, 1 << log2, p, local, round_trip_us) for name in names}
    return tuple(sorted(names, key=times.__getitem__))


def time_us(
    collective: str, name: str, nbytes: int, p: int, local: int, round_trip_us: int
) -> float:
    """Return the time of a call by an algorithm; the arguments are those of `fastest`."""
    pipelined = entry(collective, name).pipelined
    depth = depth_of(name, nbytes, p, round_trip_us) if pipelined else 1
    schedule = build(collective, name, p, 0 if collective in ROOTED else -1, depth, local)
    chunk, delay_us = nbytes / schedule.work_chunks, round_trip_us / 2
    end_us, burst = run(schedule, local, chunk, delay_us)
    if not 0 < first_chunks(schedule, local) * chunk <= min(EARLY_BYTES, _KEPT_BYTES // p):
        end_us += delay_us  # of the agreement
    # `burst` has more than 3 messages. A pipeline sends it over time.
    lost_us = _LOST_US if depth == 1 and overflows(4, int(burst * chunk)) else 0.0
    return end_us + schedule.rounds * _ROUND_US + lost_us


def run(schedule: Schedule, local: int, chunk: float, delay_us: float) -> tuple[float, int]:
    """Return when the last rank ends, and the most chunks that pass an interface at once.

    "At once": in more than 3 messages of one round.
    """
    p = schedule.world_size
    ready = np.zeros(p)
    leave, arrive = np.zeros((2, -(-p // local)))
    burst = 0
    for k in range(schedule.rounds):
        rows = schedule.steps(k, np.arange(p))
        into, source, chunks = rows[np.isin(rows[:, 1], _RECEIVES)][:, [0, 2, 7]].T
        # Each rank sends first to the next rank, and so on.
        order = np.argsort((into - source) % p, kind="stable")
        into, source, chunks = into[order], source[order], chunks[order]
        # A rank sends before it receives: the messages of a round do not wait for one another.
        there = ready[source] + chunks * chunk / _MEMORY_RATE
        far = into // local != source // local
        hosts = source[far] // local, into[far] // local
        took = chunks[far] * chunk / BYTES_PER_US
        left = _in_turn(hosts[0], ready[source[far]], took, leave)
        there[far] = _in_turn(hosts[1], left - took, took, arrive) + delay_us
        np.maximum.at(ready, into, there)
        for host in hosts:
            passed = np.bincount(host, chunks[far], len(leave))
            burst = max(
                burst, int(passed[np.bincount(host, minlength=len(leave)) > 3].max(initial=0))
            )
    return float(ready.max()), burst


def _in_turn(host: IntArray, begin: FloatArray, took: FloatArray, free: FloatArray) -> FloatArray:
    """Return when each message has passed its host's interface, and update when that is free."""
    order = np.lexsort((begin, host))
    host, begin, took = host[order], np.maximum(begin[order], free[host[order]]), took[order]
    before = np.cumsum(took) - took
    # The running maximum of a host begins anew, above those of the hosts before it.
    step = 1.0 + 2 * (begin.max(initial=0.0) + took.sum())
    ended = np.maximum.accumulate(begin - before + host * step) - host * step + before + took
    np.maximum.at(free, host, ended)
    result: FloatArray = np.empty_like(ended)
    result[order] = ended
    return result


def first_chunks(schedule: Schedule, local: int) -> int:
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
