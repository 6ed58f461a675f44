"""The queue of the C++ engine: asynchronous calls that run without the interpreter.

Theory of operation: the progress thread of a group spends its life in `Turn.serve`, in C++ and
without the interpreter lock. A queued call whose program can run as it is (`Flight`) runs there
and ends there: whoever waits for it sleeps in C++ too, or finds out when asking. `serve` returns
for what needs Python: a call that C++ cannot run, one that has ended badly, and one that has ended
well and has callbacks. In the first two cases nothing else runs until Python has said `finish`, so
the calls of a group run in the order of submission, whoever runs them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from functools import partial
from typing import Any

from unisono.base.completion import Completion
from unisono.base.deadline import Deadline
from unisono.base.native import extension as _engine
from unisono.engines.api import Call, Communicator, Task
from unisono.engines.order import OrderedEngine
from unisono.errors import ClosedError
from unisono.transports.api import Status

__all__ = ["QueueEngine"]

_FOREVER_S = 4e9


class _Queued:
    """A call in the queue, and where its completion learns of its end."""

    __slots__ = ("_comm", "_turn", "call", "completion", "flight", "task")

    def __init__(
        self, turn: Any, comm: Communicator, task: Task, completion: Completion, flight: Any
    ) -> None:
        self._turn = turn
        self._comm = comm
        self.completion = completion
        self.flight = flight
        seq = turn.push(flight)
        task.call = task.call._replace(seq=seq)
        self.call: Call = task.call
        self.task: Task | None = task

    def poll(self) -> bool:
        """Finish the completion if the call is over and nobody else does; return whether it is."""
        flight = self.flight
        if flight is None:
            return True
        if not self._turn.is_over(self.call.seq) or flight.is_handed:
            return False
        self.release()
        self.completion.finish()
        return True

    def wait(self, deadline: Deadline | None) -> bool:
        """Block until the call is over; False if the deadline passed first."""
        seq = self.call.seq
        if not self._turn.is_over(seq):
            if self._comm.closed():
                raise ClosedError(
                    f"{self.call.op} on group '{self._comm.name}', which {self._comm.closed()}"
                )
            if not self._turn.wait(seq, _FOREVER_S if deadline is None else deadline.remaining()):
                return False
        self.poll()
        return True

    def watch(self) -> bool:
        """Have the progress thread finish the completion; False: the call has ended well."""
        flight = self.flight
        # Without one, another thread is about to finish it.
        return flight is None or bool(self._turn.watch(flight))

    def release(self) -> None:
        """Let go of the arrays."""
        self.flight = self.task = None


class QueueEngine(OrderedEngine):
    """Runs asynchronous tasks on a thread that needs no interpreter for most of them."""

    def __init__(self, comm: Communicator) -> None:
        super().__init__(comm, _engine.Turn())
        # In the order of the queue: what is not known to be over.
        self._queued: deque[_Queued] = deque()
        self._last_over: Status | None = None

    @abstractmethod
    def prepare(self, task: Task) -> Any:
        """Return the task as a `Flight`, or None if C++ alone cannot run it."""

    @abstractmethod
    def perform_rest(self, task: Task, code: int, peer: int) -> None:
        """Do what remains of a task that has ended with this status; raises as `perform` does."""

    def last_queued(self) -> Status | None:
        """Return the last queued call that has begun, if it is known."""
        begun = self._turn.begun
        calls = [queued.call for queued in list(self._queued)]
        found = [Status(call.seq, call.text) for call in calls if call.seq <= begun]
        return found[-1] if found else self._last_over

    # ---- order ----------------------------------------------------------------------------

    def _put(self, task: Task, completion: Completion) -> int:
        self._forget()
        flight = self.prepare(task)
        is_ours = flight is not None
        queued = _Queued(self._turn, self.comm, task, completion, flight or _engine.Flight())
        self._queued.append(queued)
        if is_ours:
            completion.ends_with(queued)
        return queued.call.seq

    def _forget(self) -> None:
        """Let go of what is over and told."""
        while self._queued and self._queued[0].poll():
            queued = self._queued.popleft()
            self._last_over = Status(queued.call.seq, queued.call.text)

    def _take_back(self) -> list[tuple[Call, Completion]]:
        first = self._turn.close()
        return [
            (queued.call, queued.completion)
            for queued in self._queued
            if first and queued.call.seq >= first
        ]

    def _wait_until_still(self, limit_s: float) -> None:
        self._turn.wait_until_still(limit_s)

    def _wake(self) -> None:
        """Do nothing: the turn wakes who waits for it."""

    def _progress(self) -> None:
        while True:
            reason, seq, code, peer = self._turn.serve()
            if reason == _engine.Turn.CLOSED:
                return
            with self._changed:
                self._forget()
                queued = None if reason == _engine.Turn.IDLE else self._numbered(seq)
            if queued is not None:
                self._handle(queued, reason, code, peer)
            # A waiting thread must not keep the buffers of a finished task alive.
            del queued

    def _numbered(self, seq: int) -> _Queued:
        return next(queued for queued in self._queued if queued.call.seq == seq)

    def _handle(self, queued: _Queued, reason: int, code: int, peer: int) -> None:
        completion, task = queued.completion, queued.task
        queued.release()
        if reason == _engine.Turn.ENDED:
            completion.finish()
            return
        assert task is not None
        rest = partial(self.perform_rest, code=code, peer=peer)
        self._run_and_finish(
            task,
            completion,
            partial(self._turn.finish, queued.call.seq),
            self.perform if reason == _engine.Turn.FOREIGN else rest,
        )
