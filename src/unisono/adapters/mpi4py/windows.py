"""MPI's windows over `unisono.new_window`: bytes, with locks and accumulations of their own.

A window of memory that the program has given keeps a public copy (MPI's separate memory model):
each synchronisation moves what this rank has changed there, and what others have changed here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, Self

import numpy as np

from unisono.adapters.mpi4py.buffers import BOTTOM, NONE, Bytes, buffer, memory_of
from unisono.adapters.mpi4py.comm import COMM_NULL, COMM_SELF, Comm, _split
from unisono.adapters.mpi4py.datatypes import TypeMap, kind_of
from unisono.adapters.mpi4py.errors import NUMBERS, PROC_NULL, fail, require, translated
from unisono.adapters.mpi4py.handles import Attributes, Described, Group, Handle, WorldRanks
from unisono.adapters.mpi4py.messages import CommState
from unisono.adapters.mpi4py.ops import OPS, SUM, Op
from unisono.adapters.mpi4py.packing import Run, simple
from unisono.adapters.mpi4py.requests import Ongoing, Request
from unisono.beyond.windows.window import new_window
from unisono.core.base.deadline import Deadline
from unisono.core.c10d.objects.functions import all_gather_object

_POSTED, _COMPLETED = 1, 2
_ACCESS, _UPDATE = 0, 1


class WinState(Described):
    """The object of a window.

    Attributes:
        comm: Its ranks, and the messages of post, start, complete and wait.
        memory: What the program sees of this rank's part.
        places: (bytes, unit of displacements) of each rank's part.
    """

    def __init__(self, state: CommState, given: Bytes | None, size: int, unit: int, flavor: str):
        super().__init__()
        self.comm = CommState(_split(state.group, 0, state.rank))
        self.flavor = NUMBERS[f"WIN_FLAVOR_{flavor}"]
        group = self.comm.group
        start = np.zeros(max(size, 1), np.uint8)
        start[:size] = 0 if given is None else given
        self.window = new_window(start, group)
        self.locks = new_window(np.zeros(2, np.int64), group)
        self.places: list[Any] = [None] * self.comm.size
        all_gather_object(self.places, (size, unit), group)
        self.public = np.asarray(self.window.local)[:size]
        self.memory = self.public if given is None else given
        self.seen = None if given is None else given.copy()
        self.attributes |= {
            NUMBERS["WIN_BASE"]: int(self.memory.__array_interface__["data"][0]) if size else 0,
            NUMBERS["WIN_SIZE"]: size,
            NUMBERS["WIN_DISP_UNIT"]: unit,
            NUMBERS["WIN_FLAVOR"]: self.flavor,
            NUMBERS["WIN_MODEL"]: NUMBERS["WIN_SEPARATE" if given is not None else "WIN_UNIFIED"],
        }
        self.held: dict[int, bool] = {}  # the locks, and whether they are shared
        self.posted: list[int] = []
        self.started: list[int] = []

    def sync(self) -> None:
        """Exchange changes between the program's memory and the public copy."""
        if self.seen is None:
            return
        changed = np.flatnonzero(self.memory != self.seen)
        self.public[changed] = self.memory[changed]
        now = self.public.copy()  # a rank may put meanwhile, which is no change of the program
        if self.memory.flags.writeable:
            self.memory[:] = now
        self.seen[:] = now

    def lock(self, rank: int, which: int, shared: bool = False) -> None:
        """Take a lock of a rank's part; ends by the group's time-out."""
        deadline, pause = Deadline(self.comm.group.timeout_s), 0.0
        while True:
            held = self.locks.fetch_add(0, rank, which)
            wanted = held + 1 if shared else -1
            free = held >= 0 if shared else held == 0
            if free and self.locks.compare_and_swap(held, wanted, rank, which) == held:
                return
            if deadline.expired():
                fail("ERR_PENDING", f"no lock of rank {rank} within {deadline}")
            time.sleep(pause)
            pause = min(pause + 1e-5, 1e-3)

    def unlock(self, rank: int, which: int, shared: bool = False) -> None:
        """Give a lock back."""
        self.locks.fetch_add(-1 if shared else 1, rank, which)

    def close(self) -> None:
        """End the window; a collective call."""
        self.comm.group.barrier()
        self.window.close()
        self.locks.close()
        self.comm.close()


