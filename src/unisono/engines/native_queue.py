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
from collections.abc import Callable
from functools import partial
from typing import Any

from unisono.base.completion import Completion
from unisono.base.deadline import Deadline
from unisono.base.extension import extension as _engine
from unisono.engines.api import Call, Communicator, Task
from unisono.engines.queue import OrderedEngine
from unisono.errors import ClosedError
from unisono.transports.messages import CallStatus

__all__ = ["QueueEngine"]

_FOREVER_S = 4e9


class _Queued:
    """A call in the queue, and where its completion learns of its end.

    Attributes:
        completion: None once it is finished, or about to be by who asked: it holds the arrays.
        task: Makes the task of it from its number; None once that is not needed any more.
    """

    __slots__ = ("_comm", "_seq", "_turn", "call", "completion", "flight", "is_put", "task")

    def __init__(
        self,
        turn: Any,
        comm: Communicator,
        call: Call,
        completion: Completion,
        flight: Any,
        task: Callable[[int], Task],
    ) -> None:
        self._turn = turn
        self._comm = comm
        self.call = call
        self.completion: Completion | None = completion
        self.flight = flight
        self.task: Callable[[int], Task] | None = task
        self._seq = 0
        # False: it has no number yet, but C++ is about to get it.
        self.is_put = False

    @property
    def seq(self) -> int:
        """The number in the group's order; 0 before it is queued."""
        if (flight := self.flight) is not None:
            self._seq = int(flight.seq)
        return self._seq

    def status(self) -> CallStatus:
        """Return what other ranks are told of it."""
        return CallStatus(self.seq, self.call.text)

    def is_over(self) -> bool:
        """Whether the call is over, and Python need not say so to whoever waits."""
        flight = self.flight
        if flight is None or not self.is_put:
            return self.is_put
        return self._turn.is_over(self.seq) and not flight.is_handed

    def poll(self) -> None:
        """Finish the completion if the call is over and nobody else does."""
        if self.is_over() and (completion := self.release()) is not None:
            completion.finish()

    def wait(self, deadline: Deadline | None) -> bool:
        """Block until the call is over; False if the deadline passed first."""
        seq = self.seq
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
        if flight is None or self._turn.watch(flight):
            return True
        self.release()
        return False

    def release(self) -> Completion | None:
        """Let go of the arrays; return the completion, for the caller to finish."""
        self._seq = self.seq
        completion, self.completion = self.completion, None
        self.flight = self.task = None
        return completion


def _numbered(task: Task, seq: int) -> Task:
    task.call = task.call._replace(seq=seq)
    return task


class QueueEngine(OrderedEngine):
    """Runs asynchronous tasks on a thread that needs no interpreter for most of them."""

    def __init__(self, comm: Communicator) -> None:
        super().__init__(comm, _engine.Turn())
        # In the order of the queue: what is not known to be over.
        self._queued: deque[_Queued] = deque()
        self._last_over: CallStatus | None = None

    @abstractmethod
    def prepare(self, task: Task) -> Any:
        """Return the task as a `Flight`, or None if C++ alone cannot run it."""

    @abstractmethod
    def perform_rest(self, task: Task, code: int, peer: int) -> None:
        """Do what remains of a task that has ended with this status; raises as `perform` does."""

    @abstractmethod
    def task_again(self, repeated: Any, buffers: tuple[Any, Any], seq: int) -> Task:
        """Return the task of a call that C++ repeats, on these buffers."""

    def last_queued(self) -> CallStatus | None:
        """Return the last queued call that has begun, if it is known."""
        begun = self._turn.begun
        found = [queued for queued in list(self._queued) if 0 < queued.seq <= begun]
        return found[-1].status() if found else self._last_over

    # ---- order ----------------------------------------------------------------------------

    def _put(self, task: Task, completion: Completion) -> int:
        flight = self.prepare(task)
        return self._append(task.call, completion, flight, lambda seq: _numbered(task, seq))

    def submit(self, task: Task, completion: Completion, *, inline: bool) -> None:
        super().submit(task, completion, inline=inline)
        self._forget()

    def _append(
        self, call: Call, completion: Completion, flight: Any, task: Callable[[int], Task]
    ) -> int:
        given = flight or _engine.Flight()
        queued = _Queued(self._turn, self.comm, call, completion, given, task)
        try:
            # Before the push: Ctrl-C between the two must not free what C++ works on.
            self._queued.append(queued)
            if flight is not None:
                completion.ends_with(queued)
            return int(self._turn.push(given))
        finally:
            queued.is_put = True

    def _begun_again(
        self, flight: Any, repeated: Any, buffers: tuple[Any, Any]
    ) -> tuple[Completion, str]:
        """Queue a call that C++ has prepared; return its completion and its name."""
        call, output = repeated.call, buffers[1]
        outputs = output if isinstance(output, list) else [] if output is None else [output]
        self._require_open(call)
        completion: Completion = self.pending_type(outputs, None, self.runs_here)
        with self._changed:
            self._require_open(call)
            self._worker.start(self._progress)
            task = partial(self.task_again, repeated, buffers)
            self._append(call, completion, flight, task)
        self._forget()
        return completion, call.op

    def _forget(self) -> None:
        """Let go of what is over and told."""
        over = []
        with self._changed:
            while self._queued and (queued := self._queued[0]).is_over():
                # A signal handler may make calls in `is_over`, and so let go of what is first.
                if not self._queued or self._queued[0] is not queued:
                    continue
                self._queued.popleft()
                if queued.seq:
                    self._last_over = queued.status()
                over.append(queued)
        # Not under the lock: a callback may wait for another thread, which makes a call.
        for queued in over:
            queued.poll()

    def _take_back(self) -> list[tuple[Call, Completion]]:
        first = self._turn.close()
        return [
            (queued.call, queued.completion)
            for queued in self._queued
            if first and queued.seq >= first and queued.completion is not None
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
            self._forget()
            with self._changed:
                queued = None if reason == _engine.Turn.IDLE else self._find(seq)
            if queued is not None:
                self._handle(queued, reason, code, peer)
            # A waiting thread must not keep the buffers of a finished task alive.
            del queued

    def _find(self, seq: int) -> _Queued:
        return next(queued for queued in self._queued if queued.seq == seq)

    def _handle(self, queued: _Queued, reason: int, code: int, peer: int) -> None:
        make, completion = queued.task, queued.release()
        assert completion is not None
        if reason == _engine.Turn.ENDED:
            completion.finish()
            return
        assert make is not None
        rest = partial(self.perform_rest, code=code, peer=peer)
        self._run_and_finish(
            make(queued.seq),
            completion,
            partial(self._turn.finish, queued.seq),
            self.perform if reason == _engine.Turn.FOREIGN else rest,
        )
