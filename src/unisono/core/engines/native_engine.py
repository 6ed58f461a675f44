"""The native engine: programs executed in C++, without the interpreter lock.

Order, threads and errors are those of every engine. Only the execution of a task differs. Programs
of posts and reads run over memory that all ranks of a group share (`Group`). Programs of messages
run over rings and wires (`Steps`).

The memory of a group is made when its first call runs. If the ranks cannot share memory, the group
uses messages.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any, NoReturn, cast

import numpy as np

from unisono.core.base import config
from unisono.core.base.buffers import Array
from unisono.core.base.deadline import Deadline
from unisono.core.base.log import get_logger
from unisono.core.base.seam import cpp as _engine
from unisono.core.base.threads.completion import Completion
from unisono.core.base.types import DType, ReduceOp, dtype_named
from unisono.core.engines.api import NO_STEPS, Communicator, Prepared, Task
from unisono.core.engines.array_lists import ArrayOrList, are_even, concatenated, copy_back
from unisono.core.engines.errors import LATE_S, status_of_code, takes_no_part
from unisono.core.engines.native_queue import QueueEngine
from unisono.core.engines.reference import TaskRun
from unisono.core.engines.shared_memory import SLOT_BYTES, share_memory
from unisono.core.platform.nodes import memory_node
from unisono.core.schedules import (
    Layout,
    Program,
    Schedule,
    SharedProgram,
    build,
    layout_for,
    lower_shared,
    lower_uneven,
)
from unisono.core.transports.control import Question
from unisono.core.transports.messages import Failure
from unisono.errors import InvalidArgumentError

_log = get_logger("engines.native")

# A dtype without reductions, such as float8, is bytes to the C++ engine.
_CODES: dict[str, int] = _engine.dtype_codes()
_BYTES = _CODES.get("uint8", 0)

# How long a rank that takes no part any more has for its reason. Only two kinds of ranks need all
# of it: a stopped rank, and a rank whose connections are held open by a child process.
_SILENCE_S = 1.0

# How long to wait for the reason of an abort. If the aborting rank has ended, another rank caused
# the abort, and sends the reason to all ranks.
_ABORT_WORDS_S = 5.0

_INT64 = dtype_named("int64")


class _NativeProgram(SharedProgram):
    """A shared program with its copy in C++."""

    native: Any

    def __init__(self, shared: SharedProgram) -> None:
        super().__init__(shared.messages, shared.pieces, shared.loops, shared.pieces_scratch)
        self.native = _engine.Program(
            shared.pieces.ctypes.data,
            len(shared.pieces),
            shared.loops.ctypes.data,
            len(shared.loops),
            shared.pieces_scratch,
        )


@functools.lru_cache(maxsize=1024)
def _in_messages(program: Program) -> Any:
    """Return the copy in C++ of a program's steps."""
    count = len(program.steps)
    table = np.full((count, 11), -1, np.int64)
    table[:, [*range(7), 10]] = program.steps
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


def _whole(memory: ArrayOrList) -> ArrayOrList:
    return memory if are_even(memory) else concatenated(memory)


def _rounded(factor: float, dtype: DType) -> float:
    """Return a factor as C++ needs it: for float16 rounded once, as NumPy does."""
    if dtype.name != "float16":
        return factor
    with np.errstate(over="ignore"):
        return float(np.float16(factor))


def _ask_others(engine: NativeEngine | None) -> None:
    """Ask the other ranks for their last calls; C++ calls this when a deadline comes near."""
    if engine is None:
        return
    comm = engine.comm
    if engine._asked is not None:
        comm.transport.close_question(engine._asked)
    engine._asked = comm.transport.inquire(comm.context, 0, comm.others, places=True)


def _regular(parts: Sequence[str] | Sequence[int]) -> int:
    """Return the ranks per part if it is equal and ranks are numbered part by part; else 1."""
    count = [*parts].count(parts[0])
    rows = [set(parts[at : at + count]) for at in range(0, len(parts), count)]
    regular = all(len(row) == 1 for row in rows) and len(set(parts)) * count == len(parts)
    return count if regular else 1


