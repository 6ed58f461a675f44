"""The MPI engine: collectives of an MPI library, on data that the ranks have agreed on.

MPI moves and reduces; the group's own links stay the control plane. They find the rank that is late
or lost, carry an abort and the texts of calls that differ, and move messages (send, recv). Programs
(deterministic calls, and calls with `algorithm=`) run over these links, too.

A call has two parts. The agreement is an all_reduce of 4 numbers in memory of the engine. No array
of the caller is in MPI before all ranks have come, because MPI cannot take an array back. Then
MPI's collective runs. A small call is polled. A large call blocks a helper thread, because the
libraries tune blocking collectives, and polls from Python would slow the data down. Both waits have
the call's deadline.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from unisono.base.completion import Completion
from unisono.base.deadline import Deadline
from unisono.engines.api import Collective, Communicator, Task
from unisono.engines.array_lists import concatenated, copy_back
from unisono.engines.errors import LATE_S, Expired
from unisono.engines.mpi_library import Helper, library, note_broken
from unisono.engines.mpi_ops import datatype, own_op, vendor_op
from unisono.engines.queue import OrderedEngine
from unisono.engines.reference import Run
from unisono.errors import UnsupportedError
from unisono.transports.control import Question
from unisono.transports.messages import Failure, Kind

Array = np.ndarray[Any, Any]

# From this size on the call blocks the helper thread, which costs 15 us. Open MPI's non-blocking
# collectives of 1 MiB take 3 to 6 times as long as its blocking collectives.
_BLOCKING_BYTES = 256 * 1024

# Polls before the first yield, between two looks at the control plane, and before the first sleep.
_SPINS, _LOOK, _SLEEP = 50, 16, 5000
_MOST_SLEEP_S = 1e-3

# The same for a wait for the helper thread.
_LOOK_S = 5e-3

# A rank that left, or failed in a later call, has done its part of the call; its data may still be
# under way.
_LEFT_S = 2.0

# A rank that gives up a call keeps its arrays this long after the agreement. A call that takes
# longer on another rank asks whether a rank has given up: its arrays may hold other numbers by now.
# A greater value delays errors, a smaller value adds some 0.2 ms to more calls.
_SETTLED_S = 0.05

# How long an error of MPI may wait for its reason, which comes over the links.
_REASON_S = 1.0

# A time-out leaves this behind if all ranks were in the call.
_WRITES = "; MPI may still write the arrays of the call"

_MASK = 0xFFFF_FFFF_FFFF_FFFF

# Requests that never ended, with the arrays that MPI may still read and write.
_unfinished: list[tuple[object, ...]] = []


class MPIEngine(OrderedEngine):
    """Runs tasks by the collectives of an MPI library.

    Args:
        comm: The group; the ranks of its transport have ranks in MPI_COMM_WORLD.
    """

    name = "mpi"
    has_collectives = True

    def __init__(self, comm: Communicator) -> None:
        if not comm.mpi_ranks:
            raise UnsupportedError(
                f"group '{comm.name}' cannot use MPI: the group it is made from does not",
                hint="make the default group with backend='mpi', or name the backend of this group",
            )
        # First, because a group that is broken already calls `note_failure` at once.
        self._helper = Helper(f"unisono-mpi-{comm.name}")
        self._broken = False
        super().__init__(comm)
        found = library()
        self.over = found.name
        self._MPI = found.MPI
        self._group: Any = None
        # Memory of the agreement, which MPI may use even after a time-out.
        self._words = np.zeros(4, np.uint64)
        # By (dtype, op): the op that all ranks use.
        self._ops: dict[tuple[str, int], Any] = {}

    def info(self) -> dict[str, str]:
        # MPI's users expect its network here, too.
        return super().info() | {"p2p": self.comm.transport.name}

    def perform(self, task: Task) -> None:
        self._start_record(task)
        prepared = task.prepared
        with Run(self.comm, task) as run:
            if self.comm.size == 1:
                run.execute(prepared.program)
                return
            try:
                if self._group is None:
                    self._connect(task, run)
                began_s = time.monotonic()
                block = self._agree(task, run)
                if prepared.what is not None:
                    self._collect(task, prepared.what, block)
                    if time.monotonic() > began_s + _SETTLED_S:
                        self._confirm(task)
                elif block is None or prepared.exchange is None:
                    run.execute(prepared.program)
                else:
                    run.execute(prepared.exchange.program)
            except self._MPI.Exception as error:
                # A lost rank often shows as an error of MPI first.
                comm = self.comm
                comm.transport.ask(comm.context, 0, comm.others, Deadline(_REASON_S))
                _Watch(self, task).look(last=True)
                raise RuntimeError(f"{self.over}: {error}") from error

    def note_failure(self, failure: Failure) -> None:
        super().note_failure(failure)
        self._broken = True
        lost = failure.kind == "lost" and any(map(self._is_lost, failure.peers))
        note_broken(self._helper, lost=lost)

    def close(self) -> None:
        if self.comm.closed():
            return
        transport = self.comm.transport
        downs = [rank for rank in self.comm.others if transport.down(rank) is not None]
        lost = any(map(self._is_lost, downs))
        # A call that still runs breaks the group here.
        super().close()
        if self._broken or lost:
            # On a busy host a rank may close its links without a good-bye.
            note_broken(self._helper, lost=False)
        elif self._group is not None and not self._MPI.Is_finalized():
            # A library has room for some 2,000 communicators.
            self._group.Free()
        self._helper.close()

    def _is_lost(self, rank: int) -> bool:
        """Whether a rank did not leave by itself, as far as this rank knows."""
        down = self.comm.transport.down(rank)
        return down is None or not down.left

    # ---- agreement ------------------------------------------------------------------------

    def _connect(self, task: Task, run: Run) -> None:
        """Make MPI's communicator of this group."""
        comm, world = self.comm, self._MPI.COMM_WORLD
        # MPI would wait for an absent rank without a deadline, and without a name.
        run.meet()
        made: list[Any] = []

        def make() -> None:
            ranks = [comm.mpi_ranks[rank] for rank in comm.ranks]
            group = world.Get_group().Incl(ranks)
            made.append(world.Create_group(group, comm.context % 32749))
            made[0].Set_errhandler(self._MPI.ERRORS_RETURN)

        self._run_blocking(task, make, ())
        self._group = made[0]

    def _agree(self, task: Task, run: Run) -> Array | None:
        """Check that all ranks are in the same call.

        Returns:
            None if the sizes of all ranks are even and equal. Else [p, k], their numbers.
        """
        prepared = task.prepared
        exchange, word = prepared.exchange, prepared.call.fingerprint
        even = 1 if exchange is None else exchange.even
        words = self._words
        words[:] = word, _MASK - word, even, _MASK - even
        spec = [words, 4, self._MPI.UINT64_T]
        self._poll(task, self._group.Iallreduce(self._MPI.IN_PLACE, spec, self._MPI.MIN), (words,))
        least, most_left, even, even_left = map(int, words)
        if least + most_left != _MASK:
            raise run.mismatch()
        # 0 is the word of sizes that are not even, even if all ranks have it.
        if exchange is None or (even and even + even_left == _MASK):
            return None
        mine = np.ascontiguousarray(exchange.mine)
        table = np.empty((self.comm.size, mine.size), np.int64)
        self._poll(task, self._group.Iallgather(mine, table), (mine, table))
        exchange.check(task.call, table)
        return table

    # ---- collectives ----------------------------------------------------------------------

    def _collect(self, task: Task, what: Collective, table: Array | None) -> None:
        """Run MPI's collective."""
        prepared, comm = task.prepared, self.comm
        given, out = concatenated(task.input), concatenated(task.output)
        kept = out.copy() if what.kind == "exscan" and comm.rank == 0 and out is not None else None
        if what.reduces:
            unit, op = datatype(prepared.dtype), self._op(task)
            name, arguments = self._reduction(what, given, out, unit, op)
        else:
            name, arguments = self._movement(what, given, out, prepared.dtype.itemsize, table)
        arrays = (given, out, task)
        # Equal on all ranks: MPI does not match a polled collective with a blocking one.
        largest = 0 if table is None else int(table.max()) * prepared.dtype.itemsize
        if (what.nbytes if table is None else largest) < _BLOCKING_BYTES:
            self._poll(task, getattr(self._group, f"I{name}")(*arguments), arrays)
        else:
            call = getattr(self._group, name.capitalize())
            self._run_blocking(task, lambda: call(*arguments), arrays)
        if kept is not None and out is not None:
            # MPI does not define the first rank's result, and may have used its array.
            out[:] = kept
        copy_back(out, task.output)

    def _reduction(
        self, what: Collective, given: Any, out: Any, unit: Any, op: Any
    ) -> tuple[str, tuple[Any, ...]]:
        """Return the name and the arguments of a collective that reduces."""
        here = self._MPI.IN_PLACE
        if what.kind == "reduce_scatter" and what.blocks is None:
            target = [out, out.size, unit]
            return "reduce_scatter_block", ([given, out.size, unit], target, op)
        if what.kind == "reduce_scatter":
            source, target = [given, given.size, unit], [out, out.size, unit]
            return "reduce_scatter", (source, target, list(what.blocks or ()), op)
        data = [out, out.size, unit]
        if what.kind == "reduce":
            at_root = self.comm.rank == what.root
            return "reduce", ((here, data) if at_root else (data, None)) + (op, what.root)
        return {"all_reduce": "allreduce"}.get(what.kind, what.kind), (here, data, op)

    def _movement(
        self, what: Collective, given: Any, out: Any, itemsize: int, table: Array | None
    ) -> tuple[str, tuple[Any, ...]]:
        """Return the name and the arguments of a collective that moves bytes."""
        size, unit = self.comm.size, self._MPI.BYTE

        def whole(array: Any) -> Any:
            return [array, array.nbytes, unit]

        def part(array: Any) -> Any:
            return None if array is None else [array, array.nbytes // size, unit]

        def parts(array: Any, sizes: Any) -> Any:
            return None if array is None else [array, [n * itemsize for n in sizes], unit]

        kind, root, uneven = what.kind, what.root, table is not None
        if kind == "barrier":
            return "barrier", ()
        if kind == "broadcast":
            return "bcast", (whole(out), root)
        if kind == "all_gather" and what.blocks is not None:
            return "allgatherv", (whole(given), parts(out, what.blocks))
        if kind == "all_gather":
            return "allgather", (whole(given), part(out))
        if kind == "all_to_all" and uneven:
            return "alltoallv", (parts(given, what.sent), parts(out, what.received))
        if kind == "all_to_all":
            return "alltoall", (part(given), part(out))
        if kind == "gather":
            target = parts(out, what.blocks) if uneven else part(out)
            return "gatherv" if uneven else "gather", (whole(given), target, root)
        source = parts(given, what.blocks) if uneven else part(given)
        return "scatterv" if uneven else "scatter", (source, whole(out), root)

    def _op(self, task: Task) -> Any:
        """Return the op of a task: the library's if it is right on all ranks."""
        dtype, op = task.prepared.dtype, task.prepared.op.op
        key = dtype.name, op.value
        if key not in self._ops:
            found = vendor_op(dtype, op)
            right = np.array([found is not None], np.uint8)
            spec = [right, 1, self._MPI.UINT8_T]
            request = self._group.Iallreduce(self._MPI.IN_PLACE, spec, self._MPI.MIN)
            self._poll(task, request, (right,))
            self._ops[key] = found if right[0] else own_op(dtype, op)
        return self._ops[key]

    # ---- waits ----------------------------------------------------------------------------

    def _confirm(self, task: Task) -> None:
        """Check that no rank has given up a call whose data have arrived.

        That rank may have written into its arrays before MPI read them. Its failure, which is on
        its way here, comes before the answer.
        """
        comm = self.comm
        watch = _Watch(self, task, deadline=Deadline(max(task.deadline.remaining(), _REASON_S)))
        question = comm.transport.inquire(comm.context, task.seq, comm.others)
        try:
            while not question.wait_until(Deadline(_LOOK_S)):
                watch.look()
            watch.look()
        finally:
            comm.transport.close_question(question)
        watch.close()

    def _poll(self, task: Task, request: Any, arrays: tuple[object, ...]) -> None:
        """Test a request until it is done."""
        test, rounds = request.Test, 0
        watch = _Watch(self, task, _WRITES if arrays and arrays[-1] is task else "")
        try:
            while not test():
                rounds += 1
                if rounds > _SPINS:
                    os.sched_yield()
                    if rounds % _LOOK == 0:
                        watch.look()
                if rounds > _SLEEP:
                    time.sleep(min(_MOST_SLEEP_S, (rounds - _SLEEP) * 1e-7))
        except BaseException:
            _unfinished.append((request, *arrays))
            watch.settle()
            raise
        watch.close()

    def _run_blocking(
        self, task: Task, call: Callable[[], object], arrays: tuple[object, ...]
    ) -> None:
        """Run a call that blocks in MPI on the helper thread."""
        watch = _Watch(self, task, _WRITES if arrays and arrays[-1] is task else "")
        done: Completion = self._helper.begin(call)
        try:
            while not done.wait_until(Deadline(_LOOK_S)):
                watch.look()
        except BaseException:
            _unfinished.append((done, *arrays))
            watch.settle()
            raise
        watch.close()
        if done.error is not None:
            watch.settle()
            raise done.error


class _Watch:
    """The other ends of a wait in MPI: the deadline, a lost rank, and an abort."""

    def __init__(
        self, engine: MPIEngine, task: Task, note: str = "", deadline: Deadline | None = None
    ) -> None:
        self._comm = engine.comm
        self._seq = task.seq
        self._deadline = deadline or task.deadline
        self._late = self._deadline.earlier(LATE_S)
        self._note = note
        self._began_s = time.monotonic()
        self._asked: Question | None = None
        self._left_s = 0.0

    def look(self, *, last: bool = False) -> None:
        """Raise the reason for which the wait must end, if there is one; `last`: without a wait."""
        comm = self._comm
        transport = comm.transport
        reasons = transport.failure(comm.context), *map(transport.down, comm.others)
        for reason in reasons:
            if reason is None:
                continue
            self._left_s = self._left_s or time.monotonic()
            if isinstance(reason, Failure):
                ends = reason.ends(Kind.COLLECTIVE, self._seq)
            else:
                ends = not reason.left
            if last or ends or time.monotonic() > self._left_s + _LEFT_S:
                raise reason
        if self._asked is None and self._late.expired():
            self._asked = transport.inquire(comm.context, 0, comm.others, places=True)
        if self._deadline.expired():
            raise Expired(self._asked, self._note)

    def settle(self) -> None:
        """Keep the caller's arrays until all other ranks ask before they take their results."""
        if self._note:
            time.sleep(max(0.0, self._began_s + _SETTLED_S - time.monotonic()))

    def close(self) -> None:
        """End the question to the other ranks, if there is one."""
        if self._asked is not None:
            self._comm.transport.close_question(self._asked)
