"""The queue of the C++ engine: asynchronous calls that run without the interpreter.

Theory of operation: the progress thread of a group stays in `CallQueue.serve`, in C++ and without
the interpreter lock. If a call needs no Python before or after its program, it runs and ends there.
A thread that waits for the call sleeps in C++, too; a thread that polls detects the end.

`serve` returns if a call needs Python. There are three cases: C++ cannot run the call, the call has
failed, or the call has succeeded and has callbacks. In the first two cases no other call runs until
Python calls `finish`. So the calls of a group run in the order of submission.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from functools import partial
from typing import Any

from unisono.base.completion import Completion
from unisono.base.deadline import Deadline
from unisono.base.extension import extension as _engine
from unisono.engines.api import Call, Communicator, Prepared, Task
from unisono.engines.array_lists import Memory
from unisono.engines.queue import OrderedEngine
from unisono.errors import ClosedError
from unisono.transports.messages import CallStatus

_FOREVER_S = 4e9
_PART_S = 0.05


class QueuedCall:
    """A call in the queue; the source of its completion (see `base.completion.Source`).

    Attributes:
        completion: None from the moment on at which a thread finishes it, because it holds the
            arrays.
        native: The call in C++; None after `release`.
        task: None after `release`.
    """

    __slots__ = ("_comm", "_seq", "_turn", "call", "completion", "is_put", "native", "task")

    def __init__(
        self, turn: Any, comm: Communicator, task: Task, completion: Completion, native: Any
    ) -> None:
        self._turn = turn
        self._comm = comm
        self.call = task.prepared.call
        self.completion: Completion | None = completion
        self.native = native
        self.task: Task | None = task
        self._seq = 0
        # False: the call has no number yet, and is about to be given to C++.
        self.is_put = False

    @property
    def seq(self) -> int:
        """The number in the group's order; 0 before the call is queued."""
        if (native := self.native) is not None:
            self._seq = int(native.seq)
        return self._seq

    def status(self) -> CallStatus:
        """Return the call as other ranks see it."""
        return CallStatus(self.seq, self.call.text)

    def is_over(self) -> bool:
        """Whether the call is over and the progress thread does not handle its end."""
        native = self.native
        if native is None or not self.is_put:
            return self.is_put
        return self._turn.is_over(self.seq) and not native.is_handed

    def poll(self) -> None:
        """Finish the completion if the call is over and no other thread does."""
        if self.is_over() and (completion := self.completion) is not None:
            # In this order: an exception of a signal handler between the two must not lose the end.
            completion.finish()
            self.release()

    def wait(self, deadline: Deadline | None) -> bool:
        """Block until the call is over; return False if the deadline passed first."""
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
        """Make the progress thread finish the completion; False: the call has succeeded."""
        native = self.native
        if native is None or self._turn.watch(native):
            return True
        self.poll()
        return False

    def release(self) -> Completion | None:
        """Release the arrays; return the completion, for the caller to finish."""
        self._seq = self.seq
        completion, self.completion = self.completion, None
        self.native = self.task = None
        return completion


