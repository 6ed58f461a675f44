"""`pool`: start ranks once, and call functions on them from cell to cell."""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from multiprocessing import connection, reduction
from typing import Any, NamedTuple, Self

import numpy as np

from unisono.beyond.pool.memory import Region, dumps_with, new_array
from unisono.beyond.pool.rank import CallAnswer, error_of, run_cell, run_each, serve
from unisono.core.base.deadline import Deadline
from unisono.core.base.integers import as_integer
from unisono.core.platform.posix import SIGKILL, require_posix
from unisono.errors import (
    ClosedError,
    Context,
    InvalidArgumentError,
    UsageError,
    WorkerFailedError,
)
from unisono.launcher.launch import pickling
from unisono.launcher.output.console import Console, WorkerName
from unisono.launcher.output.reader import WorkerStream
from unisono.launcher.payload import Payload
from unisono.launcher.spawn import SpawnContext, check_start
from unisono.launcher.traceback_text import exception_line, is_consequence

_POLL_S = 0.5
"""How often to look for ranks whose end wakes no wait."""

_SETTLE_S = 0.5
"""How long a rank that raised waits for the others, before it ends the calls that wait for it."""

_INTERRUPT_S = 5.0
"""How long an interrupted rank may take before it is killed."""

RankCall = tuple[Callable[..., Any], Sequence[Any], dict[str, Any]]

_newest: weakref.ref[Pool] | None = None


class _CurrentStdout:
    """The standard output of the moment: a notebook replaces it for each cell."""

    def write(self, data: bytes, /) -> None:
        sys.stdout.write(data.decode("utf-8", "replace"))

    def flush(self) -> None:
        sys.stdout.flush()


class _Results(dict[int, list[Any]]):
    """The results of `map` by the number of their first task; each moves the bar."""

    def __init__(self, advance: Callable[[int], object]) -> None:
        super().__init__()
        self._advance = advance

    def __setitem__(self, number: int, found: list[Any]) -> None:
        super().__setitem__(number, found)
        self._advance(len(found))


