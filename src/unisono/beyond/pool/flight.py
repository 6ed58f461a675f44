"""Calls of a pool that are under way: their answers, failures and interrupts."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from unisono.beyond.pool.processes import INTERRUPT_S, POLL_S, RankProcesses
from unisono.beyond.pool.rank import (
    CallAnswer,
    RaisedError,
    error_of,
    run_cell,
    run_each,
    run_each_kept,
)
from unisono.core.base.deadline import Deadline
from unisono.core.platform.posix import SIGKILL
from unisono.errors import Context, InvalidArgumentError, WorkerFailedError
from unisono.launcher.launch import pickling
from unisono.launcher.payload import Payload, loads_result
from unisono.launcher.traceback_text import exception_line, is_consequence

_SETTLE_S = 0.5
"""How long a rank that raised waits for the others, before it ends the calls that wait for it."""

_REPORT = -1
"""Number, among those of calls, of a report to the other ranks."""

RankCall = tuple[Callable[..., Any], Sequence[Any], dict[str, Any]]


def result_of(rank: int, answer: CallAnswer) -> Any:
    """Return what a call returned, from an answer without an exception."""
    assert answer.result is not None
    try:
        return answer.result.load_once(loads_result)
    except Exception as error:
        raise InvalidArgumentError(
            f"the result of rank {rank} cannot be loaded: {type(error).__name__}: {error}",
            hint="return what this process can import",
        ) from error


def kept_error(number: int, raised: RaisedError) -> Exception:
    """Return what a task of `map` has raised, with its traceback as the cause."""
    error, cause = (
        error_of(raised),
        WorkerFailedError(f"task {number} raised an exception\n{raised.text}"),
    )
    if not isinstance(error, Exception):
        return cause
    error.add_note(f"raised in task {number}")
    error.__cause__ = cause
    return error


def _name_of(task: RankCall) -> str:
    fn, args, _ = task
    if fn is run_cell:
        return "the cell"
    fn = args[0] if fn in (run_each, run_each_kept) else fn
    return f"{getattr(fn, '__name__', None) or repr(fn)}()"


class FailedCall(NamedTuple):
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


class Flight:
    """Calls of a pool that are under way.

    Args:
        pool: The processes.
        results: Gets the results, by number.
        name: Name of a numbered call in an error; "" if the rank says it all.

    Attributes:
        failures: By rank, in the order in which they came.
        ended: How ranks ended, by rank; also of those whose call has failed before.
        interrupted: How many interrupts came.
    """

    def __init__(
        self, pool: RankProcesses, results: dict[int, Any] | None = None, name: str = ""
    ) -> None:
        self.failures: dict[int, FailedCall] = {}
        self.ended: dict[int, str] = {}
        self.interrupted = 0
        self._groups: set[str] = set()  # what calls did to groups; see CallAnswer
        self._pool = pool
        self._busy: dict[int, int] = {}
        self._results = {} if results is None else results
        self._name = name
        self._sent: tuple[RankCall, Payload] | None = None
        self._is_reading = False
        self._settled: Deadline | None = None
        self._kill_at: Deadline | None = None

    @property
    def needs_groups(self) -> bool:
        """Whether groups make no calls any more, or may be out of step."""
        is_halted = bool(self.failures or self.interrupted)
        return "broken" in self._groups or (is_halted and "used" in self._groups)

    def ask(self, rank: int, number: int, name: str, *values: Any) -> None:
        """Send a message that a rank answers."""
        self._busy[rank] = number
        self._pool.ask(rank, name, *values)

    def wait(self, next_task: Callable[[int], tuple[int, RankCall] | None] | None = None) -> None:
        """Wait until all messages are answered, or until all have ended after a failure.

        Args:
            next_task: Gives calls to ranks that are free. None if the ranks make a group, in which
                they wait for each other.
        """
        pool = self._pool
        if next_task is not None:
            pool.watch.begin()
        while True:
            if next_task is not None:
                self._send_calls(next_task)
            elif self.failures:
                self._kill_at = self._kill_at or Deadline(INTERRUPT_S)
                self._signal(signal.SIGINT)
            if not self._busy:
                return
            if self.interrupted:  # A rank has ignored a signal that came before its call.
                self._signal(signal.SIGINT)
            limits = [each.remaining() for each in (self._settled, self._kill_at) if each]
            for rank, answer in pool.answers(self._busy, min([POLL_S, *limits])):
                self._take(rank, answer)
            if self._settled is not None and self._settled.expired():
                self._settled = None
                self._report()
            if next_task is not None and pool.watch.looks():
                self._end_endless()
            if self._kill_at is not None and self._kill_at.expired():
                self._kill_at = None
                self._signal(SIGKILL)

    def _send_calls(self, next_task: Callable[[int], tuple[int, RankCall] | None]) -> None:
        for rank in range(self._pool.size):
            if self.failures or self.interrupted or rank in self._busy:
                continue
            try:
                self._is_reading = True
                try:
                    found = next_task(rank)
                finally:
                    self._is_reading = False
                if found is not None:
                    self._send(rank, *found)
            except BaseException as error:  # of an iterable, or of a pickle
                self.failures[rank] = FailedCall(0, error, "")

    def _send(self, rank: int, number: int, task: RankCall) -> None:
        if self._sent is None or self._sent[0] is not task:  # All ranks often get the same one.
            what = "the function or its arguments"
            with pickling(task, what, self._pool.dumps_of) as dumps:
                self._sent = task, Payload(task, dumps)
        self._busy[rank], self._pool.watch.called[rank] = number, _name_of(task)
        self._pool.post(rank, self._sent[1])

    def _take(self, rank: int, answer: CallAnswer | str) -> None:
        number = self._busy.pop(rank)
        if isinstance(answer, str):
            self.ended[rank] = answer
            self.failures.setdefault(rank, FailedCall(number, None, "", answer))
            return
        self._groups.add(answer.groups)
        self._pool.shown.setdefault(rank, []).extend(answer.shown)
        if answer.raised is not None:
            failed = FailedCall(number, error_of(answer.raised), answer.raised.text)
            self.failures.setdefault(rank, failed)
            self._settled = self._settled or Deadline(_SETTLE_S)
            return
        try:
            result = result_of(rank, answer)
        except InvalidArgumentError as error:
            self.failures[rank] = FailedCall(number, error, "")
            return
        if number != _REPORT:
            self._results[number] = result

    def _report(self) -> None:
        """End the calls in which ranks wait for those that raised."""
        if all(number == _REPORT for number in self._busy.values()):
            return
        for rank, failure in self.failures.items():
            if failure.text and rank not in self._busy and rank not in self.ended:
                self._tell_others(rank, f"rank {rank} raised {exception_line(failure.text)}")

    def _tell_others(self, rank: int, text: str) -> None:
        """Let a rank that makes no call end the calls of its groups, for a reason."""
        self.ask(rank, _REPORT, "report", text)
        self._groups.add("broken")

    def _end_endless(self) -> None:
        """End calls in which ranks wait for one that has returned, or was not called."""
        watch = self._pool.watch
        if self._settled or self.interrupted or _REPORT in self._busy.values():
            return
        for rank, call in watch.missing(self._busy):
            if rank not in self._busy:
                called = watch.called.get(rank)
                left = (
                    f"returned from {called} without" if called else "was not called and makes no"
                )
                self._tell_others(rank, f"rank {rank} {left} {call}")

    @contextlib.contextmanager
    def interrupts(self) -> Iterator[None]:
        """Pass a Ctrl-C on to the ranks; `raise_first` raises it."""
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
        if not self.interrupted:
            self._pool.watch.busy = list(self._busy)
        self.interrupted += 1
        self._kill_at = Deadline(INTERRUPT_S if self.interrupted == 1 else 0.0)
        self._signal(signal.SIGINT)
        # What an iterable waits for may never come, nor the start of a process.
        if self._is_reading or self.interrupted > 2:
            raise KeyboardInterrupt

    def _signal(self, signum: int) -> None:
        for rank in list(self._busy):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pool.pids()[rank], signum)

    def raise_first(
        self, noted: Callable[[BaseException, dict[int, str]], object] | None = None
    ) -> None:
        """Raise the interrupt, or the failure that is no consequence of another.

        Args:
            noted: Called with the error, and how ranks ended, before it is raised.
        """
        if self.interrupted:
            error: BaseException = KeyboardInterrupt()
            if text := self._pool.watch.described():
                error.add_note(text)
        elif self.failures:
            error = self._first()
        else:
            return
        if noted is not None:
            noted(error, self.ended)
        try:
            raise error
        finally:
            del error  # otherwise a circle with its traceback would keep the call's file open

    def _first(self) -> BaseException:
        rank, first = min(self.failures.items(), key=lambda each: is_consequence(each[1].text))
        size = self._pool.size
        context = Context(rank=rank, world_size=size)
        where = f" in {self._name} {first.number}" if self._name else ""
        if first.error is not None and not first.text:
            return first.error
        if first.end:
            return WorkerFailedError(
                f"a rank of the pool ended{where}: {first.end}",
                context=context,
                hint="its standard error may have the reason",
            )
        cause = WorkerFailedError(
            f"rank {rank} of the pool raised an exception{where}\n{first.text}".rstrip(),
            context=context,
        )
        if not isinstance(first.error, Exception):
            return cause
        first.error.add_note(f"raised on rank {rank} of {size}{where}")
        first.error.__cause__ = cause
        return first.error
