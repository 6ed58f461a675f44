"""The native engine: programs executed in C++, without the interpreter lock.

Order, threads and errors are those of every engine. Only the execution of a task differs. Programs
of posts and reads run over memory that all ranks of a group share (`Group`). Programs of messages
run over rings and wires (`Steps`).

The memory of a group is made when its first call runs. If the ranks cannot share memory, the group
uses messages.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn, cast

import numpy as np

from unisono.base import config
from unisono.base.deadline import Deadline
from unisono.base.extension import extension as _engine
from unisono.base.log import get_logger
from unisono.base.types import DType, ReduceOp, dtype_named
from unisono.engines.api import Call, Communicator, Exchange, Task
from unisono.engines.array_lists import Memory, are_even, concatenated, copy_back
from unisono.engines.errors import LATE_S, status_of_code, takes_no_part
from unisono.engines.native_queue import QueueEngine
from unisono.engines.reference import Run
from unisono.engines.shared_memory import SLOT_BYTES, share_memory
from unisono.errors import InvalidArgumentError
from unisono.schedules import (
    Layout,
    Program,
    Schedule,
    SharedProgram,
    build,
    layout_for,
    lower_shared,
    lower_uneven,
)
from unisono.transports.control import Question
from unisono.transports.messages import CallStatus, Failure

_log = get_logger("engines.native")

Array = np.ndarray[Any, Any]

# A dtype without reductions, such as float8, is bytes to the C++ engine.
_CODES: dict[str, int] = {} if _engine is None else _engine.dtype_codes()
_BYTES = _CODES.get("uint8", 0)

# How long a rank that takes no part any more has for its reason. Only two kinds of ranks need all
# of it: a stopped rank, and a rank whose connections are held open by a child process.
_SILENCE_S = 1.0

# How long to wait for the reason of an abort. If the aborting rank has ended, another rank caused
# the abort, and sends the reason to all ranks.
_ABORT_WORDS_S = 5.0

_INT64 = dtype_named("int64")

_NO_STEPS = Program(np.empty((0, 7), np.int64), 0)


def is_native_built() -> bool:
    """Whether the extension module is built, and fits this version."""
    return _engine is not None


class _Repeated(NamedTuple):
    """The call that C++ returns to Python if a repeated call fails."""

    call: Call
    program: Program
    dtype: DType
    op: ReduceOp
    exchange: Exchange | None


class _NativeProgram(SharedProgram):
    """A shared program with its copy in C++."""

    native: Any

    def __init__(self, shared: SharedProgram) -> None:
        super().__init__(
            shared.steps, shared.scratch_count, shared.pieces, shared.loops, shared.pieces_scratch
        )
        native = _engine.Program(
            shared.pieces.ctypes.data,
            len(shared.pieces),
            shared.loops.ctypes.data,
            len(shared.loops),
            shared.pieces_scratch,
        )
        object.__setattr__(self, "native", native)


@functools.lru_cache(maxsize=1024)
def _in_messages(program: Program) -> Any:
    """Return the copy in C++ of a program's steps."""
    count = len(program.steps)
    table = np.full((count, 10), -1, np.int64)
    table[:, :7] = program.steps
    loop = np.array([0, count, 1, 0, 0])
    return _engine.Program(table.ctypes.data, count, loop.ctypes.data, 1, program.scratch_count)


@functools.lru_cache(maxsize=64)
def _uneven(
    messages: Program, counts: bytes, rank: int, size: int, itemsize: int
) -> _NativeProgram | None:
    """Return `lower_uneven`, cached for calls that repeat their sizes."""
    table = np.frombuffer(counts, np.int64).reshape(size, size)
    shared = lower_uneven(messages, table, rank, itemsize, SLOT_BYTES)
    return None if shared is None else _NativeProgram(shared)


def _before_exchange(task: Task) -> tuple[Task, int]:
    """Return the task to run first, and the number by which ranks compare their sizes."""
    if task.exchange is None:
        return task, 1
    even = task.exchange.even
    # A program of sizes that the ranks have not compared may address memory outside the buffers.
    return task if even else replace(task, program=_NO_STEPS), even


def _whole(memory: Memory) -> Memory:
    return memory if are_even(memory) else concatenated(memory)


def _flat(memory: Memory) -> Memory:
    if isinstance(memory, list):
        return [each.reshape(-1) for each in memory]
    return None if memory is None else memory.reshape(-1)


def _ask_others(engine: NativeEngine | None) -> None:
    """Ask the other ranks for their last calls; C++ calls this when a deadline comes near."""
    if engine is None:
        return
    comm = engine.comm
    if engine._asked is not None:
        comm.transport.close_question(engine._asked)
    engine._asked = comm.transport.inquire(comm.context, 0, comm.others)


def _regular(hosts: Sequence[str]) -> int:
    """Return the ranks per host if it is equal and ranks are numbered host by host; else 1."""
    count = hosts.count(hosts[0])
    rows = [set(hosts[at : at + count]) for at in range(0, len(hosts), count)]
    regular = all(len(row) == 1 for row in rows) and len(set(hosts)) * count == len(hosts)
    return count if regular else 1


