"""The processes of a pool or an executor: messages to them, their answers, output and memory."""

from __future__ import annotations

import contextlib
import itertools
import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from multiprocessing import connection, reduction
from typing import Any, Self

from unisono.beyond.pool.captured import CallNames
from unisono.beyond.pool.display import Shown
from unisono.beyond.pool.memory import Region, dumps_with
from unisono.beyond.pool.output import RankOutput
from unisono.beyond.pool.rank import CallAnswer, serve
from unisono.beyond.pool.watch import RankWatch
from unisono.core.base.deadline import Deadline
from unisono.errors import ClosedError
from unisono.launcher.payload import Payload
from unisono.launcher.spawn import SpawnContext

POLL_S = 0.5
"""How often to look for ranks whose end wakes no wait."""

INTERRUPT_S = 5.0
"""How long an interrupted rank may take before it is killed."""


class RankProcesses:
    """Processes that make calls.

    Args:
        size: How many.
        start_method: As for `launch`.
        with_group: Whether they are the ranks of a group.

    Attributes:
        numbers: Of messages, and of cells.
        regions: Memory that the processes share with this one, by key.
        held: Arrays that a result of the call may refer to; None if no call is made.
        output: What they print.
        watch: What they do.
        shown: What their calls want to show, by rank.
    """

    def __init__(self, size: int, start_method: str, with_group: bool) -> None:
        self.size = size
        self.numbers = itertools.count(1)
        # The number of the message that each rank answers next. Answers to others are dropped.
        self._awaited: dict[int, int] = {}
        self.regions: dict[str, Region] = {}
        self.held: list[Any] | None = None
        self._names = CallNames()
        self.output = RankOutput()
        self.watch = RankWatch()
        self.shown: dict[int, list[Shown]] = {}
        self._context: SpawnContext | None = SpawnContext(
            *(serve, (size, with_group), size),
            start_method=start_method,
            joins=False,
            returns="messages",
        )
        self.kill = weakref.finalize(self, _kill, self._context, self.output, self.watch)
        try:
            self._context.wait_loaded(range(size))
            for rank in range(size):
                self._equip(rank)
        except BaseException:
            self.kill()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def is_closed(self) -> bool:
        """Whether they have been ended."""
        return self._context is None

    def close(self) -> None:
        """End them; a second call does nothing, nor does that of a fork of this process."""
        context, self._context = self._context, None
        if context is None or not context.is_own:
            return
        for link in context.links:
            with contextlib.suppress(OSError):
                link.send(("end",))
        last = Deadline(INTERRUPT_S)
        while any(process.exitcode is None for process in context.processes):
            if last.expired():
                break
            waits = [process.sentinel for process in context.processes]
            self.output.pump(connection.wait([*waits, *self.output.sources()], POLL_S))
        self.output.flush()
        self.kill()

    def _started(self) -> SpawnContext:
        if self._context is None:
            raise ClosedError("the pool is closed", hint="make another: unisono.pool(...)")
        return self._context

    def pids(self) -> list[int]:
        """Return the process of each rank."""
        return self._started().pids()

    def tell(self, rank: int, *message: Any, fd: int | None = None) -> None:
        """Send a message, and a descriptor; `answers` notices a rank that has died."""
        context = self._started()
        with contextlib.suppress(OSError):
            context.links[rank].send(message)
            if fd is not None:
                reduction.send_handle(context.links[rank], fd, context.pids()[rank])

    def ask(self, rank: int, name: str, *values: Any) -> None:
        """Send a message that the rank answers."""
        self._awaited[rank] = next(self.numbers)
        self.tell(rank, name, self._awaited[rank], *values)

    def attach(self, region: Region) -> None:
        """Share memory with all ranks."""
        self.regions[region.key] = region
        if self.held is not None:
            self.held.append(region.base())
        for rank in range(self.size):
            self.tell(rank, "attach", region.key, region.nbytes, fd=region.fd)

    def share(self, regions: Sequence[Region]) -> None:
        """Share the memory of a call that comes next."""
        self.drop_regions()
        for region in regions:
            if region.key not in self.regions:
                self.attach(region)

    def drop_regions(self) -> None:
        """Let memory go that this process no longer uses."""
        for key in [key for key, region in self.regions.items() if region.base() is None]:
            del self.regions[key]
            for rank in range(self.size):
                self.tell(rank, "drop", key)

    def _equip(self, rank: int) -> None:
        """Give a new process what the older ones have."""
        target = self.output.open(rank)
        try:
            self.tell(rank, "output", fd=target)
        finally:
            os.close(target)
        with self.watch.opened(rank) as link:
            self.tell(rank, "watch", fd=link.fileno())
        for region in list(self.regions.values()):
            if (base := region.base()) is not None:
                self.tell(rank, "attach", region.key, region.nbytes, fd=region.fd)
            del base  # the descriptor is open until then

    def end_of(self, rank: int) -> str | None:
        """Return how a rank ended; None while it runs."""
        return self._started().end_of(rank)

    def restart(self, ranks: Sequence[int]) -> None:
        """Start new processes for ranks that have ended."""
        if ranks:
            context = self._started()
            self.output.flush()
            self.output.finish(ranks)
            context.restart(ranks)
            context.wait_loaded(ranks)
            for rank in ranks:
                self._equip(rank)

    def dumps_of(self, module: Any) -> Callable[..., Any]:
        """Return the `dumps` of pickle or cloudpickle that refers to the shared arrays."""
        return dumps_with(self.regions, module, self.attach, self._names.check)

    def post(self, rank: int, payload: Payload) -> None:
        """Send a call to a rank that is free."""
        context = self._started()
        self.ask(rank, "call")
        with contextlib.suppress(OSError):
            payload.send(context.links[rank], context.pids()[rank])

    def answers(
        self, ranks: Iterable[int], limit_s: float | None, others: Sequence[Any] = ()
    ) -> list[tuple[int, CallAnswer | str]]:
        """Return the answers that came, or how a rank ended; pass output on meanwhile.

        Args:
            ranks: Ranks that make a call.
            limit_s: How long to wait at most.
            others: Descriptors that end the wait.
        """
        context = self._started()
        links, ranks = context.links, list(ranks)
        ends = [context.processes[rank].sentinel for rank in ranks]
        waits = [*(links[rank] for rank in ranks), *ends, *self.output.sources(), *others]
        self.output.pump(connection.wait(waits, limit_s))
        found: list[tuple[int, CallAnswer | str]] = []
        for rank in ranks:
            try:
                answer = self._received(rank, links[rank]) or context.end_of(rank)
            except (EOFError, OSError, RuntimeError):
                context.processes[rank].join(POLL_S)
                answer = context.end_of(rank) or f"rank {rank} closed its connection"
            if answer is not None:
                found.append((rank, answer))
        return found

    def _received(self, rank: int, link: Any) -> CallAnswer | str | None:
        """Return the answer of a rank to its last message; None if it has not come."""
        while link.poll(0):
            answer = link.recv()
            if not isinstance(answer, CallAnswer):
                return str(answer.text)  # the report of an error outside of all calls
            if answer.raised is None:
                answer = answer._replace(result=Payload.received(link))
            if answer.number == self._awaited[rank]:
                return answer
        return None


def _kill(context: SpawnContext, output: RankOutput, watch: RankWatch) -> None:
    if not context.is_own:
        return
    context.kill()
    context.close_ended()
    output.finish(range(len(context.processes)))
    watch.close()
