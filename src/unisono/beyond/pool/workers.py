"""The ranks of a group as the workers of an executor: tasks and results are messages."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterable, Sequence
from multiprocessing import connection
from typing import Any, Self

import numpy as np

from unisono.beyond.pool.rank import CallAnswer, RaisedError, raised_by
from unisono.core.c10d.lifecycle import destroy_process_group
from unisono.core.c10d.new_groups import split_group
from unisono.core.groups.process_group import ProcessGroup
from unisono.core.operations.work import Work
from unisono.errors import UnisonoError
from unisono.launcher.launch import pickling
from unisono.launcher.payload import Payload

# Workers and the root wait for each other for as long as tasks take.
_WITHOUT_END = float("inf")


class RankWorkers:
    """What an executor needs of a pool, made of the ranks of a group; `serve` is the other side.

    Args:
        group: Made anew for this; all ranks call.
        root: Rank that has the executor.
    """

    def __init__(self, group: ProcessGroup, root: int) -> None:
        made: Any = split_group(group, color=0)
        self._group: ProcessGroup = made
        self._root = root
        self.ranks = [rank for rank in range(self._group.size()) if rank != root]
        self.taken = threading.Lock()
        self._ends: dict[int, str] = {}
        self._calls: dict[int, Work] = {}
        self._wake: Callable[[], object] = print

    def open(self, wake: Callable[[], object]) -> Self:
        """Begin with an executor, which `wake` tells of answers."""
        self._wake = wake
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.taken.release()

    def close(self) -> None:
        """End the workers' loops, and the group."""
        if self._group.rank() == self._root:
            for rank in self.ranks:
                if rank not in self._ends:
                    self._send(np.empty(0, np.uint8), rank)
        if not self._ends:
            destroy_process_group(self._group)

    def _send(self, data: Any, rank: int) -> None:
        try:
            self._group.send(data, rank)
        except UnisonoError as error:
            self._ends[rank] = f"rank {self._group.ranks[rank]}: {error}"

    def end_of(self, rank: int) -> str | None:
        """Return how a worker ended; None while it runs."""
        return self._ends.get(self.ranks[rank])

    def post(self, rank: int, payload: Payload) -> None:
        """Send a call to a worker that is free."""
        peer = self.ranks[rank]
        self._send(np.frombuffer(payload.data(), np.uint8), peer)
        self._calls[rank] = self._group.recv_array(peer, async_op=True, timeout=_WITHOUT_END)
        self._calls[rank].on_end(self._wake)

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
                peer = self.ranks[rank]
                found.append((rank, self._ends.setdefault(peer, f"rank {peer}: {error}")))
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
                with pickling(value, f"the result of rank {self._group.rank()}") as dumps:
                    result = Payload(value, dumps).data()
            except Exception as error:
                raised = raised_by(error, __file__)
            answer = np.frombuffer(pickle.dumps((raised, result)), np.uint8)
            self._group.send(answer, self._root)
        self.close()

    def _next(self) -> Any:
        work = self._group.recv_array(self._root, async_op=True, timeout=_WITHOUT_END)
        work.wait()
        return work.result()[0]