class PoolRank:
    """One rank of a pool.

    Attributes:
        rank: Its number.
    """

    def __init__(self, pool: Pool, rank: int) -> None:
        self._pool = pool
        self.rank = rank

    def run(self, fn: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
        """Call `fn(*args, **keywords)` on this rank only, and return the result.

        A collective in `fn` would wait for the other ranks, which do not call it.

        Raises:
            WorkerFailedError, Exception: See `Pool.run`.
        """
        return self._pool._run({self.rank: (fn, args, keywords)})[self.rank]

    def __repr__(self) -> str:
        return f"<rank {self.rank} of {self._pool!r}>"


class Pool:
    """Processes that stay, as ranks of one group; made by `pool`."""

    def __init__(
        self, nprocs: int, *, start_method: str, replace: bool, with_group: bool = True
    ) -> None:
        require_posix("unisono.pool")
        self._size = nprocs
        self._replaces = replace
        self._lost = ""
        self._generation = itertools.count() if with_group else None
        self._numbers = itertools.count(1)
        self._regions: dict[str, Region] = {}
        self._dropped: list[str] = []
        self._lock = threading.Lock()
        self._console = Console(
            _CurrentStdout(), prefix="[rank {rank}] ", fold=False, clock=time.monotonic
        )
        self._streams: dict[int, WorkerStream] = {}
        self._context: SpawnContext | None = SpawnContext(
            *(serve, (nprocs, with_group), nprocs),
            start_method=start_method,
            joins=False,
            returns="messages",
        )
        self._close = weakref.finalize(self, _kill, self._context, self._streams)
        try:
            self._context.wait_loaded()
            for rank in range(nprocs):
                self._equip(rank)
            self._regroup()
        except BaseException:
            self._close()
            raise

    def __len__(self) -> int:
        """Return the number of ranks."""
        return self._size

    def __getitem__(self, rank: int) -> PoolRank:
        """Return one rank; negative numbers count from the end."""
        return PoolRank(self, range(self._size)[rank])

    def __repr__(self) -> str:
        state = "closed" if self._context is None else self._lost or "ready"
        return f"<unisono.pool of {self._size} ranks: {state}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def pids(self) -> list[int]:
        """Return the process of each rank."""
        return self._started().pids()

    def run(self, fn: Callable[..., Any], *args: Any, **keywords: Any) -> list[Any]:
        """Call `fn(*args, **keywords)` on each rank and return the results, by rank.

        In `fn` the default group has all ranks of the pool: `get_rank()` tells which one it is.

            with unisono.pool(4) as ranks:
                ranks.run(load, "data")            # sets a `global` name, which stays
                means = ranks.run(mean_of_all)

        A function of the notebook runs in the main module of the rank. The names that it uses get
        the notebook's values at each call, except those that it assigns with `global`.

        If a rank raises an exception, calls of the other ranks that wait for it end. Their groups
        are made anew then, and what the ranks hold stays. An interrupt does the same.

        Raises:
            WorkerFailedError: A rank died; names it. The pool then makes no further calls, or with
                `replace=True` a new process has the rank already.
            ClosedError: The pool is closed, or has lost a rank.
            InvalidArgumentError: The function, an argument or a result cannot be pickled.
            Exception: That of the rank that failed first. Its cause is a WorkerFailedError that
                ends with the traceback.
        """
        results = self._run(dict.fromkeys(range(self._size), (fn, args, keywords)))
        return [results[rank] for rank in range(self._size)]

    def map(
        self,
        fn: Callable[..., Any],
        *tasks: Iterable[Any],
        chunksize: int = 1,
        progress: bool | None = None,
    ) -> list[Any]:
        """Call `fn` with each task on whichever rank is free; return the results in order.

        Args:
            fn: Function of one argument for each of `tasks`. It makes no collective calls.
            tasks: Iterables of arguments, as for the built-in `map`. They are read as ranks become
                free.
            chunksize: How many tasks a rank gets at once.
            progress: Whether to show a bar, which needs rich. By default, if rich is installed and
                the output is a terminal or a notebook.

        Raises:
            WorkerFailedError, Exception: See `run`; the tasks that run are finished first.
        """
        size = max(as_integer(chunksize, "chunksize"), 1)
        chunks = _chunks(zip(*tasks, strict=False), size)
        numbered: Iterator[tuple[int, RankCall]] = (
            (i * size, (run_each, (fn, chunk), {})) for i, chunk in enumerate(chunks)
        )
        total = min((len(each) for each in tasks if isinstance(each, Sized)), default=None)
        with _bar(total, progress) as advance:
            results = _Results(advance)
            self._work(lambda rank: next(numbered, None), results, "task")
        return [each for number in sorted(results) for each in results[number]]

    def shared_array(self, shape: int | Sequence[int], dtype: Any = float) -> np.ndarray[Any, Any]:
        """Return an array of zeros that this process and all ranks read and write.

        As an argument or result of `run`, the array and its slices stay the same memory. Elsewhere
        a pickle copies it. The memory is freed with the last array in it.

            x = ranks.shared_array((4, 1000))
            ranks.run(fill_own_row, x)             # x has the rows now

        Raises:
            InvalidArgumentError: The dtype holds objects.
        """
        context = self._started()
        region, array = new_array(shape, dtype)
        with self._lock:
            self._regions[region.key] = region
            for link in context.links:
                self._share(link, region)
        weakref.finalize(region.base(), _drop, region.key, self._regions, self._dropped)
        return array

    def cell(self, source: str) -> None:
        """Run source text on each rank, in its main module; the value of the last line is printed.

        In IPython `%%ranks` runs the rest of the cell so, on the pool that was made last.

        Raises:
            WorkerFailedError, Exception: See `run`.
        """
        task: RankCall = run_cell, (source, next(self._numbers)), {}
        self._run(dict.fromkeys(range(self._size), task))

    def close(self) -> None:
        """End the ranks; a second call does nothing."""
        context, self._context = self._context, None
        if context is None:
            return
        for link in context.links:
            with contextlib.suppress(OSError):
                link.send(("end",))
        last = Deadline(_INTERRUPT_S)
        while any(context.end_of(rank) is None for rank in range(self._size)):
            if last.expired():
                break
            waits = [process.sentinel for process in context.processes]
            self._pump(connection.wait([*waits, *self._sources()], _POLL_S))
        self._flush()
        self._close()

    def _started(self) -> SpawnContext:
        if self._context is None:
            raise ClosedError("the pool is closed", hint="make another: unisono.pool(...)")
        if self._lost:
            raise ClosedError(
                f"the pool makes no calls any more: {self._lost}",
                hint="unisono.pool(..., replace=True) starts another process for a rank that dies",
            )
        return self._context

    def _equip(self, rank: int) -> None:
        """Give a new process what the older ones have."""
        context = self._started()
        link = context.links[rank]
        source, target = os.pipe()
        name = WorkerName(rank=rank, local_rank=rank)
        file = open(source, "rb", 0)  # noqa: SIM115  the stream closes it
        self._streams[rank] = WorkerStream(file, [self._console.sink_of(name)])
        try:
            link.send(("output",))
            reduction.send_handle(link, target, context.pids()[rank])
        finally:
            os.close(target)
        for region in list(self._regions.values()):
            self._share(link, region)

    def _share(self, link: Any, region: Region) -> None:
        if region.base() is not None:
            link.send(("attach", region.key, region.nbytes))
            reduction.send_handle(link, region.fd, 0)

    def _regroup(self) -> None:
        """Make the group of all ranks anew."""
        if self._generation is None:
            return
        message = "group", next(self._generation)
        for link in self._started().links:
            link.send(message)
        flight = _Flight(self, dict.fromkeys(range(self._size), 0))
        flight.wait()
        if flight.failures:
            self._lost = "its group could not be made"
            flight.raise_first()

    def _run(self, tasks: dict[int, RankCall]) -> dict[int, Any]:
        results: dict[int, Any] = {}
        wanted = list(tasks)
        self._work(lambda rank: (rank, tasks.pop(rank)) if rank in tasks else None, results, "")
        return {rank: results[rank] for rank in wanted}

    def _work(
        self,
        next_task: Callable[[int], tuple[int, RankCall] | None],
        results: dict[int, Any],
        name: str,
    ) -> None:
        """Make calls until there are no more, or one fails.

        Args:
            next_task: Returns the number and the call for a rank that is free, or None.
            results: Gets the results, by number.
            name: Name of a numbered call in an error; "" if the rank says it all.
        """
        with self._lock:
            context = self._started()
            while self._dropped:
                message = "drop", self._dropped.pop()
                for link in context.links:
                    link.send(message)
            flight = _Flight(self, {}, results, name)
            with flight.interrupts():
                flight.wait(next_task)
            self._flush()
            self._mend(flight)
            flight.raise_first()

    def _mend(self, flight: _Flight) -> None:
        ended = [rank for rank, failure in flight.failures.items() if failure.end]
        if ended and not self._replaces:
            self._lost = flight.failures[ended[0]].end
            return
        self.restart(ended)
        if ended or flight.is_broken:
            self._regroup()

    def restart(self, ranks: Sequence[int]) -> None:
        """Start new processes for ranks that have ended."""
        if ranks:
            context = self._started()
            self._flush()
            for rank in ranks:
                if (stream := self._streams.pop(rank, None)) is not None:
                    stream.finish()
            context.restart(ranks)
            context.wait_loaded()
            for rank in ranks:
                self._equip(rank)

    def post(self, rank: int, payload: Payload) -> None:
        """Send a call to a rank that is free; one that has died is noticed by `answers`."""
        context = self._started()
        with contextlib.suppress(OSError):
            context.links[rank].send(("call",))
            payload.send(context.links[rank], context.pids()[rank])

    def result(self, rank: int) -> Any:
        """Return what a call returned; after an answer without an exception."""
        payload = Payload.received(self._started().links[rank])
        try:
            return payload.load_once()
        except Exception as error:
            raise InvalidArgumentError(
                f"the result of rank {rank} cannot be loaded: {type(error).__name__}: {error}",
                hint="return what this process can import",
            ) from error

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
        waits = [*(links[rank] for rank in ranks), *ends, *self._sources(), *others]
        self._pump(connection.wait(waits, limit_s))
        found: list[tuple[int, CallAnswer | str]] = []
        for rank in ranks:
            try:
                if links[rank].poll(0):
                    answer = links[rank].recv()
                    # Otherwise it is the report of an error outside of all calls.
                    found.append((rank, answer if isinstance(answer, CallAnswer) else answer.text))
                elif (end := context.end_of(rank)) is not None:
                    found.append((rank, end))
            except (EOFError, OSError):
                context.processes[rank].join(_POLL_S)
                found.append((rank, context.end_of(rank) or f"rank {rank} closed its connection"))
        return found

    def _sources(self) -> list[Any]:
        return [stream.source for stream in self._streams.values()]

    def _pump(self, ready: Iterable[Any]) -> None:
        found = set(ready)
        for rank, stream in list(self._streams.items()):
            if stream.source in found and not stream.pump():
                stream.finish()
                del self._streams[rank]

    def _flush(self) -> None:
        """Pass on all output that has come."""
        while ready := select.select(self._sources(), [], [], 0)[0]:
            self._pump(ready)
        for stream in self._streams.values():
            stream.flush_partial()
        self._console.close()


class _FailedCall(NamedTuple):
    """How a call failed.

    Attributes:
        number: Number of the call.
        error: The exception, or None if it cannot be loaded, or if the rank ended.
        text: Traceback, or "".
        end: How the rank ended, or "".
    """

    number: int
    error: BaseException | None
    text: str
    end: str = ""


class _Flight:
    """Calls of a pool that are under way.

    Attributes:
        failures: By rank, in the order in which they came.
        is_broken: Whether a group makes no calls any more.
    """

    def __init__(
        self,
        pool: Pool,
        busy: dict[int, int],
        results: dict[int, Any] | None = None,
        name: str = "",
    ) -> None:
        self.failures: dict[int, _FailedCall] = {}
        self.is_broken = False
        self._pool = pool
        self._busy = busy
        self._results = {} if results is None else results
        self._name = name
        self._sent: tuple[RankCall, Payload] | None = None
        self._reporting: set[int] = set()
        self._settled: Deadline | None = None
        self._interrupted = 0
        self._kill_at: Deadline | None = None

    def wait(self, next_task: Callable[[int], tuple[int, RankCall] | None] | None = None) -> None:
        """Send calls to free ranks, and wait until all have ended or one has failed."""
        pool = self._pool
        while True:
            for rank in range(len(pool)):
                if next_task is None or self.failures or self._interrupted or rank in self._busy:
                    continue
                if (found := next_task(rank)) is not None:
                    self._send(rank, *found)
            waiting = self._busy.keys() | self._reporting
            if not waiting:
                return
            limits = [each.remaining() for each in (self._settled, self._kill_at) if each]
            for rank, answer in pool.answers(waiting, min([_POLL_S, *limits])):
                self._take(rank, answer)
            if self._settled is not None and self._settled.expired():
                self._settled = None
                self._report()
            if self._kill_at is not None and self._kill_at.expired():
                self._kill_at = None
                self._signal(SIGKILL)

    def _send(self, rank: int, number: int, task: RankCall) -> None:
        if self._sent is None or self._sent[0] is not task:  # All ranks often get the same one.
            try:
                with pickling(task, "the function or its arguments", dumps_with) as dumps:
                    self._sent = task, Payload(task, dumps)
            except InvalidArgumentError as error:
                self.failures[rank] = _FailedCall(number, error, "")
                return
        self._busy[rank] = number
        self._pool.post(rank, self._sent[1])

    def _take(self, rank: int, answer: CallAnswer | str) -> None:
        number = self._busy.pop(rank, -1)
        if isinstance(answer, str):
            self._reporting.discard(rank)
            self.failures[rank] = _FailedCall(number, None, "", answer)
            return
        self.is_broken = self.is_broken or answer.is_broken
        if answer.raised is not None:
            self.failures[rank] = _FailedCall(number, error_of(answer.raised), answer.raised.text)
            self._settled = self._settled or Deadline(_SETTLE_S)
            return
        try:
            result = self._pool.result(rank)
        except InvalidArgumentError as error:
            self.failures[rank] = _FailedCall(number, error, "")
            return
        if rank in self._reporting:
            self._reporting.discard(rank)
        else:
            self._results[number] = result

    def _report(self) -> None:
        """End the calls in which ranks wait for those that raised."""
        if self._busy:
            for rank, failure in self.failures.items():
                if failure.text:
                    message = "report", exception_line(failure.text)
                    self._pool._started().links[rank].send(message)
                    self._reporting.add(rank)
                    self.is_broken = True

    @contextlib.contextmanager
    def interrupts(self) -> Iterator[None]:
        """Pass a Ctrl-C on to the ranks, and raise it after the block."""
        before = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is not threading.main_thread() or not callable(before):
            yield
            return
        signal.signal(signal.SIGINT, self._interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _interrupt(self, signum: int, frame: object) -> None:
        self._interrupted += 1
        self._kill_at = Deadline(_INTERRUPT_S if self._interrupted == 1 else 0.0)
        self._signal(signal.SIGINT)

    def _signal(self, signum: int) -> None:
        for rank in self._busy:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pool.pids()[rank], signum)

    def raise_first(self) -> None:
        """Raise the interrupt, or the failure that is no consequence of another."""
        if self._interrupted:
            raise KeyboardInterrupt
        if not self.failures:
            return
        rank, first = min(self.failures.items(), key=lambda each: is_consequence(each[1].text))
        size = len(self._pool)
        context = Context(rank=rank, world_size=size)
        where = f" in {self._name} {first.number}" if self._name else ""
        if isinstance(first.error, InvalidArgumentError) and not first.text:
            raise first.error
        if first.end:
            raise WorkerFailedError(
                f"a rank of the pool ended{where}: {first.end}",
                context=context,
                hint="its standard error may have the reason; replace=True starts another process",
            )
        cause = WorkerFailedError(
            f"rank {rank} of the pool raised an exception{where}\n{first.text}".rstrip(),
            context=context,
        )
        if not isinstance(first.error, Exception):
            raise cause
        first.error.add_note(f"raised on rank {rank} of {size}{where}")
        raise first.error from cause


def _kill(context: SpawnContext, streams: dict[int, WorkerStream]) -> None:
    context.kill()
    for process in context.processes:
        with contextlib.suppress(ValueError):  # the process runs on after SIGKILL
            process.close()
    for stream in streams.values():
        stream.finish()
    streams.clear()


def _drop(key: str, regions: dict[str, Region], dropped: list[str]) -> None:
    regions.pop(key, None)
    dropped.append(key)


def _chunks(tasks: Iterator[tuple[Any, ...]], size: int) -> Iterator[list[tuple[Any, ...]]]:
    while chunk := list(itertools.islice(tasks, size)):
        yield chunk


@contextlib.contextmanager
def _bar(total: int | None, wanted: bool | None) -> Iterator[Callable[[int], object]]:
    """Show a bar; yield a function that takes how many tasks have ended."""
    shows = wanted if wanted is not None else sys.stdout.isatty() or "ipykernel" in sys.modules
    try:
        if not shows:
            raise ImportError
        from rich.progress import Progress
    except ImportError:
        if wanted:
            raise
        yield lambda count: None
        return
    with Progress() as bar:
        task = bar.add_task("tasks", total=total)
        yield lambda count: bar.update(task, advance=count)


def pool(nprocs: int, *, start_method: str = "spawn", replace: bool = False) -> Pool:
    """Start `nprocs` processes that stay, as the ranks of one group.

        with unisono.pool(4) as ranks:
            ranks.run(f, x)            # f(x) on each rank; [4] results
            ranks[2].run(g)            # on one rank
            ranks.map(h, tasks)        # each task on whichever rank is free
            x = ranks.shared_array(10) # memory of this process and of all ranks

    What the ranks print is shown with the rank, while a call runs. Functions as for `launch`: with
    cloudpickle also lambdas and functions of a notebook. The ranks end with the pool, and with this
    process.

    Args:
        nprocs: Number of ranks.
        start_method: As for `launch`.
        replace: Whether a new process takes the place of a rank that dies. It has an empty memory,
            and the group of all ranks is made anew.

    Raises:
        ArgumentTypeError, InvalidArgumentError: A wrong argument.
        WorkerFailedError: A rank ended while it started.
    """
    global _newest
    nprocs = check_start("pool(nprocs)", print, (), nprocs, start_method)
    made = Pool(nprocs, start_method=start_method, replace=replace)
    _newest = weakref.ref(made)
    if "IPython" in sys.modules and (shell := sys.modules["IPython"].get_ipython()) is not None:
        shell.register_magic_function(_run_cell, "cell", "ranks")
    return made


def _run_cell(line: str, cell: str) -> None:
    newest = None if _newest is None else _newest()
    if newest is None:
        raise UsageError("there is no pool", hint="make one: ranks = unisono.pool(4)")
    newest.cell(cell)
