"""What a backend is: all operations of a process group, for arrays of one device type."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, NoReturn

from unisono.base.completion import Completion
from unisono.base.deadline import Deadline
from unisono.base.types import ReduceOp
from unisono.errors import UnsupportedError, UsageError
from unisono.stores import Store

__all__ = ["CPUOptions", "CallOptions", "DeviceBackend", "GroupSpec", "Pending"]

# What a backend has besides operations.
_NO_OPERATIONS = (
    "name", "device", "agree", "refuse", "split", "abort", "close", "broken", "info", "runs_here",
    "last_number",
)  # fmt: skip


@dataclass(frozen=True)
class CPUOptions:
    """What `pg_options` may hold for the CPU backend.

    Attributes:
        transport: "inproc" or "tcp"; None leaves it to UNISONO_TRANSPORT.
        engine: "native" or "reference"; None leaves it to UNISONO_ENGINE.
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
        name: Name of the group, for people.
        key: Name of the group that no other group of the same world has.
        timeout_s: Default of every call, in seconds.
        options: What the user passed as `pg_options`, or None.
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
    """How one call is to run.

    Attributes:
        async_op: Return before the end.
        deadline: Of the whole call.
        algorithm: Name of an algorithm to use instead of the selected one.
        label: The call that this one is a part of; shown in errors instead of its own name, and
            equal on all ranks.
    """

    async_op: bool
    deadline: Deadline
    algorithm: str | None = None
    label: str | None = None
    deterministic: bool = False
    split_sizes: Sequence[int] | None = None