def _ranks_of_part(hosts: Sequence[str], nodes: Sequence[int]) -> int:
    """Return the ranks of a host, or of a node if there is one host; see `Topology.local`."""
    if len(set(hosts)) > 1:
        return _regular(hosts)
    found = _regular(nodes)
    return found if found > 1 else len(nodes)


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
    divides = True

    def __init__(self, comm: Communicator, *, crowded: bool) -> None:
        super().__init__(comm)
        if isa := config.get("UNISONO_CPU"):
            _choose_isa(isa)
        _engine.let_threads_move(config.get_flag("UNISONO_MOVE"))
        self._crowded = crowded
        self._hosts = [comm.transport.hosts[rank] for rank in comm.ranks]
        self.shares_memory = len(set(self._hosts)) == 1
        nodes = comm.transport.nodes or (0,) * comm.transport.world_size
        self._nodes = [nodes[rank] for rank in comm.ranks]
        self.local = _ranks_of_part(self._hosts, self._nodes)
        self.over = "shared memory" if self.shares_memory else "messages"
        self._group: Any = None
        self._steps: Any = None
        # Prepared calls, in C++, that gather k numbers of each rank, by k.
        self._tables: dict[int, Any] = {}
        # Not an Event, whose lock a signal handler that aborts the group would wait for.
        self._failure_known = Completion()
        self._connected = False
        self._asked: Question | None = None

    def lower(self, schedule: Schedule, layout: Layout, itemsize: int) -> Program:
        if self.shares_memory and layout.in_splits is None and layout.out_splits is None:
            rank, count = self.comm.rank, layout.count
            shared = lower_shared(schedule, rank, count, itemsize, SLOT_BYTES)
            if shared is not None:
                return _NativeProgram(shared)
        if schedule.collective == "barrier":
            return NO_STEPS  # after the agreement every rank has entered the call
        return super().lower(schedule, layout, itemsize)

    def perform(self, task: Task) -> None:
        self._start_record(task)
        if not self._connected:
            with TaskRun(self.comm, task) as run:
                self._connect(run)
        if self.comm.size == 1:
            with TaskRun(self.comm, task) as run:
                run.execute(task.prepared.program)
            return
        status = self._execute(task, self._native(task.prepared))
        if status[0] != _engine.OK:
            self.continue_task(task, *status)

    def prepare(self, task: Task) -> Prepared | bool | None:
        if not self._connected:
            return None
        prepared = task.prepared
        if self.comm.size == 1 or not (are_even(task.input) and are_even(task.output)):
            return False
        self._native(prepared)
        return prepared

    def continue_task(self, task: Task, code: int, peer: int) -> None:
        if code != _engine.UNEVEN:
            self._raise(task, code, peer)
        self._exchange(task)

    def _exchange(self, task: Task) -> None:
        """Compare the numbers that may differ by rank, and run the program for unequal sizes."""
        prepared, exchange = task.prepared, task.prepared.exchange
        assert exchange is not None
        table = self._gather(task, exchange.mine)
        exchange.check(task.call, table)
        program, shared = exchange.program_for(table), None
        if self._group is not None and exchange.counts is not None:
            counts, size = exchange.counts(table).tobytes(), self.comm.size
            shared = _uneven(program, counts, self.comm.rank, size, prepared.dtype.itemsize)
        native = self._in_cpp(shared or program, prepared.dtype, prepared.op)
        self._require_ok(task, *self._execute(task, native))

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
        # Before the group leaves, because no call may begin in it any more.
        self.calls.close()
        if not self.comm.closed():
            self._cancel("while a call ran")
        if self._group is not None:
            self._group.leave()
        super().close()

    # ---- the C++ engine -------------------------------------------------------------------

    def _native(self, prepared: Prepared) -> Any:
        """Return a prepared call for C++."""
        if prepared.native is None:
            exchange, program = prepared.exchange, prepared.program
            even = 1 if exchange is None else exchange.even
            if not even:
                # A program of sizes that the ranks have not compared may address memory outside
                # the buffers.
                program = NO_STEPS
            shares = self._group is not None and isinstance(program, _NativeProgram)
            kind = prepared.kind("shared memory" if shares else "messages")
            prepared.native = self._in_cpp(
                program,
                prepared.dtype,
                prepared.op,
                fingerprint=prepared.call.fingerprint,
                even=even,
                kind=kind,
                count=prepared.count,
                members=prepared.members,
                copies=prepared.members == 0 and prepared.writes_output,
                factor=1.0 if (by := prepared.op.factor) is None else _rounded(by, prepared.dtype),
            )
        return prepared.native

    def _in_cpp(self, program: Program, dtype: DType, op: ReduceOp, **agreed: float) -> Any:
        """Return a call for C++; without `agreed` one on which the ranks have agreed already."""
        if self._group is not None and isinstance(program, _NativeProgram):
            runner, steps = self._group, program.native
        else:
            runner, steps = self._steps, _in_messages(program)
        return _engine.Prepared(
            runner,
            steps,
            dtype.itemsize,
            dtype=_CODES.get(dtype.name, _BYTES),
            op=op.op.value,
            **{"fingerprint": 0, "even": 1, **agreed},
        )

    def _execute(self, task: Task, native: Any) -> tuple[int, int]:
        """Run a call in C++ on the memory of a task; return (code, peer)."""
        given, result = _whole(task.input), _whole(task.output)
        status = self._run_in_cpp(task, native, given, result)
        if status[0] == _engine.OK and result is not task.output:
            copy_back(cast(Array, result), task.output)
        return status

    def _run_in_cpp(
        self, task: Task, native: Any, given: ArrayOrList, result: ArrayOrList
    ) -> tuple[int, int]:
        left_s = task.deadline.remaining()
        status: tuple[int, int] = self.calls.run(native, given, result, left_s, task.seq)
        return status

    def _require_ok(self, task: Task, code: int, peer: int) -> None:
        if code != _engine.OK:
            self._raise(task, code, peer)

    def _gather(self, task: Task, mine: Array) -> Array:
        """Return [world_size, k]: the numbers of all ranks."""
        comm = self.comm
        # The ranks have agreed already. The number shows that each of them still is in this call.
        row = np.concatenate(([task.seq], mine))
        table = np.empty((comm.size, row.size), np.int64)
        native = self._tables.get(row.size)
        if native is None:
            schedule = build("all_gather", "one_shot", comm.size)
            program = self.lower(schedule, layout_for(schedule, row.size), 8)
            native = self._tables[row.size] = self._in_cpp(program, _INT64, ReduceOp.SUM)
        self._require_ok(task, *self._run_in_cpp(task, native, row, table.reshape(-1)))
        if (table[:, 0] != task.seq).any():
            self._raise(task, _engine.MISMATCH, comm.rank)
        return table[:, 1:]

    def _raise(self, task: Task, code: int, peer: int) -> NoReturn:
        """Raise the exception that the reference engine would raise for this code."""
        comm = self.comm
        if code == _engine.MISMATCH:
            with TaskRun(comm, task) as run:
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
        if not self._failure_known.done():
            transport = self.comm.transport
            transport.ask(self.comm.context, 0, [peer], Deadline(_SILENCE_S))
        limit_s = _ABORT_WORDS_S if code == _engine.ABORTED else 0.0
        return self._failure_known.wait_until(Deadline(limit_s))

    # ---- setting up -----------------------------------------------------------------------

    def _slot_node(self) -> int:
        """Return the NUMA node on which to keep what this rank posts; -1: on its own.

        It is the node of the readers if all other ranks are on one other node. If readers are on
        several nodes, the rank's own is best: the writes and a part of the reads stay on it.
        """
        nodes = self._nodes
        others = {nodes[rank] for rank in range(self.comm.size) if rank != self.comm.rank}
        apart = len(others) == 1 and nodes[self.comm.rank] not in others
        if not apart or config.get("UNISONO_NODES") != "numa" or memory_node() < 0:
            return -1
        return others.pop()

    def _connect(self, run: TaskRun) -> None:
        """Make or open the group's memory; all ranks get the same result."""
        comm = self.comm
        if comm.size == 1:
            self._connected = True
            return
        run.compare_engines(self.name)
        if self.shares_memory:
            if (shared := share_memory(comm, run)) is not None:
                segment, pids = shared
                segment.place_slots(comm.rank, self._slot_node())
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
            if messages.team is not None:
                each.set_team(messages.team)
            if comm.trace is not None:
                each.set_recorder(comm.trace.recorder)
            each.set_late(lambda: _ask_others(here()), int(LATE_S * 1e9))

        def end(failure: Failure) -> None:
            self._failure_known.finish()
            self.note_failure(failure)
            for each in runners:
                # Another rank may have finished the call that runs here.
                if each is self._group and failure.by in comm.others:
                    each.fail(comm.ranks.index(failure.by))
                else:
                    each.abort()

        comm.transport.on_failure(comm.context, end)
        self._connected = True
