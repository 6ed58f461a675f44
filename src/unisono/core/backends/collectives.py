"""From the arrays of a collective to its memory and its description; the same for every device.

A backend adds `_submit`, which moves the data, and `memory`, which makes flat memory of arrays. A
list of arrays stands for their concatenation, so a call has one input and one output only.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from unisono.core.backends import flat
from unisono.core.backends.api import CallOptions, DeviceBackend, Pending
from unisono.core.backends.blocks import (
    Blocks,
    Splits,
    require_blocks,
    require_stripes,
    require_total,
    split_sizes,
)
from unisono.core.backends.flat import FlatMemory
from unisono.core.backends.neighbors import MessageSizes, NeighborMessages
from unisono.core.backends.prepared_calls import CallSpec
from unisono.core.base.types import RedOpType, ReduceOp, code_of
from unisono.errors import InvalidArgumentError


class ArrayBackend(DeviceBackend):
    """The collectives of a backend whose `_submit` moves flat memory.

    Attributes:
        memory: The functions that make flat memory of arrays: the module `backends.flat`, or an
            object with the same functions.
    """

    memory: Any = flat

    @abstractmethod
    def _submit(
        self,
        spec: CallSpec,
        subject: FlatMemory | None,
        input: FlatMemory | None,
        output: FlatMemory | None,
        results: Sequence[Any],
        options: CallOptions,
    ) -> Pending:
        """Submit one collective.

        Args:
            spec: The call without its memory.
            subject: The array that describes the call in an error.
            input: INPUT of the program.
            output: OUTPUT of the program.
            results: The arrays that the caller gets as result.
            options: How to run it.
        """

    # ---- collectives ----------------------------------------------------------------------

    def broadcast(self, tensor: Any, root: int, options: CallOptions) -> Pending:
        is_root = self.spec.rank == root
        data = self.memory.one(tensor, write=not is_root)
        spec = CallSpec("broadcast", "broadcast", data.count, root, members=0 if is_root else None)
        return self._submit(spec, data, None, data, [tensor], options)

    def all_reduce(self, tensor: Any, op: ReduceOp, options: CallOptions) -> Pending:
        data = self.memory.one(tensor, write=True, private=op.op is RedOpType.PREMUL_SUM)
        spec = CallSpec("all_reduce", "all_reduce", data.count, op=op)
        return self._submit(spec, data, None, data, [tensor], options)

    def all_reduce_coalesced(
        self, tensors: Sequence[Any], op: ReduceOp, options: CallOptions
    ) -> Pending:
        private = op.op is RedOpType.PREMUL_SUM
        data = self.memory.many(tensors, write=True, name="tensors", private=private, repeats=True)
        called = "all_reduce_coalesced"
        spec = CallSpec("all_reduce", called, data.count, op=op, agreed=data.sizes)
        return self._submit(spec, data, None, data, tensors, options)

    def reduce(self, tensor: Any, root: int, op: ReduceOp, options: CallOptions) -> Pending:
        is_root = self.spec.rank == root
        private = op.op is RedOpType.PREMUL_SUM
        data = self.memory.one(tensor, write=is_root, private=private)
        members = None if is_root else 0
        spec = CallSpec("reduce", "reduce", data.count, root, op, members=members)
        return self._submit(spec, data, None, data, [tensor], options)

    def all_gather(self, outputs: Sequence[Any], tensor: Any, options: CallOptions) -> Pending:
        data = self.memory.one(tensor, write=False)
        target = self.memory.listed(outputs, write=True, name="tensor_list", like=data.dtype)
        blocks = require_blocks(target.sizes, self.spec.rank, data.count, "tensor_list")
        data = self.memory.apart(data, target)
        spec = CallSpec("all_gather", "all_gather", data.count, splits=blocks)
        return self._submit(spec, data, data, target, outputs, options)

    def all_gather_into_tensor(self, output: Any, tensor: Any, options: CallOptions) -> Pending:
        data, target = self._pair(tensor, output, "output_tensor")
        blocks = self._blocks(target, data, options, "output_tensor", "input_tensor")
        spec = CallSpec("all_gather", "all_gather_into_tensor", data.count, splits=blocks)
        return self._submit(spec, data, data, target, [output], options)

    def all_gather_coalesced(
        self, outputs: Sequence[Sequence[Any]], tensors: Sequence[Any], options: CallOptions
    ) -> Pending:
        data = self.memory.many(tensors, write=False, name="input_tensor_list")
        flat = [t for row in outputs for t in row]
        target = self.memory.many(flat, write=True, name="output_tensor_lists", like=data.dtype)
        if target.sizes != data.sizes * self.spec.size:
            raise InvalidArgumentError(
                f"output_tensor_lists hold {target.sizes} elements, expected {data.sizes} for "
                f"each of {self.spec.size} ranks"
            )
        spec = CallSpec("all_gather", "all_gather_coalesced", data.count, agreed=data.sizes)
        given = self.memory.apart(data, target)
        return self._submit(spec, data, given, target, flat, options)

    def all_gather_into_tensor_coalesced(
        self, outputs: Sequence[Any], tensors: Sequence[Any], options: CallOptions
    ) -> Pending:
        data = self.memory.many(tensors, write=False, name="inputs")
        target = self.memory.striped(
            outputs, self.spec.size, write=True, name="outputs", like=data.dtype
        )
        require_stripes(self.spec.size, target, data, "outputs", "inputs")
        called = "all_gather_into_tensor_coalesced"
        spec = CallSpec("all_gather", called, data.count, agreed=data.sizes)
        return self._submit(spec, data, data, target, outputs, options)

    def gather(
        self, tensor: Any, outputs: Sequence[Any] | None, root: int, options: CallOptions
    ) -> Pending:
        data = self.memory.one(tensor, write=False)
        target, blocks = self._all_blocks(data, outputs, root, write=True, name="gather_list")
        if target is not None:
            data = self.memory.apart(data, target)
        spec = CallSpec("gather", "gather", data.count, root, splits=blocks)
        return self._submit(spec, data, data, target, outputs or [], options)

    def scatter(
        self, output: Any, inputs: Sequence[Any] | None, root: int, options: CallOptions
    ) -> Pending:
        target = self.memory.one(output, write=True)
        data, blocks = self._all_blocks(target, inputs, root, write=False, name="scatter_list")
        if data is not None:
            data = self.memory.apart(data, target)
        spec = CallSpec("scatter", "scatter", target.count, root, splits=blocks)
        return self._submit(spec, target, data, target, [output], options)

    def reduce_scatter(
        self, output: Any, inputs: Sequence[Any], op: ReduceOp, options: CallOptions
    ) -> Pending:
        target = self.memory.one(output, write=True)
        data = self.memory.listed(inputs, write=False, name="input_list", like=target.dtype)
        if op.op is RedOpType.PREMUL_SUM:
            data.make_private()
        blocks = require_blocks(data.sizes, self.spec.rank, target.count, "input_list")
        data = self.memory.apart(data, target)
        spec = CallSpec("reduce_scatter", "reduce_scatter", target.count, op=op, splits=blocks)
        return self._submit(spec, target, data, target, [output], options)

    def reduce_scatter_tensor(
        self, output: Any, tensor: Any, op: ReduceOp, options: CallOptions
    ) -> Pending:
        data, target = self._pair(tensor, output, "output")
        blocks = self._blocks(data, target, options, "input", "output")
        if op.op is RedOpType.PREMUL_SUM:
            data.make_private()
        called = "reduce_scatter_tensor"
        spec = CallSpec("reduce_scatter", called, target.count, op=op, splits=blocks)
        return self._submit(spec, target, data, target, [output], options)

    def reduce_scatter_tensor_coalesced(
        self, outputs: Sequence[Any], tensors: Sequence[Any], op: ReduceOp, options: CallOptions
    ) -> Pending:
        target = self.memory.many(outputs, write=True, name="outputs")
        data = self.memory.striped(
            tensors, self.spec.size, write=False, name="inputs", like=target.dtype
        )
        require_stripes(self.spec.size, data, target, "inputs", "outputs")
        called = "reduce_scatter_tensor_coalesced"
        spec = CallSpec("reduce_scatter", called, target.count, op=op, agreed=target.sizes)
        return self._submit(spec, target, data, target, outputs, options)

    def all_to_all(
        self, outputs: Sequence[Any], inputs: Sequence[Any], options: CallOptions
    ) -> Pending:
        data = self.memory.listed(inputs, write=False, name="input_tensor_list")
        target = self.memory.listed(outputs, write=True, name="output_tensor_list", like=data.dtype)
        data = self.memory.apart(data, target)
        splits = Splits(data.sizes, target.sizes)
        return self._exchange("all_to_all", data, target, outputs, splits, options)

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
        splits = Splits(ins, outs)
        return self._exchange("all_to_all_single", data, target, [output], splits, options)

    def neighbor_all_to_all(
        self,
        outputs: Sequence[Any],
        inputs: Sequence[Any],
        links: NeighborMessages,
        options: CallOptions,
    ) -> Pending:
        data = target = like = None
        if inputs:
            data = self.memory.listed(inputs, write=False, name="inputs", places=links.linked[0])
            like = data.dtype
        if outputs:
            target = self.memory.listed(
                outputs, write=True, name="outputs", like=like, places=links.linked[1]
            )
        if data is not None and target is not None:
            data = self.memory.apart(data, target)
        subject = data or target
        sent, received = (() if each is None else each.sizes for each in (data, target))
        code = 0 if subject is None else code_of(subject.dtype)
        called = "neighbor_all_to_all"
        sizes = MessageSizes(links, code, sent, received)
        spec = CallSpec(called, called, sum(sent), splits=sizes)
        return self._submit(spec, subject, data, target, outputs, options)

    def scan(self, tensor: Any, op: ReduceOp, options: CallOptions) -> Pending:
        return self._prefix("scan", tensor, op, options, self.spec.rank + 1)

    def exscan(self, tensor: Any, op: ReduceOp, options: CallOptions) -> Pending:
        return self._prefix("exscan", tensor, op, options, self.spec.rank)

    # ---- parts of the above ------------------------------------------------------------------

    def _prefix(
        self, name: str, tensor: Any, op: ReduceOp, options: CallOptions, members: int
    ) -> Pending:
        """Submit a reduction over the first `members` ranks."""
        data = self.memory.one(tensor, write=True, private=op.op is RedOpType.PREMUL_SUM)
        spec = CallSpec(name, name, data.count, op=op, members=members)
        return self._submit(spec, data, None, data, [tensor], options)

    def _blocks(
        self,
        whole: FlatMemory,
        part: FlatMemory,
        options: CallOptions,
        whole_name: str,
        part_name: str,
    ) -> Blocks | None:
        """Return the sizes of the blocks of a tensor if they differ; check that they fit."""
        size, rows = self.spec.size, options.split_sizes
        if not rows:
            require_total(size, whole, part.count, whole_name, part_name)
            return None
        sizes = split_sizes(whole.shape or (), rows, size, whole_name)
        return require_blocks(sizes, self.spec.rank, part.count, whole_name)

    def _exchange(
        self,
        called: str,
        data: FlatMemory,
        target: FlatMemory,
        outputs: Sequence[Any],
        splits: Splits,
        options: CallOptions,
    ) -> Pending:
        """Submit an all_to_all. Sizes may differ by rank; then the ranks compare them."""
        sent, received = splits
        if self.spec.size == 1 and sent != received:
            raise InvalidArgumentError(
                f"{called}: this rank sends {sent[0]} elements to itself, which expects "
                f"{received[0]}"
            )
        count = sent[0] if splits.even else sum(sent) // self.spec.size
        spec = CallSpec("all_to_all", called, count, splits=splits)
        return self._submit(spec, data, data, target, outputs, options)

    def _all_blocks(
        self, own: FlatMemory, arrays: Sequence[Any] | None, root: int, *, write: bool, name: str
    ) -> tuple[FlatMemory | None, Blocks]:
        """Return the arrays of all ranks (None except on the root), and the known sizes."""
        if self.spec.rank != root or arrays is None:
            return None, Blocks.own(own.count, self.spec.rank, self.spec.size)
        blocks = self.memory.listed(arrays, write=write, name=name, like=own.dtype)
        require_blocks(blocks.sizes, self.spec.rank, own.count, name)
        return blocks, Blocks.listed(blocks.sizes)

    def _pair(self, tensor: Any, output: Any, output_name: str) -> tuple[FlatMemory, FlatMemory]:
        """Return input and output of a call, of one dtype; the input is copied if they overlap."""
        data = self.memory.one(tensor, write=False, name="input")
        target = self.memory.one(output, write=True, name=output_name)
        if data.dtype != target.dtype:
            raise InvalidArgumentError(
                f"{output_name} has dtype {target.dtype}, the input has {data.dtype}"
            )
        return self.memory.apart(data, target), target
