"""ProcessGroup: an ordered set of ranks and everything they can do together."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from threading import get_ident
from types import SimpleNamespace
from typing import Any

from unisono.backends import (
    BackendConfig,
    CallOptions,
    DeviceBackend,
    GroupSpec,
    Pending,
    make_backend,
)
from unisono.base import config
from unisono.base.buffers import device_of
from unisono.base.deadline import Deadline, Timeout, to_seconds
from unisono.base.streams import explicit_stream
from unisono.base.types import ReduceOp
from unisono.errors import ArgumentTypeError, ClosedError, InvalidArgumentError, UnsupportedError
from unisono.groups.c10d_methods import C10dNames, add_c10d_methods
from unisono.groups.checks import CHECKS, as_integer
from unisono.groups.dispatch import dispatcher
from unisono.groups.overlap import concurrent_call_error
from unisono.groups.stream_queue import Communication
from unisono.groups.work import Work
from unisono.stores import PrefixStore, Store

__all__ = ["ProcessGroup", "group_timeout_s"]

# A call that has not become one: the other ranks wait in theirs.
_REFUSED = (ArgumentTypeError, InvalidArgumentError, UnsupportedError)


class ProcessGroup(C10dNames):
    """Ranks that communicate; has every operation as a method.

    Each method returns a `Work`, which is done already unless `async_op` is set; an error of
    a synchronous call is raised at once. Roots and peers are ranks *in this group*. Arguments
    that all methods share:

        async_op: Return at once; the arrays must stay untouched until the work is done.
        timeout: Seconds or timedelta; the group's timeout if None.
        algorithm: Name of an algorithm to use instead of the selected one.
        deterministic: Reduce in the order of ranks, so that the bits of the result do not depend
            on how; see docs/reference/reductions.md.

    All members must make the same calls in the same order. Threads: a collective call that
    overlaps one of another thread is refused with UsageError; use one group per thread. Send and
    recv are matched by peer and tag, and may be called from any thread at any time.

    Args:
        store: Shared by exactly the members; wrap it in a PrefixStore if others use it too.
        rank: This process's rank in the group.
        size: Number of ranks.
        backend: "unisono", or one per device: "cpu:unisono,cuda:nccl".
        timeout: Default of every call: 1,800 s unless UNISONO_TIMEOUT says otherwise.
        name: For people.
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
        backend: str | None = None,
        timeout: Timeout | None = None,
        name: str = "default",
        *,
        options: Any = None,
        _ranks: tuple[int, ...] | None = None,
        _parent: ProcessGroup | None = None,
        _key: str = "0",
    ) -> None:
        if size < 1 or not 0 <= rank < size:
            raise InvalidArgumentError(f"rank {rank} of {size}: expected 0 <= rank < size")
        self.store = store
        self.name = name
        self.key = _key
        self.ranks = tuple(range(size)) if _ranks is None else _ranks
        self._rank = rank
        self._timeout_s = group_timeout_s(timeout)
        self.config = BackendConfig(backend)
        self.backends: dict[str, DeviceBackend] = {}
        self._closed = False
        # How often a call was made that names something new; the same on all members.
        self.counts: Counter[str] = Counter()
        # Made by the first call in a stream.
        self._communication: Communication | None = None
        # Read by the C++ engine, see engines/repeat.py.
        self.calls: Any = None
        # Its `caller` is the thread that is in a collective call, 0 if none is.
        self._guard: Any = SimpleNamespace(caller=0)
        # Takes plain messages of CPU arrays; see `backends.p2p.Port`.
        self.port: Any = None
        try:
            for device, backend_name in self.config.device_backend_map.items():
                self.backends[device] = self._make(backend_name, device, options, _parent)
            if "cpu" in self.backends:
                self.calls = self.backends["cpu"].calls
                # Calls that the C++ engine repeats look at it, too.
                self._guard = self.calls or self._guard
                self.port = self.backends["cpu"].port
        except BaseException:
            self.close()
            raise

    def _make(
        self, name: str, device: str, options: Any, parent: ProcessGroup | None
    ) -> DeviceBackend:
        spec = GroupSpec(
            store=PrefixStore(device, self.store),
            rank=self._rank,
            size=self.size(),
            ranks=self.ranks,
            name=self.name,
            key=self.key,
            timeout_s=self._timeout_s,
            options=options,
        )
        if parent is not None and parent.config.device_backend_map.get(device) == name:
            return parent.backends[device].split(spec)
        return make_backend(name, device, spec)

    # ---- who ------------------------------------------------------------------------------

    def rank(self) -> int:
        """Return this process's rank in the group."""
        return self._rank

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
            ArgumentTypeError: Not a number.
            InvalidArgumentError: Not a member; lists the members.
        """
        try:
            return self.ranks.index(global_rank)
        except ValueError:
            number = as_integer(global_rank, "a global rank")
            raise InvalidArgumentError(
                f"global rank {number} is not in group '{self.name}' (ranks {list(self.ranks)})"
            ) from None

    # ---- collectives ----------------------------------------------------------------------

    def broadcast(self, tensor: Any, root: int = 0, **how: Any) -> Work:
        """Copy root's tensor into everybody's."""
        return self._call("broadcast", (tensor, root), how)

    def all_reduce(self, tensor: Any, op: ReduceOp = ReduceOp.SUM, **how: Any) -> Work:
        """Replace everybody's tensor by the reduction over all ranks."""
        return self._call("all_reduce", (tensor, op), how)

    def all_reduce_coalesced(
        self, tensors: Sequence[Any], op: ReduceOp = ReduceOp.SUM, **how: Any
    ) -> Work:
        """all_reduce of several tensors of one dtype, as one message."""
        return self._call("all_reduce_coalesced", (tensors, op), how)

    def reduce(self, tensor: Any, root: int = 0, op: ReduceOp = ReduceOp.SUM, **how: Any) -> Work:
        """Replace root's tensor by the reduction over all ranks; the others keep theirs."""
        return self._call("reduce", (tensor, root, op), how)

    def all_gather(self, outputs: Sequence[Any], tensor: Any, **how: Any) -> Work:
        """Copy rank i's tensor into everybody's outputs[i]."""
        return self._call("all_gather", (outputs, tensor), how)

    def all_gather_into_tensor(
        self,
        output: Any,
        tensor: Any,
        *,
        output_split_sizes: Sequence[int] | None = None,
        **how: Any,
    ) -> Work:
        """Concatenate the tensors of all ranks in everybody's output.

        `output_split_sizes`: rows of dimension 0 from each rank; equal parts if None.
        """
        if output_split_sizes is not None:
            how["_split_sizes"] = output_split_sizes
        return self._call("all_gather_into_tensor", (output, tensor), how)

    def all_gather_coalesced(
        self, outputs: Sequence[Sequence[Any]], tensors: Sequence[Any], **how: Any
    ) -> Work:
        """all_gather of several tensors of one dtype, as one message: `outputs[rank][i]`."""
        return self._call("all_gather_coalesced", (outputs, tensors), how)

    def all_gather_into_tensor_coalesced(
        self, outputs: Sequence[Any], tensors: Sequence[Any], **how: Any
    ) -> Work:
        """all_gather_into_tensor of several tensors of one dtype, as one message."""
        return self._call("all_gather_into_tensor_coalesced", (outputs, tensors), how)

    def gather(
        self, tensor: Any, outputs: Sequence[Any] | None = None, root: int = 0, **how: Any
    ) -> Work:
        """Copy rank i's tensor into outputs[i] on root; `outputs` is None elsewhere."""
        return self._call("gather", (tensor, outputs, root), how)

    def scatter(
        self, output: Any, inputs: Sequence[Any] | None = None, root: int = 0, **how: Any
    ) -> Work:
        """Copy root's inputs[i] into the output of rank i; `inputs` is None elsewhere."""
        return self._call("scatter", (output, inputs, root), how)

    def reduce_scatter(
        self, output: Any, inputs: Sequence[Any], op: ReduceOp = ReduceOp.SUM, **how: Any
    ) -> Work:
        """Fill rank i's output with the reduction of everybody's inputs[i]."""
        return self._call("reduce_scatter", (output, inputs, op), how)

    def reduce_scatter_tensor(
        self,
        output: Any,
        tensor: Any,
        op: ReduceOp = ReduceOp.SUM,
        *,
        input_split_sizes: Sequence[int] | None = None,
        **how: Any,
    ) -> Work:
        """Fill rank i's output with the reduction of the i-th part of everybody's tensor.

        `input_split_sizes`: rows of dimension 0 for each rank; equal parts if None.
        """
        if input_split_sizes is not None:
            how["_split_sizes"] = input_split_sizes
        return self._call("reduce_scatter_tensor", (output, tensor, op), how)

    def reduce_scatter_tensor_coalesced(
        self,
        outputs: Sequence[Any],
        tensors: Sequence[Any],
        op: ReduceOp = ReduceOp.SUM,
        **how: Any,
    ) -> Work:
        """reduce_scatter_tensor of several tensors of one dtype, as one message."""
        return self._call("reduce_scatter_tensor_coalesced", (outputs, tensors, op), how)

    def all_to_all(self, outputs: Sequence[Any], inputs: Sequence[Any], **how: Any) -> Work:
        """Copy inputs[j] of rank i into outputs[i] of rank j, for all i and j."""
        return self._call("all_to_all", (outputs, inputs), how)

    def all_to_all_single(
        self,
        output: Any,
        tensor: Any,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        **how: Any,
    ) -> Work:
        """all_to_all of parts of one tensor; split sizes are rows of dimension 0."""
        arguments = (output, tensor, output_split_sizes, input_split_sizes)
        return self._call("all_to_all_single", arguments, how)

    def scan(self, tensor: Any, op: ReduceOp = ReduceOp.SUM, **how: Any) -> Work:
        """Replace rank r's tensor by the reduction over ranks 0..r."""
        return self._call("scan", (tensor, op), how)

    def exscan(self, tensor: Any, op: ReduceOp = ReduceOp.SUM, **how: Any) -> Work:
        """Replace rank r's tensor by the reduction over ranks 0..r-1; rank 0 keeps its own."""
        return self._call("exscan", (tensor, op), how)

    def barrier(self, **how: Any) -> Work:
        """End on no rank before every rank has begun."""
        return self._call("barrier", (), how)

    def agree(self, text: str, **how: Any) -> None:
        """Raise CollectiveMismatchError on all ranks unless all say the same text; moves nothing.

        On a broken group it does nothing: what is left of it may go on in groups of its own.
        """
        if self.size() > 1 and next(iter(self.backends.values())).broken() is None:
            self._call("agree", (text,), how)

    # ---- point to point -------------------------------------------------------------------

    def send(self, tensor: Any, peer: int, tag: int = 0, **how: Any) -> Work:
        """Send to a rank; done when the tensor may be changed."""
        return self._start("send", (tensor, peer, tag), how)

    def recv(self, tensor: Any, peer: int | None = None, tag: int = 0, **how: Any) -> Work:
        """Receive from a rank, or from any if None."""
        if peer is None:
            return self.recv_any_source(tensor, tag, **how)
        return self._start("recv", (tensor, peer, tag), how)

    def recv_any_source(self, tensor: Any, tag: int = 0, **how: Any) -> Work:
        """Receive from whichever rank sends; the work's `source_rank` tells which."""
        return self._start("recv_any_source", (tensor, tag), how)

    # ---- life -----------------------------------------------------------------------------

    def abort(self, reason: str = "abort() was called") -> None:
        """End every call of the group with CollectiveAbortedError, on all ranks."""
        for backend in self.backends.values():
            backend.abort(f"{reason} on rank {self.ranks[self._rank]}")

    def report_failure(self, text: str) -> None:
        """Tell the other ranks that this one goes down with an error of its own."""
        for backend in self.backends.values():
            backend.abort(f"rank {self.ranks[self._rank]} raised {text}", failed=True)

    def close(self) -> None:
        """Release links and threads; no collective. Closing twice is fine."""
        self._closed = True
        self.port = None
        if self._communication is not None:
            self._communication.close()
        backends, self.backends = self.backends, {}
        for backend in backends.values():
            backend.close()

    def refuse(self, op: str, error: Exception, arguments: Sequence[Any] = (), **how: Any) -> None:
        """Tell ranks that make the collective call `op` that this one cannot; changes nothing.

        They get CollectiveMismatchError with the text of `error`, and the group stays usable.
        The call takes its place in the order of calls on this rank too.

        Args:
            op: What was called here.
            error: Why it is no call; errors that calls end with are ignored.
            arguments: What it was called with; decides which backend is meant.
            **how: As in any call.
        """
        if not isinstance(error, _REFUSED):
            return
        error.name_call(op)
        why = error.what.removeprefix(f"{op}: ")
        if self._closed or self.size() == 1 or error.told:
            return
        error.told = True
        devices = [device_of(_leaf(argument)) for argument in arguments]
        device = next((d for d in devices if d in self.backends), next(iter(self.backends)))
        self.backends[device].refuse(
            op, why, Deadline(self._timeout_s), wait=not how.get("async_op")
        )

    def enter(self, op: str) -> int:
        """Keep other threads' collective calls out until `leave`, which takes what this returns."""
        guard, me = self._guard, get_ident()
        # No call between the look and the mark, so that no other thread can run in between.
        caller = guard.caller
        # A thread that is not here was left behind by a fork; the engine says what that means.
        if caller != 0 and caller != me and caller in sys._current_frames():
            raise concurrent_call_error(self, op, caller)
        guard.caller = me
        return int(caller)

    def leave(self, caller: int) -> None:
        """End what `enter` began."""
        self._guard.caller = caller

    def _call(self, op: str, arguments: tuple[Any, ...], how: dict[str, Any]) -> Work:
        """Make a collective call; refuse it while another thread is in one."""
        caller = self.enter(op)
        try:
            return self._start(op, arguments, how)
        except _REFUSED as error:
            self.refuse(op, error, arguments, **how)
            raise
        finally:
            self.leave(caller)

    @property
    def plain_port(self) -> Any:
        """What takes a plain message; None if a stream has a say in it."""
        return self.port if explicit_stream() is None else None

    def _start(self, op: str, arguments: tuple[Any, ...], how: dict[str, Any]) -> Work:
        if self._closed:
            raise ClosedError(f"{op} on group '{self.name}', which was destroyed")
        try:
            subject, arguments = CHECKS[op](self, *arguments)
            options = self._options(op, **how)
            device = next(iter(self.backends)) if subject is None else device_of(subject)
            kernel = dispatcher.kernel(op, device)
            queue = self._communication
            if explicit_stream() is not None or (queue is not None and queue.waiting()):
                begin = partial(kernel, self, device, *arguments)
                return self._in_stream(op, device, begin, options)
            pending = kernel(self, device, *arguments, options)
        except _REFUSED as error:
            error.name_call(how.get("_label") or op)
            raise
        if not options.async_op and pending.error is not None:
            raise pending.error
        return Work(pending, op)

    def _in_stream(
        self, op: str, device: str, begin: Callable[[CallOptions], Pending], options: CallOptions
    ) -> Work:
        """Make a call that begins when the current stream gets to it."""
        if self._communication is None:
            self._communication = Communication(self)
            if self.calls is not None:
                # From now on every call has to look whether one waits in a stream.
                self.calls.close()
            self.port = None
        work = Work(self._communication.call(op, device, begin, options), op)
        if not options.async_op:
            # As in torch; a receive's result is whom it came from.
            looked_at = op in ("agree", "barrier", "recv", "recv_any_source")
            work.wait_on_host() if looked_at else work.wait()
        return work

    def _options(
        self,
        op: str,
        *,
        async_op: bool = False,
        timeout: Timeout | None = None,
        algorithm: str | None = None,
        deterministic: bool = False,
        _label: str | None = None,
        _split_sizes: Sequence[int] | None = None,
        **unknown: Any,
    ) -> CallOptions:
        if unknown:
            call = _label or op
            raise ArgumentTypeError(
                f"{call}() got an unexpected keyword argument {next(iter(unknown))!r} "
                f"(known besides its own: async_op, timeout, algorithm, deterministic)"
            )
        deadline = Deadline(self._timeout_s if timeout is None else timeout)
        return CallOptions(async_op, deadline, algorithm, _label, deterministic, _split_sizes)

    def __repr__(self) -> str:
        if self._closed:
            return f"<ProcessGroup '{self.name}' closed>"
        parts = [f"rank={self._rank}", f"size={self.size()}"]
        for device, backend in self.backends.items():
            parts.append(f"{device}={backend.name}")
            parts += [f"{key}={value}" for key, value in backend.info().items()]
            if broken := backend.broken():
                parts.append(f"broken: {broken}")
        return f"<ProcessGroup '{self.name}' {' '.join(parts)}>"


def _leaf(argument: Any) -> Any:
    """Return the first array in an argument that may be a list of lists."""
    while isinstance(argument, (list, tuple)) and argument:
        argument = argument[0]
    return argument


def group_timeout_s(timeout: Timeout | None) -> float:
    """Return the default time-out of a group's calls, in seconds."""
    return config.get_float("UNISONO_TIMEOUT") if timeout is None else to_seconds(timeout)


add_c10d_methods(ProcessGroup)