class QueueEngine(OrderedEngine):
    """Runs asynchronous tasks on a thread that needs no interpreter for most tasks."""

    def __init__(self, comm: Communicator) -> None:
        super().__init__(comm, _engine.CallQueue())
        # In the order of the queue: calls that are not known to be over.
        self._queued: deque[QueuedCall] = deque()
        self._last_over: CallStatus | None = None
        self.calls = _engine.Calls(self._turn, self._continue_here, self._queue_prepared)
        if comm.trace is not None:
            self.calls.set_recorder(comm.trace.recorder)

    def set_timeout(self, timeout_s: float) -> None:
        super().set_timeout(timeout_s)
        self.calls.set_timeout(timeout_s)

    def close(self) -> None:
        self.calls.close()
        super().close()

    @abstractmethod
    def continue_task(self, task: Task, code: int, peer: int) -> None:
        """Continue a task whose program has ended with this status; raises as `perform` does."""

    def keep_memory(self, *memory: object) -> None:
        """Keep the memory of a call that ends with an exception, if it is still in use."""
        return None

    def last_queued(self) -> CallStatus | None:
        """Return the last queued call that has begun, or None if it is unknown."""
        begun = self._turn.begun
        found = [queued for queued in list(self._queued) if 0 < queued.seq <= begun]
        return found[-1].status() if found else self._last_over

    # ---- calls that C++ makes without Python ----------------------------------------------

    def last_call(self) -> CallStatus | None:
        queued, last = self.last_queued(), self.calls.last()
        if last is None or (queued is not None and queued.seq > last[0]):
            return queued
        return CallStatus(last[0], last[1].call.text)

    def _continue_here(
        self,
        prepared: Prepared,
        numbers: tuple[int, int],
        status: tuple[int, int],
        raised: BaseException | None,
        memory: tuple[Memory, Memory],
        timeout_s: float,
    ) -> None:
        """Continue a call that C++ ran on this thread, which still has the turn.

        Args:
            prepared: The call.
            numbers: Its number, and that of its record.
            status: Of its program; not OK.
            raised: The exception of a signal handler, or None.
            memory: Input and output.
            timeout_s: Its time-out.
        """
        seq, record = numbers
        if raised is not None:
            self.keep_memory(prepared, memory)
            self._end_record(record, raised)
            self.abort(f"{type(raised).__name__} on rank {self.comm.transport.rank}")
            raise raised
        task = Task(prepared, *memory, Deadline(timeout_s), seq=seq, record=record)
        try:
            error = self._run(task, lambda task: self.continue_task(task, *status))
        except BaseException as interrupt:
            self.abort(f"{type(interrupt).__name__} on rank {self.comm.transport.rank}")
            raise
        if error is not None:
            raise error

    def _queue_prepared(
        self, prepared: Prepared, input: Memory, output: Memory
    ) -> tuple[Completion, str] | None:
        """Queue a call that C++ found; return its completion and its name.

        None if that is not possible. Python must make the call then: it raises the reason, and
        reports it to the other ranks.
        """
        outputs = output if isinstance(output, list) else [] if output is None else [output]
        completion: Completion = self.pending_type(outputs, None, self.runs_here)
        task = Task(prepared, input, output, Deadline(self.timeout_s))
        made = self.last_number()
        try:
            self.submit(task, completion, inline=False)
        except BaseException as error:
            if self.last_number() > made:
                raise
            if isinstance(error, Exception):
                return None
            self.abort(f"{type(error).__name__} on rank {self.comm.transport.rank}")
            raise
        return completion, prepared.call.op

    # ---- order ----------------------------------------------------------------------------

    def _put(self, task: Task, completion: Completion) -> int:
        needs_python = not self.prepare(task)
        if needs_python:
            native = _engine.QueuedCall()
        else:
            left_s = task.deadline.remaining()
            recorder = None if self.comm.trace is None else self.comm.trace.recorder
            native = _engine.QueuedCall(
                task.prepared.native, task.input, task.output, left_s, recorder
            )
        queued = QueuedCall(self._turn, self.comm, task, completion, native)
        try:
            # Before the push: otherwise Ctrl-C between the two would free memory that C++ uses.
            self._queued.append(queued)
            if not needs_python:
                completion.ends_with(queued)
            seq = int(self._turn.push(native))
            task.record = native.record
            return seq
        finally:
            queued.is_put = True

    def submit(self, task: Task, completion: Completion, *, inline: bool) -> None:
        super().submit(task, completion, inline=inline)
        self._discard_ended()

    def _discard_ended(self) -> None:
        """Remove the calls that are over, and finish their completions."""
        over = []
        with self._changed:
            while self._queued and (queued := self._queued[0]).is_over():
                # A signal handler may make calls inside `is_over`, and so remove the first call.
                if not self._queued or self._queued[0] is not queued:
                    continue
                self._queued.popleft()
                if queued.seq:
                    self._last_over = queued.status()
                over.append(queued)
        # Not under the lock: a callback may wait for a thread that makes a call.
        for queued in over:
            queued.poll()

    def _clear_queue(self) -> list[tuple[Call, Completion]]:
        first = self._turn.close()
        return [
            (queued.call, queued.completion)
            for queued in self._queued
            if first and queued.seq >= first and queued.completion is not None
        ]

    def _tasks(self) -> list[Task]:
        return [task for queued in list(self._queued) if (task := queued.task) is not None]

    def _wait_until_idle(self, limit: Deadline) -> None:
        while not limit.expired():
            with self._changed:
                last = self._queued[-1] if self._queued else None
            if last is not None and not self._turn.is_over(last.seq):
                last.wait(limit)
            elif self._turn.runs():
                # In parts, because this wait in C++ does not end at Ctrl-C.
                self._turn.wait_until_still(min(limit.remaining(), _PART_S))
            else:
                return

    def _wait_until_still(self, limit_s: float) -> None:
        self._turn.wait_until_still(limit_s)

    def _wake(self) -> None:
        """Do nothing: the turn in C++ wakes the threads that wait for it."""

    def _progress(self) -> None:
        while True:
            reason, seq, code, peer = self._turn.serve()
            if reason == _engine.CallQueue.CLOSED:
                return
            self._discard_ended()
            with self._changed:
                queued = None if reason == _engine.CallQueue.IDLE else self._find(seq)
            if queued is not None:
                self._handle(queued, reason, code, peer)
            # Otherwise this thread would keep the buffers of a finished task while it waits.
            del queued

    def _find(self, seq: int) -> QueuedCall:
        return next(queued for queued in self._queued if queued.seq == seq)

    def _handle(self, queued: QueuedCall, reason: int, code: int, peer: int) -> None:
        task, completion = queued.task, queued.release()
        assert completion is not None
        if reason == _engine.CallQueue.ENDED:
            completion.finish()
            return
        assert task is not None
        task.seq = queued.seq
        rest = partial(self.continue_task, code=code, peer=peer)
        self._run_and_finish(
            task,
            completion,
            partial(self._turn.finish, queued.seq),
            self.perform if reason == _engine.CallQueue.FOREIGN else rest,
        )
