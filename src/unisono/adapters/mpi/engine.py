"""The MPI engine: collectives of an MPI library, on data that the ranks have agreed on.

MPI moves and reduces; the group's own links stay the control plane. They find the rank that is late
or lost, carry an abort and the texts of calls that differ, and move messages (send, recv). Programs
(deterministic calls, and calls with `algorithm=`) run over these links, too.

A call has two parts. The agreement is in shared memory if the ranks are on one host, else an
all_reduce of 4 numbers in memory of the engine. No array of the caller is in MPI before all ranks
have come, because MPI cannot take an array back. Then MPI's collective runs. C++ makes the calls
(`native/mpi`), on a thread if the ranks are on several hosts. If it waits longer than a moment, it
returns to Python, which looks for lost ranks and the deadline between further moments.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, NoReturn, cast

import numpy as np

from unisono.adapters.mpi.calls import CallMaker, address, handle, in_bytes, most_moved
from unisono.adapters.mpi.library import Helper, library, note_broken, process
from unisono.adapters.mpi.ops import datatype, own_op, vendor_op
from unisono.core.base.buffers import Array
from unisono.core.base.deadline import Deadline
from unisono.core.base.seam import cpp as _engine
from unisono.core.base.threads.completion import Completion
from unisono.core.base.types import dtype_named
from unisono.core.engines.api import Collective, Communicator, Prepared, Task
from unisono.core.engines.array_lists import concatenated, copy_back
from unisono.core.engines.errors import LATE_S, DeadlinePassed, status_of_code
from unisono.core.engines.native_queue import QueueEngine
from unisono.core.engines.reference import TaskRun
from unisono.core.engines.shared_memory import share_memory
from unisono.core.transports.control import Question
from unisono.core.transports.messages import Failure, Purpose
from unisono.errors import UnsupportedError

# INPUT and OUTPUT of a call, as C++ takes them.
ArrayPair = tuple[Array | None, Array | None]

# Between two looks at the control plane in a wait for the helper thread.
_LOOK_S = 5e-3

# A rank that left, or failed in a later call, has done its part of the call; its data may still be
# under way.
_LEFT_S = 2.0

# A rank that gives up a call keeps its arrays this long after the agreement. A call that takes
# longer on another rank asks whether a rank has given up: its arrays may hold other numbers by now.
# A greater value delays errors, a smaller value adds some 0.2 ms to more calls. As in C++.
_SETTLED_S = 0.05

# How long an error of MPI may wait for its reason, which comes over the links.
_REASON_S = 1.0

# A time-out leaves this behind if all ranks were in the call.
_WRITES = "; MPI may still write the arrays of the call"

_FLAG = dtype_named("uint8")


@functools.cache
def _no_steps() -> Any:
    """Return the program of each call for C++: MPI has the steps."""
    return _engine.Program(0, 0, 0, 0, 0)


# Calls that did not end, with the memory that MPI may still read and write.
_unfinished: list[tuple[object, ...]] = []


class MPIEngine(QueueEngine):
    """Runs tasks by the collectives of an MPI library.

    Args:
        comm: The group; the ranks of its transport have ranks in MPI_COMM_WORLD.
    """

    name = "mpi"
    has_collectives = True

    def __init__(self, comm: Communicator) -> None:
        if not comm.library_ranks:
            raise UnsupportedError(
                f"group '{comm.name}' cannot use MPI: the group it is made from does not",
                hint="make the default group with backend='mpi', or name the backend of this group",
            )
        # First, because a group that is broken already calls `note_failure` at once.
        self._helper = Helper(f"unisono-mpi-{comm.name}")
        self._native_group: Any = None
        self._broken = False
        super().__init__(comm)
        found = library()
        self.over = found.name
        self.most_moved = most_moved()
        self._MPI = found.MPI
        self._mpi_comm: Any = None
        self._maker: Any = None
        # By (dtype, op): the handle of the op that all ranks use.
        self._ops: dict[tuple[str, int], int] = {}

    def info(self) -> dict[str, str]:
        # MPI's users expect its network here, too.
        return super().info() | {"p2p": self.comm.transport.name}

    def prepare(self, task: Task) -> Prepared | bool | None:
        prepared, what = task.prepared, task.prepared.what
        scales = prepared.divisor or prepared.op.factor is not None
        # MPI takes one array. A copy may stand for a list, which C++ passes as a list.
        is_copied = task.begin is not None or task.finish is not None
        in_lists = isinstance(task.input, list) or isinstance(task.output, list)
        # MPI may write the array of the first rank of an exscan, which has no result.
        if what is None or what.kind == "exscan" or scales or is_copied or in_lists:
            return False
        if self._native_group is None or not self._knows_op(prepared):
            return None
        self._native(prepared)
        return prepared

    def perform(self, task: Task) -> None:
        self._start_record(task)
        prepared, what = task.prepared, task.prepared.what
        with TaskRun(self.comm, task) as run:
            if self.comm.size == 1:
                run.execute(prepared.program)
                return
            if self._native_group is None:
                self._connect(task, run)
            if what is None:
                status = self._run_in_cpp(task, self._in_cpp(None, prepared), (None, None))
                if status == _engine.OK:
                    run.execute(prepared.program)
                elif prepared.exchange is not None:
                    run.execute(prepared.exchange.program_for(self._compare_sizes(task)))
                return
        given, out = concatenated(task.input), concatenated(task.output)
        kept = (
            out.copy()
            if what.kind == "exscan" and self.comm.rank == 0 and out is not None
            else None
        )
        self._collect(task, what, (given, out))
        if kept is not None and out is not None:
            # MPI does not define the first rank's result, and may have used its array.
            out[:] = kept
        copy_back(out, task.output)

    def continue_task(self, task: Task, code: int, peer: int) -> None:
        # `prepare` returns no other calls.
        assert task.prepared.what is not None
        arrays = cast(ArrayPair, (task.input, task.output))
        try:
            code = self._wait(task, code, peer, note=_WRITES)
        except BaseException:
            self.keep_memory(task.prepared, arrays)
            raise
        if code == _engine.UNEVEN:
            self._collect_uneven(task, task.prepared.what, arrays)

    def keep_memory(self, *memory: object) -> None:
        group = self._native_group
        is_moving = group.give_up()
        if group.is_under_way():
            _unfinished.append((self, *memory))
        if group.is_in_mpi() and not library().is_openmpi:
            # The other libraries hold a lock meanwhile, which the making of a group needs.
            process.held.append((group.is_in_mpi, self._has_lost))
        if is_moving:
            time.sleep(_SETTLED_S)

    def finished(self) -> int:
        group = self._native_group
        return super().finished() if group is None else max(super().finished(), group.finished())

    def note_failure(self, failure: Failure) -> None:
        super().note_failure(failure)
        if self._native_group is not None:
            self._native_group.abort()
        # A rank that closed the group reports that itself, and goes on to MPI_Finalize.
        others = [peer for peer in failure.peers if peer != failure.by]
        is_lost = failure.kind == "lost"
        if is_lost and not others and not any(is_stuck() for is_stuck in self._stuck()):
            return
        self._broken = True
        lost = is_lost and any(map(self._is_lost, others))
        note_broken(self._stuck(), lost=lost)

    def close(self) -> None:
        if self.comm.closed():
            return
        died = self._has_lost()
        # A call that still runs breaks the group here.
        super().close()
        if self._broken or died:
            # On a busy host a rank may close its links without a good-bye.
            note_broken(self._stuck(), lost=False)
        elif self._mpi_comm is not None and not self._MPI.Is_finalized():
            # A library has room for some 2,000 communicators.
            self._mpi_comm.Free()
        if self._native_group is not None:
            self._native_group.close()
        self._helper.close()

    def _stuck(self) -> list[Callable[[], bool]]:
        """Return the questions whether a thread is in MPI, and may stay there."""
        group = self._native_group
        return [self._helper.is_stuck, *([] if group is None else [group.is_in_mpi])]

    def _has_died(self, rank: int) -> bool:
        """Whether a rank did not leave by itself, as far as this rank knows."""
        down = self.comm.transport.down(rank)
        return down is not None and not down.left

    def _has_lost(self) -> bool:
        """Whether a rank died, as far as this rank knows."""
        return any(map(self._has_died, self.comm.others))

    def _is_lost(self, rank: int) -> bool:
        """Whether a rank of a failed call has died, or may have."""
        return self.comm.transport.down(rank) is None or self._has_died(rank)

    # ---- calls in C++ -----------------------------------------------------------------------

    def _connect(self, task: Task, run: TaskRun) -> None:
        """Make MPI's communicator of this group."""
        comm, world = self.comm, self._MPI.COMM_WORLD
        run.compare_engines(self.name)
        # MPI would wait for an absent rank without a deadline, and without a name.
        if run.meet(bool(why := process.why_no_group())):
            raise UnsupportedError(why or "on another rank MPI can make no group any more")
        hosts = [comm.transport.hosts[rank] for rank in comm.ranks]
        # A rank without a host name cannot share memory, or must not.
        shares = all(hosts) and len(set(hosts)) == 1
        shared = share_memory(comm, run) if shares else None
        made: list[Any] = []

        def make() -> None:
            ranks = [comm.library_ranks[rank] for rank in comm.ranks]
            group = world.Get_group().Incl(ranks)
            made.append(world.Create_group(group, comm.context % 32749))
            made[0].Set_errhandler(self._MPI.ERRORS_RETURN)

        try:
            self._run_blocking(task, make)
        except self._MPI.Exception as error:
            self._raise_error(task, error)
        self._mpi_comm = made[0]
        self._maker = CallMaker(handle(made[0]), comm.rank, comm.size)
        crowded = comm.transport.is_crowded
        beside = shared and _engine.SharedAgreement(shared[0], comm.rank, self._maker.probe())
        agreement = self._maker.agreement()
        self._native_group = _engine.MPIGroup(address("MPI_Test"), agreement, crowded, beside)

    def _native(self, prepared: Prepared) -> Any:
        """Return a prepared call for C++."""
        if prepared.native is None:
            exchange, what = prepared.exchange, prepared.what
            # Sizes that are not even are compared before MPI gets an array.
            is_whole = what is not None and (exchange is None or exchange.even)
            call = self._call(what, prepared) if what is not None and is_whole else None
            prepared.native = self._in_cpp(call, prepared)
        return prepared.native

    def _in_cpp(self, call: Any, agreed: Prepared | None = None) -> Any:
        """Return a call for C++.

        Args:
            call: Of MPI; None: only the agreement.
            agreed: The call on which the ranks agree before. None: they have agreed already.
        """
        words: tuple[int, ...] = 0, 1
        if agreed is not None:
            even = 1 if agreed.exchange is None else agreed.exchange.even
            words = agreed.call.fingerprint, even, agreed.kind(self.over), agreed.count
            words = *words, agreed.members
        runner = _engine.MPIRunner(self._native_group, call or self._maker.nothing)
        return _engine.Prepared(runner, _no_steps(), 1, 0, 0, *words)

    def _call(
        self, what: Collective, prepared: Prepared, mine: int | None = None, largest: int = 0
    ) -> Any:
        """Return MPI's call of a collective; `mine`, `largest`: see `CallMaker.movement`."""
        dtype = prepared.dtype
        unit, itemsize = handle(datatype(dtype)), dtype.itemsize
        if what.reduces:
            op = self._ops[dtype.name, prepared.op.op.value]
            return self._maker.reduction(what, unit, what.nbytes // itemsize, op)
        if dtype.kind == "x":
            # MPI may have no type of this size.
            what, mine = in_bytes(what, itemsize), mine and mine * itemsize
            itemsize = 1
        return self._maker.movement(what, unit, what.nbytes // itemsize, mine, largest)

    def _run_in_cpp(self, task: Task, native: Any, arrays: ArrayPair, note: str = "") -> int:
        """Run a call in C++; return OK or UNEVEN."""
        try:
            # A signal handler may raise as soon as C++ returns.
            status = self.calls.run(native, *arrays, task.deadline.remaining(), task.seq)
            return self._wait(task, *status, note=note)
        except BaseException:
            self.keep_memory(native, arrays)
            raise

    def _wait(self, task: Task, code: int, error: int, *, note: str) -> int:
        """Wait for the rest of a call that C++ has begun; return OK or UNEVEN.

        Args:
            task: Has the deadline.
            code: Status of the call.
            error: MPI's error, if that is the status.
            note: The effect of a time-out if MPI has the arrays.
        """
        if code == _engine.WAITING:
            group, watch = self._native_group, _MPIWatch(self.comm, task)
            while code == _engine.WAITING:
                if group.has_arrived():
                    self._confirm(task)
                else:
                    watch.look(lambda: note if group.give_up() else "")
                code, error = group.go_on()
            watch.close()
        if code == _engine.MISMATCH:
            with TaskRun(self.comm, task) as run:
                raise run.mismatch()
        if code == _engine.LIBRARY:
            self._raise_error(task, self._MPI.Exception(error))
        if code not in (_engine.OK, _engine.UNEVEN):
            raise status_of_code(self.comm, task.call, code, 0, asked=None, shares_memory=False)
        return code

    def _confirm(self, task: Task) -> None:
        """Check that no rank has given up a call whose data have arrived.

        That rank may have written into its arrays before MPI read them. Its failure, which is on
        its way here, comes before the answer. A rank that left has done its part. A rank that died
        may not have, and a library may end the call without that rank's data. A rank that has ended
        the call may be in C code that holds its interpreter lock, and even waits for this rank. So
        the wait for answers ends.
        """
        comm = self.comm
        question = comm.transport.inquire(comm.context, task.seq, comm.others)
        limit, has_answers = Deadline(_REASON_S), False
        try:
            while not has_answers and not limit.expired():
                has_answers = question.wait_until(Deadline(_LOOK_S))
                failure = comm.transport.failure(comm.context)
                if failure is not None and failure.ends(Purpose.COLLECTIVE, task.seq):
                    raise failure
        finally:
            comm.transport.close_question(question)
        for down in map(comm.transport.down, comm.others):
            if down is not None and not down.left:
                raise down

    def _raise_error(self, task: Task, error: Exception) -> NoReturn:
        # A lost rank often shows as an error of MPI first.
        comm = self.comm
        comm.transport.ask(comm.context, 0, comm.others, Deadline(_REASON_S))
        time.sleep(_SETTLED_S)
        _MPIWatch(comm, task).look(last=True)
        raise RuntimeError(f"{self.over}: {error}") from error

    # ---- collectives ----------------------------------------------------------------------

    def _collect(self, task: Task, what: Collective, arrays: ArrayPair) -> None:
        """Agree with the other ranks, and run MPI's collective."""
        prepared = task.prepared
        knows_op = self._knows_op(prepared)
        native = self._native(prepared) if knows_op else self._in_cpp(None, prepared)
        if self._run_in_cpp(task, native, arrays, _WRITES) == _engine.UNEVEN:
            self._collect_uneven(task, what, arrays)
        elif not knows_op:
            self._choose_op(task)
            self._run_in_cpp(task, self._in_cpp(self._call(what, prepared)), arrays, _WRITES)

    def _collect_uneven(self, task: Task, what: Collective, arrays: ArrayPair) -> None:
        """Compare the sizes of all ranks, and run MPI's collective for these sizes."""
        given, out = arrays
        mine = out if what.kind == "scatter" else given
        assert mine is not None
        largest = int(self._compare_sizes(task).max()) * task.prepared.dtype.itemsize
        call = self._call(what, task.prepared, mine.size, largest)
        self._run_in_cpp(task, self._in_cpp(call), arrays, _WRITES)

    def _compare_sizes(self, task: Task) -> Array:
        """Return [p, k]: the numbers of all ranks, which fit together."""
        exchange = task.prepared.exchange
        assert exchange is not None
        mine = np.ascontiguousarray(exchange.mine)
        table = np.empty((self.comm.size, mine.size), np.int64)
        what = Collective("all_gather", table.nbytes, -1, False)
        call = self._maker.movement(what, handle(self._MPI.BYTE), table.nbytes)
        self._run_in_cpp(task, self._in_cpp(call), (mine, table))
        exchange.check(task.call, table)
        return table

    def _knows_op(self, prepared: Prepared) -> bool:
        """Whether the ranks have chosen the op of a call, or it needs none."""
        what = prepared.what
        key = prepared.dtype.name, prepared.op.op.value
        return what is None or not what.reduces or key in self._ops

    def _choose_op(self, task: Task) -> None:
        """Choose the op of a task: the library's if it is right on all ranks."""
        dtype, op = task.prepared.dtype, task.prepared.op.op
        found = vendor_op(dtype, op)
        right = np.array([found is not None], np.uint8)
        what = Collective("all_reduce", 1, -1, True)
        call = self._maker.reduction(what, handle(datatype(_FLAG)), 1, handle(self._MPI.MIN))
        self._run_in_cpp(task, self._in_cpp(call), (None, right))
        self._ops[dtype.name, op.value] = handle(found) if right[0] else own_op(dtype, op)

    def _run_blocking(self, task: Task, call: Callable[[], object]) -> None:
        """Run a call that blocks in MPI on the helper thread."""
        watch = _MPIWatch(self.comm, task)
        done: Completion = self._helper.begin(call)
        try:
            while not done.wait_until(Deadline(_LOOK_S)):
                watch.look()
        except BaseException:
            _unfinished.append((done, self))
            process.held.append((lambda: not done.done(), self._has_lost))
            raise
        watch.close()
        if done.error is not None:
            raise done.error


class _MPIWatch:
    """The other ends of a wait in MPI: the deadline, a lost rank, and an abort."""

    def __init__(self, comm: Communicator, task: Task) -> None:
        self._comm = comm
        self._seq = task.seq
        self._deadline = task.deadline
        self._late = task.deadline.earlier(LATE_S)
        self._asked: Question | None = None
        self._left_s = 0.0

    def look(self, note: Callable[[], str] = str, *, last: bool = False) -> None:
        """Raise the reason for which the wait must end, if there is one.

        Args:
            note: Gives up the call, and returns the effect of a time-out.
            last: Whether this rank does not wait any more.
        """
        comm = self._comm
        transport = comm.transport
        reasons = transport.failure(comm.context), *map(transport.down, comm.others)
        for reason in reasons:
            if reason is None:
                continue
            self._left_s = self._left_s or time.monotonic()
            if isinstance(reason, Failure):
                ends = reason.ends(Purpose.COLLECTIVE, self._seq)
            else:
                ends = not reason.left
            if last or ends or time.monotonic() > self._left_s + _LEFT_S:
                raise reason
        if self._asked is None and self._late.expired():
            self._asked = transport.inquire(comm.context, 0, comm.others, places=True)
        if self._deadline.expired():
            raise DeadlinePassed(self._asked, note())

    def close(self) -> None:
        """End the question to the other ranks, if there is one."""
        if self._asked is not None:
            self._comm.transport.close_question(self._asked)
