"""The queue of the C++ engine: asynchronous calls that run without the interpreter.

Theory of operation: the progress thread of a group stays in `CallQueue.serve`, in C++ and without
the interpreter lock. If a call needs no Python before or after its program, it runs and ends there.
A thread that waits for a small call that is next runs it. Otherwise it sleeps in C++. A thread that
polls detects the end.

`serve` returns if a call needs Python. There are three cases: C++ cannot run the call, the call has
failed, or the call has succeeded and has callbacks. In the first two cases no other call runs until
Python calls `finish`. So the calls of a group run in the order of submission.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from unisono.core.base.deadline import Deadline
from unisono.core.base.seam import cpp as _engine
from unisono.core.base.threads.completion import Completion
from unisono.core.engines.api import Call, Communicator, Prepared, Task
from unisono.core.engines.array_lists import ArrayOrList
from unisono.core.engines.queue import OrderedEngine
from unisono.core.transports.messages import CallStatus
from unisono.errors import ClosedError

_FOREVER_S = 4e9
_PART_S = 0.05


class QueuedCall:
    """A call in the queue, and its end.

    C++ makes most of them, without `__init__`, and sets `engine`, `prepared` and `native`. The
    `Pending` of such a call is made if the caller needs it, or if the call fails.

    Attributes:
        engine: The engine of the queue.
        prepared: The call without its memory.
        native: The call in C++; None after `release`.
        task: Of a call that Python has queued; None after `release`.
        made: The completion; None before its first use. Read it through `pending`.
        is_put: False if the call has no number yet, and is about to be given to C++.
        is_taken: Whether a thread finishes the completion, or nothing is left to finish.
        watcher: The callback of `on_end`, until it is called.
    """

    # C++ sets the slots of each call. Few calls need the other attributes and their dictionary.
    __slots__ = ("__dict__", "engine", "native", "prepared", "watcher")

    task: Task | None = None
    made: Any = None
    is_put = True
    is_taken = False
    _seq = 0
    _record = 0

    def __init__(self, engine: QueueEngine, task: Task, made: Any, native: Any) -> None:
        self.engine = engine
        self.prepared = task.prepared
        self.native = native
        self.task = task
        self.made = made
        self.watcher: Callable[[], object] | None = None
        self.is_put = False

    @property
    def call(self) -> Call:
        """The call, without its number."""
        return self.prepared.call

    @property
    def seq(self) -> int:
        """The number in the group's order; 0 before the call is queued."""
        if (native := self.native) is not None:
            self._seq = int(native.seq)
        return self._seq

    def pending(self, output: ArrayOrList) -> Any:
        """Return the completion; make it, with the result `output`, at the first call."""
        if (made := self.made) is None:
            engine = self.engine
            outputs = output if isinstance(output, list) else [] if output is None else [output]
            new = engine.pending_type(outputs, None, engine.runs_here)
            native = self.native
            new.recorded = engine.comm.trace, self._record if native is None else native.record
            new.ends_with(self)
            # Atomic: another thread or a signal handler may be here as well.
            made = vars(self).setdefault("made", new)
            _engine.track(self)
            # Read after the completion was set; `poll` reads in the other order.
            if made is new and self.is_taken:
                made.finish()
        return made

    def wait_well(self) -> bool:
        """Wait for the end; False if the call has not ended well, or the completion must wait."""
        native = self.native
        if self.made is not None or native is None:
            if self._record and (trace := self.engine.comm.trace) is not None:
                trace.recorder.note_wait(self._record)
            return self.has_ended_well()
        if not self.engine.calls.wait_well(native):
            return False
        # As `poll`, which would ask again.
        self._seq = native.seq
        self.is_taken = True
        self.native = None
        if (made := vars(self).pop("made", None)) is not None:
            made.finish()
        return True

    def has_ended_well(self) -> bool:
        """Return whether it has ended well, and no completion was made."""
        return self.is_taken and self.made is None

    def status(self) -> CallStatus:
        """Return the call as other ranks see it."""
        return CallStatus(self.seq, self.call.text)

    def is_over(self) -> bool:
        """Whether the call is over and the progress thread does not handle its end."""
        native = self.native
        if native is None or not self.is_put:
            return self.is_put
        # Without a number it is not in the queue yet.
        return self.seq != 0 and self.engine.turn.is_over(self.seq) and not native.is_handed

    def poll(self) -> None:
        """Finish the completion if the call is over and no other thread does."""
        if not self.is_taken and self.is_over():
            self.end_well()

    def end_well(self) -> None:
        """Finish the completion, if there is one, and call what `on_end` was given."""
        # In this order: an exception of a signal handler between the two must not lose the end.
        if (made := self.made) is not None:
            made.finish()
        self.release()
        # `pending` may have made it meanwhile. The queue must not keep its arrays.
        if (made := vars(self).pop("made", None)) is not None:
            made.finish()
        # After `release`; `on_end` looks in the other order.
        if (watcher := self._unwatched()) is not None:
            Completion(done=True).add_callback(lambda _: watcher())

    def wait(self, deadline: Deadline | None) -> bool:
        """Block until the call is over; return False if the deadline passed first."""
        seq, turn, comm = self.seq, self.engine.turn, self.engine.comm
        if not turn.is_over(seq):
            if closed := comm.closed():
                raise ClosedError(f"{self.call.op} on group '{comm.name}', which {closed}")
            if not turn.wait(seq, _FOREVER_S if deadline is None else deadline.remaining()):
                return False
        self.poll()
        return True

    def on_end(self, callback: Callable[[], object]) -> bool:
        """Have the progress thread call `callback()` at the end; False: `pending` must have it."""
        if (native := self.native) is None or self.made is not None or self.watcher is not None:
            return False
        # No call between the look and this line, because a signal handler may come here as well.
        self.watcher = callback
        if self.engine.turn.watch(native) and not self.is_taken:
            return True
        # It has ended. A thread that has found the callback calls it.
        return self._unwatched() is None

    def _unwatched(self) -> Callable[[], object] | None:
        """Return the callback of `on_end` and forget it; None if there is none."""
        watcher, self.watcher = self.watcher, None
        return watcher

    def watch(self) -> bool:
        """Make the progress thread finish the completion; False: the call has succeeded."""
        native = self.native
        if native is None or self.engine.turn.watch(native):
            return True
        self.poll()
        return False

    def take(self) -> Any:
        """Return the completion, for the progress thread to finish, and release the arrays."""
        made = self.pending(self.native.result) if self.made is None else self.made
        self.release()
        if (watcher := self._unwatched()) is not None:
            made.add_callback(lambda _: watcher())
        return made

    def release(self) -> None:
        """Release the arrays."""
        self._seq = self.seq
        self.is_taken = True
        if (native := self.native) is not None:
            # 0: the completion has it, because Python records the call.
            self._record = native.record
        self.native = self.task = None

    def left_s(self) -> float:
        """Return the seconds until the call's deadline; 0 after its end."""
        native, task = self.native, self.task
        return task.deadline.remaining() if task else native.left_s if native else 0.0

    def started(self) -> Task:
        """Return the task, which has begun."""
        if self.task is None:
            native = self.native
            deadline = Deadline.ending(native.timeout_s, native.left_s)
            input, output = native.memory
            finish, record = native.write_back, native.record
            self.task = Task(self.prepared, input, output, deadline, None, finish, record=record)
        self.task.seq = self.seq
        return self.task


