"""The interface of a backend: the operations of a process group for arrays of one device type."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from unisono.core.base.deadline import Deadline
from unisono.core.base.threads.completion import Pending as Pending
from unisono.core.recorder import GroupTrace
from unisono.core.stores import Store


@dataclass(frozen=True)
class CPUOptions:
    """Values of `pg_options` for the CPU backend.

    Attributes:
        transport: "inproc", "tcp", or a registered name; None: the value of UNISONO_TRANSPORT.
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
        partial: A receive takes shorter messages, too; "raw": also of another dtype.
        prepare: Set `Pending.prepared`.
    """

    async_op: bool
    deadline: Deadline
    algorithm: str | None = None
    label: str | None = None
    deterministic: bool = False
    split_sizes: Sequence[int] | None = None
    partial: bool | str = False
    prepare: bool = False


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
    """Object that runs calls on NumPy arrays in C++, or None; see `operations.methods.in_cpp`."""
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

    def on_broken(self, callback: Callable[[], object]) -> None:  # noqa: B027  a backend may lack it
        """Call `callback()` when the group breaks, before its calls end; at once if it has."""

    def runs_here(self) -> bool:
        """Whether the calling thread runs queued calls, so that it must not wait for them."""
        return False

    def last_number(self) -> int:
        """Return the number of collective calls; 0 if the backend does not count them."""
        return 0

    def info(self) -> dict[str, str]:
        """Return the facts that the group's repr shows: engine, transport, ..."""
        return {}
