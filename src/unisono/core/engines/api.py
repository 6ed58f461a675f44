"""The contract of every engine: a task goes in, a completion comes out."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np

from unisono.core.base.buffers import Array
from unisono.core.base.deadline import Deadline
from unisono.core.base.threads.completion import Completion
from unisono.core.base.types import DType, RedOpType, ReduceOp
from unisono.core.engines.array_lists import ArrayOrList
from unisono.core.recorder import make_trace, number_of_kind
from unisono.core.rendezvous.launchers import local_rank
from unisono.core.schedules import Buf, Layout, Program, Schedule, SharedProgram, lower
from unisono.core.transports import Transport
from unisono.core.transports.connect import round_trip_us
from unisono.core.transports.messages import Failure
from unisono.errors import ClosedError, Context


class Communicator:
    """The connected state behind one process group on one backend.

    Args:
        transport: Shared with the other groups of the same world.
        ranks: Ranks of the transport (global ranks), in group order.
        name: Name of the group, for errors.
        key: Distinguishes this group from other groups of the same name and members.

    Attributes:
        trace: Records the calls; None if UNISONO_TRACE is 0.
        library_ranks: The rank of each rank of the transport in the world of the engine's library;
            empty without one.
        engine_is_agreed: Whether the ranks have compared their engines, as they do for links.
    """

    library_ranks: tuple[int, ...] = ()
    engine_is_agreed = False

    def __init__(
        self, transport: Transport, ranks: tuple[int, ...], name: str, key: str = ""
    ) -> None:
        self.transport = transport
        self.ranks = ranks
        self.rank = ranks.index(transport.rank)
        self.size = len(ranks)
        self.name = name
        self.key = key
        self.made_s = time.monotonic()
        self._pid = os.getpid()
        self._closed = False
        self.trace = make_trace(transport.rank, ranks, name, key, local_rank)
        # The members are part of the number. Otherwise ranks that disagree about the members of a
        # group of this name would mix their messages. As it is, a time-out names the absent ranks.
        digest = blake2b(repr((name, key, ranks)).encode(), digest_size=7).digest()
        self.context = int.from_bytes(digest, "little")

    @property
    def others(self) -> tuple[int, ...]:
        """Global ranks of the other members."""
        return tuple(rank for rank in self.ranks if rank != self.transport.rank)

    @property
    def round_trip_us(self) -> int:
        """The round trip between the members' hosts; 0 on one host. See `Topology`."""
        hosts = self.transport.hosts
        trips_us = self.transport.trips_us or (0,) * len(hosts)
        return round_trip_us([hosts[r] for r in self.ranks], [trips_us[r] for r in self.ranks])

    @property
    def here(self) -> str:
        """This rank as errors name it, with its global rank: "rank 3 of 8"."""
        return f"rank {self.transport.rank} of {self.transport.world_size}"

    def where(self, **fields: Any) -> Context:
        """Return the context of an error in this group, with global ranks."""
        transport = self.transport
        return Context(
            rank=transport.rank,
            world_size=transport.world_size,
            group=self.name,
            group_key=self.key,
            **fields,
        )

    def closed(self) -> str | None:
        """Return why no call can be made any more, or None."""
        if self._pid != os.getpid():
            return "belongs to the parent of this fork"
        return "was destroyed" if self._closed else None

    def close(self, finished: int = 0) -> None:
        """Release everything that the transport holds for this group, and the transport.

        Ranks that wait for this rank in a call after `finished`, its last one, get an error.

        A second call does nothing, because the transport may have other users. In the child of a
        fork it does nothing, because a lock that another thread held at the fork stays locked.
        """
        if self.closed() is None:
            self._closed = True
            why = f"group '{self.name}' was destroyed before this call ended"
            self.transport.forget(self.context, ClosedError(why), finished)
            self.transport.close()


class Call(NamedTuple):
    """One collective call, as all ranks must agree on it.

    Attributes:
        op: Name of the function the user called, for errors.
        text: The call with its arguments, for errors: "all_reduce(float32[4], SUM)".
        fingerprint: 64 bits over everything that must be equal on all ranks. Never 0, which means
            in a message that the ranks disagree.
        nbytes: Size of this rank's buffer, for errors.
        seq: Position in the group's order, from 1; 0 before the call has one.
    """

    op: str
    text: str
    fingerprint: int
    nbytes: int = 0
    seq: int = 0

    @classmethod
    def of(cls, op: str, text: str, agreed: tuple[object, ...], nbytes: int = 0) -> Call:
        """Return the call whose fingerprint is that of `agreed`: collective, dtype, count, ..."""
        return cls(op, text, fingerprint_of(*agreed), nbytes)