def _choose_isa(name: str) -> None:
    if name not in _engine.isas():
        raise InvalidArgumentError(
            f"UNISONO_CPU={name!r} is no instruction set of this machine "
            f"(it has: {', '.join(_engine.isas())})"
        )
    _engine.set_isa(name)


class NativeEngine(QueueEngine):
    """Runs tasks over shared memory if all ranks are on one host, and otherwise with messages.

    Args:
        comm: The group; all its ranks have a host id.
        crowded: Whether more ranks than cores take part on this host.
    """

    name = "native"

    def __init__(self, comm: Communicator, *, crowded: bool) -> None:
        super().__init__(comm)
        if isa := config.get("UNISONO_CPU"):
            _choose_isa(isa)
        self._crowded = crowded
        self._hosts = [comm.transport.hosts[rank] for rank in comm.ranks]
        self.shares_memory = len(set(self._hosts)) == 1
        self.ranks_per_host = _regular(self._hosts)
        self.over = "shared memory" if self.shares_memory else "messages"
        self._group: Any = None
        self._steps: Any = None
        # Programs that gather k numbers of each rank, by k.
        self._tables: dict[int, Program] = {}
        self._failure_known = threading.Event()
        self._connected = False
        self._asked: Question | None = None
        self.calls = _engine.Calls(self._turn, self._finish_repeat, self._queue_repeat)
        comm.transport.watch_calls(comm.context, self._last_without_python)

    def set_timeout(self, timeout_s: float) -> None:
        super().set_timeout(timeout_s)
        self.calls.set_timeout(timeout_s)

    def lower(self, schedule: Schedule, layout: Layout, itemsize: int) -> Program:
        if self.shares_memory and layout.in_splits is None and layout.out_splits is None:
            rank, count = self.comm.rank, layout.count
            shared = lower_shared(schedule, rank, count, itemsize, SLOT_BYTES)
            if shared is not None:
                return _NativeProgram(shared)
        return super().lower(schedule, layout, itemsize)

    def perform(self, task: Task) -> None:
        if not self._connected:
            with Run(self.comm, task) as run:
                self._connect(run)
        if self.comm.size == 1:
            with Run(self.comm, task) as run:
                run.execute(task.program)
            return
        first, even = _before_exchange(task)
        if not self._execute(first, task.call.fingerprint, even):
            self._exchange(task)

    def prepare(self, task: Task) -> Any:
        ready = self._connected and self.comm.size > 1
        plain = task.begin is None and task.finish is None
        if not (ready and plain and are_even(task.input) and are_even(task.output)):
            return None
        first, even = _before_exchange(task)
        return self._flight(first, task.call.fingerprint, even)

    def _exchange(self, task: Task) -> None:
        """Compare the numbers that may differ by rank, and run the program for unequal sizes."""
        exchange = task.exchange
        assert exchange is not None
        table = self._gather(task, exchange.mine)
        exchange.check(task.call, table)
        program, shared = exchange.program, None
        if self._group is not None and exchange.counts is not None:
            counts = exchange.counts(table).tobytes()
            shared = _uneven(program, counts, self.comm.rank, self.comm.size, task.dtype.itemsize)
        self._execute(replace(task, program=shared or program))

    def finished(self) -> int:
        # Calls over shared memory are not counted: the memory shows which calls a rank has ended.
        return 0 if self._steps is None else int(self._steps.finished())

    def fail(self, failure: Failure) -> None:
        super().fail(failure)
        # The group may have been broken before, by a rank that has finished the call that has
        # failed here. This rank waits no more, and other ranks must not wait for it.
        if self._group is not None:
            self._group.abort()

    def close(self) -> None:
        self.calls.close()
        if self._group is not None:
            self._group.leave()
        super().close()

    # ---- repeated calls -------------------------------------------------------------------

    def _last_without_python(self) -> CallStatus | None:
        """Return the last call that this rank has begun without `Transport.enter`, or None."""
        queued, last = self.last_queued(), self.calls.last()
        if last is None or (queued is not None and queued.seq > last[0]):
            return queued
        return CallStatus(last[0], last[1].call.text)

    def _finish_repeat(
        self,
        what: _Repeated,
        seq: int,
        status: tuple[int, int],
        raised: BaseException | None,
        buffers: tuple[Memory, Memory],
    ) -> None:
        """Finish a repeated call that failed in C++. The caller still holds the turn."""
        if raised is not None:
            self.abort(f"{type(raised).__name__} on rank {self.comm.transport.rank}")
            raise raised
        task = self.repeated_task(what, buffers, seq)
        error = self._run(task, lambda task: self.continue_task(task, *status))
        if error is not None:
            raise error

    def repeated_task(self, repeated: Any, buffers: tuple[Memory, Memory], seq: int) -> Task:
        call, program, dtype, op, exchange = repeated
        source, target = map(_flat, buffers)
        deadline = Deadline(self.timeout_s)
        call = call._replace(seq=seq)
        return Task(call, program, source, target, dtype, op, deadline, exchange)

    def continue_task(self, task: Task, code: int, peer: int) -> None:
        if code != _engine.UNEVEN:
            self._raise(task, code, peer)
        self._exchange(task)

    # ---- the C++ engine -------------------------------------------------------------------

    def _execute(self, task: Task, fingerprint: int = 0, even: int = 1) -> bool:
        """Run a task's program.

        Args:
            task: The task.
            fingerprint: The ranks agree on it first; 0 if they have agreed already.
            even: Compared in the agreement, too.

        Returns:
            False if `even` differs between ranks; then nothing was written.
        """
        given, result = _whole(task.input), _whole(task.output)
        changed = given is not task.input or result is not task.output
        whole = replace(task, input=given, output=result) if changed else task
        code, peer = self._flight(whole, fingerprint, even).run()
        if code and code != _engine.UNEVEN:
            self._raise(task, code, peer)
        if result is not task.output:
            copy_back(cast(Array, result), task.output)
        return not code

    def _flight(self, task: Task, fingerprint: int, even: int) -> Any:
        """Return the task for C++, to run here or queued; arguments as in `_execute`."""
        program, dtype = task.program, task.dtype
        if self._group is not None and isinstance(program, _NativeProgram):
            runner, native = self._group, program.native
        else:
            runner, native = self._steps, _in_messages(program)
        calls = repeated = None
        if fingerprint and task.begin is None and task.finish is None:
            calls = self.calls
            repeated = _Repeated(task.call, program, dtype, task.op, task.exchange)
        return _engine.Flight(
            runner,
            native,
            task.input,
            task.output,
            itemsize=dtype.itemsize,
            dtype=_CODES.get(dtype.name, _BYTES),
            op=task.op.op.value,
            fingerprint=fingerprint,
            even=even,
            timeout_s=task.deadline.remaining(),
            calls=calls,
            call=repeated,
        )

    def _gather(self, task: Task, mine: Array) -> Array:
        """Return [world_size, k]: the numbers of all ranks."""
        comm = self.comm
        table = np.empty((comm.size, mine.size), np.int64)
        program = self._tables.get(mine.size)
        if program is None:
            schedule = build("all_gather", "one_shot", comm.size)
            program = self.lower(schedule, layout_for(schedule, mine.size), 8)
            self._tables[mine.size] = program
        flat = table.reshape(-1)
        self._execute(replace(task, program=program, dtype=_INT64, input=mine, output=flat))
        return table

    def _raise(self, task: Task, code: int, peer: int) -> NoReturn:
        """Raise the exception that the reference engine would raise for this code."""
        comm = self.comm
        if code == _engine.MISMATCH:
            with Run(comm, task) as run:
                raise run.mismatch()
        if takes_no_part(code) and self._is_explained(comm.ranks[peer], code):
            code = _engine.ABORTED
        raise status_of_code(
            comm,
            task.call,
            code,
            peer,
            asked=self._asked,
            shares_memory=self._group is not None,
        )

    def _is_explained(self, peer: int, code: int) -> bool:
        """Whether the reason is known why a rank takes no part any more.

        The shared memory shows the end of a rank at once. The reason comes over a link: before
        this rank's answer to any question, and before the end of the link. Either ends the question
        that is asked here.
        """
        if not self._failure_known.is_set():
            transport = self.comm.transport
            transport.ask(self.comm.context, 0, [peer], Deadline(_SILENCE_S))
        return self._failure_known.wait(_ABORT_WORDS_S if code == _engine.ABORTED else 0)

    # ---- setting up -----------------------------------------------------------------------

    def _connect(self, run: Run) -> None:
        """Make or open the group's memory; all ranks get the same result."""
        comm = self.comm
        if comm.size == 1:
            self._connected = True
            return
        if self.shares_memory:
            if (shared := share_memory(comm, run)) is not None:
                segment, pids = shared
                self._group = _engine.Group(segment, comm.rank, pids, self._crowded)
            else:
                self.over = "messages"
                _log.info("group '%s' cannot share memory; it uses messages", comm.name)
        messages = comm.transport.messages
        numbers = [self._hosts.index(host) for host in self._hosts]
        self._steps = _engine.Steps(messages.native, comm.context, comm.ranks, numbers, self._group)
        runners = [each for each in (self._group, self._steps) if each is not None]
        # A weak reference to the engine, because the collector sees no cycles through C++.
        here = weakref.ref(self)
        for each in runners:
            each.set_late(lambda: _ask_others(here()), int(LATE_S * 1e9))

        def end(failure: Failure) -> None:
            self._failure_known.set()
            for each in runners:
                # Another rank may have finished the call that runs here.
                if each is self._group and failure.by in comm.others:
                    each.fail(comm.ranks.index(failure.by))
                else:
                    each.abort()

        comm.transport.on_failure(comm.context, end)
        self._connected = True
