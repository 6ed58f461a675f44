"""`Executor`: tasks on processes, with the interface of concurrent.futures."""

from __future__ import annotations

import itertools
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from concurrent import futures
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.spawn import prepare
from typing import Any, Self

from unisono.beyond.pool.captured import CallNames, note_module
from unisono.beyond.pool.display import progress_bar
from unisono.beyond.pool.flight import result_of
from unisono.beyond.pool.pool import chunks_of, zip_sized
from unisono.beyond.pool.processes import RankProcesses
from unisono.beyond.pool.rank import CallAnswer, RaisedError, error_of, run_each
from unisono.beyond.pool.snapshots import TaskSnapshot
from unisono.beyond.pool.workers import RankWorkers
from unisono.core.base.deadline import Deadline, Timeout
from unisono.core.base.integers import as_integer
from unisono.core.base.text import takes_own_keywords
from unisono.core.c10d.lifecycle import destroy_process_group, init_process_group
from unisono.core.groups.world import current
from unisono.core.platform.machine import allowed_cpus
from unisono.core.platform.posix import set_blocking
from unisono.errors import (
    Context,
    InvalidArgumentError,
    UsageError,
    WorkerFailedError,
)
from unisono.launcher.payload import Payload
from unisono.launcher.spawn import check_start
from unisono.launcher.workers.program import run_program

_POLL_S = 0.5
_TAKE_S = 5.0


@dataclass
class _QueuedTask:
    """A call and its future; `attempts` is how many workers have died in it."""

    future: futures.Future[Any]
    call: TaskSnapshot
    attempts: int = 0

    def begins(self) -> bool:
        """Whether it is to be run; False if it was cancelled. It may have begun before."""
        return self.future.running() or self.future.set_running_or_notify_cancel()


