"""The result of a simulation: when ranks end, why so late, and how busy links were."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from unisono.core.schedules.ir import IntArray
from unisono.workbench.simulate.networks import Network

CAUSES = ("latency", "sending", "busy", "ends")
"""What the time of a critical path is made of.

latency  the latencies of the links that its messages cross
sending  the time that the slowest link of each message needs for its bytes
busy     waiting for links that carry other messages
ends     what ranks do: overheads, copies, reductions, waiting for a core
"""


@dataclass(frozen=True, eq=False)
class Result:
    """One call in virtual time; times are integers of picoseconds.

    Attributes:
        finish_ps: Per rank, the end of its last row, int64 [p].
        causes_ps: Time of each of `CAUSES` on the critical path; the sum is `last_ps`.
        path: The ranks of the critical path, from the first to the rank that ends last; empty if
            the evaluator does not follow single ranks.
        hops: Number of messages on the critical path.
        messages: Number of messages of all ranks.
        nbytes: Bytes of all messages.
        link_busy_ps: Time that each link carries messages, int64 [links]; None if links have no
            numbers in this model, or if there are millions.
        exact: Whether the times are those of the events; False if the evaluator approximates
            links that several ranks share.
        method: The evaluator, in words.
        network: The network.
        again: Function that returns the end in a random order of equal times; see `range_ps`.
    """

    finish_ps: IntArray
    causes_ps: dict[str, int]
    path: tuple[int, ...]
    hops: int
    messages: int
    nbytes: int
    link_busy_ps: IntArray | None
    exact: bool
    method: str
    network: Network = field(repr=False)
    again: Callable[[int], int] | None = field(default=None, repr=False)

    @property
    def last_ps(self) -> int:
        """The time at which the last rank ends."""
        return int(self.finish_ps.max())

    @property
    def first_ps(self) -> int:
        """The time at which the first rank ends."""
        return int(self.finish_ps.min())

    @property
    def last_us(self) -> float:
        """The time at which the last rank ends, in microseconds."""
        return self.last_ps / 1e6

    def range_ps(self, orders: int = 8) -> tuple[int, int]:
        """Return the earliest and the latest end over orders of messages that arrive at one time.

        Nothing says which of two messages a link serves first that arrive at the same picosecond.
        The result takes one order, and `orders` others are drawn. The two values are equal if the
        order does not count, or if the evaluator was not that of the events.

        Cost: `orders` runs of the events.
        """
        ends = {self.last_ps}
        if self.again is not None:
            ends |= {self.again(seed) for seed in range(orders)}
        return min(ends), max(ends)

    def busiest(self, count: int = 1) -> list[tuple[str, int]]:
        """Return the names of the links that carry messages longest, and how long, in ps."""
        if self.link_busy_ps is None:
            return []
        names, busy = self.network.link_name, self.link_busy_ps
        return [(names(link), int(busy[link])) for link in self.busiest_links(count)]

    def busiest_links(self, count: int) -> list[int]:
        """Return the links that carry messages longest, without links that carry none."""
        if self.link_busy_ps is None:
            return []
        order = np.argsort(-self.link_busy_ps, kind="stable")[:count]
        links: list[int] = order[self.link_busy_ps[order] > 0].tolist()
        return links
