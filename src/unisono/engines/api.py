"""The contract of every engine: a task goes in, a completion comes out."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np

from unisono.base.completion import Completion
from unisono.base.deadline import Deadline
from unisono.base.types import DType, ReduceOp
from unisono.engines.array_lists import Memory
from unisono.errors import ClosedError, Context
from unisono.schedules import Layout, Program, Schedule, lower
from unisono.transports import Transport

__all__ = [
    "Call",
    "Communicator",
    "Engine",
    "Exchange",
    "Task",
    "fingerprint_of",
    "name_ranks",
]

Array = np.ndarray[Any, Any]


class Communicator:
    """The connected state behind one process group on one backend.

    Args:
        transport: Shared with the other groups of the same world.
        ranks: Ranks of the transport (global ranks), in group order.
        name: Name of the group, for errors.
        key: Tells this group from others of the same name and members.
    """

    def __init__(
        self, transport: Transport, ranks: tuple[int, ...], name: str, key: str = ""
    ) -> None:
        self.transport = transport
        self.ranks = ranks
        self.rank = ranks.index(transport.rank)
        self.size = len(ranks)
        self.name = name
        self._pid = os.getpid()
        self._closed = False
        # Members are part of the number, so that ranks that disagree about who belongs to a
        # group of this name never mix their messages; the wait for the absent ones names them.
        digest = blake2b(repr((name, key, ranks)).encode(), digest_size=7).digest()
        self.context = int.from_bytes(digest, "little")

    @property
    def others(self) -> tuple[int, ...]:
        """Global ranks of the other members."""
        return tuple(rank for rank in self.ranks if rank != self.transport.rank)

    @property
    def here(self) -> str:
        """This rank as errors name it, by its number in the world: "rank 3 of 8"."""
        return f"rank {self.transport.rank} of {self.transport.world_size}"

    def where(self, **fields: Any) -> Context:
        """Return the context of an error in this group; its ranks are global ranks."""
        transport = self.transport
        return Context(
            rank=transport.rank, world_size=transport.world_size, group=self.name, **fields
        )

    def closed(self) -> str | None:
        """Return why no call can be made any more, or None."""
        if self._pid != os.getpid():
            return "belongs to the parent of this fork"
        return "was destroyed" if self._closed else None

    def close(self) -> None:
        """Release what the transport holds for this group, and the transport.

        A second time, or in the child of a fork, it does nothing: the transport may have other
        users, and a lock that another thread held at the fork stays locked.
        """
        if self.closed() is None:
            self._closed = True
            told = f"group '{self.name}' was destroyed before this call ended"
            self.transport.forget(self.context, ClosedError(told))
            self.transport.close()


class Call(NamedTuple):
    """One collective call, as all ranks must agree on it.

    Attributes:
        op: Name of the function the user called, for errors.
        text: The call with its arguments, for errors: "all_reduce(float32[4], SUM)".
        fingerprint: 64 bits over everything that must be equal on all ranks; never 0, which means
            "ranks disagree" on the wire.
        nbytes: Size of this rank's buffer, for errors.
        seq: Position in the group's order, from 1; given by the engine on submission.
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
        even: A nonzero word if this rank's numbers are the plain default. If all ranks say the
            same word, nothing is exchanged and the task's own program runs.
        mine: [k] int64 of this rank.
        check: Gets the call and [world_size, k] of all ranks; raises the same error on every
            rank.
        program: Runs instead of the task's program once the numbers were exchanged.
        counts: From those numbers to [p, p] elements that each rank sends to each, if the call is
            an all_to_all, a gather or a scatter.
    """

    even: int
    mine: Array
    check: Callable[[Call, Array], None]
    program: Program
    counts: Callable[[Array], Array] | None = None


@dataclass(slots=True)
class Task:
    """A program with everything it needs to run.

    Attributes:
        call: What the ranks agree on before any buffer is written.
        program: This rank's steps.
        input: [*] read-only, an array or a list; None if the program has no input buffer.
        output: [*] written in place, likewise; None if this rank gets no output.
        dtype: Of the elements in both.
        op: Reduce op of recv_reduce and reduce steps.
        deadline: Of the whole call.
        exchange: Numbers to compare after the agreement.
        begin: Runs when the turn has come: packs, scales. None if the arrays are used in place.
        finish: Runs after success, before the completion: unpacks, scales. None if the result
            is where it belongs.
    """

    call: Call
    program: Program
    input: Memory
    output: Memory
    dtype: DType
    op: ReduceOp
    deadline: Deadline
    exchange: Exchange | None = None
    begin: Callable[[], None] | None = None
    finish: Callable[[], None] | None = None


class Engine(ABC):
    """Runs the tasks of one communicator, one after another, in the order of submission.

    Contract: no buffer is written before all ranks have agreed on the call. Ranks that disagree
    all get CollectiveMismatchError and the group stays usable. Every other failure (time-out,
    lost rank, abort) breaks the group on all ranks and names who is to blame.
    """

    name: str
    shares_memory = False
    """Whether programs of `post` and `read` steps are the fast ones."""

    ranks_per_host = 1
    """If the ranks are numbered host by host, with as many on each; else 1."""

    over = "messages"
    """What programs run over, as far as it is known."""

    calls: Any = None
    """What repeats calls without Python code, if the engine can; see `engines.repeat`."""

    pending_type: Any = Completion
    """Makes the completion of a call that is repeated: (outputs, deadline, runs_here)."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.timeout_s = 0.0

    def set_timeout(self, timeout_s: float) -> None:
        """Say what time-out a call has that is repeated, in seconds; tasks bring their own."""
        self.timeout_s = timeout_s

    def lower(self, schedule: Schedule, layout: Layout, itemsize: int) -> Program:
        """Return this rank's program in the form that this engine executes best."""
        return lower(schedule, self.comm.rank, layout)

    @abstractmethod
    def submit(self, task: Task, completion: Completion, *, inline: bool) -> None:
        """Give the task its place in the order, run it, and finish `completion`.

        Args:
            task: What to run.
            completion: What the caller waits for.
            inline: Run on the calling thread if nothing is pending; the completion is done on
                return. Otherwise the progress thread runs it.

        Raises:
            ClosedError: The engine is closed, or belongs to the parent of a fork.
            UsageError: A synchronous call from the progress thread, which would wait for itself.
        """

    def runs_here(self) -> bool:
        """Whether the calling thread is the one that runs queued tasks; it must not wait."""
        return False

    @abstractmethod
    def last_number(self) -> int:
        """Return the number of the last call, which counts those of this rank from 1."""

    @abstractmethod
    def abort(self, reason: str) -> None:
        """End everything that runs or waits, here and on the other ranks."""

    @abstractmethod
    def close(self) -> None:
        """Close the communicator and the progress thread; what is queued gets ClosedError."""


def name_ranks(ranks: tuple[int, ...] | list[int]) -> str:
    """Return "rank 3", "ranks 3 and 4" or "ranks 3, 4 and 9"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 12:
        return f"{len(ranks)} ranks ({', '.join(map(str, ranks[:8]))}, ...)"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