class _Queue:
    """What the executor and its thread share.

    Attributes:
        tasks: Tasks without a worker, oldest first.
        is_closing: Whether no more tasks come.
        broken: Why no task can be run, or None.
        fd: Descriptor that is readable when something has changed.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()  # the garbage collector may close an executor at any place
        self.tasks: deque[_QueuedTask] = deque()
        self.is_closing = False
        self.broken: BaseException | None = None
        self.started = threading.Event()
        self._pid = os.getpid()
        self.fd, self._sender = os.pipe()
        for fd in (self.fd, self._sender):
            set_blocking(fd, False)

    def wake(self) -> None:
        with self.lock, suppress(BlockingIOError):  # if the pipe is full, it is readable already
            if self._sender >= 0:
                os.write(self._sender, b"+")

    def woken(self) -> None:
        with suppress(BlockingIOError):
            os.read(self.fd, 4096)

    def close(self) -> None:
        if os.getpid() == self._pid:  # a fork of the process has no thread of the executor
            self.is_closing = True
            self.wake()

    def release(self) -> None:
        """Close the descriptors, when no task can be run any more."""
        with self.lock:
            self.broken = self.broken or UsageError("the executor is closed")
            os.close(self.fd)
            os.close(self._sender)
            self._sender = -1

    def fail(self, error: BaseException) -> None:
        """Let all tasks fail, those that come later, too."""
        with self.lock:
            self.broken = error
            tasks = list(self.tasks)
            self.tasks.clear()
        for task in tasks:
            if task.begins():
                task.future.set_exception(error)


class _TaskDispatcher:
    """Gives the tasks of a queue to the ranks of a pool, on a thread."""

    def __init__(
        self,
        queue: _Queue,
        size: int,
        open_pool: Callable[[], Any],
        retries: int,
        initial: TaskSnapshot | None,
    ) -> None:
        self._queue = queue
        self._size = size
        self._open_pool = open_pool
        # Those that have not ended for good.
        self._ranks = list(range(size))
        self._retries = retries
        self._initial = initial
        self._busy: dict[int, _QueuedTask | None] = {}  # None is the initializer

    def run(self) -> None:
        queue = self._queue
        try:
            with self._open_pool() as pool:
                self._serve(pool)
        except BaseException as error:
            for task in self._busy.values():
                if task is not None:
                    task.future.set_exception(error)
            queue.fail(error)
        finally:
            queue.started.set()
            queue.release()

    def _serve(self, pool: RankProcesses | RankWorkers) -> None:
        for rank in list(self._ranks):
            self._begin(pool, rank)
        self._queue.started.set()
        while True:
            for rank in list(self._ranks):
                while self._is_free(rank) and (task := self._next()) is not None:
                    self._send(pool, rank, task)
            if not self._busy and self._is_over():
                return
            for rank, answer in pool.answers(self._busy, _POLL_S, [self._queue.fd]):
                self._take(pool, rank, answer)
            self._queue.woken()

    def _is_free(self, rank: int) -> bool:
        return rank in self._ranks and rank not in self._busy

    def _is_over(self) -> bool:
        queue = self._queue
        with queue.lock:
            # A script that ends without `shutdown` waits for its tasks, as for threads.
            is_over = queue.is_closing or not threading.main_thread().is_alive()
            if is_over and not queue.tasks:
                queue.is_closing = True
                return True
            return False

    def _next(self) -> _QueuedTask | None:
        queue = self._queue
        with queue.lock:
            while queue.tasks:
                task = queue.tasks.popleft()
                if task.begins():
                    return task
        return None

    def _begin(self, pool: RankProcesses | RankWorkers, rank: int) -> None:
        if self._initial is not None:
            self._post(pool, rank, self._payload(pool, self._initial), None)

    def _send(self, pool: RankProcesses | RankWorkers, rank: int, task: _QueuedTask) -> None:
        try:
            payload = self._payload(pool, task.call)
        except (MemoryError, OSError) as error:
            task.future.set_exception(error)
            return
        self._post(pool, rank, payload, task)

    def _payload(self, pool: RankProcesses | RankWorkers, call: TaskSnapshot) -> Payload:
        if isinstance(pool, RankProcesses):
            pool.share(call.shared)
        return call.payload()

    def _post(
        self,
        pool: RankProcesses | RankWorkers,
        rank: int,
        payload: Payload,
        task: _QueuedTask | None,
    ) -> None:
        if pool.end_of(rank) is None:
            pool.post(rank, payload)
            if isinstance(pool, RankProcesses) or pool.end_of(rank) is None:
                self._busy[rank] = task
                return
        if task is not None:  # the worker ended while it was idle, so not in this task
            with self._queue.lock:
                self._queue.tasks.appendleft(task)
        self._restart(pool, rank)

    def _restart(self, pool: RankProcesses | RankWorkers, rank: int) -> None:
        """Start another process, or go on without a rank of a group."""
        if isinstance(pool, RankProcesses):
            pool.restart([rank])
            self._begin(pool, rank)
            return
        self._ranks.remove(rank)
        if not self._ranks:
            raise WorkerFailedError(f"all workers of the executor have ended: {pool.end_of(rank)}")

    def _take(self, pool: RankProcesses | RankWorkers, rank: int, answer: CallAnswer | str) -> None:
        task = self._busy[rank]
        named = self._named(pool, rank)
        if isinstance(answer, str):
            self._lose(named, answer, task, isinstance(pool, RankWorkers))
        elif answer.raised is not None:
            self._fail(named, answer.raised, task)
        else:
            try:
                result = result_of(named.rank or 0, answer)
            except InvalidArgumentError as error:
                if task is not None:
                    task.future.set_exception(error)
            else:
                if task is not None:
                    task.future.set_result(result)
        del self._busy[rank]
        if isinstance(answer, str):
            self._restart(pool, rank)

    def _named(self, pool: RankProcesses | RankWorkers, rank: int) -> Context:
        """Name a worker; one of the ranks of a group by its rank in the job."""
        if isinstance(pool, RankProcesses):
            return Context(rank=rank, world_size=self._size)
        return Context(rank=pool.name_of(rank), world_size=pool.world_size)

    def _fail(self, context: Context, raised: RaisedError, task: _QueuedTask | None) -> None:
        rank = context.rank
        if task is None:
            raise WorkerFailedError(
                f"the initializer failed on worker {rank}\n{raised.text}", context=context
            )
        cause = WorkerFailedError(
            f"worker {rank} raised an exception\n{raised.text}", context=context
        )
        error = error_of(raised)
        if not isinstance(error, Exception):
            task.future.set_exception(cause)
            return
        note_module(error)
        error.add_note(f"raised on worker {rank} of {context.world_size}")
        error.__cause__ = cause
        task.future.set_exception(error)

    def _lose(self, context: Context, end: str, task: _QueuedTask | None, of_job: bool) -> None:
        """Run the task of a worker that ended elsewhere, or let it fail."""
        if task is None:
            raise WorkerFailedError(
                f"a worker of the executor ended in the initializer: {end}", context=context
            )
        task.attempts += 1
        if task.attempts <= self._retries:
            with self._queue.lock:
                self._queue.tasks.appendleft(task)
            return
        again = f" (attempt {task.attempts})" if self._retries else ""
        task.future.set_exception(
            WorkerFailedError(
                f"a worker of the executor ended in the task{again}: {end}",
                context=context,
                hint="`unisono run` ends the job, too; elsewhere retries=1 runs such a task again"
                if of_job
                else "the other tasks go on; retries=1 runs such a task on another worker",
            )
        )


class Executor(futures.Executor):
    """Run tasks on processes that stay, as `concurrent.futures.ProcessPoolExecutor` does.

    It differs in that a worker that dies takes only its own task with it, which names the worker
    and how it ended. Another process takes its place, and the other tasks go on. With cloudpickle
    installed, tasks may be lambdas and functions of a notebook. The methods that
    `concurrent.futures` lacks are those of mpi4py.futures.

        with unisono.Executor(4, retries=1) as executor:
            squares = list(executor.map(square, range(100), chunksize=10))

    Args:
        max_workers: Number of processes; by default one for each CPU that this process may use.
        initializer: Function that each new worker calls first.
        initargs: Its arguments.
        retries: How often a task is run again whose worker died in it. Such a task should be
            harmless to repeat.
        start_method: As for `unisono.launch`.

    Raises:
        ArgumentTypeError, InvalidArgumentError: A wrong argument.
    """

    _workers: RankWorkers | None = None
    """The ranks that are the workers, in place of processes of this host."""

    @takes_own_keywords
    def __init__(
        self,
        max_workers: int | None = None,
        *,
        initializer: Callable[..., object] | None = None,
        initargs: Sequence[Any] = (),
        retries: int = 0,
        start_method: str = "spawn",
    ) -> None:
        workers = self._workers
        wanted = len(allowed_cpus()) if max_workers is None else max_workers
        fn = print if initializer is None else initializer
        call = "Executor(max_workers, initializer=fn, initargs=(x,))"
        self._size = check_start(call, fn, initargs, wanted, start_method)
        if as_integer(retries, "retries") < 0:
            raise InvalidArgumentError(f"retries must be at least 0, got {retries}")
        self._names = CallNames()
        initial = None
        if initializer is not None:
            initial = self._snapshot(initializer, tuple(initargs), {})
        if workers is not None and not workers.taken.acquire(timeout=_TAKE_S):
            raise UsageError(
                "the ranks are the workers of another executor",
                hint="use one executor at a time: shut the other one down before",
            )
        self._queue = _Queue()
        open_pool: Callable[[], Any] = partial(
            RankProcesses, self._size, start_method, with_group=False
        )
        if workers is not None:
            self._size = len(workers.ranks)
            workers.queue = self._queue
            open_pool = workers.__enter__
        dispatcher = _TaskDispatcher(self._queue, self._size, open_pool, retries, initial)
        self._thread = threading.Thread(target=dispatcher.run, name="unisono-executor")
        self._thread.start()
        self._close = weakref.finalize(self, self._queue.close)

    def __repr__(self) -> str:
        state = "closed" if self._queue.is_closing else "failed" if self._queue.broken else "ready"
        return f"<unisono.Executor of {self._size} workers: {state}>"

    @property
    def num_workers(self) -> int:
        """Number of processes."""
        return self._size

    def bootup(self, wait: bool = True) -> Self:
        """Wait until the workers have started, unless `wait` is False; return the executor."""
        if wait:
            self._queue.started.wait()
        return self

    def submit(self, fn: Callable[..., Any], /, *args: Any, **keywords: Any) -> futures.Future[Any]:
        """Add the task `fn(*args, **keywords)`; return its Future.

        The Future raises what the task raised, with the worker in a note. If the worker died, it
        raises WorkerFailedError. The task gets the arguments as they are now: they are pickled at
        once. Waiting tasks share the copy of an array that has not changed.

        Raises:
            UsageError: The executor is closed.
            WorkerFailedError: No worker can be started any more.
        """
        future: futures.Future[Any] = futures.Future()
        queue = self._queue
        try:
            task = _QueuedTask(future, self._snapshot(fn, args, keywords))
        except UsageError as error:
            future.set_exception(error)
            return future
        with queue.lock:
            if queue.is_closing:
                raise UsageError("the executor is closed")
            if queue.broken is not None:
                raise queue.broken
            queue.tasks.append(task)
            queue.wake()
        return future

    def _snapshot(self, fn: Any, args: Any, keywords: dict[str, Any]) -> TaskSnapshot:
        return TaskSnapshot(fn, args, keywords, self._names, self._workers is None)

    def map(
        self,
        fn: Callable[..., Any],
        *iterables: Iterable[Any],
        timeout: Timeout | None = None,
        chunksize: int = 1,
        buffersize: int | None = None,
        unordered: bool = False,
        progress: bool = False,
    ) -> Iterator[Any]:
        """Return an iterator over the results of `fn` for each group of arguments.

        Args:
            fn: The function.
            iterables: Its arguments, as for the built-in `map`.
            timeout: Until the last result; None waits without a limit.
            chunksize: Tasks that a worker gets at once.
            buffersize: How many chunks are under way at most. The rest of the iterables is read as
                results are taken. None reads them at once.
            unordered: Whether results come as they are ready.
            progress: Whether to show a bar, as in `Pool.map`, while results are taken.

        Raises:
            InvalidArgumentError: `chunksize` or `buffersize` is below 1.
            TimeoutError: From the iterator: `timeout` has passed.
        """
        return self.starmap(
            *(fn, zip_sized(iterables) if progress else zip(*iterables, strict=False)),
            timeout=timeout,
            chunksize=chunksize,
            buffersize=buffersize,
            unordered=unordered,
            progress=progress,
        )

    def starmap(
        self,
        fn: Callable[..., Any],
        iterable: Iterable[Sequence[Any]],
        timeout: Timeout | None = None,
        chunksize: int = 1,
        buffersize: int | None = None,
        unordered: bool = False,
        progress: bool = False,
    ) -> Iterator[Any]:
        """Do as `map` does for arguments that are in tuples already."""
        for name, value in (("chunksize", chunksize), ("buffersize", buffersize)):
            if value is not None and as_integer(value, name) < 1:
                raise InvalidArgumentError(f"{name} must be at least 1, got {value}")
        chunks = chunks_of(iter(iterable), chunksize)
        deadline = Deadline(float("inf") if timeout is None else timeout)
        flying = [self.submit(run_each, fn, c) for c in itertools.islice(chunks, buffersize)]
        results = self._results(fn, flying, chunks, deadline, unordered)
        if not progress:
            return results
        return _with_bar(results, len(iterable) if isinstance(iterable, Sized) else None)

    def _results(
        self,
        fn: Callable[..., Any],
        flying: list[futures.Future[Any]],
        chunks: Iterator[list[Any]],
        deadline: Deadline,
        unordered: bool,
    ) -> Iterator[Any]:
        try:
            while flying:
                left_s = deadline.remaining()
                wait_s = None if left_s == float("inf") else left_s
                watched = flying if unordered else flying[:1]
                done, _ = futures.wait(watched, wait_s, futures.FIRST_COMPLETED)
                if not done:
                    raise TimeoutError(f"a task did not end within {deadline.timeout_s:g} s")
                for future in done:
                    flying.remove(future)
                    flying += [self.submit(run_each, fn, c) for c in itertools.islice(chunks, 1)]
                    yield from future.result()
        finally:
            for future in flying:
                future.cancel()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more tasks, and end the workers when all tasks have ended.

        Args:
            wait: Whether to wait for that.
            cancel_futures: Whether to cancel the tasks that have not begun.
        """
        self._close()
        with self._queue.lock:
            waiting = list(self._queue.tasks) if cancel_futures else []
        for task in waiting:
            task.future.cancel()
        if wait:
            self._thread.join()


