"""The CPU backend: from arrays to tasks for an engine.

Every collective takes the same steps: view the arrays as flat memory, describe the call, take its
prepared call (algorithm and program), submit a task. A list of arrays stands for their
concatenation, so a schedule has one input and one output only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from unisono.backends import p2p, tuning
from unisono.backends.agreement import agree, refuse
from unisono.backends.api import CallOptions, CPUOptions, DeviceBackend, GroupSpec, Pending
from unisono.backends.blocks import (
    Blocks,
    Splits,
    require_blocks,
    require_stripes,
    require_total,
    split_sizes,
)
from unisono.backends.flat import Flat, apart, listed, many, one, striped
from unisono.backends.neighbors import Links, Sizes
from unisono.backends.prepared_calls import NO_DTYPE, CallSpec, PreparedCalls
from unisono.base import config
from unisono.base.deadline import Deadline
from unisono.base.types import DType, RedOpType, ReduceOp, code_of, require_reducible
from unisono.engines import (
    Communicator,
    Engine,
    Task,
    host_id,
    join_mpi,
    make_engine,
)
from unisono.engines.errors import already_broken_error
from unisono.engines.kernels import divide, scale
from unisono.errors import ArgumentTypeError, InvalidArgumentError
from unisono.schedules.tables import Shape, Table
from unisono.stores import PrefixStore
from unisono.transports import connect, has_ended


def _fill(copies: list[Flat], dtype: DType, op: ReduceOp | None) -> None:
    """Copy the values of the caller's arrays into the private copies of a call."""
    for data in copies:
        data.fill()
    if op is not None and op.factor is not None:
        scale(copies[0].array, dtype, op.factor)


def _connect(spec: GroupSpec, options: CPUOptions, word: str) -> Communicator:
    """Return the communicator of a group with links of its own; publish a word in them."""
    deadline = Deadline(spec.timeout_s)
    host = "" if options.engine == "reference" else host_id()
    transport = connect(spec.store, spec.rank, spec.size, deadline, options.transport, host, word)
    comm = Communicator(transport, tuple(range(spec.size)), spec.name, spec.key)
    if (options.engine or config.get("UNISONO_ENGINE")) == "mpi":
        try:
            store = PrefixStore(f"mpi/{transport.world_number}", spec.store)
            comm.mpi_ranks = join_mpi(store, spec.rank, spec.size, deadline)
        except BaseException:
            comm.close()
            raise
    return comm


class Operands(NamedTuple):
    """The memory of one call.

    Attributes:
        subject: The array that describes the call in an error.
        input: INPUT of the program.
        output: OUTPUT of the program.
        results: The arrays that the caller gets as result.
    """

    subject: Flat | None
    input: Flat | None = None
    output: Flat | None = None
    results: Sequence[Any] = ()