class _Target:
    """Some elements in the part of a rank."""

    def __init__(self, state: WinState, origin: Run, rank: int, given: Any) -> None:
        self.state, self.rank = state, rank
        require(0 <= rank < state.comm.size, "ERR_RANK", f"rank {rank}")
        size, unit = state.places[rank]
        disp, count, kind = 0, origin.count, origin.kind
        if given is not None and not isinstance(given, (list, tuple)):
            if isinstance(given, dict):
                raise ValueError("target: expecting integral or list/tuple")
            disp = int(given)
        elif given is not None:
            words = list(given)
            if len(words) > 3:
                raise ValueError("target: expecting 3 items at most")
            disp = int(words[0]) if words else 0
            if len(words) == 2:
                count = int(words[1])
            elif len(words) == 3:
                count = origin.count if words[1] is None else int(words[1])
                kind = kind_of(words[2]) or kind
        self.kind: TypeMap = kind
        self.offset = disp * unit
        self.pieces = kind.pieces(self.offset, 0, count * kind.size)
        ends = [at + n for at, n in self.pieces]
        require(disp >= 0 and all(at >= 0 for at, _ in self.pieces), "ERR_DISP", f"{disp}")
        require(not ends or max(ends) <= size, "ERR_RMA_RANGE", f"{max(ends, default=0)} of {size}")
        self.nbytes = sum(n for _, n in self.pieces)

    def put(self, data: Bytes) -> None:
        """Write."""
        at = 0
        for offset, size in self.pieces:
            self.state.window.put(data[at : at + size], self.rank, offset)
            at += size

    def get(self) -> Bytes:
        """Read."""
        out, at = np.empty(self.nbytes, np.uint8), 0
        for offset, size in self.pieces:
            self.state.window.get(out[at : at + size], self.rank, offset)
            at += size
        return out

    def update(self, change: Callable[[Bytes], Bytes | None]) -> Bytes:
        """Change the elements alone; return what they were."""
        state = self.state
        state.lock(self.rank, _UPDATE)
        try:
            if self.rank == state.comm.rank:
                state.sync()
            before = self.get()
            after = change(before.copy())
            if after is not None:
                self.put(after)
                state.window.flush(self.rank)
        finally:
            state.unlock(self.rank, _UPDATE)
        return before


