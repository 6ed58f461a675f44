"""The order of a group's tasks: on the caller's thread, or on a progress thread.

All engines share the sequence numbers, the queue and the handling of errors. A sub-class executes
the tasks.
"""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from bisect import insort
from collections import deque
from collections.abc import Callable
from operator import itemgetter
from typing import Any

from unisono.core.base.deadline import Deadline
from unisono.core.base.log import get_logger
from unisono.core.base.threads.completion import Completion
from unisono.core.base.threads.reentry import has_lock
from unisono.core.base.threads.worker import WorkerThread
from unisono.core.engines.api import Call, Communicator, Engine, Task
from unisono.core.engines.errors import (
    DeadlinePassed,
    broken_group_error,
    closed_text,
    nested_call_error,
    to_failure,
)
from unisono.core.recorder import GroupTrace, open_calls, write_after_failure
from unisono.core.recorder.ring import BLOCKING, NO_WAIT
from unisono.core.transports import LinkDown
from unisono.core.transports.messages import CallStatus, Failure
from unisono.errors import ClosedError, CollectiveMismatchError, UnsupportedError, UsageError

_log = get_logger("engines.queue")

# How long close() waits for a call that it has aborted, and for running callbacks.
_CLOSE_S = 10.0


class CallQueue:
    """The tasks that wait, their numbers, and the turn: the right to run a task.

    One thread has the turn at a time. The twin in C++ runs the queued calls itself. All methods but
    `give` are called under the engine's lock.
    """

    def __init__(self) -> None:
        # The identity of the thread that has the turn; 0: none.
        self._owner = 0
        # Whether a queued task is next, or none may run any more.
        self._wanted = False
        # In the order of their numbers.
        self.waiting: deque[tuple[int, tuple[Task, Completion]]] = deque()
        self.last = 0

    def take(self) -> int:
        """Take the turn and return the next number; 0 if the turn is taken or wanted."""
        return self._count() if self.is_free() and self._seize() else 0

    def give(self) -> None:
        """Give the turn back."""
        self._owner = 0

    def is_free(self) -> bool:
        """Whether `take` would take it."""
        return not self._owner and not self._wanted

    def is_mine(self) -> bool:
        """Whether the calling thread has the turn: it is in a signal handler then."""
        return self._owner == threading.get_ident()

    def runs(self) -> bool:
        """Whether a call runs."""
        return self._owner != 0

    def push(self, call: tuple[Task, Completion]) -> int:
        """Queue a task and return its number."""
        self._wanted = True
        seq = self._count()
        # A signal handler may have queued the next call meanwhile.
        insort(self.waiting, (seq, call), key=itemgetter(0))
        return seq

    def pop(self) -> tuple[Task, Completion] | None:
        """Take the turn for the next task, and return the task; None if that cannot be yet."""
        if not self.waiting or not self._seize():
            return None
        _, call = self.waiting.popleft()
        self._wanted = bool(self.waiting)
        return call

    def close(self) -> list[tuple[Call, Completion]]:
        """Drop the tasks that have not begun, and return them; no later task runs."""
        dropped, self.waiting = self.waiting, deque()
        self._wanted = True
        return [(task.prepared.call, completion) for _, (task, completion) in dropped]

    def _count(self) -> int:
        # Its own variable: a signal handler may count the next call before the return.
        seq = self.last = self.last + 1
        return seq

    def _seize(self) -> bool:
        if self._owner:
            return False
        self._owner = threading.get_ident()
        return True