class CPUBackend(DeviceBackend):
    """All operations on CPU memory, through an engine.

    Args:
        spec: The group.
        comm: Its communicator, if the transport of another group is shared.
        tables: The tuning tables of that other group.

    Attributes:
        shape: The kind of group, by which it finds its tuning table.
    """

    name = "unisono"
    device = "cpu"

    def __init__(
        self,
        spec: GroupSpec,
        comm: Communicator | None = None,
        tables: dict[Shape, Table] | None = None,
    ) -> None:
        super().__init__(spec)
        options = CPUOptions() if spec.options is None else spec.options
        if not isinstance(options, CPUOptions):
            raise ArgumentTypeError(
                f"pg_options must be unisono.lowlevel.CPUOptions, got {options!r}"
            )
        if comm is None:
            tables = tuning.read_tables(spec.size)
            comm = _connect(spec, options, tuning.published(tables))
            self.world_number = comm.transport.world_number
        self._comm = comm
        self.trace = comm.trace
        self._engine: Engine = make_engine(comm, options.engine)
        self._engine.set_timeout(spec.timeout_s)
        self.calls = self._engine.calls
        self._engine.pending_type = Pending
        self._tables = tables or {}
        self.shape = tuning.shape_of(self._engine)
        self._table = tuning.agreed(self._tables, self.shape, comm)
        self._prepared_calls = PreparedCalls(comm, self._engine, self._table)
        self.port = p2p.Port(comm)
        if self.calls is not None:
            self.port.attach(self.calls)

    # ---- collectives ----------------------------------------------------------------------

    def broadcast(self, tensor: Any, root: int, options: CallOptions) -> Pending:
        data = one(tensor, write=self.spec.rank != root)
        spec = CallSpec("broadcast", "broadcast", data.count, root)
        return self._submit(spec, Operands(data, None, data, [tensor]), options)

    def all_reduce(self, tensor: Any, op: ReduceOp, options: CallOptions) -> Pending:
        data = one(tensor, write=True, private=op.op is RedOpType.PREMUL_SUM)
        spec = CallSpec("all_reduce", "all_reduce", data.count, op=op)
        return self._submit(spec, Operands(data, None, data, [tensor]), options)

    def all_reduce_coalesced(
        self, tensors: Sequence[Any], op: ReduceOp, options: CallOptions
    ) -> Pending:
        private = op.op is RedOpType.PREMUL_SUM
        data = many(tensors, write=True, name="tensors", private=private)
        called = "all_reduce_coalesced"
        spec = CallSpec("all_reduce", called, data.count, op=op, agreed=data.sizes)
        return self._submit(spec, Operands(data, None, data, tensors), options)

    def reduce(self, tensor: Any, root: int, op: ReduceOp, options: CallOptions) -> Pending:
        is_root = self.spec.rank == root
        private = op.op is RedOpType.PREMUL_SUM
        data = one(tensor, write=is_root, private=private)
        spec = CallSpec("reduce", "reduce", data.count, root, op)
        return self._submit(spec, Operands(data, None, data, [tensor]), options, result=is_root)

    def all_gather(self, outputs: Sequence[Any], tensor: Any, options: CallOptions) -> Pending:
        data = one(tensor, write=False)
        target = listed(outputs, write=True, name="tensor_list", like=data.dtype)
        blocks = require_blocks(target.sizes, self.spec.rank, data.count, "tensor_list")
        data = apart(data, target)
        spec = CallSpec("all_gather", "all_gather", data.count, splits=blocks)
        return self._submit(spec, Operands(data, data, target, outputs), options)

    def all_gather_into_tensor(self, output: Any, tensor: Any, options: CallOptions) -> Pending:
        data, target = self._pair(tensor, output, "output_tensor")
        blocks = self._blocks(target, data, options, "output_tensor", "input_tensor")
        spec = CallSpec("all_gather", "all_gather_into_tensor", data.count, splits=blocks)
        return self._submit(spec, Operands(data, data, target, [output]), options)

    def all_gather_coalesced(
        self, outputs: Sequence[Sequence[Any]], tensors: Sequence[Any], options: CallOptions
    ) -> Pending:
        data = many(tensors, write=False, name="input_tensor_list")
        flat = [t for row in outputs for t in row]
        target = many(flat, write=True, name="output_tensor_lists", like=data.dtype)
        if target.sizes != data.sizes * self.spec.size:
            raise InvalidArgumentError(
                f"output_tensor_lists hold {target.sizes} elements, expected {data.sizes} for "
                f"each of {self.spec.size} ranks"
            )
        spec = CallSpec("all_gather", "all_gather_coalesced", data.count, agreed=data.sizes)
        return self._submit(spec, Operands(data, apart(data, target), target, flat), options)

    def all_gather_into_tensor_coalesced(
        self, outputs: Sequence[Any], tensors: Sequence[Any], options: CallOptions
    ) -> Pending:
        data = many(tensors, write=False, name="inputs")
        target = striped(outputs, self.spec.size, write=True, name="outputs", like=data.dtype)
        require_stripes(self.spec.size, target, data, "outputs", "inputs")
        called = "all_gather_into_tensor_coalesced"
        spec = CallSpec("all_gather", called, data.count, agreed=data.sizes)
        return self._submit(spec, Operands(data, data, target, outputs), options)

    def gather(
        self, tensor: Any, outputs: Sequence[Any] | None, root: int, options: CallOptions
    ) -> Pending:
        data = one(tensor, write=False)
        target, blocks = self._all_blocks(data, outputs, root, write=True, name="gather_list")
        if target is not None:
            data = apart(data, target)
        spec = CallSpec("gather", "gather", data.count, root, splits=blocks)
        return self._submit(spec, Operands(data, data, target, outputs or []), options)

    def scatter(
        self, output: Any, inputs: Sequence[Any] | None, root: int, options: CallOptions
    ) -> Pending:
        target = one(output, write=True)
        data, blocks = self._all_blocks(target, inputs, root, write=False, name="scatter_list")
        if data is not None:
            data = apart(data, target)
        spec = CallSpec("scatter", "scatter", target.count, root, splits=blocks)
        return self._submit(spec, Operands(target, data, target, [output]), options)

    def reduce_scatter(
        self, output: Any, inputs: Sequence[Any], op: ReduceOp, options: CallOptions
    ) -> Pending:
        target = one(output, write=True)
        data = listed(inputs, write=False, name="input_list", like=target.dtype)
        if op.op is RedOpType.PREMUL_SUM:
            data.make_private()
        blocks = require_blocks(data.sizes, self.spec.rank, target.count, "input_list")
        data = apart(data, target)
        spec = CallSpec("reduce_scatter", "reduce_scatter", target.count, op=op, splits=blocks)
        return self._submit(spec, Operands(target, data, target, [output]), options)

    def reduce_scatter_tensor(
        self, output: Any, tensor: Any, op: ReduceOp, options: CallOptions
    ) -> Pending:
        data, target = self._pair(tensor, output, "output")
        blocks = self._blocks(data, target, options, "input", "output")
        if op.op is RedOpType.PREMUL_SUM:
            data.make_private()
        called = "reduce_scatter_tensor"
        spec = CallSpec("reduce_scatter", called, target.count, op=op, splits=blocks)
        return self._submit(spec, Operands(target, data, target, [output]), options)

    def reduce_scatter_tensor_coalesced(
        self, outputs: Sequence[Any], tensors: Sequence[Any], op: ReduceOp, options: CallOptions
    ) -> Pending:
        target = many(outputs, write=True, name="outputs")
        data = striped(tensors, self.spec.size, write=False, name="inputs", like=target.dtype)
        require_stripes(self.spec.size, data, target, "inputs", "outputs")
        called = "reduce_scatter_tensor_coalesced"
        spec = CallSpec("reduce_scatter", called, target.count, op=op, agreed=target.sizes)
        return self._submit(spec, Operands(target, data, target, outputs), options)

    def all_to_all(
        self, outputs: Sequence[Any], inputs: Sequence[Any], options: CallOptions
    ) -> Pending:
        data = listed(inputs, write=False, name="input_tensor_list")
        target = listed(outputs, write=True, name="output_tensor_list", like=data.dtype)
        data = apart(data, target)
        splits = Splits(data.sizes, target.sizes)
        return self._exchange("all_to_all", Operands(data, data, target, outputs), splits, options)

    def all_to_all_single(
        self,
        output: Any,
        tensor: Any,
        output_splits: Sequence[int] | None,
        input_splits: Sequence[int] | None,
        options: CallOptions,
    ) -> Pending:
        data, target = self._pair(tensor, output, "output")
        size = self.spec.size
        ins = split_sizes(data.shape or (), input_splits, size, "input")
        outs = split_sizes(target.shape or (), output_splits, size, "output")
        operands = Operands(data, data, target, [output])
        return self._exchange("all_to_all_single", operands, Splits(ins, outs), options)

    def neighbor_all_to_all(
        self, outputs: Sequence[Any], inputs: Sequence[Any], links: Links, options: CallOptions
    ) -> Pending:
        data = target = like = None
        if inputs:
            data = listed(inputs, write=False, name="inputs", places=links.linked[0])
            like = data.dtype
        if outputs:
            target = listed(outputs, write=True, name="outputs", like=like, places=links.linked[1])
        if data is not None and target is not None:
            data = apart(data, target)
        subject = data or target
        sent, received = (() if each is None else each.sizes for each in (data, target))
        code = 0 if subject is None else code_of(subject.dtype)
        called = "neighbor_all_to_all"
        sizes = Sizes(links, code, sent, received)
        spec = CallSpec(called, called, sum(sent), splits=sizes)
        return self._submit(spec, Operands(subject, data, target, outputs), options)

    def scan(self, tensor: Any, op: ReduceOp, options: CallOptions) -> Pending:
        return self._prefix("scan", tensor, op, options, self.spec.rank + 1)

    def exscan(self, tensor: Any, op: ReduceOp, options: CallOptions) -> Pending:
        return self._prefix("exscan", tensor, op, options, self.spec.rank)

    def barrier(self, options: CallOptions) -> Pending:
        return self._submit(CallSpec("barrier", "barrier", 0), Operands(None), options)

    # ---- point to point -------------------------------------------------------------------

    def send(self, tensor: Any, peer: int, tag: int, options: CallOptions) -> Pending:
        return p2p.send(self._comm, tensor, peer, tag, options)

    def recv(self, tensor: Any, peer: int, tag: int, options: CallOptions) -> Pending:
        return p2p.recv(self._comm, tensor, peer, tag, options)

    def recv_any_source(self, tensor: Any, tag: int, options: CallOptions) -> Pending:
        return p2p.recv(self._comm, tensor, None, tag, options)

    def recv_array(self, peer: int | None, tag: int, options: CallOptions) -> Pending:
        return p2p.recv_array(self._comm, peer, tag, options)

    def probe(self, peer: int | None, tag: int, options: CallOptions) -> Pending:
        return p2p.probe(self._comm, peer, tag, options)

    def agree(self, text: str, options: CallOptions) -> Pending:
        return agree(self._engine, text, options.deadline, inline=not options.async_op)

    def refuse(self, op: str, why: str, deadline: Deadline, *, wait: bool) -> None:
        if self.broken() is None:
            refuse(self._engine, op, why, deadline, wait=wait)

    # ---- life -----------------------------------------------------------------------------

    def split(self, spec: GroupSpec) -> CPUBackend:
        """Return the backend of a sub-group over the same links; sends nothing."""
        transport = self._comm.transport
        if spec.options is None:
            spec = replace(spec, options=self.spec.options)
        # The ranks of a transport are global ranks. A sub-group of a sub-group must use them, too.
        comm = Communicator(transport, spec.ranks, spec.name, spec.key)
        comm.mpi_ranks = self._comm.mpi_ranks
        part = CPUBackend(spec, comm, self._tables)
        transport.retain()
        return part

    def abort(self, reason: str, failed: bool = False) -> None:
        if self._comm.closed() is not None:
            # In the child of a fork only the parent may abort the group.
            return
        self._engine.abort(reason, failed)

    def adopt_failure(self, other: Any) -> None:
        transport = self._comm.transport
        if (known := transport.failure(other._comm.context)) is not None:
            self._engine.fail(known.found_by(transport.rank))

    def set_timeout(self, timeout_s: float) -> None:
        super().set_timeout(timeout_s)
        self._engine.set_timeout(timeout_s)

    def close(self) -> None:
        self._engine.close()

    def lost(self, rank: int) -> str | None:
        down = self._comm.transport.down(self._comm.ranks[rank])
        return None if down is None else down.reason

    def has_ended(self, rank: int) -> bool:
        return has_ended(self._comm.transport, self._comm.ranks[rank])

    def broken(self) -> str | None:
        failure = self._comm.transport.failure(self._comm.context)
        return None if failure is None else failure.reason

    def blamed(self) -> tuple[int, ...]:
        failure = self._comm.transport.failure(self._comm.context)
        if failure is None or failure.kind != "timeout":
            return ()
        return tuple(self._comm.ranks.index(each) for each in failure.peers)

    def runs_here(self) -> bool:
        return self._engine.runs_here()

    def last_number(self) -> int:
        return self._engine.last_number()

    def info(self) -> dict[str, str]:
        tuned = {} if self._table is None else {"tuning": self._table.digest}
        return self._engine.info() | {"transport": self._comm.transport.name} | tuned

    # ---- from a call to a task ----------------------------------------------------------------

    def _submit(
        self,
        spec: CallSpec,
        operands: Operands,
        options: CallOptions,
        *,
        result: bool = True,
        members: int | None = None,
    ) -> Pending:
        """Submit one collective.

        Args:
            spec: The call without its memory.
            operands: Its memory.
            options: How to run it.
            result: Whether this rank's output gets a result.
            members: Number of ranks that contribute to this rank's result, for AVG; None: all.
        """
        subject, input, output, outputs = operands
        op = spec.op
        self._require_usable(options.label or spec.called)
        dtype = NO_DTYPE if subject is None else subject.dtype
        if op is not None:
            require_reducible(dtype, op)
        prepared = self._prepared_calls.get(spec, subject, options)
        if not result and output is not None and prepared.writes_output:
            # Many schedules of reduce use the other ranks' tensors as scratch. torch permits
            # this; a private copy keeps the tensors unchanged.
            output.make_private()
        average = op is not None and op.op is RedOpType.AVG
        copies = [data for data in (input, output) if data is not None and not data.in_place]

        def finish() -> None:
            if result and output is not None:
                if average:
                    divide(output.array, dtype, members or self.spec.size)
                output.write_back()

        pending = Pending(outputs, runs_here=self._engine.runs_here)
        task = Task(
            prepared,
            input=None if input is None else input.memory,
            output=None if output is None else output.memory,
            deadline=options.deadline,
            begin=partial(_fill, copies, dtype, op) if copies else None,
            finish=finish if average or output in copies else None,
        )
        if options.prepare:
            # A thread that runs queued calls must not wait for one; `submit` raises the error.
            pending.prepared = None if self.runs_here() else self._engine.prepare(task)
            return pending
        self._engine.submit(task, pending, inline=not options.async_op)
        if not options.async_op:
            pending.wait_until(None)
        return pending

    def _prefix(
        self, name: str, tensor: Any, op: ReduceOp, options: CallOptions, members: int
    ) -> Pending:
        """Submit a reduction over the first `members` ranks."""
        data = one(tensor, write=True, private=op.op is RedOpType.PREMUL_SUM)
        spec = CallSpec(name, name, data.count, op=op)
        operands = Operands(data, None, data, [tensor])
        return self._submit(spec, operands, options, result=members > 0, members=members)

    def _blocks(
        self, whole: Flat, part: Flat, options: CallOptions, whole_name: str, part_name: str
    ) -> Blocks | None:
        """Return the sizes of the blocks of a tensor if they differ; check that they fit."""
        size, rows = self.spec.size, options.split_sizes
        if not rows:
            require_total(size, whole, part.count, whole_name, part_name)
            return None
        sizes = split_sizes(whole.shape or (), rows, size, whole_name)
        return require_blocks(sizes, self.spec.rank, part.count, whole_name)

    def _exchange(
        self, called: str, operands: Operands, splits: Splits, options: CallOptions
    ) -> Pending:
        """Submit an all_to_all. Sizes may differ by rank; then the ranks compare them."""
        sent, received = splits
        if self.spec.size == 1 and sent != received:
            raise InvalidArgumentError(
                f"{called}: this rank sends {sent[0]} elements to itself, which expects "
                f"{received[0]}"
            )
        count = sent[0] if splits.even else sum(sent) // self.spec.size
        return self._submit(CallSpec("all_to_all", called, count, splits=splits), operands, options)

    def _all_blocks(
        self, own: Flat, arrays: Sequence[Any] | None, root: int, *, write: bool, name: str
    ) -> tuple[Flat | None, Blocks]:
        """Return the arrays of all ranks (None except on the root), and the known sizes."""
        if self.spec.rank != root or arrays is None:
            return None, Blocks.own(own.count, self.spec.rank, self.spec.size)
        blocks = listed(arrays, write=write, name=name, like=own.dtype)
        require_blocks(blocks.sizes, self.spec.rank, own.count, name)
        return blocks, Blocks.listed(blocks.sizes)

    def _pair(self, tensor: Any, output: Any, output_name: str) -> tuple[Flat, Flat]:
        """Return input and output of a call, of one dtype; the input is copied if they overlap."""
        data = one(tensor, write=False, name="input")
        target = one(output, write=True, name=output_name)
        if data.dtype != target.dtype:
            raise InvalidArgumentError(
                f"{output_name} has dtype {target.dtype}, the input has {data.dtype}"
            )
        return apart(data, target), target

    def _require_usable(self, called: str) -> None:
        if (failure := self._comm.transport.failure(self._comm.context)) is not None:
            raise already_broken_error(failure, self._comm, called)
