"""Every operation: name, parameters, checks, c10d's names, and the call of the backend.

Each is one method with a decorator, which makes its row in `OPS` from its parameters. The docstring
of its function describes it, if it has a function. Other code uses the rows:

    core/operations/dispatch.py        kernels of devices
    core/operations/c10d_methods.py    c10d's forms of the methods
    core/c10d/coalescing.py            calls that a block records
    adapters/torch/operations.py       methods of torch's process group

A new operation needs:

    1. a method here
    2. a method of each backend that supports it
    3. a function in `core/c10d/collectives.py`, with an example in its docstring
    4. the function's name in `unisono/__init__.py`
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar, Unpack, cast

import numpy as np

from unisono.core.backends import CallOptions, CPUBackend, DeviceBackend, GroupSpec, Pending
from unisono.core.backends.neighbors import NeighborMessages
from unisono.core.base.buffers import device_of
from unisono.core.base.deadline import Deadline
from unisono.core.base.integers import as_flag, as_splits
from unisono.core.base.seam import cpp
from unisono.core.base.threads.streams import explicit_stream
from unisono.core.base.types import Array, Arrays, Function, ReduceOp, as_reduce_op
from unisono.core.operations.c10d_methods import call_c10d_form, gather_rows, test_of_form
from unisono.core.operations.checked import (
    as_tag,
    first_of,
    first_of_pairs,
    list_on_root,
    member_rank,
    nothing_received,
    one_each,
    peer_rank,
)
from unisono.core.operations.dispatch import dispatcher
from unisono.core.operations.hooks import Hooked
from unisono.core.operations.keywords import SHARED, How, check_keywords
from unisono.core.operations.participation import Participation
from unisono.core.operations.reductions import reduce_otherwise
from unisono.core.operations.stream_queue import P2P, StreamCall, StreamQueue
from unisono.core.operations.sums.compressed import gather_compressed, reduce_compressed
from unisono.core.operations.table import KINDS, OPS, OpSchema, row_of, schema_of
from unisono.core.operations.work import Work
from unisono.core.transports.messages import ANY_TAG, PROC_NULL, MessageInfo
from unisono.errors import (
    ArgumentTypeError,
    ClosedError,
    InvalidArgumentError,
    UnsupportedError,
)

__all__ = ["OPS", "OpSchema", "Operations", "in_cpp", "schema_of"]

F = TypeVar("F", bound=Callable[..., Any])


def operation(
    c10d_op: str = "", *, in_lists: bool = False, coalesces: bool = False, shared: bool = False
) -> Callable[[F], F]:
    """Make an operation of a method that checks its arguments and calls the backend.

    All else in its row follows from the method's parameters, see `row_of`.

    Args:
        c10d_op: As in `OpSchema`.
        in_lists: Whether c10d takes each array inside a list.
        coalesces: Whether an operation NAME_coalesced replaces several calls in a block.
        shared: Whether c10d has a method of this name; the method takes c10d's form, too.
    """

    def made(check: F) -> F:
        name = check.__name__.strip("_")
        check.__qualname__ = f"ProcessGroup.{name}"
        schema = OPS[name] = row_of(check, c10d_op, in_lists=in_lists)._replace(
            c10d_methods=(name,) * shared, coalesced=f"{name}_coalesced" * coalesces
        )
        is_c10d_form = test_of_form(schema) if shared else None

        @functools.wraps(check)
        def method(self: Operations, *arguments: Any, **how: Any) -> Work:
            if is_c10d_form is not None and is_c10d_form(arguments, how):
                return call_c10d_form(self, schema, arguments, how)
            return self._call(schema, arguments, how)

        return cast(F, method)

    return made


def _form(operation: Callable[..., Work], name: str) -> Callable[..., Work]:
    """Return c10d's method of this name for an operation: it takes c10d's forms only."""
    row = OPS[operation.__name__]
    schema = OPS[row.name] = row._replace(c10d_methods=(*row.c10d_methods, name))

    def method(self: Operations, *arguments: Any, **how: Any) -> Work:
        return call_c10d_form(self, schema, arguments, how)

    method.__name__ = name
    method.__doc__ = f"`{row.name}` in c10d's forms; asynchronous unless `asyncOp` is False."
    return method


class Operations(Hooked):
    """The operations, as methods of a process group; see `ProcessGroup`.

    A method checks its arguments, and calls the backend of the device of its first array. `call`
    surrounds it with what all calls have in common.

    Attributes:
        backends: By device type; empty when the group is closed.
        stream_queue: Made by the first call in a stream.
        calls: Read by the C++ engine, see `operations.methods.in_cpp`.
        port: Takes plain messages of CPU arrays; see `backends.p2p.Port`.
        _block: Records calls instead of making them; see core/c10d/coalescing.py.
    """

    # C++ reads it in each call.
    __slots__ = ("calls",)

    name: str
    ranks: tuple[int, ...]
    backends: dict[str, DeviceBackend]
    calls: Any
    port: Any
    stream_queue: StreamQueue | None
    abort: Callable[..., None]
    refuse: Callable[..., None]
    _block: Any
    _part: Participation
    _spec: GroupSpec

    def rank(self) -> int:
        """Return this process's rank in the group."""
        return self._spec.rank

    def size(self) -> int:
        """Return the number of ranks."""
        return self._spec.size

    @property
    def group_name(self) -> str:
        """c10d's name of `key`: no other group of the same world has it."""
        return self._spec.key

    @property
    def timeout_s(self) -> float:
        """Default time-out of a call, in seconds."""
        return self._spec.timeout_s

    # ---- collectives ----------------------------------------------------------------------

    @operation("broadcast_", in_lists=True, shared=True)
    def broadcast(self, tensor: Array, root: int = 0, **how: Unpack[How]) -> Work:
        """As `unisono.broadcast`."""
        root = member_rank(self, root, "root")
        return self._work(self._on(tensor).broadcast(tensor, root, self._options(how)))

    @operation("allreduce_", in_lists=True, coalesces=True)
    def all_reduce(
        self,
        tensor: Array,
        op: ReduceOp | Function = ReduceOp.SUM,
        *,
        accumulate: str | None = None,
        reproducible: bool = False,
        compress: str | None = None,
        _lost: Any = None,
        **how: Unpack[How],
    ) -> Work:
        """As `unisono.all_reduce`; `_lost` as in `reduce_compressed`."""
        special = accumulate, reproducible
        if compress is not None:
            taken = {**how, "accumulate": accumulate, "reproducible": reproducible}
            name = "all_reduce"
            return reduce_compressed(self, name, compress, op, tensor, tensor, taken, _lost)
        if work := reduce_otherwise(self, "all_reduce", op, tensor, tensor, how, special):
            return work
        op = as_reduce_op(op)
        return self._work(self._on(tensor).all_reduce(tensor, op, self._options(how)))

    @operation("allreduce_coalesced_")
    def all_reduce_coalesced(
        self, tensors: Arrays, op: ReduceOp = ReduceOp.SUM, **how: Unpack[How]
    ) -> Work:
        """As `unisono.all_reduce_coalesced`."""
        first, op = first_of(tensors, "tensors"), as_reduce_op(op)
        return self._work(self._on(first).all_reduce_coalesced(tensors, op, self._options(how)))

    @operation("reduce_", in_lists=True, shared=True)
    def reduce(
        self,
        tensor: Array,
        root: int = 0,
        op: ReduceOp | Function = ReduceOp.SUM,
        *,
        accumulate: str | None = None,
        reproducible: bool = False,
        **how: Unpack[How],
    ) -> Work:
        """As `unisono.reduce`."""
        root = member_rank(self, root, "root")
        special = accumulate, reproducible
        if work := reduce_otherwise(self, "reduce", op, tensor, tensor, how, special, root):
            return work
        op = as_reduce_op(op)
        return self._work(self._on(tensor).reduce(tensor, root, op, self._options(how)))

    @operation("allgather_", in_lists=True)
    def all_gather(
        self,
        outputs: Arrays,
        tensor: Array,
        *,
        compress: str | None = None,
        **how: Unpack[How],
    ) -> Work:
        """As `unisono.all_gather`."""
        one_each(self, outputs, "tensor_list")
        if compress is not None:
            return gather_compressed(self, "all_gather", compress, outputs, tensor, how)
        return self._work(self._on(tensor).all_gather(outputs, tensor, self._options(how)))

    @operation("_allgather_base_", coalesces=True)
    def all_gather_into_tensor(
        self,
        output: Array,
        tensor: Array,
        *,
        output_split_sizes: Sequence[int] | None = None,
        compress: str | None = None,
        **how: Unpack[How],
    ) -> Work:
        """As `unisono.all_gather_into_tensor`, also of different sizes.

        `output_split_sizes`: rows of dimension 0 from each rank; equal parts if None.
        """
        if compress is not None:
            taken, name = (
                {**how, "output_split_sizes": output_split_sizes},
                "all_gather_into_tensor",
            )
            return gather_compressed(self, name, compress, output, tensor, taken)
        options = self._options(how, as_splits(output_split_sizes, "output_split_sizes"))
        return self._work(self._on(tensor).all_gather_into_tensor(output, tensor, options))

    @operation("allgather_coalesced_")
    def all_gather_coalesced(
        self, outputs: Sequence[Arrays], tensors: Arrays, **how: Unpack[How]
    ) -> Work:
        """As `unisono.all_gather_coalesced`."""
        one_each(self, outputs, "output_tensor_lists")
        on = self._on(first_of(tensors, "input_tensor_list"))
        return self._work(on.all_gather_coalesced(outputs, tensors, self._options(how)))

    @operation("allgather_into_tensor_coalesced_")
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
        on = self._on(first_of_pairs(outputs, tensors))
        return self._work(on.all_gather_into_tensor_coalesced(outputs, tensors, self._options(how)))

    @operation("gather_", in_lists=True, shared=True)
    def gather(
        self, tensor: Array, outputs: Arrays | None = None, root: int = 0, **how: Unpack[How]
    ) -> Work:
        """As `unisono.gather`."""
        root = member_rank(self, root, "root")
        list_on_root(self, outputs, root, "gather_list")
        return self._work(self._on(tensor).gather(tensor, outputs, root, self._options(how)))

    @operation("scatter_", in_lists=True, shared=True)
    def scatter(
        self, output: Array, inputs: Arrays | None = None, root: int = 0, **how: Unpack[How]
    ) -> Work:
        """As `unisono.scatter`."""
        root = member_rank(self, root, "root")
        list_on_root(self, inputs, root, "scatter_list")
        return self._work(self._on(output).scatter(output, inputs, root, self._options(how)))

    @operation("reduce_scatter_", in_lists=True, shared=True)
    def reduce_scatter(
        self,
        output: Array,
        inputs: Arrays,
        op: ReduceOp = ReduceOp.SUM,
        *,
        compress: str | None = None,
        **how: Unpack[How],
    ) -> Work:
        """As `unisono.reduce_scatter`."""
        one_each(self, inputs, "input_list")
        if compress is not None:
            return reduce_compressed(self, "reduce_scatter", compress, op, output, inputs, how)
        op = as_reduce_op(op)
        return self._work(self._on(output).reduce_scatter(output, inputs, op, self._options(how)))

    @operation("_reduce_scatter_base_", coalesces=True)
    def reduce_scatter_tensor(
        self,
        output: Array,
        tensor: Array,
        op: ReduceOp | Function = ReduceOp.SUM,
        *,
        input_split_sizes: Sequence[int] | None = None,
        reproducible: bool = False,
        compress: str | None = None,
        **how: Unpack[How],
    ) -> Work:
        """As `unisono.reduce_scatter_tensor`, also of different sizes.

        `input_split_sizes`: rows of dimension 0 for each rank; equal parts if None.
        """
        given = {} if input_split_sizes is None else {"input_split_sizes": input_split_sizes}
        name, special = "reduce_scatter_tensor", (None, reproducible)
        if compress is not None:
            taken = {**how, **given, "reproducible": reproducible}
            return reduce_compressed(self, name, compress, op, output, tensor, taken)
        if work := reduce_otherwise(self, name, op, output, tensor, {**how, **given}, special):
            return work
        op = as_reduce_op(op)
        options = self._options(how, as_splits(input_split_sizes, "input_split_sizes"))
        return self._work(self._on(output).reduce_scatter_tensor(output, tensor, op, options))

    @operation("reduce_scatter_tensor_coalesced_", shared=True)
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
        on, op = self._on(first_of_pairs(outputs, tensors)), as_reduce_op(op)
        options = self._options(how)
        return self._work(on.reduce_scatter_tensor_coalesced(outputs, tensors, op, options))

    @operation("alltoall_")
    def all_to_all(self, outputs: Arrays, inputs: Arrays, **how: Unpack[How]) -> Work:
        """As `unisono.all_to_all`."""
        one_each(self, outputs, "output_tensor_list")
        one_each(self, inputs, "input_tensor_list")
        return self._work(self._on(inputs[0]).all_to_all(outputs, inputs, self._options(how)))

    @operation("alltoall_base_", shared=True)
    def all_to_all_single(
        self,
        output: Array,
        tensor: Array,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        **how: Unpack[How],
    ) -> Work:
        """As `unisono.all_to_all_single`."""
        taken = as_splits(output_split_sizes, "output_split_sizes")
        given = as_splits(input_split_sizes, "input_split_sizes")
        on, options = self._on(tensor), self._options(how)
        return self._work(on.all_to_all_single(output, tensor, taken, given, options))

    @operation()
    def neighbor_all_to_all(
        self, outputs: Arrays, inputs: Arrays, links: NeighborMessages, **how: Unpack[How]
    ) -> Work:
        """Exchange arrays with neighbours; see `unisono.neighbor_all_to_all`."""
        on = self._on(next(iter([*inputs, *outputs]), None))
        return self._work(on.neighbor_all_to_all(outputs, inputs, links, self._options(how)))

    @operation()
    def scan(
        self, tensor: Array, op: ReduceOp | Function = ReduceOp.SUM, **how: Unpack[How]
    ) -> Work:
        """As `unisono.scan`."""
        if work := reduce_otherwise(self, "scan", op, tensor, tensor, how):
            return work
        op = as_reduce_op(op)
        return self._work(self._on(tensor).scan(tensor, op, self._options(how)))

    @operation()
    def exscan(
        self, tensor: Array, op: ReduceOp | Function = ReduceOp.SUM, **how: Unpack[How]
    ) -> Work:
        """As `unisono.exscan`."""
        if work := reduce_otherwise(self, "exscan", op, tensor, tensor, how):
            return work
        op = as_reduce_op(op)
        return self._work(self._on(tensor).exscan(tensor, op, self._options(how)))

    @operation("barrier", shared=True)
    def barrier(self, **how: Unpack[How]) -> Work:
        """As `unisono.barrier`."""
        return self._work(self._on().barrier(self._options(how)))

    @operation()
    def _agree(self, text: str, **how: Unpack[How]) -> Work:
        return self._work(self._on().agree(text, self._options(how)))

    def agree(self, text: str, **how: Unpack[How]) -> None:
        """Raise CollectiveMismatchError on all ranks unless all pass the same text; move no data.

        On a broken group the call does nothing, so that the working ranks can make new groups.

        Examples: On rank 1 of 2
            >>> dist.group.WORLD.agree(f"version {rank}")
            Traceback (most recent call last):
            unisono.errors.CollectiveMismatchError: ...
        """
        if self.size() > 1 and next(iter(self.backends.values())).broken() is None:
            self._agree(text, **how)

    # ---- point to point -------------------------------------------------------------------

    @operation("send", in_lists=True, shared=True)
    def send(self, tensor: Array, peer: int, tag: int = 0, **how: Unpack[How]) -> Work:
        """Send to a rank; done when the tensor may be changed. `PROC_NULL`: send nothing."""
        peer, tag, options = peer_rank(self, peer, "dst"), as_tag(tag), self._options(how)
        if peer == PROC_NULL:
            return self._work(Pending([tensor], done=True))
        return self._work(self._on(tensor).send(tensor, peer, tag, options))

    @operation("recv_", in_lists=True, shared=True)
    def recv(
        self, tensor: Array, peer: int | None = None, tag: int = 0, **how: Unpack[How]
    ) -> Work:
        """Receive from a rank, from any rank (None), or nothing (`PROC_NULL`)."""
        if peer is None:
            return self.recv_any_source(tensor, tag, **how)
        peer, tag = peer_rank(self, peer, "src"), as_tag(tag, receives=True)
        options = self._options(how)
        if peer == PROC_NULL:
            return self._work(nothing_received(tensor))
        return self._work(self._on(tensor).recv(tensor, peer, tag, options))

    @operation("recv_any_source_", in_lists=True)
    def recv_any_source(self, tensor: Array, tag: int = 0, **how: Unpack[How]) -> Work:
        """Receive from any rank; the work's `source_rank` is the sender.

        Examples: On rank 0 of 2
            >>> pg, x = dist.group.WORLD, np.array([rank])
            >>> work = pg.send(x, 0) if rank == 1 else pg.recv_any_source(x)
            >>> x, work.source_rank()
            (array([1]), 1)
        """
        tag = as_tag(tag, receives=True)
        return self._work(self._on(tensor).recv_any_source(tensor, tag, self._options(how)))

    @operation()
    def recv_array(self, peer: int | None = None, tag: int = 0, **how: Unpack[How]) -> Work:
        """Receive a message of any size and dtype; the work's `result()` is [its elements]."""
        peer = None if peer is None else peer_rank(self, peer, "src")
        tag, options = as_tag(tag, receives=True), self._options(how)
        if peer == PROC_NULL:
            return self._work(nothing_received(np.empty(0, np.uint8)))
        return self._work(self._on().recv_array(peer, tag, options))

    @operation()
    def probe(self, peer: int | None = None, tag: int = ANY_TAG, **how: Unpack[How]) -> Work:
        """Wait for a message, and leave it there; the work's `result()` is [`MessageInfo`]."""
        peer = None if peer is None else peer_rank(self, peer, "src")
        tag, options = as_tag(tag, receives=True), self._options(how)
        if peer == PROC_NULL:
            return self._work(nothing_received(MessageInfo(PROC_NULL, ANY_TAG, None, 0, 0)))
        return self._work(self._on().probe(peer, tag, options))

    # ---- c10d's other names ---------------------------------------------------------------

    allreduce = _form(all_reduce, "allreduce")
    allreduce_coalesced = _form(all_reduce_coalesced, "allreduce_coalesced")
    allgather = _form(all_gather, "allgather")
    _allgather_base = _form(all_gather_into_tensor, "_allgather_base")
    all_gather_single = _form(all_gather_into_tensor, "all_gather_single")
    allgather_coalesced = _form(all_gather_coalesced, "allgather_coalesced")
    allgather_into_tensor_coalesced = _form(
        all_gather_into_tensor_coalesced, "allgather_into_tensor_coalesced"
    )
    all_gather_single_coalesced = _form(
        all_gather_into_tensor_coalesced, "all_gather_single_coalesced"
    )
    _reduce_scatter_base = _form(reduce_scatter_tensor, "_reduce_scatter_base")
    reduce_scatter_single = _form(reduce_scatter_tensor, "reduce_scatter_single")
    reduce_scatter_single_coalesced = _form(
        reduce_scatter_tensor_coalesced, "reduce_scatter_single_coalesced"
    )
    gather_single = gather_into_tensor = gather_rows
    alltoall = _form(all_to_all, "alltoall")
    alltoall_base = _form(all_to_all_single, "alltoall_base")
    recv_anysource = _form(recv_any_source, "recv_anysource")

    # ---- what all calls have in common ------------------------------------------------------

    def _call(self, schema: OpSchema, arguments: tuple[Any, ...], how: dict[str, Any]) -> Work:
        """Make a call; refuse a collective while another thread is in a collective call."""
        op = schema.name
        block = None if self._block is None else self._block_here()
        if block is not None and (schema.coalesced or block.takes_all):
            work: Work = block.record(schema, arguments, how)
            return work
        if op in P2P:
            return self._run(schema, arguments, how)
        caller = self._part.take_guard(self, op)
        try:
            call = partial(self._run, schema, arguments, how)
            name, wait = how.get("_label") or op, how.get("async_op") is not True
            given = arguments or tuple(how.values())
            work = self._part.begin(self, name, call, given, wait=wait)
            return work
        finally:
            self._part.guard.caller = caller

    def _run(self, schema: OpSchema, arguments: tuple[Any, ...], how: dict[str, Any]) -> Work:
        op = schema.name
        if not self.backends:
            raise ClosedError(f"{op} on group '{self.name}', which was destroyed")
        try:
            if not how.keys() <= SHARED | schema.keywords:
                called = how.get("_label") or op.removesuffix("_any_source")
                check_keywords(op, called, how, of_method=True)
            is_async, ordered = how.get("async_op", False), how.get("deterministic", False)
            if type(is_async) is not bool or type(ordered) is not bool:
                is_async = how["async_op"] = as_flag(is_async, "async_op")
                how["deterministic"] = as_flag(ordered, "deterministic")
            hooks = self._hooks
            seen = None if hooks is None else hooks.begin(self, schema, arguments, how)
            work: Work = schema.check(self, *arguments, **how)
        except (ArgumentTypeError, InvalidArgumentError, UnsupportedError) as error:
            error.name_call(how.get("_label") or op)
            raise
        work._op = work._op or op
        pending = work._pending
        if not is_async:
            if isinstance(pending, StreamCall):
                # As in torch, these block the host; the result of a receive includes its sender.
                on_host = op.startswith(("agree", "barrier", "probe", "recv"))
                work.wait_on_host() if on_host else work.wait()
            elif pending.error is not None:
                raise pending.error
        if hooks is not None and seen is not None:
            hooks.end(seen, work)
        # An attribute that hides the method must get each call.
        if "_learn" in how and op not in vars(self):
            how["_learn"](pending.prepared)
        return work

    def _work(self, pending: Pending) -> Work:
        return Work(pending, "", self)

    def _options(self, how: How, splits: Sequence[int] | None = None) -> CallOptions:
        """Check the keywords that all methods share."""
        algorithm, timeout = how.get("algorithm"), how.get("timeout")
        if algorithm is not None and not isinstance(algorithm, str):
            raise ArgumentTypeError(f"algorithm must be a name, got {algorithm!r}")
        return CallOptions(
            how.get("async_op", False),
            Deadline(self._spec.timeout_s if timeout is None else timeout),
            algorithm,
            how.get("_label"),
            how.get("deterministic", False),
            splits,
            how.get("_partial", False),
            "_learn" in how,
        )

    def _on(self, subject: Any = None) -> CPUBackend:
        """Return the backend of an array's device; without an array, of the first device."""
        device = next(iter(self.backends)) if subject is None else device_of(subject)
        backend = self.backends.get(device)
        # Not `_follows_stream`, because this is on the way of each call.
        queue, plain = self.stream_queue, explicit_stream() is None and dispatcher.is_plain
        if plain and isinstance(backend, CPUBackend) and (queue is None or not queue.waiting()):
            return backend
        return cast(CPUBackend, _Detour(self, device))

    def _follows_stream(self) -> bool:
        """Whether a call begins behind the current stream, or behind a call that does."""
        queue = self.stream_queue
        return explicit_stream() is not None or (queue is not None and queue.waiting())

    def _queue(self, op: str, device: str, kernel: Callable[..., Pending], *arguments: Any) -> Any:
        """Make a call that begins when the current stream has done its earlier work."""
        if self.stream_queue is None:
            self.stream_queue = StreamQueue(self)
            # From now on every call must check the queue, which C++ does not. Not `self.calls`: it
            # is None inside a coalescing block, and comes back after it.
            for backend in self.backends.values():
                if backend.calls is not None:
                    backend.calls.close()
            self.port = None
        begin = partial(kernel, *arguments[:-1])
        call = self.stream_queue.add(op, device, begin, arguments[-1])
        self._part.is_queued = True
        return call