class OrderedEngine(Engine):
    """Runs tasks on the caller's thread, or on a progress thread that is started on first use.

    Args:
        comm: The group.
        turn: Its `CallQueue`, if that is the one in C++.
    """

    def __init__(self, comm: Communicator, turn: Any = None) -> None:
        super().__init__(comm)
        self._turn: Any = turn or CallQueue()
        self._changed = threading.Condition()
        # Whether a thread waits for the end of all tasks.
        self._drains = False
        self._closed = False
        self._finished = 0
        self._worker = WorkerThread(f"unisono-progress-{comm.name}")
        comm.transport.on_failure(comm.context, self.note_failure)
        comm.transport.calls.watch(comm.context, self)

    def submit(self, task: Task, completion: Completion, *, inline: bool) -> None:
        # Before the lock: in the child of a fork, a thread of the parent may hold it for ever.
        call = task.prepared.call
        self._require_open(call)
        if inline and self._turn.is_mine():
            raise nested_call_error(self.comm, call.op)
        # In a signal handler: the thread that would run a queued call waits for the lock.
        cannot_wait = inline and has_lock(self._changed)
        now = False
        try:
            with self._changed:
                if self._closed:
                    self._require_open(call)
                if (
                    inline
                    and self._is_server()
                    and not (self._turn.is_free() and self.comm.transport.may_wait())
                ):
                    error = UsageError(
                        f"{call.op} on group '{self.comm.name}' waits for the thread it runs on",
                        hint="in a callback of a future, call it with async_op=True",
                    )
                    error.misplaced = True
                    raise error
                seq = self._turn.take() if inline else 0
                now = seq > 0
                if not now:
                    if cannot_wait:
                        raise nested_call_error(self.comm, call.op)
                    self._worker.start(self._progress)
                    seq = self._put(task, completion)
                task.seq = seq
                self._begin_record(task, completion, inline=inline)
        except BaseException as error:
            if now:
                # The call counts, but does not run.
                self._turn.give()
                self.abort(f"{type(error).__name__} on rank {self.comm.transport.rank}")
            raise
        if now:
            self._run_and_finish(task, completion, self._turn.give)

    def note_failure(self, failure: Failure) -> None:
        """Write the records, because the group is broken. This rank may be in no call."""
        write_after_failure(aside=True)

    def _begin_record(self, task: Task, completion: Completion, *, inline: bool) -> None:
        """Begin the record of a task of the calling thread, unless C++ has begun it."""
        prepared, trace = task.prepared, self.comm.trace
        if trace is None:
            return
        if not task.record:
            call, kind = prepared.call, prepared.kind(self.over)
            words = task.seq, call.fingerprint, prepared.count, BLOCKING if inline else NO_WAIT
            task.record = trace.recorder.begin(kind, *words)
        elif inline:
            trace.recorder.note_wait(task.record)
        completion.recorded = trace, task.record

    def _start_record(self, task: Task) -> None:
        if self.comm.trace is not None:
            self.comm.trace.recorder.start(task.record)

    def _end_record(self, record: int, error: BaseException | None) -> None:
        if self.comm.trace is not None and record:
            self.comm.trace.end(record, error)
        if error is not None:
            write_after_failure()

    def is_in_call(self) -> bool:
        return bool(self._turn.is_mine()) or has_lock(self._changed)

    def _is_server(self) -> bool:
        """Whether the calling thread runs queued tasks, or moves their messages."""
        return self._worker.is_here() or not self.comm.transport.may_wait()

    def runs_here(self) -> bool:
        return self._is_server() or self.is_in_call()

    def last_number(self) -> int:
        return int(self._turn.last)

    def last_call(self) -> CallStatus | None:
        """Return the last call that did not `enter` at the transport; None: there is no such call.

        The calls of C++ are of this kind.
        """
        return None

    def describe(self) -> dict[str, Any]:
        """Return the state of the group on this rank, for JSON."""
        comm = self.comm
        failure = comm.transport.failure(comm.context)
        return {
            "group": comm.name,
            "ranks": comm.ranks,
            "runs": self._turn.runs(),
            "broken": None if failure is None else failure.reason,
            "age_s": time.monotonic() - comm.made_s,
            **({} if comm.trace is None else open_calls(comm.trace)),
        }

    def recorded(self) -> GroupTrace | None:
        return self.comm.trace

    def abort(self, reason: str, failed: bool = False) -> None:
        me = self.comm.transport.rank
        self.fail(Failure("failed" if failed else "aborted", reason, [me], me))

    def finished(self) -> int:
        """Return the number of the last call that has ended here; see `Failure.after`."""
        return self._finished

    def fail(self, failure: Failure) -> None:
        comm = self.comm
        me, finished = comm.transport.rank, self.finished()
        # This rank may give up a call that the rank which detected the failure has finished. Ranks
        # that are still in the call must know that.
        if failure.by == me or failure.after > finished:
            failure = failure.found_by(me, finished)
        comm.transport.fail(comm.context, failure, comm.others)

    def end_calls(self, cancel: str = "") -> None:
        if self.comm.closed():
            return
        if cancel:
            self._cancel(cancel)
            return
        if self.calls is not None:
            self.calls.close()
        self._drains = True
        comm, failure_of = self.comm, self.comm.transport.failure
        before = failure_of(comm.context)
        # A call ends by itself at its deadline. The limit is for the case that it does not.
        longest_s = max([self.timeout_s, *self._left_s()])
        self._wait_until_idle(Deadline(longest_s + _CLOSE_S))
        if before is None and (failure := failure_of(comm.context)) is not None:
            # The program may never look at these calls.
            _log.warning("a call of group '%s' failed at its end: %s", comm.name, failure.reason)

    def _left_s(self) -> list[float]:
        """Return the seconds until the deadlines of the queued tasks."""
        return [task.deadline.remaining() for _, (task, _) in list(self._turn.waiting)]

    def _cancel(self, why: str) -> None:
        """End all tasks, and report the reason to the ranks that may wait for this rank."""
        if self.calls is not None:
            self.calls.close()
        with self._changed:
            if self._closed:
                return
            self._closed = True
            dropped = self._clear_queue()
            runs = self._turn.runs()
        if runs or dropped:
            comm = self.comm
            text = closed_text(comm.transport.rank, comm.name, why)
            if comm.transport.failure(comm.context) is None:
                _log.warning("%s; calls that had not ended: %d", text, len(dropped) + runs)
            self.abort(text)
        for call, completion in dropped:
            why = f"group '{self.comm.name}' was destroyed before {call.text} ran"
            completion.finish(ClosedError(why))
        if runs:
            self._wait_until_still(_CLOSE_S)

    def close(self) -> None:
        if self.comm.closed():
            return
        self._cancel("while a call ran")
        self._worker.join(_CLOSE_S)
        self.comm.close(self.finished())

    def _require_open(self, call: Call) -> None:
        closed = self.comm.closed() or ("was destroyed" if self._closed else None)
        if closed:
            raise ClosedError(f"{call.op} on group '{self.comm.name}', which {closed}")

    # ---- order ----------------------------------------------------------------------------

    def _put(self, task: Task, completion: Completion) -> int:
        """Queue a task and return its number; under the lock."""
        seq = int(self._turn.push((task, completion)))
        self._changed.notify_all()
        return seq

    def _clear_queue(self) -> list[tuple[Call, Completion]]:
        """Remove and return the tasks that have not begun, and end the progress thread.

        Called under the lock.
        """
        dropped: list[tuple[Call, Completion]] = self._turn.close()
        self._changed.notify_all()
        return dropped

    def _wait_until_idle(self, limit: Deadline) -> None:
        """Wait until no task is queued or runs."""
        with self._changed:
            limit_s = min(limit.remaining(), threading.TIMEOUT_MAX)
            self._changed.wait_for(
                lambda: not self._turn.waiting and not self._turn.runs(), limit_s
            )

    def _wait_until_still(self, limit_s: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._turn.runs(), limit_s)

    def _progress(self) -> None:
        while True:
            with self._changed:
                while (popped := self._turn.pop()) is None:
                    if self._closed:
                        return
                    self._changed.wait()
            task, completion = popped
            self._run_and_finish(task, completion, self._turn.give)
            # Otherwise this thread would keep the buffers of a finished task while it waits.
            del popped, task, completion

    def _run_and_finish(
        self,
        task: Task,
        completion: Completion,
        give: Callable[[], object],
        perform: Callable[[Task], None] | None = None,
    ) -> None:
        error: BaseException | None = None
        try:
            error = self._run(task, perform or self.perform)
        except BaseException as interrupt:
            # After Ctrl-C inside a collective the other ranks cannot finish it any more.
            error = interrupt
            self.abort(f"{type(interrupt).__name__} on rank {self.comm.transport.rank}")
            if not self._worker.is_here():
                raise
            # The progress thread goes on: the completion has the error.
        finally:
            give()
            self._wake()
            # Last, because a callback may make the next call, which must find the turn free.
            completion.finish(error)

    def _wake(self) -> None:
        """Wake the progress thread if it may run or end, and a thread that closes the group."""
        with self._changed:
            if self._turn.waiting or self._drains or self._closed:
                self._changed.notify_all()

    # ---- one task -------------------------------------------------------------------------

    def _run(self, task: Task, perform: Callable[[Task], None]) -> BaseException | None:
        """Run a task and end its record; return its error, or None."""
        error: BaseException | None = None
        try:
            error = self._attempt(task, perform)
        except BaseException as interrupt:
            error = interrupt
            raise
        finally:
            self._end_record(task.record, error)
        return error

    def _attempt(self, task: Task, perform: Callable[[Task], None]) -> BaseException | None:
        """Run a task; return its error, or None."""
        comm, call = self.comm, task.call
        comm.transport.enter(comm.context, call.seq, call.text)
        try:
            if task.begin is not None:
                task.begin()
            try:
                perform(task)
            except (CollectiveMismatchError, UnsupportedError) as error:
                # All ranks raise it in this call.
                self._finished = call.seq
                return error
            if task.finish is not None:
                task.finish()
        except Exception as error:
            failure = to_failure(error, comm, call, task.deadline)
            self.fail(failure)
            failed = broken_group_error(failure, comm, call.op, call.seq, call.nbytes)
            if isinstance(error, (Failure, LinkDown, DeadlinePassed)):
                # The transport keeps the error, and its stack frames would keep the task's buffers.
                error.__traceback__ = None
            else:
                failed.__cause__ = error
            return failed
        self._finished = call.seq
        return None

    @abstractmethod
    def perform(self, task: Task) -> None:
        """Agree with the other ranks on the call, then execute its program.

        Raises:
            CollectiveMismatchError: The ranks disagree.
            LinkDown, Failure, Expired: The group is broken.
        """
