"""The interface of a backend: the operations of a process group for arrays of one device type."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from unisono.base.completion import Completion
from unisono.base.deadline import Deadline
from unisono.errors import UsageError
from unisono.stores import Store
from unisono.trace import GroupTrace


@dataclass(frozen=True)
class CPUOptions:
    """Values of `pg_options` for the CPU backend.

    Attributes:
        transport: "inproc" or "tcp"; None: the value of UNISONO_TRANSPORT.
        engine: "native", "reference" or "mpi"; None: the value of UNISONO_ENGINE.
    """

    transport: str | None = None
    engine: str | None = None


@dataclass(frozen=True)
class GroupSpec:
    """The process group that a backend is made for.

    Attributes:
        store: Shared by exactly the members, for this backend alone.
        rank: This rank in the group.
        size: Number of members.
        ranks: Global ranks of the members, in group order.
        name: Name of the group in errors.
        key: Name of the group that no other group of the same world has.
        timeout_s: Default of every call, in seconds.
        options: The `pg_options` of the user, or None.
    """

    store: Store
    rank: int
    size: int
    ranks: tuple[int, ...]
    name: str
    key: str
    timeout_s: float
    options: Any = None


class CallOptions(NamedTuple):
    """Settings of one call.

    Attributes:
        async_op: Return before the end.
        deadline: Of the whole call.
        algorithm: Name of an algorithm to use instead of the selected one.
        label: Name of a larger call that this call is a part of. Errors show it instead of the
            operation's name, and it must be equal on all ranks.
        deterministic: Reduce in the order of ranks.
        split_sizes: Rows of dimension 0 of each rank if the parts differ; equal parts if None.
        partial: A receive takes shorter messages, too.
        prepare: Set `Pending.prepared`.
    """

    async_op: bool
    deadline: Deadline
    algorithm: str | None = None
    label: str | None = None
    deterministic: bool = False
    split_sizes: Sequence[int] | None = None
    partial: bool = False
    prepare: bool = False


class Pending(Completion):
    """The end of one call, and its result.

    Attributes:
        outputs: The arrays that hold the result.
        source: Global rank that sent the message of a receive or probe; None before its end, and
            for other calls.
        tag: Tag of that message; None as for `source`.
        count: Elements that a receive got; None as for `source`.
        deadline: When a waiting thread must call `expire`; None if the backend watches the time.
        prepared: Result of `Engine.prepare`, if the options ask for it.
    """

    __slots__ = ("_runs_here", "count", "deadline", "outputs", "prepared", "source", "tag")

    def __init__(
        self,
        outputs: Sequence[Any] = (),
        deadline: Deadline | None = None,
        runs_here: Callable[[], bool] = lambda: False,
        *,
        done: bool = False,
    ) -> None:
        """Make the end of a call.

        Args:
            outputs: The arrays that hold the result.
            deadline: See the class.
            runs_here: Returns whether the calling thread runs the call.
            done: Whether the call has ended.
        """
        super().__init__(done=done)
        self.outputs = list(outputs)
        self.deadline = deadline
        self.source: int | None = None
        self.tag: int | None = None
        self.count: int | None = None
        self.prepared: Any = None
        self._runs_here = runs_here

    def expire(self) -> None:
        """End the call with an error because its deadline has passed."""

    def enqueue_wait(self) -> bool:
        """Make the current stream of the device wait for the end, not the host.

        Returns:
            False if there is no such stream: the caller must wait.
        """
        return False

    def wait_or_expire(self, limit: Deadline | None) -> bool:
        """Wait until done, at most until its own deadline; return False if `limit` comes first.

        Raises:
            UsageError: The calling thread runs the call, and would wait for itself for ever.
        """
        if self._done:
            return True
        self.require_other_thread()
        own = self.deadline
        if own is not None and (limit is None or own.remaining() <= limit.remaining()):
            if not self.wait_until(own):
                self.expire()
            return True
        return self.wait_until(limit)

    def require_other_thread(self) -> None:
        """Check that the calling thread does not run the call.

        Raises:
            UsageError: It runs the call, and would wait for itself for ever.
        """
        if self._runs_here():
            raise UsageError(
                "wait() in a callback, on the thread that runs the operations of this group, "
                "would wait for itself",
                hint="in a callback, chain with then() instead of waiting; in a signal handler, "
                "set a flag",
            )


class DeviceBackend(ABC):
    """The operations of one process group on one device type.

    An operation is a method of the name that it has in `unisono.lowlevel.OPS`. Its arguments are
    those of the method of `ProcessGroup`, by position, followed by the `CallOptions`:

        def all_reduce(self, tensor, op, options): ...

    A backend has the methods of the operations that it supports. A call of another operation
    raises UnsupportedError, which lists them.

    The process group has checked ranks, tags, reduce ops and the lengths of lists. The backend
    checks dtypes, sizes and memory. Roots and peers are ranks in the group. Each operation returns
    a `Pending`, which also carries the error of a failed operation.
    """

    name: str = ""
    device: str = ""

    world_number = 1
    """Number of this world among the worlds over the same store, if it is known."""
    calls: Any = None
    """Object that runs calls on NumPy arrays in C++, or None; see `engines.functions`."""
    trace: GroupTrace | None = None
    """The records of the group's calls, or None if the backend keeps none."""
    port: Any = None
    """Object that sends and receives plain arrays in C++, or None; see `backends.p2p.Port`."""
    control: DeviceBackend | None = None
    """The backend for CPU arrays that this backend uses for checks. It serves the group's CPU
    arrays, objects and barriers, too, unless the caller named another backend for them."""

    def __init__(self, spec: GroupSpec) -> None:
        self.spec = spec

    def bind(self, device: Any) -> None:  # noqa: B027  a backend may lack it
        """Connect the ranks for arrays of one device now, instead of at the first call."""

    def together(self) -> AbstractContextManager[object]:
        """Return a block whose sends and receives begin at its end, in any order."""
        return nullcontext()

    def agree(self, text: str, options: CallOptions) -> Pending:
        """End with CollectiveMismatchError on all ranks unless all pass the same text.

        A backend that cannot compare, such as this base class, assumes that the texts are equal.
        """
        pending = Pending()
        pending.finish(None)
        return pending

    def refuse(  # noqa: B027  a backend may lack it
        self, op: str, why: str, deadline: Deadline, *, wait: bool
    ) -> None:
        """Take part in a collective only to report that this rank's arguments are wrong.

        A backend that can report ends the other ranks' calls with an error. With this base class
        they end at their time-out.

        Args:
            op: Name of the function called on this rank.
            why: The error's first line.
            deadline: Of the call.
            wait: Wait a moment until the other ranks have the report: the process may end with
                the error.
        """

    @abstractmethod
    def split(self, spec: GroupSpec) -> DeviceBackend:
        """Return the backend of a sub-group that this rank belongs to."""

    @abstractmethod
    def abort(self, reason: str, failed: bool = False) -> None:
        """End all calls with an error, on all ranks; `failed`: this rank ends with an error."""

    def adopt_failure(self, other: Any) -> None:
        """Break this group if the group of `other`, a backend of this class, is broken."""
        return None

    def end_calls(self, cancel: str = "") -> None:  # noqa: B027  a backend may lack it
        """Wait until the calls that were made have ended; the group makes no further call.

        Args:
            cancel: End them now with an error on all ranks, for this reason: "because of ...".
        """

    @abstractmethod
    def close(self) -> None:
        """Release threads and links."""

    def set_timeout(self, timeout_s: float) -> None:
        """Set the default time-out, in seconds; each call has its own deadline besides."""
        self.spec = replace(self.spec, timeout_s=timeout_s)

    def lost(self, rank: int) -> str | None:
        """Return why a rank of the group cannot be reached, or None if no reason is known."""
        return None

    def has_ended(self, rank: int) -> bool:
        """Return whether a rank has certainly ended; a broken link alone does not show that."""
        return False

    def broken(self) -> str | None:
        """Return why the group accepts no more calls, or None if it does."""
        return None

    def blamed(self) -> tuple[int, ...]:
        """Return the ranks of the group that a time-out blames for the end of the group."""
        return ()

    def runs_here(self) -> bool:
        """Whether the calling thread runs queued calls, so that it must not wait for them."""
        return False

    def last_number(self) -> int:
        """Return the number of collective calls; 0 if the backend does not count them."""
        return 0

    def info(self) -> dict[str, str]:
        """Return the facts that the group's repr shows: engine, transport, ..."""
        return {}
