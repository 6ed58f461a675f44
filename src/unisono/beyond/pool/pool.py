"""`pool`: start ranks once, and call functions on them from cell to cell."""

from __future__ import annotations

import itertools
import re
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from functools import partial
from typing import Any, NoReturn, Self

import numpy as np

from unisono.beyond.pool.captured import check_function, note_module
from unisono.beyond.pool.display import display, progress_bar
from unisono.beyond.pool.flight import Flight, RankCall, kept_error
from unisono.beyond.pool.memory import new_array
from unisono.beyond.pool.processes import RankProcesses
from unisono.beyond.pool.rank import RaisedError, run_cell, run_each, run_each_kept
from unisono.core.base.integers import as_integer
from unisono.core.base.source.tracebacks import hide_own_frames
from unisono.core.base.text import takes_own_keywords
from unisono.core.groups.world import process_world
from unisono.core.platform.machine import allowed_cpus
from unisono.core.platform.posix import require_posix
from unisono.errors import (
    ArgumentTypeError,
    ClosedError,
    InvalidArgumentError,
    UsageError,
    WorkerFailedError,
)
from unisono.launcher.spawn import check_start
from unisono.launcher.traceback_text import exception_line

_ATTEMPTS = 3
"""How often the group is made anew, if ranks end or fail meanwhile."""

_ARGUMENTS_OF_MAP = "map gives each task as one argument; starmap takes tuples of arguments"
_ARGUMENTS_OF_RUN = (
    "run(f, x) calls f(x) on each rank: get_rank() is its rank, and run_each(f, parts) gives each "
    "rank a part"
)

_OTHER_RESULTS = (
    "the results of other tasks are lost; map(f, tasks, return_exceptions=True) returns them, with "
    "the exceptions of the rest"
)

_EXECUTOR = "unisono.Executor, which has futures"
_OTHER_NAMES = {
    **{"imap": "map", "imap_unordered": "map", "apply": "run", "terminate": "close"},
    **{"apply_async": _EXECUTOR, "map_async": _EXECUTOR, "submit": _EXECUTOR},
}
"""What the methods of other pools are called here."""

_pool_numbers = itertools.count()
_open_pools: weakref.WeakValueDictionary[int, Pool] = weakref.WeakValueDictionary()


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
        check_function(fn, "run")
        return self._pool._run({self.rank: (fn, args, keywords)})[self.rank]

    def __repr__(self) -> str:
        return f"<rank {self.rank} of {self._pool!r}>"


