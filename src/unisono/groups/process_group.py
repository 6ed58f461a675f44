"""ProcessGroup: an ordered set of ranks, with every operation as a method."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from threading import get_ident
from typing import Any, Unpack

import numpy as np

from unisono.backends import (
    BackendConfig,
    CallOptions,
    DeviceBackend,
    GroupSpec,
    Pending,
    make_backend,
)
from unisono.backends.neighbors import Links
from unisono.base import config
from unisono.base.buffers import device_of
from unisono.base.deadline import Deadline, Timeout, to_seconds
from unisono.base.integers import as_flag, as_integer, as_splits
from unisono.base.streams import explicit_stream
from unisono.base.types import Array, Arrays, ReduceOp
from unisono.engines.errors import closed_text
from unisono.errors import (
    ArgumentTypeError,
    ClosedError,
    InvalidArgumentError,
    UnsupportedError,
    UsageError,
)
from unisono.groups.c10d_methods import C10dNames, add_c10d_methods
from unisono.groups.dispatch import dispatcher
from unisono.groups.ending import (
    AT_EXIT,
    IN_CALL,
    Ending,
    close_backends,
    reason_of_error,
    waits_here,
)
from unisono.groups.keywords import How, check_keywords
from unisono.groups.operations import CHECKS, PEER_AT
from unisono.groups.participation import Participation, Place
from unisono.groups.stream_queue import StreamQueue
from unisono.groups.work import Work
from unisono.stores import PrefixStore, Store
from unisono.transports.messages import ANY_TAG, PROC_NULL, MessageInfo


class ProcessGroup(C10dNames):
    """Ranks that communicate; has every operation as a method.

    Each method returns a `Work`, which is done unless `async_op` is set. A synchronous call raises
    its error at once. Roots and peers are ranks *in this group*. All methods share these
    arguments:

        async_op: Return at once; the arrays must stay untouched until the work is done.
        timeout: Seconds or timedelta; the group's timeout if None.
        algorithm: Name of an algorithm to use instead of the selected one.
        deterministic: Reduce in the order of ranks, so that the bits of the result do not depend
            on the algorithm; see docs/reference/reductions.md.

    All members must make the same calls in the same order. Threads: a collective call that
    overlaps a collective call of another thread raises UsageError; use one group per thread. Send
    and recv are matched by peer and tag, and may be called from any thread at any time.

    Args:
        store: Shared by exactly the members; wrap it in a PrefixStore if it has other users.
        rank: This process's rank in the group.
        size: Number of ranks.
        backend: "unisono", or one per device: "cpu:unisono,cuda:nccl". As in c10d, a timedelta
            here is the time-out.
        timeout: Default of every call: UNISONO_TIMEOUT if it is set, else 1,800 s.
        name: Name of the group in errors.
        options: Passed on to the backends.

    Raises:
        InvalidArgumentError: `rank` outside 0..size-1, or an unknown backend.
        RendezvousError: Some ranks did not come in time; names them.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        backend: str | timedelta | None = None,
        timeout: Timeout | None = None,
        name: str = "default",
        *,
        options: Any = None,
    ) -> None:
        if isinstance(backend, timedelta):
            if timeout is not None:
                raise InvalidArgumentError(f"ProcessGroup got two time-outs: {backend}, {timeout}")
            backend, timeout = None, backend
        rank, size = as_integer(rank, "rank"), as_integer(size, "size")
        if size < 1 or not 0 <= rank < size:
            raise InvalidArgumentError(f"rank {rank} of {size}: expected 0 <= rank < size")
        ranks, timeout_s = tuple(range(size)), group_timeout_s(timeout)
        self._open(GroupSpec(store, rank, size, ranks, name, "0", timeout_s, options), backend)

    @classmethod
    def from_spec(
        cls, spec: GroupSpec, backend: str | None = None, parent: ProcessGroup | None = None
    ) -> ProcessGroup:
        """Make a group whose global ranks and key are given, such as a sub-group.

        Args:
            spec: The group.
            backend: As for the constructor.
            parent: Group that has all ranks of the new group. Backends of the same name share its
                links; nothing is sent then.
        """
        group = cls.__new__(cls)
        group._open(spec, backend, parent)
        return group

    def _open(
        self, spec: GroupSpec, backend: str | None, parent: ProcessGroup | None = None
    ) -> None:
        """Set the attributes and make the backends; close them again if one fails."""
        self._spec = spec
        self.name, self.ranks = spec.name, spec.ranks
        self._timeout_s = spec.timeout_s
        self.config = BackendConfig(backend)
        # Empty when the group is closed.
        self.backends: dict[str, DeviceBackend] = {}
        # Number of calls by kind, for keys and tags; the same on all members.
        self.counts: Counter[str] = Counter()
        # Made by the first call in a stream.
        self.stream_queue: StreamQueue | None = None
        # Read by the C++ engine, see engines/functions.py.
        self.calls: Any = None
        self._part = Participation()
        # Takes plain messages of CPU arrays; see `backends.p2p.Port`.
        self.port: Any = None
        try:
            for device, name in self.config.device_backend_map.items():
                self.backends[device] = self._make_backend(name, device, parent)
            for control in [each.control for each in self.backends.values() if each.control]:
                self.backends.setdefault("cpu", control)
            number = max(backend.world_number for backend in self.backends.values())
            if number > 1:
                # The members must not find keys of the world before, such as its counters.
                store = PrefixStore(f"world/{number}", spec.store)
                self._spec = replace(spec, store=store)
            if "cpu" in self.backends:
                self.calls = self.backends["cpu"].calls
                # C++ sets the mark in `calls` when it runs a call, so it must be the same mark.
                self._part.guard = self.calls or self._part.guard
                self.port = self.backends["cpu"].port
            self._ending = Ending(self, self.backends.values())
        except BaseException:
            close_backends(self.backends.values(), "because it was not made")
            raise

    def _make_backend(self, name: str, device: str, parent: ProcessGroup | None) -> DeviceBackend:
        spec = replace(self._spec, store=PrefixStore(device, self._spec.store))
        if parent is not None and parent.config.device_backend_map.get(device) == name:
            return parent.backends[device].split(spec)
        return make_backend(name, device, spec)

    # ---- identity -------------------------------------------------------------------------

    @property
    def store(self) -> Store:
        """The store that the members share."""
        return self._spec.store

    @property
    def key(self) -> str:
        """Name that no other group of the same world has."""
        return self._spec.key

    def rank(self) -> int:
        """Return this process's rank in the group."""
        return self._spec.rank

    def size(self) -> int:
        """Return the number of ranks."""
        return len(self.ranks)

    @property
    def timeout_s(self) -> float:
        """Default time-out of a call, in seconds."""
        return self._timeout_s

    def set_timeout(self, timeout: Timeout) -> None:
        """Change the default time-out of later calls."""
        self._timeout_s = to_seconds(timeout)
        for backend in self.backends.values():
            backend.set_timeout(self._timeout_s)

    def group_rank(self, global_rank: int) -> int:
        """Return the rank in this group of a global rank.

        Raises:
            ArgumentTypeError: Not an integer.
            InvalidArgumentError: Not a member; lists the members.
        """
        try:
            number = operator.index(global_rank)
        except TypeError:
            raise ArgumentTypeError(
                f"a global rank must be an integer, got {global_rank!r}"
            ) from None
        try:
            return self.ranks.index(number)
        except ValueError:
            raise InvalidArgumentError(
                f"global rank {number} is not in group '{self.name}' (ranks {list(self.ranks)})"
            ) from None

    # ---- collectives ----------------------------------------------------------------------

    def broadcast(self, tensor: Array, root: int = 0, **how: Unpack[How]) -> Work:
        """Copy root's tensor into the tensors of all ranks."""
        return self._call_collective("broadcast", (tensor, root), how)

    def all_reduce(self, tensor: Array, op: ReduceOp = ReduceOp.SUM, **how: Unpack[How]) -> Work:
        """Replace each rank's tensor by the reduction over all ranks."""
        return self._call_collective("all_reduce", (tensor, op), how)

    def all_reduce_coalesced(
        self, tensors: Arrays, op: ReduceOp = ReduceOp.SUM, **how: Unpack[How]
    ) -> Work:
        """all_reduce of several tensors of one dtype, as one message."""
        return self._call_collective("all_reduce_coalesced", (tensors, op), how)

    def reduce(
        self, tensor: Array, root: int = 0, op: ReduceOp = ReduceOp.SUM, **how: Unpack[How]
    ) -> Work:
        """Replace root's tensor by the reduction over all ranks; other ranks keep theirs."""
        return self._call_collective("reduce", (tensor, root, op), how)

    def all_gather(self, outputs: Arrays, tensor: Array, **how: Unpack[How]) -> Work:
        """Copy rank i's tensor into outputs[i] on all ranks."""
        return self._call_collective("all_gather", (outputs, tensor), how)

    def all_gather_into_tensor(
        self,
        output: Array,
        tensor: Array,
        *,
        output_split_sizes: Sequence[int] | None = None,
        **how: Unpack[How],
    ) -> Work:
        """Concatenate the tensors of all ranks in the output of each rank.

        `output_split_sizes`: rows of dimension 0 from each rank; equal parts if None.
        """
        arguments = (output, tensor)
        return self._call_collective("all_gather_into_tensor", arguments, how, output_split_sizes)

    def all_gather_coalesced(
        self, outputs: Sequence[Arrays], tensors: Arrays, **how: Unpack[How]
    ) -> Work:
        """all_gather of several tensors of one dtype, as one message: `outputs[rank][i]`."""
        return self._call_collective("all_gather_coalesced", (outputs, tensors), how)

    def all_gather_into_tensor_coalesced(
        self, outputs: Arrays, tensors: Arrays, **how: Unpack[How]
    ) -> Work:
        """all_gather_into_tensor of several tensors of one dtype, as one message.

        Examples: On rank 1 of 2
            >>> x, y = np.zeros(2), np.zeros(4)
            >>> inputs = [np.full(1, rank + 5.0), np.full(2, rank + 7.0)]
            >>> work = dist.group.WORLD.all_gather_into_tensor_coalesced([x, y], inputs)
            >>> x, y
            (array([5., 6.]), array([7., 7., 8., 8.]))
        """
        return self._call_collective("all_gather_into_tensor_coalesced", (outputs, tensors), how)

    def gather(
        self, tensor: Array, outputs: Arrays | None = None, root: int = 0, **how: Unpack[How]
    ) -> Work:
        """Copy rank i's tensor into outputs[i] on root; `outputs` is None on other ranks."""
        return self._call_collective("gather", (tensor, outputs, root), how)

    def scatter(
        self, output: Array, inputs: Arrays | None = None, root: int = 0, **how: Unpack[How]
    ) -> Work:
        """Copy root's inputs[i] into the output of rank i; `inputs` is None on other ranks."""
        return self._call_collective("scatter", (output, inputs, root), how)

    def reduce_scatter(
        self, output: Array, inputs: Arrays, op: ReduceOp = ReduceOp.SUM, **how: Unpack[How]
    ) -> Work:
        """Fill rank i's output with the reduction of inputs[i] over all ranks."""
        return self._call_collective("reduce_scatter", (output, inputs, op), how)

    def reduce_scatter_tensor(
        self,
        output: Array,
        tensor: Array,
        op: ReduceOp = ReduceOp.SUM,
        *,
        input_split_sizes: Sequence[int] | None = None,
        **how: Unpack[How],
    ) -> Work:
        """Fill rank i's output with the reduction of the i-th part of `tensor` over all ranks.

        `input_split_sizes`: rows of dimension 0 for each rank; equal parts if None.
        """
        arguments = (output, tensor, op)
        return self._call_collective("reduce_scatter_tensor", arguments, how, input_split_sizes)

    def reduce_scatter_tensor_coalesced(
        self,
        outputs: Arrays,
        tensors: Arrays,
        op: ReduceOp = ReduceOp.SUM,
        **how: Unpack[How],
    ) -> Work:
        """reduce_scatter_tensor of several tensors of one dtype, as one message.

        Examples: On rank 1 of 2
            >>> x, y = np.zeros(1), np.zeros(2)
            >>> inputs = [np.arange(2.0), np.arange(4.0)]
            >>> work = dist.group.WORLD.reduce_scatter_tensor_coalesced([x, y], inputs)
            >>> x, y
            (array([2.]), array([4., 6.]))
        """
        return self._call_collective("reduce_scatter_tensor_coalesced", (outputs, tensors, op), how)

    def all_to_all(self, outputs: Arrays, inputs: Arrays, **how: Unpack[How]) -> Work:
        """Copy inputs[j] of rank i into outputs[i] of rank j, for all i and j."""
        return self._call_collective("all_to_all", (outputs, inputs), how)

    def all_to_all_single(
        self,
        output: Array,
        tensor: Array,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        **how: Unpack[How],
    ) -> Work:
        """all_to_all of parts of one tensor; split sizes are rows of dimension 0."""
        arguments = (output, tensor, output_split_sizes, input_split_sizes)
        return self._call_collective("all_to_all_single", arguments, how)

    def neighbor_all_to_all(
        self, outputs: Arrays, inputs: Arrays, links: Links, **how: Unpack[How]
    ) -> Work:
        """Exchange arrays with neighbours; see `unisono.neighbor_all_to_all`."""
        return self._call_collective("neighbor_all_to_all", (outputs, inputs, links), how)

    def scan(self, tensor: Array, op: ReduceOp = ReduceOp.SUM, **how: Unpack[How]) -> Work:
        """Replace rank r's tensor by the reduction over ranks 0..r."""
        return self._call_collective("scan", (tensor, op), how)

    def exscan(self, tensor: Array, op: ReduceOp = ReduceOp.SUM, **how: Unpack[How]) -> Work:
        """Replace rank r's tensor by the reduction over ranks 0..r-1; rank 0 keeps its own."""
        return self._call_collective("exscan", (tensor, op), how)

    def barrier(self, **how: Unpack[How]) -> Work:
        """End on no rank before every rank has begun."""
        return self._call_collective("barrier", (), how)

    def agree(self, text: str, **how: Unpack[How]) -> None:
        """Raise CollectiveMismatchError on all ranks unless all pass the same text; move no data.

        On a broken group the call does nothing, so that the working ranks can make new groups.

        Examples: On rank 1 of 2
            >>> dist.group.WORLD.agree(f"version {rank}")
            Traceback (most recent call last):
            unisono.errors.CollectiveMismatchError: ...
        """
        if self.size() > 1 and next(iter(self.backends.values())).broken() is None:
            self._call_collective("agree", (text,), how)

    # ---- point to point -------------------------------------------------------------------

    def send(self, tensor: Array, peer: int, tag: int = 0, **how: Unpack[How]) -> Work:
        """Send to a rank; done when the tensor may be changed. `PROC_NULL`: send nothing."""
        return self._call_kernel("send", (tensor, peer, tag), how)

    def recv(
        self, tensor: Array, peer: int | None = None, tag: int = 0, **how: Unpack[How]
    ) -> Work:
        """Receive from a rank, from any rank (None), or nothing (`PROC_NULL`)."""
        if peer is None:
            return self.recv_any_source(tensor, tag, **how)
        return self._call_kernel("recv", (tensor, peer, tag), how)

    def recv_any_source(self, tensor: Array, tag: int = 0, **how: Unpack[How]) -> Work:
        """Receive from any rank; the work's `source_rank` is the sender.

        Examples: On rank 0 of 2
            >>> pg, x = dist.group.WORLD, np.array([rank])
            >>> work = pg.send(x, 0) if rank == 1 else pg.recv_any_source(x)
            >>> x, work.source_rank()
            (array([1]), 1)
        """
        return self._call_kernel("recv_any_source", (tensor, tag), how)

    def recv_array(self, peer: int | None = None, tag: int = 0, **how: Unpack[How]) -> Work:
        """Receive a message of any size and dtype; the work's `result()` is [its elements]."""
        return self._call_kernel("recv_array", (peer, tag), how)

    def probe(self, peer: int | None = None, tag: int = ANY_TAG, **how: Unpack[How]) -> Work:
        """Wait for a message, and leave it there; the work's `result()` is [`MessageInfo`]."""
        return self._call_kernel("probe", (peer, tag), how)

    # ---- life -----------------------------------------------------------------------------

    def abort(self, reason: str = "abort() was called") -> None:
        """End every call of the group with CollectiveAbortedError, on all ranks."""
        for backend in self.backends.values():
            backend.abort(f"{reason} on rank {self.ranks[self._spec.rank]}")

    def report_failure(self, text: str) -> None:
        """Report to the other ranks that this rank ends with an uncaught error."""
        for backend in self.backends.values():
            backend.abort(f"rank {self.ranks[self._spec.rank]} raised {text}", failed=True)

    def close(self) -> None:
        """Finish the collective calls that were made, then release links and threads.

        Each call ends within its time-out. Sends are finished, too, and receives end with
        ClosedError. If an exception is being handled, calls that have not ended are cancelled
        instead, and the other ranks get the reason. The method is not a collective, and a second
        call does nothing. A group that the program drops is closed on a thread.
        """
        self.end()

    def end(self, cancel: str = "") -> None:
        """Close as `close` does; cancel the calls that have not ended if there is a reason."""
        if not self.backends or not self._ending.begin():
            return
        self.port = None
        streams, cancel = self.stream_queue, cancel or self._reason_to_cancel()
        try:
            # Calls in streams begin in this group, so its backends stay until then.
            if streams is not None and not cancel:
                streams.drain()
        except BaseException as error:
            cancel = reason_of_error(error) or AT_EXIT
            raise
        finally:
            backends, self.backends = self.backends, {}
            if streams is not None and streams.close():
                for backend in backends.values():
                    backend.abort(closed_text(self.ranks[self._spec.rank], self.name, cancel))
            close_backends(backends.values(), cancel)

    def _reason_to_cancel(self) -> str:
        """Return why `close` must not wait for calls that were made; "" if it may."""
        streams, backends = self.stream_queue, self.backends.values()
        if self.is_in_call():
            return IN_CALL
        if any(each.runs_here() for each in backends) or (streams and streams.runs_here()):
            return "in a callback of one of its calls"
        if streams and streams.waits_for_this_thread():
            return "in a function of a stream for which its calls wait"
        return self._ending.reason_to_cancel()

    def is_in_call(self) -> bool:
        """Whether the calling thread is in a collective call of the group, or waits for a call."""
        return bool(self._part.guard.caller == get_ident()) or waits_here()

    def refuse(
        self, op: str, error: BaseException, arguments: Sequence[Any] = (), **how: Any
    ) -> None:
        """Report to the ranks in the collective call `op` that this rank cannot make the call.

        They raise CollectiveMismatchError with the text of `error`; no array is changed and the
        group stays usable. The call counts in the order of calls on this rank too. If this rank
        cannot even report, its next call breaks the group.

        Args:
            op: Name of the function called here.
            error: The error that ends the call here before this rank takes part in it.
            arguments: Arguments of the call; the device of the arrays selects the backend.
            **how: As in any call.
        """
        if isinstance(error, UsageError):
            error.name_call(op)
        self._part.refuse(self, op, error, arguments, wait=how.get("async_op") is not True)

    def place(self) -> Place:
        """Return this rank's place in the order of calls, for `is_known_to_all`."""
        return self._part.place(self)

    def is_known_to_all(self, error: BaseException, since: Place) -> bool:
        """Return whether the other ranks have this error, or a report of it, in this block.

        Args:
            error: The exception that ends the block.
            since: The place at which the block began.
        """
        return self._part.is_known_to_all(self, error, since)

    def take_guard(self, op: str) -> int:
        """Refuse other threads' collective calls until `release_guard`, which takes the result.

        Raises:
            UsageError: Another thread is in a collective call of the group.
        """
        return self._part.take_guard(self, op)

    def release_guard(self, caller: int) -> None:
        """Undo `take_guard`, which has returned `caller`."""
        self._part.guard.caller = caller

    def _call_collective(
        self, op: str, arguments: tuple[Any, ...], how: How, splits: Sequence[int] | None = None
    ) -> Work:
        """Make a collective call; refuse it while another thread is in a collective call."""
        caller = self.take_guard(op)
        try:
            call = partial(self._call_kernel, op, arguments, how, splits)
            name, wait = how.get("_label") or op, how.get("async_op") is not True
            work: Work = self._part.begin(self, name, call, arguments, wait=wait)
            return work
        finally:
            self.release_guard(caller)

    @property
    def plain_port(self) -> Any:
        """The port for plain messages; None if the calling thread is in a stream."""
        return self.port if explicit_stream() is None else None

    def _call_kernel(
        self, op: str, arguments: tuple[Any, ...], how: How, splits: Sequence[int] | None = None
    ) -> Work:
        """Check a call and run its kernel, or queue it behind the current stream."""
        if not self.backends:
            raise ClosedError(f"{op} on group '{self.name}', which was destroyed")
        try:
            subject, arguments = CHECKS[op](self, *arguments)
            options = self._options(op, splits, **how)
            if op in PEER_AT and arguments[PEER_AT[op]] == PROC_NULL:
                return Work(_no_message(op, arguments), op)
            device = next(iter(self.backends)) if subject is None else device_of(subject)
            kernel = dispatcher.kernel(op, device)
            queue = self.stream_queue
            if explicit_stream() is not None or (queue is not None and queue.waiting()):
                begin = partial(kernel, self, device, *arguments)
                return self._queue_behind_stream(op, device, begin, options)
            pending = kernel(self, device, *arguments, options)
        except (ArgumentTypeError, InvalidArgumentError, UnsupportedError) as error:
            error.name_call(how.get("_label") or op)
            raise
        if not options.async_op and pending.error is not None:
            raise pending.error
        return Work(pending, op, self)

    def _queue_behind_stream(
        self, op: str, device: str, begin: Callable[[CallOptions], Pending], options: CallOptions
    ) -> Work:
        """Make a call that begins when the current stream has done its earlier work."""
        if self.stream_queue is None:
            self.stream_queue = StreamQueue(self)
            if self.calls is not None:
                # From now on every call must check the queue, which C++ does not.
                self.calls.close()
            self.port = None
        work = Work(self.stream_queue.add(op, device, begin, options), op, self)
        self._part.is_queued = True
        if not options.async_op:
            # As in torch, these block the host; the result of a receive includes its sender.
            on_host = op.startswith(("agree", "barrier", "probe", "recv"))
            work.wait_on_host() if on_host else work.wait()
        return work

    def _options(
        self,
        op: str,
        splits: Sequence[int] | None = None,
        *,
        async_op: Any = False,
        timeout: Timeout | None = None,
        algorithm: Any = None,
        deterministic: Any = False,
        _label: str | None = None,
        _partial: bool = False,
        **unknown: Any,
    ) -> CallOptions:
        if unknown:
            check_keywords(op, _label or op.removesuffix("_any_source"), unknown)
        if algorithm is not None and not isinstance(algorithm, str):
            raise ArgumentTypeError(f"algorithm must be a name, got {algorithm!r}")
        asynchronous, ordered = (
            as_flag(async_op, "async_op"),
            as_flag(deterministic, "deterministic"),
        )
        due = Deadline(self._timeout_s if timeout is None else timeout)
        side = "output" if op == "all_gather_into_tensor" else "input"
        sizes = as_splits(splits, f"{side}_split_sizes")
        return CallOptions(asynchronous, due, algorithm, _label, ordered, sizes, _partial)

    def __repr__(self) -> str:
        if not self.backends:
            return f"<ProcessGroup '{self.name}' closed>"
        parts = [f"rank={self._spec.rank}", f"size={self.size()}"]
        for device, backend in self.backends.items():
            parts.append(f"{device}={backend.name}")
            parts += [f"{key}={value}" for key, value in backend.info().items()]
            if broken := backend.broken():
                parts.append(f"broken: {broken}")
        return f"<ProcessGroup '{self.name}' {' '.join(parts)}>"


def _no_message(op: str, arguments: tuple[Any, ...]) -> Pending:
    """Return the end of a message to or from `PROC_NULL`."""
    outputs: dict[str, Any] = {
        "recv_array": np.empty(0, np.uint8),
        "probe": MessageInfo(PROC_NULL, ANY_TAG, None, 0, 0),
    }
    pending = Pending([outputs.get(op, arguments[0])], done=True)
    if op != "send":
        pending.source, pending.tag, pending.count = PROC_NULL, ANY_TAG, 0
    return pending


def group_timeout_s(timeout: Timeout | None) -> float:
    """Return the default time-out of a group's calls, in seconds."""
    return config.get_float("UNISONO_TIMEOUT") if timeout is None else to_seconds(timeout)


add_c10d_methods(ProcessGroup)
