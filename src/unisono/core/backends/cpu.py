"""The CPU backend: from arrays to tasks for an engine.

Every collective takes the same steps: view the arrays as flat memory, describe the call, take its
prepared call (algorithm and program), submit a task. A list of arrays stands for their
concatenation, so a schedule has one input and one output only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from unisono.core.backends import tuning
from unisono.core.backends.agreement import agree, refuse
from unisono.core.backends.api import CallOptions, CPUOptions, GroupSpec, Pending
from unisono.core.backends.collectives import ArrayBackend
from unisono.core.backends.flat import FlatMemory
from unisono.core.backends.p2p import MessageBackend, Port
from unisono.core.backends.prepared_calls import NO_DTYPE, CallSpec, PreparedCalls
from unisono.core.base import config
from unisono.core.base.deadline import Deadline
from unisono.core.base.threads.worker import WorkerThread
from unisono.core.base.types import DType, ReduceOp, require_reducible
from unisono.core.engines import (
    Communicator,
    Engine,
    Prepared,
    Task,
    host_id,
    make_engine,
    other_engine,
)
from unisono.core.engines.errors import already_broken_error, closed_text, nested_call_error
from unisono.core.engines.kernels import divide, scale
from unisono.core.schedules import Layout, Program, Schedule
from unisono.core.schedules.choice.tables import ChoiceTable, GroupShape
from unisono.core.stores import PrefixStore
from unisono.core.stores.prefix import innermost
from unisono.core.transports import connect, has_ended
from unisono.core.transports.messages import Failure
from unisono.errors import ArgumentTypeError

_NOW = Deadline(0.0)
"""The deadline of a task that does not run."""


def _fill(copies: list[FlatMemory], dtype: DType, op: ReduceOp | None) -> None:
    """Copy the values of the caller's arrays into the private copies of a call."""
    for data in copies:
        data.fill()
    if op is not None and op.factor is not None:
        scale(copies[0].array, dtype, op.factor)


def _connect(spec: GroupSpec, name: str, scheme: str | None, word: str) -> Communicator:
    """Return the communicator of a group with links of its own; publish a word in them.

    Args:
        spec: The group.
        name: Its engine.
        scheme: Its transport; UNISONO_TRANSPORT if None.
        word: Published.
    """
    deadline = Deadline(spec.timeout_s)

    def host_of() -> str:
        other_engine(name)
        # Not when the store is made: the other ranks learn of an error here.
        if (check := getattr(innermost(spec.store), "check_encryption", None)) is not None:
            check()
        return host_id(name)

    transport = connect(spec.store, spec.rank, spec.size, deadline, scheme, host_of, word)
    comm = Communicator(transport, tuple(range(spec.size)), spec.name, spec.key)
    comm.engine_is_agreed = True
    if (other := other_engine(name)) is not None:
        try:
            store = PrefixStore(f"{name}/{transport.world_number}", spec.store)
            comm.library_ranks = other.join(store, spec.rank, spec.size, deadline)
        except BaseException:
            comm.close()
            raise
    return comm


class _Elsewhere:
    """The engine of calls whose data a library moves, as `PreparedCalls` sees it."""

    shares_memory = False
    local = 1
    has_collectives = True

    def __init__(self, engine: Engine, library: str) -> None:
        self.name = library
        self.most_moved = engine.most_moved
        self._engine = engine

    def lower(self, schedule: Schedule, layout: Layout, itemsize: int) -> Program:
        """Return this rank's program."""
        return self._engine.lower(schedule, layout, itemsize)


