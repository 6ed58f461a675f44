"""The order of a group's tasks: on the caller's thread, or on a progress thread.

What all engines share: sequence numbers, the queue, and what becomes of an error. How a task is
executed is the sub-class's business.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections import deque

from unisono.base.completion import Completion
from unisono.engines.api import Communicator, Engine, Task
from unisono.engines.failures import (
    Expired,
    break_group,
    broken_group_error,
    to_failure,
)
from unisono.errors import ClosedError, CollectiveMismatchError, UsageError
from unisono.transports import LinkDown
from unisono.transports.api import Failure

__all__ = ["OrderedEngine"]

# How long close() waits for the call that it has broken, and for callbacks that run.
_CLOSE_S = 10.0


class OrderedEngine(Engine):
    """Runs tasks on the caller's thread, or on a progress thread made when first needed."""

    def __init__(self, comm: Communicator) -> None:
        super().__init__(comm)
        self._changed = threading.Condition()
        self._queue: deque[tuple[Task, Completion]] = deque()
        self._busy = False
        self._closed = False
        self._seq = 0
        self._thread: threading.Thread | None = None

    def submit(self, task: Task, completion: Completion, *, inline: bool) -> None:
        # Before the lock, which in the child of a fork another thread may hold for ever.
        self._require_open(task)
        with self._changed:
            self._require_open(task)
            free = not self._busy and not self._queue
            if inline and self.runs_here() and not (free and self.comm.transport.may_wait()):
                raise UsageError(
                    f"{task.call.op} on group '{self.comm.name}' waits for the thread it runs on",
                    hint="in a callback of a future, call it with async_op=True",
                )
            self._seq += 1
            task.call = task.call._replace(seq=self._seq)
            if inline and free:
                self._busy = True
            else:
                self._queue.append((task, completion))
                self._start_thread()
                self._changed.notify_all()
        if inline and free:
            self._run_and_finish(task, completion)

    def runs_here(self) -> bool:
        here = threading.current_thread() is self._thread
        return here or not self.comm.transport.may_wait()

    def abort(self, reason: str) -> None:
        me = self.comm.transport.rank
        break_group(self.comm, Failure("aborted", reason, [me], me))

    def close(self) -> None:
        if self.comm.closed():
            return
        with self._changed:
            if self._closed:
                return
            self._closed = True
            dropped, self._queue = self._queue, deque()
            busy, thread = self._busy, self._thread
            self._changed.notify_all()
        for task, completion in dropped:
            told = f"group '{self.comm.name}' was destroyed before {task.call.text} ran"
            completion.finish(ClosedError(told))
        if busy:
            # Its peers are in this call too, and it cannot end any more.
            self.abort(f"rank {self.comm.transport.rank} destroyed the group while a call ran")
            with self._changed:
                self._changed.wait_for(lambda: not self._busy, _CLOSE_S)
        if thread is not None and thread is not threading.current_thread():
            thread.join(_CLOSE_S)
        self.comm.close()

    def _require_open(self, task: Task) -> None:
        closed = self.comm.closed() or ("was destroyed" if self._closed else None)
        if closed:
            raise ClosedError(f"{task.call.op} on group '{self.comm.name}', which {closed}")

    # ---- order ----------------------------------------------------------------------------

    def _start_thread(self) -> None:
        if self._thread is None:
            name = f"unisono-progress-{self.comm.name}"
            self._thread = threading.Thread(target=self._progress, name=name, daemon=True)
            self._thread.start()

    def _progress(self) -> None:
        while True:
            with self._changed:
                while not self._closed and (self._busy or not self._queue):
                    self._changed.wait()
                if self._closed:
                    return
                task, completion = self._queue.popleft()
                self._busy = True
            self._run_and_finish(task, completion)
            # A waiting thread must not keep the buffers of a finished task alive.
            del task, completion

    def _run_and_finish(self, task: Task, completion: Completion) -> None:
        error: BaseException | None = None
        try:
            error = self._run(task)
        except BaseException as interrupt:
            # Ctrl-C in the middle of a collective: the other ranks cannot finish it any more.
            error = interrupt
            self.abort(f"{type(interrupt).__name__} on rank {self.comm.transport.rank}")
            raise
        finally:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
            # Not before: a callback may make the next call, which must find the engine free.
            completion.finish(error)

    # ---- one task -------------------------------------------------------------------------

    def _run(self, task: Task) -> BaseException | None:
        """Run a task; return its error."""
        comm, call = self.comm, task.call
        comm.transport.enter(comm.context, call.seq, call.text)
        try:
            self.perform(task)
            task.finish()
        except CollectiveMismatchError as error:
            return error
        except Exception as error:
            failure = to_failure(error, comm, call, task.deadline)
            break_group(comm, failure)
            told = broken_group_error(failure, comm, call.op, call.seq, call.nbytes)
            if isinstance(error, (Failure, LinkDown, Expired)):
                # The transport keeps it, and its frames would keep the task's buffers.
                error.__traceback__ = None
            else:
                told.__cause__ = error
            return told
        return None

    @abstractmethod
    def perform(self, task: Task) -> None:
        """Agree with the other ranks on the call, then execute its program.

        Raises:
            CollectiveMismatchError: The ranks disagree.
            LinkDown, Failure, Expired: The group is broken.
        """