class QueueEngine(OrderedEngine):
    """Runs asynchronous tasks on a thread that needs no interpreter for most tasks."""

    def __init__(self, comm: Communicator) -> None:
        super().__init__(comm, _engine.CallQueue())
        # In the order of the queue: calls that are not known to be over.
        self._queued: deque[QueuedCall] = deque()
        self._last_over: CallStatus | None = None
        # Whether C++ queues calls.
        self._opened = False
        self.calls = _engine.Calls(self._turn, self._continue_here)
        if comm.trace is not None:
            self.calls.set_recorder(comm.trace.recorder)

    def set_timeout(self, timeout_s: float) -> None:
        super().set_timeout(timeout_s)
        self.calls.set_timeout(timeout_s)

    @property
    def turn(self) -> Any:
        """The queue in C++."""
        return self._turn

    def close(self) -> None:
        self.calls.close()
        super().close()
        # The calls refer to this engine, and the garbage collector does not visit all of them.
        if not self._turn.runs():
            self._queued.clear()

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
        memory: tuple[ArrayOrList, ArrayOrList],
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

    # ---- order ----------------------------------------------------------------------------

    def _put(self, task: Task, completion: Completion) -> int:
        is_plain = task.begin is None and task.finish is None
        needs_python = not (is_plain and self.prepare(task))
        if needs_python:
            native = _engine.QueuedCall()
        else:
            left_s = task.deadline.remaining()
            recorder = None if self.comm.trace is None else self.comm.trace.recorder
            native = _engine.QueuedCall(
                task.prepared.native, task.input, task.output, left_s, recorder
            )
        queued = QueuedCall(self, task, completion, native)
        try:
            # Before the push: otherwise Ctrl-C between the two would free memory that C++ uses.
            self._queued.append(queued)
            if not needs_python:
                completion.ends_with(queued)
            if not (seq := int(self._turn.push(native))):
                # A collection of garbage has run code that closed the group.
                self._require_open(task.prepared.call)
            task.record = native.record
            if not self._opened:
                # Now that the progress thread runs.
                self._opened = True
                is_locked = self._changed._is_owned  # type: ignore[attr-defined]
                self.calls.open_queue(
                    self, QueuedCall, self._queued, self._discard_ended, is_locked
                )
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
                over.append(self._queued.popleft())
            if (last := next((each for each in reversed(over) if each.seq), None)) is not None:
                self._last_over = last.status()
        # Not under the lock: a callback may wait for a thread that makes a call.
        for queued in over:
            if not queued.is_taken:
                queued.poll()

    def _clear_queue(self) -> list[tuple[Call, Completion]]:
        first = self._turn.close()
        return [
            (queued.call, queued.take())
            for queued in list(self._queued)
            if first and queued.seq >= first and not queued.is_taken
        ]

    def _left_s(self) -> list[float]:
        return [queued.left_s() for queued in list(self._queued)]

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
            # Otherwise this thread and the queue would keep the buffers of a finished task while
            # this thread waits.
            if queued is not None:
                del queued
                self._discard_ended()

    def _find(self, seq: int) -> QueuedCall:
        # A copy, because C++ queues calls without the lock.
        return next(queued for queued in list(self._queued) if queued.seq == seq)

    def _handle(self, queued: QueuedCall, reason: int, code: int, peer: int) -> None:
        if reason == _engine.CallQueue.ENDED:
            queued.end_well()
            return
        task, completion = queued.started(), queued.take()
        rest = partial(self.continue_task, code=code, peer=peer)
        self._run_and_finish(
            task,
            completion,
            partial(self._turn.finish, queued.seq),
            self.perform if reason == _engine.CallQueue.FOREIGN else rest,
        )