class CPUBackend(MessageBackend, ArrayBackend):
    """All operations on CPU memory, through an engine.

    Args:
        spec: The group.
        comm: Its communicator, if the transport of another group is shared.
        tables: The tuning tables of that other group.

    Attributes:
        shape: The kind of group, by which it finds its tuning table.
    """

    name = "unisono"
    device = "cpu"

    def __init__(
        self,
        spec: GroupSpec,
        comm: Communicator | None = None,
        tables: dict[GroupShape, ChoiceTable] | None = None,
    ) -> None:
        super().__init__(spec)
        options = CPUOptions() if spec.options is None else spec.options
        if not isinstance(options, CPUOptions):
            raise ArgumentTypeError(
                f"pg_options must be unisono.lowlevel.CPUOptions, got {options!r}"
            )
        engine = options.engine or config.get("UNISONO_ENGINE")
        if comm is None:
            tables = tuning.read_tables(spec.size)
            comm = _connect(spec, engine, options.transport, tuning.published(tables))
            self.world_number = comm.transport.world_number
        else:
            comm.transport.retain()
        self._comm = comm
        self.trace = comm.trace
        # Sub-groups have the engine of the world, although the environment may change.
        self.spec = replace(spec, options=replace(options, engine=engine))
        try:
            self._engine: Engine = make_engine(comm, engine)
        except BaseException:
            comm.close()
            raise
        self._engine.set_timeout(spec.timeout_s)
        self.calls = self._engine.calls
        self._engine.pending_type = Pending
        self._tables = tables or {}
        self.shape = tuning.shape_of(self._engine)
        self.table = tuning.agreed(self._tables, self.shape, comm)
        self._prepared_calls = PreparedCalls(comm, self._engine, self.table)
        self.port = Port.of(comm, self.calls)
        if self.calls is not None:
            self.calls.set_resized(self._resized)

    # ---- calls without arrays ------------------------------------------------------------

    def barrier(self, options: CallOptions) -> Pending:
        return self._submit(CallSpec("barrier", "barrier", 0), None, None, None, (), options)

    def agree(self, text: str, options: CallOptions) -> Pending:
        return agree(self._engine, text, options.deadline, inline=not options.async_op)

    def refuse(self, op: str, why: str, deadline: Deadline, *, wait: bool) -> None:
        if wait and self._engine.is_in_call():
            raise nested_call_error(self._comm, op)
        if self.broken() is None:
            refuse(self._engine, op, why, deadline, wait=wait)

    # ---- life -----------------------------------------------------------------------------

    def split(self, spec: GroupSpec) -> CPUBackend:
        """Return the backend of a sub-group over the same links; sends nothing."""
        transport = self._comm.transport
        if spec.options is None:
            spec = replace(spec, options=self.spec.options)
        # The ranks of a transport are global ranks. A sub-group of a sub-group must use them, too.
        comm = Communicator(transport, spec.ranks, spec.name, spec.key)
        comm.library_ranks = self._comm.library_ranks
        return CPUBackend(spec, comm, self._tables)

    def abort(self, reason: str, failed: bool = False) -> None:
        if self._comm.closed() is not None:
            # In the child of a fork only the parent may abort the group.
            return
        self._engine.abort(reason, failed)

    def adopt_failure(self, other: Any) -> None:
        transport = self._comm.transport
        if (known := transport.failure(other._comm.context)) is not None:
            self._engine.fail(known.found_by(transport.rank))

    def fail(self, kind: str, reason: str, peers: Sequence[int]) -> None:
        """End the calls of the group on all ranks, because of some global ranks; see `Failure`."""
        self._engine.fail(Failure(kind, reason, peers, self._comm.transport.rank))

    def set_timeout(self, timeout_s: float) -> None:
        super().set_timeout(timeout_s)
        self._engine.set_timeout(timeout_s)

    def end_calls(self, cancel: str = "") -> None:
        engine, comm = self._engine, self._comm
        if not engine.is_in_call():
            engine.end_calls(cancel)
            return
        # A signal handler closes the group inside a call of its own thread. That call cannot end
        # before the handler has.
        why = cancel or "inside a call of the same thread"
        engine.abort(closed_text(comm.transport.rank, comm.name, why))

    def close(self) -> None:
        engine = self._engine
        if engine.is_in_call():
            # Another thread waits for that call.
            WorkerThread(f"unisono-close-{self._comm.name}").start(engine.close)
        else:
            engine.close()

    def lost(self, rank: int) -> str | None:
        down = self._comm.transport.down(self._comm.ranks[rank])
        return None if down is None else down.reason

    def has_ended(self, rank: int) -> bool:
        return has_ended(self._comm.transport, self._comm.ranks[rank])

    def broken(self) -> str | None:
        failure = self._comm.transport.failure(self._comm.context)
        return None if failure is None else failure.reason

    def on_broken(self, callback: Callable[[], object]) -> None:
        def broke(failure: Failure) -> None:
            callback()

        self._comm.transport.on_failure(self._comm.context, broke)

    def blamed(self) -> tuple[int, ...]:
        failure = self._comm.transport.failure(self._comm.context)
        if failure is None or failure.kind != "timeout":
            return ()
        return tuple(self._comm.ranks.index(each) for each in failure.peers)

    def runs_here(self) -> bool:
        return self._engine.runs_here()

    def last_number(self) -> int:
        return self._engine.last_number()

    def info(self) -> dict[str, str]:
        tuned = {} if self.table is None else {"tuning": self.table.digest}
        transport = self._comm.transport
        shown = {"transport": transport.name}
        if transport.protection:
            shown["between_hosts"] = transport.protection
        return self._engine.info() | shown | tuned

    # ---- from a call to a task ----------------------------------------------------------------

    def _submit(
        self,
        spec: CallSpec,
        subject: FlatMemory | None,
        input: FlatMemory | None,
        output: FlatMemory | None,
        results: Sequence[Any],
        options: CallOptions,
    ) -> Pending:
        op = spec.op
        self.require_usable(options.label or spec.called)
        dtype = NO_DTYPE if subject is None else subject.dtype
        if op is not None:
            require_reducible(dtype, op)
        prepared = self._prepared_calls.get(spec, subject, options)
        if output is not None and prepared.members == 0 and prepared.writes_output:
            # Many schedules of reduce use the other ranks' tensors as scratch. torch permits
            # this; a private copy keeps the tensors unchanged.
            output.make_private()
        copies = [data for data in (input, output) if data is not None and not data.in_place]
        divisor = 0 if self._engine.divides else prepared.divisor

        def finish() -> None:
            assert output is not None
            if divisor:
                divide(output.array, dtype, divisor)
            if prepared.members:
                output.write_back()

        pending = Pending(results, runs_here=self._engine.runs_here)
        task = Task(
            prepared,
            input=None if input is None else input.memory,
            output=None if output is None else output.memory,
            deadline=options.deadline,
            begin=partial(_fill, copies, dtype, op) if copies else None,
            finish=finish if divisor or output in copies else None,
        )
        self._engine.submit(task, pending, inline=not options.async_op)
        if not options.async_op:
            pending.wait_until(None)
        if options.prepare:
            # Now the ranks are connected, which the first call of a group does.
            pending.prepared = self._engine.prepare(task)
        return pending

    def _resized(self, prepared: Prepared, shape: tuple[int, ...]) -> Prepared | bool | None:
        """Return what C++ needs for a call on one array, made for an array of another shape."""
        resized = self._prepared_calls.resized(prepared, shape)
        return self._engine.prepare(Task(resized, None, None, _NOW))

    # ---- the control plane of another backend ---------------------------------------------

    @property
    def comm(self) -> Communicator:
        """The connected state behind the group."""
        return self._comm

    def calls_of(self, library: str) -> PreparedCalls:
        """Return an empty table of calls whose data a library moves; programs have no steps."""
        return PreparedCalls(self._comm, _Elsewhere(self._engine, library), moves_data=False)

    def check(self, prepared: Prepared, deadline: Deadline) -> Pending:
        """Start to compare a call, with its sizes, on all ranks; move no data."""
        pending = Pending(runs_here=self._engine.runs_here)
        self._engine.submit(Task(prepared, None, None, deadline), pending, inline=False)
        return pending

    def require_usable(self, called: str) -> None:
        """Check that the group is not broken.

        Raises:
            CommunicationError: It is broken; has the reason.
        """
        if (failure := self._comm.transport.failure(self._comm.context)) is not None:
            raise already_broken_error(failure, self._comm, called)