class Pending(Completion):
    """The end of one call, with what it knows only then.

    Attributes:
        outputs: The arrays that hold the result.
        source: Global rank a receive got its message from; None before, or for other calls.
        deadline: When whoever waits must call `expire`; None if the backend watches the time.
    """

    __slots__ = ("_runs_here", "deadline", "outputs", "source")

    def __init__(
        self,
        outputs: Sequence[Any] = (),
        deadline: Deadline | None = None,
        runs_here: Callable[[], bool] = lambda: False,
    ) -> None:
        """Make one.

        Args:
            outputs: The arrays that hold the result.
            deadline: See the class.
            runs_here: Whether the calling thread is the one that runs the call.
        """
        super().__init__()
        self.outputs = list(outputs)
        self.deadline = deadline
        self.source: int | None = None
        self._runs_here = runs_here

    def expire(self) -> None:
        """End the call with an error because its deadline has passed."""

    def wait_or_expire(self, limit: Deadline | None) -> bool:
        """Wait until done, which its own deadline makes it; False if `limit` comes first.

        Raises:
            UsageError: On the thread that runs the call, which would wait for itself for ever.
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
        """Check that the calling thread is not the one that runs the call.

        Raises:
            UsageError: It is, and would wait for itself for ever.
        """
        if self._runs_here():
            raise UsageError(
                "wait() in a callback, on the thread that runs the operations of this group, "
                "would wait for itself",
                hint="in a callback, chain with then() instead of waiting",
            )


class DeviceBackend(ABC):
    """One process group's operations on one device type.

    A backend implements the operations it has; the others raise UnsupportedError naming those
    that exist. Arguments are checked by the process group as far as ranks and list lengths go;
    dtypes, sizes and memory are the backend's business. Roots and peers are ranks in the group.
    Every operation returns a `Pending`; a failed one carries its error there.
    """

    name: str = ""
    device: str = ""

    calls: Any = None
    """What repeats calls on NumPy arrays without Python code; see `engines.repeat`."""
    port: Any = None
    """What sends and receives plain arrays without Python code; see `backends.p2p.Port`."""

    def __init__(self, spec: GroupSpec) -> None:
        self.spec = spec

    def broadcast(self, tensor: Any, root: int, options: CallOptions) -> Pending:
        """Copy root's tensor into everybody's."""
        self._lacks("broadcast")

    def all_reduce(self, tensor: Any, op: ReduceOp, options: CallOptions) -> Pending:
        """Reduce in place; every rank gets the result."""
        self._lacks("all_reduce")

    def all_reduce_coalesced(
        self, tensors: Sequence[Any], op: ReduceOp, options: CallOptions
    ) -> Pending:
        """Reduce several tensors of one dtype as one message."""
        self._lacks("all_reduce_coalesced")

    def reduce(self, tensor: Any, root: int, op: ReduceOp, options: CallOptions) -> Pending:
        """Reduce in place; root gets the result."""
        self._lacks("reduce")

    def all_gather(self, outputs: Sequence[Any], tensor: Any, options: CallOptions) -> Pending:
        """Copy every rank's tensor into everybody's list."""
        self._lacks("all_gather")

    def all_gather_into_tensor(self, output: Any, tensor: Any, options: CallOptions) -> Pending:
        """Concatenate every rank's tensor in everybody's output."""
        self._lacks("all_gather_into_tensor")

    def all_gather_coalesced(
        self, outputs: Sequence[Sequence[Any]], tensors: Sequence[Any], options: CallOptions
    ) -> Pending:
        """Gather several tensors of one dtype as one message: `outputs[rank][i]`."""
        self._lacks("all_gather_coalesced")

    def all_gather_into_tensor_coalesced(
        self, outputs: Sequence[Any], tensors: Sequence[Any], options: CallOptions
    ) -> Pending:
        """all_gather_into_tensor of several tensors of one dtype as one message."""
        self._lacks("all_gather_into_tensor_coalesced")

    def gather(
        self, tensor: Any, outputs: Sequence[Any] | None, root: int, options: CallOptions
    ) -> Pending:
        """Copy every rank's tensor into root's list."""
        self._lacks("gather")

    def scatter(
        self, output: Any, inputs: Sequence[Any] | None, root: int, options: CallOptions
    ) -> Pending:
        """Copy the i-th tensor of root's list to rank i."""
        self._lacks("scatter")

    def reduce_scatter(
        self, output: Any, inputs: Sequence[Any], op: ReduceOp, options: CallOptions
    ) -> Pending:
        """Reduce the i-th tensors of all lists to rank i."""
        self._lacks("reduce_scatter")

    def reduce_scatter_tensor(
        self, output: Any, tensor: Any, op: ReduceOp, options: CallOptions
    ) -> Pending:
        """Reduce the i-th parts of all tensors to rank i."""
        self._lacks("reduce_scatter_tensor")

    def reduce_scatter_tensor_coalesced(
        self, outputs: Sequence[Any], tensors: Sequence[Any], op: ReduceOp, options: CallOptions
    ) -> Pending:
        """reduce_scatter_tensor of several tensors of one dtype as one message."""
        self._lacks("reduce_scatter_tensor_coalesced")

    def all_to_all(
        self, outputs: Sequence[Any], inputs: Sequence[Any], options: CallOptions
    ) -> Pending:
        """Copy inputs[i] to rank i, whose outputs[this rank] receives it."""
        self._lacks("all_to_all")

    def all_to_all_single(
        self,
        output: Any,
        tensor: Any,
        output_splits: Sequence[int] | None,
        input_splits: Sequence[int] | None,
        options: CallOptions,
    ) -> Pending:
        """Copy the i-th part of every tensor to rank i; parts are rows of dimension 0."""
        self._lacks("all_to_all_single")

    def scan(self, tensor: Any, op: ReduceOp, options: CallOptions) -> Pending:
        """Reduce over the ranks up to this one, in place."""
        self._lacks("scan")

    def exscan(self, tensor: Any, op: ReduceOp, options: CallOptions) -> Pending:
        """Reduce over the ranks before this one, in place; rank 0 keeps its own."""
        self._lacks("exscan")

    def barrier(self, options: CallOptions) -> Pending:
        """End on no rank before every rank has begun."""
        self._lacks("barrier")

    def agree(self, text: str, options: CallOptions) -> Pending:
        """End with CollectiveMismatchError on all ranks unless all say the same.

        A backend that cannot tell, as here, takes it for granted.
        """
        pending = Pending()
        pending.finish(None)
        return pending

    def send(self, tensor: Any, peer: int, tag: int, options: CallOptions) -> Pending:
        """Send to a rank; done when the tensor may be changed."""
        self._lacks("send")

    def recv(self, tensor: Any, peer: int, tag: int, options: CallOptions) -> Pending:
        """Receive from a rank."""
        self._lacks("recv")

    def recv_any_source(self, tensor: Any, tag: int, options: CallOptions) -> Pending:
        """Receive from whichever rank sends; `Pending.source` tells which."""
        self._lacks("recv_any_source")

    def refuse(  # noqa: B027  a backend may lack it
        self, op: str, why: str, deadline: Deadline, *, wait: bool
    ) -> None:
        """Take part in a collective that this rank's arguments do not allow, to say so.

        A backend that can tell ends the other ranks' calls with an error; one that cannot, as
        here, leaves them to their time-out.

        Args:
            op: What was called here.
            why: The error's first line.
            deadline: Of the call.
            wait: Give the other ranks a moment to hear of it: the caller may end with the error.
        """

    @abstractmethod
    def split(self, spec: GroupSpec) -> DeviceBackend:
        """Return the backend of a sub-group that this rank belongs to."""

    @abstractmethod
    def abort(self, reason: str, failed: bool = False) -> None:
        """End all calls with an error, on all ranks; `failed` says this rank is going down."""

    @abstractmethod
    def close(self) -> None:
        """Release threads and links."""

    def set_timeout(self, timeout_s: float) -> None:
        """Take a new default time-out, in seconds; calls bring their own deadline with them."""
        self.spec = replace(self.spec, timeout_s=timeout_s)

    def broken(self) -> str | None:
        """Return why the group accepts no more calls, or None if it does."""
        return None

    def runs_here(self) -> bool:
        """Whether the calling thread is the one that runs queued calls; it must not wait."""
        return False

    def last_number(self) -> int:
        """Return how many collective calls were made; 0 if the backend does not count them."""
        return 0

    def info(self) -> dict[str, str]:
        """Return what to show in the group's repr: engine, transport, ..."""
        return {}

    def _lacks(self, op: str) -> NoReturn:
        has = [
            name
            for name, method in vars(DeviceBackend).items()
            if not name.startswith("_")
            and name not in _NO_OPERATIONS
            and getattr(type(self), name, method) is not method
        ]
        raise UnsupportedError(
            f"backend {self.name!r} ({self.device}) has no {op} "
            f"(it has: {', '.join(has) or 'no operation'})"
        )