class Pool:
    """Processes that stay, as ranks of one group; `pool` has the same arguments."""

    def __init__(
        self, nprocs: int | None = None, *, start_method: str = "spawn", replace: bool = False
    ) -> None:
        nprocs = self._size = _checked_size(nprocs, start_method)
        self._replaces = replace
        self._lost = ""
        self._replaced: dict[int, str] = {}  # how the processes before ended, by rank
        self._generations = itertools.count()
        self._lock = threading.RLock()
        self._processes = RankProcesses(nprocs, start_method, with_group=True)
        try:
            self._renewed().raise_first()
        except BaseException:
            self._processes.kill()
            raise
        self._number = next(_pool_numbers)
        _open_pools[self._number] = self
        process_world.hint = "only ranks have a group: call it inside ranks.run or %%ranks"
        if "IPython" in sys.modules and (shell := sys.modules["IPython"].get_ipython()) is not None:
            shell.register_magic_function(run_magic, "cell", "ranks")

    def __len__(self) -> int:
        """Return the number of ranks."""
        return self._size

    def __getitem__(self, rank: int) -> PoolRank:
        """Return one rank; negative numbers count from the end."""
        if not hasattr(rank, "__index__"):
            raise ArgumentTypeError(
                f"a pool gives one rank at a time, got {rank!r}",
                hint="[ranks[i].run(f) for i in ...], or run(f) on all ranks",
            )
        if not -self._size <= rank < self._size:
            raise IndexError(f"there is no rank {rank}: the pool has ranks 0 to {self._size - 1}")
        return PoolRank(self, range(self._size)[rank])

    def __getattr__(self, name: str) -> NoReturn:
        found = _OTHER_NAMES.get(name)
        hint = "" if found is None else f"; use {found}"
        raise AttributeError(f"a pool has no {name}{hint}", name=name, obj=self)

    def __repr__(self) -> str:
        state = "closed" if self._processes.is_closed else self._lost or "ready"
        return f"<unisono.pool of {self._size} ranks: {state}>"

    def __reduce__(self) -> NoReturn:
        raise ArgumentTypeError(
            "a pool cannot be pickled or copied: only the process that made it makes calls",
            hint="a function on a rank reads what you made before: x = ranks.shared_array(3), "
            "then ranks.run(f, x)",
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def pids(self) -> list[int]:
        """Return the process of each rank."""
        self._check()
        return self._processes.pids()

    def run(self, fn: Callable[..., Any], *args: Any, **keywords: Any) -> list[Any]:
        """Call `fn(*args, **keywords)` on each rank and return the results, by rank.

        In `fn` the default group has all ranks of the pool: `get_rank()` tells which one it is.

            with unisono.pool(4) as ranks:
                ranks.run(load, "data")            # sets a `global` name, which stays
                means = ranks.run(mean_of_all)

        A function of the notebook runs in the main module of the rank. A call sends copies of the
        notebook's names that its functions read, and takes them away at its end; only modules stay.
        Names that the ranks assign, with `global` or in `%%ranks`, are theirs and stay. A call that
        would send a name of theirs is refused.

        A notebook shows open figures of pyplot, and what ranks give to `display`, after the call.

        If a rank raises an exception, calls of the other ranks that wait for it end. If a rank has
        used a group, all groups are made anew then. What the ranks hold stays. An interrupt does
        the same.

        Raises:
            WorkerFailedError: A rank died; names it. The pool then makes no further calls, or with
                `replace=True` a new process has the rank already.
            ClosedError: The pool is closed, or has lost a rank.
            UsageError: The call would send a name of the ranks. Or an iterable of `map` calls the
                pool that reads it.
            PeerFailedError: A rank waits in a collective or a receive for one that has returned, or
                that was not called.
            InvalidArgumentError: The function, an argument or a result cannot be pickled.
            Exception: That of the rank that failed first. Its cause is a WorkerFailedError that
                ends with the traceback.
        """
        check_function(fn, "run")
        results = self._run(dict.fromkeys(range(self._size), (fn, args, keywords)))
        return [results[rank] for rank in range(self._size)]

    def run_each(self, fn: Callable[..., Any], parts: Iterable[Any]) -> list[Any]:
        """Call `fn(parts[rank])` on each rank and return the results, by rank.

            def keep(rows):
                global mine                        # stays on the rank
                mine = rows

            ranks.run_each(keep, np.array_split(table, len(ranks)))

        Raises:
            InvalidArgumentError: There is not one part for each rank.
            WorkerFailedError, Exception: See `run`.
        """
        check_function(fn, "run_each")
        each = list(parts)
        if len(each) != self._size:
            raise InvalidArgumentError(f"{self._size} ranks need as many parts, got {len(each)}")
        results = self._run({rank: (fn, (part,), {}) for rank, part in enumerate(each)})
        return [results[rank] for rank in range(self._size)]

    def map(
        self,
        fn: Callable[..., Any],
        *tasks: Iterable[Any],
        chunksize: int = 1,
        progress: bool | None = None,
        return_exceptions: bool = False,
    ) -> list[Any]:
        """Call `fn` with each task on whichever rank is free; return the results in order.

        Args:
            fn: Function of one argument for each of `tasks`. It makes no collective calls.
            tasks: Iterables of arguments, as for the built-in `map`. They are read as ranks become
                free.
            chunksize: How many tasks a rank gets at once.
            progress: Whether to show a bar; without rich, or in a notebook without ipywidgets, a
                line that counts. By default, on a terminal and in a notebook.
            return_exceptions: Whether the result of a task that raises is the exception.

        Raises:
            ArgumentTypeError: `fn` is no function, or there are no tasks to iterate over.
            InvalidArgumentError: `chunksize` is below 1.
            WorkerFailedError, Exception: See `run`; the tasks that run are finished first.
        """
        if not tasks:
            raise ArgumentTypeError("map takes tasks after the function: map(f, range(8))")
        for each in tasks:
            _check_iterable(each, "map", "map(f, range(8))")
        return self.starmap(
            *(fn, zip_sized(tasks)),
            chunksize=chunksize,
            progress=progress,
            return_exceptions=return_exceptions,
        )

    def starmap(
        self,
        fn: Callable[..., Any],
        tasks: Iterable[Sequence[Any]],
        *,
        chunksize: int = 1,
        progress: bool | None = None,
        return_exceptions: bool = False,
    ) -> list[Any]:
        """Do as `map` does for arguments that are in tuples already."""
        check_function(fn, "map")
        _check_iterable(tasks, "starmap", "starmap(f, [(1, 2), (3, 4)])")
        size = as_integer(chunksize, "chunksize")
        if size < 1:
            raise InvalidArgumentError(f"chunksize must be at least 1, got {size}")
        chunks = chunks_of(iter(tasks), size)
        make = run_each_kept if return_exceptions else run_each
        numbered: Iterator[tuple[int, RankCall]] = (
            (i * size, (make, (fn, chunk), {})) for i, chunk in enumerate(chunks)
        )
        total = len(tasks) if isinstance(tasks, Sized) else None
        with progress_bar(total, progress) as advance:
            results = _Results(advance)
            self._work(lambda rank: next(numbered, None), results, "task")
        found = [each for number in sorted(results) for each in results[number]]
        return [
            kept_error(i, each) if isinstance(each, RaisedError) else each
            for i, each in enumerate(found)
        ]

    def shared_array(self, shape: int | Sequence[int], dtype: Any = float) -> np.ndarray[Any, Any]:
        """Return an array of zeros that this process and all ranks read and write.

        In a call of a pool, or of an `Executor` with processes of its own, the array and its slices
        stay the same memory. Elsewhere a pickle copies it. The memory is freed with the last array
        in it.

            x = ranks.shared_array((4, 1000))
            ranks.run(fill_own_row, x)             # x has the rows now

        Raises:
            ArgumentTypeError: The shape is no int or sequence of ints, or the dtype is none.
            InvalidArgumentError: A size is negative, or the dtype holds objects.
            MemoryError: This host has less memory.
        """
        self._check()
        region, array = new_array(shape, dtype)
        with self._lock:
            self._processes.attach(region)
        return array

    def cell(self, source: str) -> None:
        """Run source text on each rank, in its main module; the value of the last line is printed.

        A notebook also shows figures of pyplot, and a last value that has a picture or HTML.

        In IPython `%%ranks` runs the rest of the cell so, on the open pool that was made last.
        `%%ranks 0 2` names ranks, and `%%ranks workers 0` a rank of the pool `workers`.

        Raises:
            WorkerFailedError, Exception: See `run`.
        """
        self._cell(source, range(self._size))

    def _cell(self, source: str, ranks: Iterable[int]) -> None:
        task: RankCall = run_cell, (source, next(self._processes.numbers)), {}
        self._run(dict.fromkeys(ranks, task))

    def close(self) -> None:
        """End the ranks; a second call does nothing, nor does that of a fork of this process."""
        self._processes.close()
        _open_pools.pop(self._number, None)
        if not _open_pools:
            process_world.hint = None

    def _check(self) -> None:
        if self._processes.is_closed:
            raise ClosedError("the pool is closed", hint="make another: unisono.pool(...)")
        if self._lost:
            raise ClosedError(
                f"the pool makes no calls any more: {self._lost}",
                hint=None
                if self._replaces
                else "unisono.pool(..., replace=True) starts another process for a rank that dies",
            )

    def _renewed(self) -> Flight:
        """Make the group of all ranks anew; return how that ended."""
        flight, generation = Flight(self._processes), next(self._generations)
        with flight.interrupts():
            for rank in range(self._size):
                flight.ask(rank, 0, "group", generation)
            flight.wait()
        return flight

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
            self._check()
            if self._processes.held is not None:
                raise UsageError(
                    "the pool is making a call, so it can make no other",
                    hint="an iterable of `map` calls the pool: make a list of it before",
                )
            flight = Flight(self._processes, results, name)
            regions = list(self._processes.regions.values())
            self._processes.held = [region.base() for region in regions]
            try:
                self._processes.drop_regions()
                with flight.interrupts():
                    self._fly(flight, next_task)
            finally:
                self._processes.held = None
                found, self._processes.shown = self._processes.shown, {}
            for rank, objects in sorted(found.items()):
                display(rank, objects)
            flight.raise_first(partial(self._note_reasons, name))

    def _fly(self, flight: Flight, next_task: Callable[[int], tuple[int, RankCall] | None]) -> None:
        try:
            flight.wait(next_task)
            self._processes.output.flush()
            if flight.failures or flight.needs_groups:
                self._mend(flight)
        except BaseException as error:
            # Ranks may still be in the call, or wait in the renewal of a group.
            self._lost = self._lost or f"a call was left by {type(error).__name__}"
            raise

    def _mend(self, flight: Flight) -> None:
        """Replace ranks that ended, and make groups anew that may be out of step."""
        last, why = flight, ""
        for _ in range(_ATTEMPTS):
            ended = {
                rank: end for rank in range(self._size) if (end := self._processes.end_of(rank))
            }
            ended = last.ended | ended
            flight.ended |= ended
            if ended and not self._replaces:
                self._lost = next(iter(ended.values()))
                return
            self._processes.restart(list(ended))
            self._replaced |= ended
            if last is flight and not (ended or flight.needs_groups):
                return
            last = self._renewed()
            flight.interrupted += last.interrupted
            if not last.failures:
                return
            why = next(each.end or exception_line(each.text) for each in last.failures.values())
        self._lost = f"its group could not be made: {why}"

    def _note_reasons(self, name: str, error: BaseException, ended: dict[int, str]) -> None:
        """Note in an error what a call lacks, the ranks that ended, and the pool's state."""
        note_module(error)
        if isinstance(error, NameError):
            self._note_name(error)
        if name and isinstance(error.__cause__, WorkerFailedError):
            error.add_note(_OTHER_RESULTS)
        if isinstance(error, TypeError) and re.search(r"missing \d+ required pos", str(error)):
            error.add_note(_ARGUMENTS_OF_MAP if name else _ARGUMENTS_OF_RUN)
        for end in ended.values():
            if end not in str(error):
                error.add_note(f"a rank of the pool ended: {end}")
        if self._lost and self._lost not in (str(error), *ended.values()):
            error.add_note(f"the pool makes no calls any more: {self._lost}")
        if isinstance(error, WorkerFailedError) and not self._replaces:
            error.add_note("unisono.pool(..., replace=True) starts another process for such a rank")

    def _note_name(self, error: NameError) -> None:
        found = re.search(r"name '(\w+)' is not defined", str(error))
        if found is not None and found[1] in vars(sys.modules["__main__"]):
            error.add_note(
                f"the notebook has {found[1]}: run(f, {found[1]}) gives it to all ranks, and "
                "run_each(f, parts) gives each rank a part; a call sends the names that its "
                "functions read, for that call alone"
            )
        context = getattr(error.__cause__, "context", None)
        if context is not None and (end := self._replaced.get(context.rank)) is not None:
            error.add_note(f"a new process, with an empty memory, has replaced {end}")


def _checked_size(nprocs: int | None, start_method: str) -> int:
    require_posix("unisono.pool")
    hide_own_frames()
    wanted = len(allowed_cpus()) if nprocs is None else nprocs
    return check_start("pool(nprocs)", print, (), wanted, start_method)


def _check_iterable(tasks: Any, call: str, example: str) -> None:
    if not np.iterable(tasks):
        raise ArgumentTypeError(f"{call} takes an iterable of tasks, got {tasks!r}", hint=example)


def zip_sized(iterables: Sequence[Iterable[Any]]) -> Iterable[Sequence[Any]]:
    """Return what the built-in `zip` does; a list if all iterables have a length."""
    pairs = zip(*iterables, strict=False)
    return list(pairs) if all(isinstance(each, Sized) for each in iterables) else pairs


def chunks_of(tasks: Iterator[Sequence[Any]], size: int) -> Iterator[list[Sequence[Any]]]:
    """Yield lists of `size` tasks; the last may be shorter."""
    while chunk := list(itertools.islice(tasks, size)):
        yield chunk


@takes_own_keywords
def pool(nprocs: int | None = None, *, start_method: str = "spawn", replace: bool = False) -> Pool:
    """Start processes that stay, as the ranks of one group.

        with unisono.pool(4) as ranks:
            ranks.run(f, x)            # f(x) on each rank; [4] results
            ranks.run_each(f, parts)   # f(parts[i]) on rank i
            ranks[2].run(g)            # on one rank
            ranks.map(h, tasks)        # each task on whichever rank is free
            x = ranks.shared_array(10) # memory of this process and of all ranks

    What the ranks print is shown with the rank, while a call runs. Functions as for `launch`: with
    cloudpickle also lambdas and functions of a notebook. The ranks end with the pool, and with this
    process. `Out` of IPython keeps a pool that a cell has shown: `close` it before another.

    Args:
        nprocs: Number of ranks; by default one for each CPU that this process may use.
        start_method: As for `launch`.
        replace: Whether a new process takes the place of a rank that dies. It has an empty memory,
            and the group of all ranks is made anew.

    Raises:
        ArgumentTypeError, InvalidArgumentError: A wrong argument.
        WorkerFailedError: A rank ended while it started.
    """
    return Pool(nprocs, start_method=start_method, replace=replace)


def run_magic(line: str, cell: str) -> None:
    """Run the cell below `%%ranks` on the open pool that was made last.

    Args:
        line: The name of another pool and numbers of ranks, or none of them.
        cell: The source.

    Raises:
        UsageError: There is no open pool, or the line has something else.
    """
    hide_own_frames()
    words = line.replace(",", " ").split()
    named = vars(sys.modules["__main__"]).get(words[0]) if words else None
    if isinstance(named, Pool):
        del words[0]
    elif not _open_pools:
        raise UsageError("there is no open pool", hint="make one: ranks = unisono.pool(4)")
    chosen = named if isinstance(named, Pool) else _open_pools[max(_open_pools.keys())]
    try:
        numbers = [int(each) for each in words]
    except ValueError:
        raise UsageError(
            f"%%ranks takes the name of a pool and numbers of ranks, got {line.strip()!r}",
            hint="%%ranks for all ranks, or %%ranks 0 2",
        ) from None
    chosen._cell(cell, sorted({chosen[each].rank for each in numbers} or range(len(chosen))))