class _Detour:
    """Stands for a backend: its methods go through the dispatcher, and behind a stream.

    A backend of another device may lack an operation, and has a method for each that it has.
    """

    def __init__(self, group: Operations, device: str) -> None:
        self._group, self._device = group, device

    def __getattr__(self, op: str) -> Callable[..., Pending]:
        group, device = self._group, self._device
        kernel = partial(dispatcher.kernel(op, device), group, device)
        return partial(group._queue, op, device, kernel) if group._follows_stream() else kernel


def in_cpp(function: F, letters: str = "") -> F:
    """Return a function that C++ runs as far as it can; `function` itself without C++.

    A small collective takes half a microsecond between two processes. The way through the groups,
    the dispatcher, the backend and the engine takes ten times that. So the function looks in C++
    for the prepared call of its arguments: function, group, dtypes, shapes, root, op, algorithm and
    order. A number as time-out is for this call only. The arrays must be NumPy arrays, plain
    tensors of torch, or lists of them; C++ packs arrays that are not contiguous. C++ runs the
    prepared call at once, or queues it for the progress thread. All other calls run `function`. If
    the arguments of a collective are new, it gets one more keyword, `_learn`, for what
    `Engine.prepare` returns.

    A wrapper in the dispatcher suspends this, because the meaning of a call then depends on more
    than its arguments. With an explicit stream, Python runs every call.

    C++ knows the parameters before `group` by the row of the operation, and the others by their
    names. A call that gives a parameter without a kind runs in Python. `isend` and `irecv` are
    `send` and `recv` without a wait.

    Args:
        function: One of c10d's functions, or another one that passes `_learn` on.
        letters: The kinds of the first parameters of a function that is not c10d's; see `Kind` in
            native/bindings/arguments.hpp.
    """
    code = getattr(function, "__wrapped__", function).__code__
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    if letters:
        names = names[: len(letters)]
    else:
        names, letters = _kinds_of(function.__name__, names)
    made: Any = cpp.make_function(function, names, letters, min(code.co_argcount, len(letters)))
    return function if made is function else cast(F, functools.update_wrapper(made, function))


def _kinds_of(op: str, names: tuple[str, ...]) -> tuple[tuple[str, ...], str]:
    """Return the parameters of one of c10d's functions, and their kinds."""
    is_started = op in ("isend", "irecv")
    kinds = OPS[op[is_started:]].repeat or ""
    # A message has neither an algorithm nor an order of reduction.
    how = ("algorithm", "deterministic", "timeout") if "async_op" in names else ("timeout",)
    names = tuple(dict.fromkeys(names + how))
    letters = (kinds.capitalize() if is_started else kinds)[: names.index("group")]
    for name in names[len(letters) :]:
        letters += KINDS.get(name, "-")
    return names, letters
