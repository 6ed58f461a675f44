"""The events to come in a run, by time."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush
from random import Random


class Agenda:
    """Events by time; those of one time are in the order in which they were put.

    Args:
        turns: Draws the order of the events that `next` returns; None: as they were put.

    Attributes:
        times: A heap of the times that have events.
        events: The events of each time, as numbers.
    """

    def __init__(self, turns: Random | None = None) -> None:
        self.turns = turns
        self.times: list[int] = []
        self.events: dict[int, list[int]] = {}

    def put(self, time: int, event: int) -> None:
        """Add an event."""
        # Events of equal time are frequent, and cheap without a place of their own in the heap.
        events = self.events.get(time)
        if events is None:
            self.events[time] = [event]
            heappush(self.times, time)
        else:
            events.append(event)

    def next(self) -> tuple[int, list[int]]:
        """Remove the first time, and return it and its events."""
        time = heappop(self.times)
        events = self.events.pop(time)
        if self.turns is not None:
            self.turns.shuffle(events)
        return time, events

    def in_order(self) -> Iterator[tuple[int, int]]:
        """Yield times and events in the order of both; an event may put others."""
        while self.times:
            time, batch = self.next()
            batch.sort(reverse=True)
            while batch:
                yield time, batch.pop()
                if self.times and self.times[0] < time:
                    # An event was put for an earlier time.
                    for event in batch:
                        self.put(time, event)
                    break