class Win(Attributes, Handle, np.ndarray[Any, Any], root=True):  # type: ignore[misc]
    """A window; an array, so that `memoryview` gives the memory of this rank's part."""

    error = "ERR_WIN"

    def __new__(cls, win: Win | None = None) -> Self:
        if win is not None and not isinstance(win, Win):
            raise TypeError(f"expected a Win, got {type(win).__name__}")
        return cls.of(None if win is None else win.ob)

    @classmethod
    def of(cls, ob: Any) -> Self:
        """Return a handle of an object."""
        self = (NONE if ob is None else ob.memory).view(cls)
        self.ob = ob
        return self

    __ne__, __repr__, __reduce_ex__ = object.__ne__, object.__repr__, object.__reduce_ex__

    @classmethod
    def _make(cls, comm: Any, given: Bytes | None, size: int, unit: int, flavor: str) -> Self:
        comm = COMM_NULL if comm is None else comm
        require(comm, "ERR_COMM")
        require(size >= 0, "ERR_SIZE", str(size))
        require(unit > 0, "ERR_DISP", str(unit))
        with translated():
            return cls.of(WinState(comm.live, given, size, unit, flavor))

    @classmethod
    def Create(
        cls, memory: Any, disp_unit: int = 1, info: Any = None, comm: Comm | None = None
    ) -> Self:
        """Make a window of the program's memory."""
        data = NONE if memory is None or memory is BOTTOM else memory_of(memory, True)[0]
        made = cls._make(_or_self(comm), data, len(data), disp_unit, "CREATE")
        made._given = memory
        return made

    @classmethod
    def Allocate(
        cls, size: int, disp_unit: int = 1, info: Any = None, comm: Comm | None = None
    ) -> Self:
        """Make a window and its memory."""
        return cls._make(_or_self(comm), None, size, disp_unit, "ALLOCATE")

    @classmethod
    def Allocate_shared(
        cls, size: int, disp_unit: int = 1, info: Any = None, comm: Comm | None = None
    ) -> Self:
        """Make a window whose parts the ranks of a host map."""
        return cls._make(_or_self(comm), None, size, disp_unit, "SHARED")

    _given: Any = None

    def Shared_query(self, rank: int) -> tuple[buffer, int]:
        """Return the memory of a rank's part, and its unit of displacements."""
        state = self.live
        if rank == PROC_NULL:
            rank = next((r for r, (n, _) in enumerate(state.places) if n), 0)
        require(0 <= rank < state.comm.size, "ERR_RANK", f"rank {rank}")
        size, unit = state.places[rank]
        if rank == state.comm.rank:
            return buffer._of(state.memory, self), unit
        with translated():
            part = np.asarray(state.window.map_remote_tensor(rank))
        return buffer._of(part[:size], self), unit

    def tomemory(self) -> buffer:
        """Return the memory of this rank's part."""
        return buffer._of(self.live.memory, self)

    def Get_group(self) -> Group:
        """Return the ranks."""
        return Group.of(WorldRanks(self.live.comm.group.ranks))

    group = property(Get_group)
    group_size = property(lambda self: self.live.comm.size)
    group_rank = property(lambda self: self.live.comm.rank)
    flavor = property(lambda self: self.live.flavor)
    model = property(lambda self: self.live.attributes[NUMBERS["WIN_MODEL"]])

    @property
    def attrs(self) -> tuple[int, int, int]:
        """Address, bytes and unit of displacements."""
        found = self.live.attributes
        return tuple(found[NUMBERS[f"WIN_{k}"]] for k in ("BASE", "SIZE", "DISP_UNIT"))

    def Free(self) -> None:
        """End the window; a collective call."""
        state = self.live
        for key in [k for k in state.attributes if k in NUMBERS.values()]:
            del state.attributes[key]
        self.delete_attributes()
        with translated():
            state.sync()
            state.window.fence()
            state.sync()
            state.close()
        self.ob = None

    # ---- data -----------------------------------------------------------------------------

    def Put(self, origin: Any, target_rank: int, target: Any = None) -> None:
        """Write into the part of a rank."""
        state, part = self.live, simple(origin, False, target_rank)
        if target_rank == PROC_NULL:
            return
        with translated():
            to = _Target(state, part, target_rank, target)
            to.put(part.pack()[: to.nbytes])
            self._own(target_rank)

    def Get(self, origin: Any, target_rank: int, target: Any = None) -> None:
        """Read from the part of a rank."""
        state, part = self.live, simple(origin, True, target_rank)
        if target_rank == PROC_NULL:
            return
        with translated():
            self._own(target_rank)
            data = _Target(state, part, target_rank, target).get()
        part.fill(data)

    def _own(self, rank: int) -> None:
        """Make what this rank has done to its own part seen."""
        if rank == self.live.comm.rank:
            self.live.sync()

    def Accumulate(self, origin: Any, target_rank: int, target: Any = None, op: Op = SUM) -> None:
        """Set elements of a part to origin (op) element, atomically."""
        self.Get_accumulate(origin, None, target_rank, target, op)

    def Get_accumulate(
        self, origin: Any, result: Any, target_rank: int, target: Any = None, op: Op = SUM
    ) -> None:
        """As Accumulate; read the elements before."""
        no_op = op == OPS["NO_OP"]
        part = simple(origin, False, target_rank)
        into = None if result is None else simple(result, True, target_rank)
        state = self.live
        if target_rank == PROC_NULL:
            return
        with translated():
            basis = into if no_op and into is not None else part
            to = _Target(state, basis, target_rank, target)
            data = None if no_op else part.pack()

            def change(before: Bytes) -> Bytes | None:
                if data is None:
                    return None
                op.live.apply(data[: len(before)], before, _like(part, to))
                return before

            before = to.update(change)
            self._own(target_rank)
        if into is not None:
            into.fill(before)

    def Fetch_and_op(
        self, origin: Any, result: Any, target_rank: int, target_disp: int = 0, op: Op = SUM
    ) -> None:
        """As Get_accumulate, of one element."""
        is_read = op == OPS["NO_OP"] and origin is None
        _require_one(*([] if is_read else [origin]), result)
        self.Get_accumulate(origin, result, target_rank, [target_disp, 1, _type(result)], op)

    def Compare_and_swap(
        self, origin: Any, compare: Any, result: Any, target_rank: int, target_disp: int = 0
    ) -> None:
        """Set one element to origin if it equals compare, atomically; read it before."""
        parts = [simple(each, each is result, target_rank) for each in (origin, compare, result)]
        _require_one(origin, compare, result)
        state = self.live
        if target_rank == PROC_NULL:
            return
        new, old = parts[0].pack(), parts[1].pack()
        with translated():
            to = _Target(state, parts[0], target_rank, target_disp)
            before = to.update(lambda now: new if np.array_equal(now, old) else None)
            self._own(target_rank)
        parts[2].fill(before)

    # ---- order ----------------------------------------------------------------------------

    def Fence(self, assertion: int = 0) -> None:
        """Wait for all ranks, and for what they have written."""
        with translated():
            self.live.sync()
            self.live.window.fence()
            self.live.sync()

    def _exchange(self, sends: Sequence[int], recvs: Sequence[int], tag: int) -> None:
        comm = self.live.comm
        for rank in sends:
            comm.send(np.empty(0, np.uint8), rank, tag, "b")
        for rank in recvs:
            comm.now.recv(rank, tag, lambda call, data: None).wait()

    def _ranks(self, group: Group) -> list[int]:
        return [self.live.comm.group.ranks.index(rank) for rank in group.live]

    def Post(self, group: Group, assertion: int = 0) -> None:
        """Open this rank's part to a group."""
        self.live.sync()
        self.live.posted = self._ranks(group)
        self._exchange(self.live.posted, (), _POSTED)

    def Start(self, group: Group, assertion: int = 0) -> None:
        """Wait until the parts of a group are open."""
        self.live.started = self._ranks(group)
        self._exchange((), self.live.started, _POSTED)

    def Complete(self) -> None:
        """End what `Start` began."""
        with translated():
            self.live.window.flush()
        self._exchange(self.live.started, (), _COMPLETED)
        self.live.started = []

    def Wait(self) -> Literal[True]:
        """Wait until the group of `Post` has completed."""
        self._exchange((), self.live.posted, _COMPLETED)
        self.live.posted = []
        self.live.sync()
        return True

    def Test(self) -> bool:
        """Return whether the group of `Post` has completed."""
        state = self.live
        if not all(state.comm.probe(rank, _COMPLETED, False) for rank in state.posted):
            return False
        return self.Wait()

    def Lock(
        self, rank: int, lock_type: int = NUMBERS["LOCK_EXCLUSIVE"], assertion: int = 0
    ) -> None:
        """Lock the part of a rank."""
        state, shared = self.live, lock_type == NUMBERS["LOCK_SHARED"]
        require(shared or lock_type == NUMBERS["LOCK_EXCLUSIVE"], "ERR_LOCKTYPE")
        if rank == PROC_NULL:
            return
        require(0 <= rank < state.comm.size, "ERR_RANK", f"rank {rank}")
        with translated():
            state.lock(rank, _ACCESS, shared)
        state.held[rank] = shared
        self._own(rank)

    def Unlock(self, rank: int) -> None:
        """Unlock the part of a rank."""
        state = self.live
        if rank == PROC_NULL:
            return
        require(rank in state.held, "ERR_RMA_SYNC", f"rank {rank} is not locked")
        self._own(rank)
        with translated():
            state.window.flush(rank)
            state.unlock(rank, _ACCESS, state.held.pop(rank))

    def Lock_all(self, assertion: int = 0) -> None:
        """Lock all parts, shared."""
        for rank in range(self.live.comm.size):
            self.Lock(rank, NUMBERS["LOCK_SHARED"])

    def Unlock_all(self) -> None:
        """Unlock all parts."""
        for rank in range(self.live.comm.size):
            self.Unlock(rank)

    def Flush(self, rank: int) -> None:
        """Wait until what this rank has written is in the part of a rank."""
        if rank != PROC_NULL:
            with translated():
                self.live.window.flush(rank)
            self._own(rank)

    Flush_local = Flush

    def Flush_all(self) -> None:
        """Wait until what this rank has written is in all parts."""
        with translated():
            self.live.window.flush()
        self.live.sync()

    Flush_local_all = Flush_all

    def Sync(self) -> None:
        """Exchange changes with the public copy."""
        self.live.sync()


def _add_requests() -> None:
    """Add the forms with a request, which have ended when they return."""
    for name in ("Put", "Get", "Accumulate", "Get_accumulate"):
        call = getattr(Win, name)

        def started(self: Win, *arguments: Any, call: Any = call, **how: Any) -> Request:
            call(self, *arguments, **how)
            return Request.of(Ongoing())

        started.__name__, started.__doc__ = f"R{name.lower()}", f"As {name}, with a request."
        setattr(Win, started.__name__, started)


_add_requests()


def _or_self(comm: Any) -> Any:
    return COMM_SELF if comm is None else comm


def _like(part: Run, to: _Target) -> Run:
    return Run(part.memory, part.offset, part.count, to.kind if to.kind.dtype else part.kind)


def _type(message: Any) -> Any:
    from unisono.adapters.mpi4py.datatypes import Datatype

    return Datatype.of(simple(message, True).kind)


def _require_one(*messages: Any) -> None:
    parts = [simple(message, False) for message in messages]
    if any(part.count != 1 for part in parts):
        raise ValueError(f"expecting one element, got {[part.count for part in parts]}")
    if len({id(part.kind) for part in parts}) != 1:
        raise ValueError("mismatch in the datatypes of the buffers")


WIN_NULL = Win()