def _with_bar(results: Iterator[Any], total: int | None) -> Iterator[Any]:
    with progress_bar(total, True) as advance:
        for each in results:
            advance(1)
            yield each


@contextmanager
def ranks_as_workers(group: Any = None, root: int = 0, **options: Any) -> Iterator[Any]:
    """Give tasks to the ranks of a group, on all hosts; all ranks enter.

    The root gets an `Executor` with these options, whose workers are the other ranks. These make
    the tasks, and get None when it has ended. A worker that dies is not replaced. A group of one
    rank has processes of its own as workers.

        with unisono.futures.MPICommExecutor() as executor:
            if executor is not None:
                print(list(executor.map(square, range(100))))

    Args:
        group: A group, or a communicator of `unisono.MPI`; by default all ranks.
        root: The rank that has the executor.
        options: See `Executor`; the number of workers is that of the other ranks.

    Raises:
        InvalidArgumentError: There is no such rank, the ranks do not agree on it, or the group is
            an inter-communicator.
    """
    if current().default is None:
        init_process_group()
    state = getattr(group, "ob", group)
    if getattr(state, "is_inter", False):
        raise InvalidArgumentError("an inter-communicator has no rank for the executor")
    members: Any = getattr(state, "group", state) or current().default
    root = as_integer(root, "root")
    if members.size() == 1 or Executor._workers is not None:
        if not 0 <= root < members.size():
            raise InvalidArgumentError(f"root {root} is no rank of a group of {members.size()}")
        with Executor(**options) as executor:
            yield executor
        return
    workers = RankWorkers(members, root)
    if members.rank() != root:
        workers.serve()
        yield None
        return
    try:
        with _RankExecutor(workers, options) as executor:
            yield executor
    finally:
        workers.close()


class _RankExecutor(Executor):
    """An executor over ranks."""

    def __init__(self, workers: RankWorkers, options: dict[str, Any]) -> None:
        self._workers = workers
        super().__init__(**options)


def main() -> None:
    """Run a program on rank 0, with the other ranks as the workers of its executors."""
    arguments = sys.argv[1:]
    if not arguments:
        sys.exit("usage: python -m unisono.futures [-m MODULE | -c TEXT | PROGRAM] ...")
    init_process_group()
    group = current().default
    assert group is not None
    if group.size() > 1:
        workers = RankWorkers(group, 0)
        if group.rank() != 0:
            # Functions of the program are found in its module, which does not run as the main one.
            where = "name" if arguments[0] == "-m" else "path"
            if arguments[0] != "-c":
                prepare({f"init_main_from_{where}": arguments[where == "name"]})
            workers.serve()
            return
        Executor._workers = workers
    try:
        run_program(arguments)
    finally:
        if Executor._workers is not None:
            Executor._workers.close()
        destroy_process_group()
