"""Count the cost of a schedule on its steps: rounds, messages and bytes."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from unisono.core.schedules.ir import IntArray, Op, Schedule


@dataclass(frozen=True)
class Cost:
    """Counts of one call. A count per rank is the largest over all ranks.

    Attributes:
        rounds: Message latencies on the critical path.
        messages: Messages sent per rank. A post to all other ranks counts once for each of them.
        bytes_sent: Sent per rank.
        bytes_received: Received or read per rank.
        bytes_reduced: Reduced per rank.
        critical_bytes: Sum over rounds of the largest number of bytes that a rank sends or
            receives in the round.
        critical_reduced: Sum over rounds of the largest number of bytes that a rank reduces in
            the round.
    """

    rounds: int
    messages: int
    bytes_sent: Fraction
    bytes_received: Fraction
    bytes_reduced: Fraction
    critical_bytes: Fraction
    critical_reduced: Fraction

    def time(self, alpha: float, beta: float, gamma: float = 0.0) -> float:
        """Return the time of one call if all ranks start each round together.

        T = alpha * rounds + beta * critical_bytes + gamma * critical_reduced

        Args:
            alpha: Latency per round, in any unit of time.
            beta: Time per byte sent; links are full-duplex.
            gamma: Time per byte reduced.
        """
        moved, reduced = float(self.critical_bytes), float(self.critical_reduced)
        return alpha * self.rounds + beta * moved + gamma * reduced


def cost(schedule: Schedule, nbytes: int | Fraction = 1) -> Cost:
    """Count rounds, messages and bytes of the schedule for data of `nbytes`.

    `nbytes` is the whole data: the vector (all_reduce, broadcast, reduce) or all p blocks (the
    gathered result, the input of reduce_scatter and all_to_all). The counts are exact if the number
    of chunks divides `nbytes`. With the default 1 the counts are factors of n.
    """
    p = schedule.world_size
    everyone = np.arange(p)
    messages, totals = np.zeros(p, np.int64), np.zeros((3, p), np.int64)
    critical = np.zeros(2, np.int64)
    for k in range(schedule.rounds):
        rows = schedule.steps(k, everyone)
        sent, received, reduced = counts = _chunks(rows, p)
        messages += np.bincount(rows[:, 0], _copies(rows, p), p).astype(np.int64)
        totals += counts
        critical += (max(sent.max(), received.max()), reduced.max())
    chunk = Fraction(nbytes) / schedule.work_chunks
    most = [int(total.max()) * chunk for total in totals]
    on_path = [int(c) * chunk for c in critical]
    return Cost(schedule.rounds, int(messages.max()), *most, *on_path)


def _copies(rows: IntArray, p: int) -> IntArray:
    """Return the number of messages that each row sends."""
    puts = np.isin(rows[:, 1], (Op.SEND, Op.POST))
    return np.where(puts, np.where(rows[:, 2] < 0, p - 1, 1), 0)


def _chunks(rows: IntArray, p: int) -> IntArray:
    """Return the chunks sent, received and reduced by each rank, [3, p]."""
    rank, op, n = rows[:, 0], rows[:, 1], rows[:, 7]
    received = np.isin(op, (Op.RECV, Op.RECV_REDUCE, Op.READ, Op.READ_REDUCE))
    reduced = np.isin(op, (Op.RECV_REDUCE, Op.READ_REDUCE, Op.REDUCE))
    weights = (n * _copies(rows, p), n * received, n * reduced)
    return np.stack([np.bincount(rank, w, p).astype(np.int64) for w in weights])
