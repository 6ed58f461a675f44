"""The ranks of a group as the workers of an executor: tasks and results are messages."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterable, Sequence
from multiprocessing import connection
from typing import Any, Self

import numpy as np

from unisono.beyond.pool.rank import CallAnswer, RaisedError, raised_by
from unisono.core.c10d.lifecycle import destroy_process_group
from unisono.core.c10d.new_groups import split_group
from unisono.core.groups.process_group import ProcessGroup
from unisono.core.groups.world import current
from unisono.core.operations.work import Work
from unisono.errors import InvalidArgumentError, UnisonoError
from unisono.launcher.launch import pickling
from unisono.launcher.payload import Payload

# Workers and the root wait for each other for as long as tasks take.
_WITHOUT_END = float("inf")


class RankWorkers:
    """What an executor needs of a pool, made of the ranks of a group; `serve` is the other side.

    Args:
        group: Made anew for this; all ranks call.
        root: Rank that has the executor.

    Attributes:
        queue: Of the last executor; it is told of answers.

    Raises:
        InvalidArgumentError: There is no such rank, or other ranks gave another one.
    """

    def __init__(self, group: ProcessGroup, root: int) -> None:
        size = group.size()
        # Ranks with another root get another group, so that all of them know.
        made: Any = split_group(group, color=root if 0 <= root < size else size)
        if made.size() < size or not 0 <= root < size:
            destroy_process_group(made)
            if not 0 <= root < size:
                raise InvalidArgumentError(f"root {root} is no rank of a group of {size}")
            raise InvalidArgumentError(
                f"the ranks do not agree on the root: only ranks {list(made.ranks)} gave {root}",
                hint="give the same root on all ranks",
            )
        self._group: ProcessGroup = made
        self._root = root
        self.ranks = [rank for rank in range(self._group.size()) if rank != root]
        self.taken = threading.Lock()
        self._ends: dict[int, str] = {}
        self._calls: dict[int, Work] = {}
        self.queue: Any = None
        default = current().default
        assert default is not None
        self.world_size = default.size()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.taken.release()

    def close(self) -> None:
        """End the executor when its tasks have ended, then the workers' loops, and the group."""
        if self.queue is not None:
            self.queue.close()
        with self.taken:
            if self._group.rank() == self._root:
                for rank in self.ranks:
                    if rank not in self._ends:
                        self._send(np.empty(0, np.uint8), rank)
            destroy_process_group(self._group)

    def _send(self, data: Any, rank: int) -> None:
        try:
            self._group.send(data, rank)
        except UnisonoError as error:
            self._ends[rank] = f"rank {self._group.ranks[rank]}: {error}"

    def name_of(self, rank: int) -> int:
        """Return the global rank of a worker."""
        return self._group.ranks[self.ranks[rank]]

    def end_of(self, rank: int) -> str | None:
        """Return how a worker ended; None while it runs."""
        return self._ends.get(self.ranks[rank])

    def post(self, rank: int, payload: Payload) -> None:
        """Send a call to a worker that is free; `end_of` tells if it has ended before."""
        peer = self.ranks[rank]
        self._send(np.frombuffer(payload.data(), np.uint8), peer)
        if peer not in self._ends:
            self._calls[rank] = self._group.recv_array(peer, async_op=True, timeout=_WITHOUT_END)
            self._calls[rank].on_end(self.queue.wake)

    def answers(
        self, ranks: Iterable[int], limit_s: float | None, others: Sequence[Any] = ()
    ) -> list[tuple[int, CallAnswer | str]]:
        """Return the answers that came, or how a worker ended; see `Pool.answers`."""
        ranks = list(ranks)
        if not any(self._calls[rank].is_completed() for rank in ranks):
            connection.wait(others, limit_s)
        found: list[tuple[int, CallAnswer | str]] = []
        for rank in ranks:
            work = self._calls[rank]
            if not work.is_completed():
                continue
            if (error := work.exception()) is not None:
                end = f"rank {self.name_of(rank)}: {error}"
                found.append((rank, self._ends.setdefault(self.ranks[rank], end)))
                continue
            raised, result = pickle.loads(work.result()[0])
            payload = None if raised else Payload.of(result)
            found.append((rank, CallAnswer(0, raised, "", payload)))
        return found

    def serve(self) -> None:
        """Make the calls that the root sends, until it ends."""
        while len(task := self._next()):
            raised: RaisedError | None = None
            result = b""
            try:
                fn, args, keywords = Payload.of(task).load_once()
                value = fn(*args, **keywords)
                me = self._group.ranks[self._group.rank()]
                with pickling(value, f"the result of rank {me}") as dumps:
                    result = Payload(value, dumps).data()
            except BaseException as error:  # sys.exit() ends the task, not the worker
                raised = raised_by(error, __file__)
            answer = np.frombuffer(pickle.dumps((raised, result)), np.uint8)
            self._group.send(answer, self._root)
        self.close()

    def _next(self) -> Any:
        work = self._group.recv_array(self._root, async_op=True, timeout=_WITHOUT_END)
        work.wait()
        return work.result()[0]