def fingerprint_of(*parts: object) -> int:
    """Return a nonzero 64-bit hash that is the same in every process."""
    digest = blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") or 1


class Exchange(NamedTuple):
    """Numbers that may differ by rank but must fit together, such as split sizes.

    Attributes:
        even: A nonzero number if this rank's sizes are the plain default. If it is equal on all
            ranks, nothing is exchanged and the task's own program runs.
        mine: [k] int64: the numbers of this rank.
        check: Receives the call and [world_size, k], the numbers of all ranks. Raises the same
            error on every rank.
        program: Runs instead of the task's program after the exchange.
        counts: Returns [p, p], the elements that each rank sends to each rank, from the numbers
            of all ranks. Set if the call is an all_to_all, a gather or a scatter.
        choose: Returns a faster program for the numbers of all ranks; see `program_for`.
    """

    even: int
    mine: Array
    check: Callable[[Call, Array], None]
    program: Program
    counts: Callable[[Array], Array] | None = None
    choose: Callable[[Array], Program] | None = None

    def program_for(self, table: Array) -> Program:
        """Return the program to run for [world_size, k], the numbers of all ranks."""
        return self.program if self.choose is None else self.choose(table)


REFUSED = ", but refused it: "
"""What follows the name in the text of a call that its rank refused, before the reason."""

NO_STEPS = Program(np.empty((0, 8), np.int64), 0)
"""The program of a call that moves no data, or that a library runs (`Prepared.what`)."""


class Collective(NamedTuple):
    """A collective, for an engine that has it ready-made (`Engine.has_collectives`).

    Attributes:
        kind: Name of the schedules' collective.
        nbytes: Of the whole data, equal on all ranks unless the ranks exchange their sizes.
        root: Rank in the group; -1 without a root.
        reduces: Whether the call has a reduce op.
        blocks: Elements of each rank's block as far as this rank knows them; None if all blocks
            are equal.
        sent: Elements to each rank of an all_to_all.
        received: Elements from each rank of an all_to_all.
    """

    kind: str
    nbytes: int
    root: int
    reduces: bool
    blocks: tuple[int, ...] | None = None
    sent: tuple[int, ...] | None = None
    received: tuple[int, ...] | None = None


@dataclass(slots=True, eq=False)
class Prepared:
    """A call without its memory: what is worked out once for each kind of call.

    Attributes:
        call: The call; the ranks agree on it before any buffer is written.
        program: This rank's steps.
        dtype: Of the elements in INPUT and OUTPUT.
        op: Reduce op of recv_reduce and reduce steps.
        exchange: Numbers to compare after the agreement.
        algorithm: Name of the algorithm, for the record of a call.
        count: Elements, for the record of a call.
        native: The same for C++, made by the C++ engine when the call first runs.
        what: The collective to run instead of the programs; None: the engine runs a program.
        writes_output: Whether the program uses this rank's OUTPUT for more than reading.
        members: Number of ranks that contribute to this rank's result; 0: its OUTPUT is no result,
            and keeps its values.
        source: The backend's description of the call, from which it makes others like it.
    """

    call: Call
    program: Program
    dtype: DType
    op: ReduceOp = ReduceOp.SUM
    exchange: Exchange | None = None
    algorithm: str = ""
    count: int = 0
    native: Any = None
    what: Collective | None = None
    writes_output: bool = field(init=False)
    members: int = field(init=False, default=1)
    source: Any = field(init=False, default=None)

    def __post_init__(self) -> None:
        program = self.program
        rows = program.pieces if isinstance(program, SharedProgram) else program.steps
        self.writes_output = bool((rows[:, 4] == Buf.OUTPUT).any())

    @property
    def divisor(self) -> int:
        """The number that AVG divides the result by; 0: by none, as a rank's own values."""
        return self.members if self.op.op is RedOpType.AVG and self.members > 1 else 0

    def kind(self, route: str) -> int:
        """Return the kind of the record of such a call."""
        # The text of an agreement may be any. The number of names must not grow with it.
        op = self.call.op if self.call.op.isidentifier() else "agree"
        dtype = self.dtype if self.count else None
        return number_of_kind(op, dtype, self.algorithm, route)


@dataclass(slots=True)
class Task:
    """A prepared call with everything that it needs to run.

    Attributes:
        prepared: The call without its memory.
        input: [*] read-only, an array or a list; None if the program has no input buffer. Arrays
            that C++ found may have any shape.
        output: [*] written in place, likewise; None if this rank gets no output.
        deadline: Of the whole call.
        begin: Packs and scales when the task's turn has come. None if the arrays are used in
            place.
        finish: Unpacks and scales after success, before the completion. None if the result is
            in its place already.
        seq: Number of the call; given by the engine on submission.
        record: Number of its record; 0 without one.
    """

    prepared: Prepared
    input: ArrayOrList
    output: ArrayOrList
    deadline: Deadline
    begin: Callable[[], None] | None = None
    finish: Callable[[], None] | None = None
    seq: int = 0
    record: int = 0

    @property
    def call(self) -> Call:
        """The call, with its number."""
        return self.prepared.call._replace(seq=self.seq)


class Engine(ABC):
    """Runs the tasks of one communicator, one after another, in the order of submission.

    Contract: no buffer is written before all ranks have agreed on the call. If ranks disagree,
    all of them get CollectiveMismatchError and the group stays usable. Every other failure
    (time-out, lost rank, abort) breaks the group on all ranks and names the ranks to blame.
    """

    name: str
    shares_memory = False
    """Whether programs of `post` and `read` steps are faster than programs of messages."""

    local = 1
    """Ranks of a host, or of a node if there is one host; see `Topology.local`."""

    has_collectives = False
    """Whether tasks name their collective (`Prepared.what`) if any algorithm may run it."""

    most_moved = 2**63
    """Bytes that a collective may move; a program moves more."""

    over = "messages"
    """What carries the data of programs ("messages", "shared memory"), as far as it is known."""

    divides = False
    """Whether the engine divides results by `Prepared.divisor`; if not, `Task.finish` does."""

    calls: Any = None
    """Runs calls without Python code, if the engine can; see `operations.methods.in_cpp`."""

    pending_type: Any = Completion
    """Type of the completion of a call that C++ makes; made from (outputs, deadline, runs_here)."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.timeout_s = 0.0

    def set_timeout(self, timeout_s: float) -> None:
        """Set the time-out of calls that C++ makes, in seconds; a task has its own deadline."""
        self.timeout_s = timeout_s

    def lower(self, schedule: Schedule, layout: Layout, itemsize: int) -> Program:
        """Return this rank's program in the form that this engine executes fastest."""
        return lower(schedule, self.comm.rank, layout)

    @abstractmethod
    def submit(self, task: Task, completion: Completion, *, inline: bool) -> None:
        """Give the task its place in the order, run it, and finish `completion`.

        Args:
            task: The task to run.
            completion: Becomes done when the task has ended.
            inline: Run on the calling thread if no task is pending. The completion is done on
                return. Otherwise the progress thread runs the task.

        Raises:
            ClosedError: The engine is closed, or belongs to the parent of a fork.
            UsageError: A synchronous call from the progress thread, which would wait for itself.
                Or a call of a thread that is inside a call of the group (`is_in_call`).
        """

    def info(self) -> dict[str, str]:
        """Return the facts that the group's repr shows."""
        return {"engine": self.name, "over": self.over.replace(" ", "-")}

    def runs_here(self) -> bool:
        """Whether tasks cannot end before the calling thread goes on; if so, it must not wait."""
        return False

    def is_in_call(self) -> bool:
        """Whether the calling thread is inside a call of the group already.

        So it is in a signal handler or a destructor. It must neither make another call nor wait for
        the end of that call.
        """
        return False

    def prepare(self, task: Task) -> Prepared | bool | None:
        """Return what C++ needs to run the kind of call that a task is; run nothing.

        C++ packs and unpacks arrays itself, so `begin` and `finish` of the task do not matter.

        Returns:
            The task's prepared call. False if every such call needs Python. None if this call
            needs Python, for example because the group is not connected yet.
        """
        return None

    @abstractmethod
    def last_number(self) -> int:
        """Return the number of this rank's last call; the first call has number 1."""

    @abstractmethod
    def fail(self, failure: Failure) -> None:
        """Send a failure to every member, and end the calls of this group here."""

    @abstractmethod
    def abort(self, reason: str, failed: bool = False) -> None:
        """End all running and waiting tasks, here and on the other ranks.

        A call that has ended here goes on where it has not ended yet.

        Args:
            reason: The cause, as the end of a sentence.
            failed: Whether this rank raised, instead of a call of abort().
        """

    @abstractmethod
    def end_calls(self, cancel: str = "") -> None:
        """Wait until all tasks have ended, within their deadlines; accept no calls in C++.

        Args:
            cancel: End them now with errors on all ranks, for this reason: "because of ...".
        """

    @abstractmethod
    def close(self) -> None:
        """Close the communicator and the progress thread; queued tasks end with ClosedError."""
