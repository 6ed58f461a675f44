"""One collective as calls of NCCL on addresses.

NCCL has all_reduce, broadcast, reduce, all_gather and reduce_scatter of equal blocks. All else is
made of sends and receives in one launch. Reductions that NCCL lacks (bitwise, 16-bit integers,
complex products, scans) move the contributions, and the array library reduces them in rank order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from unisono.adapters.nccl.arrays import ArrayLibrary
from unisono.adapters.nccl.flat import Piece
from unisono.adapters.nccl.gpu import GPU
from unisono.adapters.nccl.library import BYTES, DTYPES, Libraries, reduction_of
from unisono.adapters.nccl.link import NCCLLink
from unisono.core.backends.blocks import Blocks, Splits
from unisono.core.backends.neighbors import MessageSizes
from unisono.core.backends.prepared_calls import CallSpec
from unisono.core.base.types import DType, RedOpType, ReduceOp, require_reducible
from unisono.errors import UnsupportedError

_ARITHMETIC = (RedOpType.SUM, RedOpType.AVG, RedOpType.PRODUCT, RedOpType.MIN, RedOpType.MAX)
_SCANS = ("scan", "exscan")

SentPiece = tuple[Piece, int]


class CallMemory(NamedTuple):
    """The addresses of one call.

    Attributes:
        dtype: Of all elements.
        source: The input; empty without one.
        target: The output; empty without one.
        library: For reductions that NCCL lacks.
        check: For `NCCLLink.settle`.
    """

    dtype: DType
    source: list[Piece]
    target: list[Piece]
    library: ArrayLibrary
    check: Callable[[], object]


def require_reducible_on(dtype: DType, op: ReduceOp, collective: str, gpu: GPU) -> None:
    """Check that NCCL, or the array library, has a reduction.

    Raises:
        UnsupportedError: It has not. A float8 needs compute capability 9.0.
    """
    by_nccl = op.op in _ARITHMETIC and collective not in _SCANS
    if dtype.kind != "x" or dtype.name not in DTYPES or not by_nccl:
        require_reducible(dtype, op)
    elif not gpu.has_float8:
        raise UnsupportedError(
            f"reduce op {op.name} on {dtype} needs a GPU of compute capability 9.0 or newer"
        )


def cut(pieces: Sequence[Piece], sizes: Sequence[int], itemsize: int) -> list[Piece]:
    """Return memory as blocks of these sizes; one piece is cut, a list is in blocks already."""
    if len(pieces) == len(sizes):
        return list(pieces)
    (address, _), made = pieces[0], []
    for size in sizes:
        made.append(Piece(address, size))
        address += size * itemsize
    return made


class Kernels:
    """The calls of one communicator.

    Args:
        libraries: NCCL.
        link: The communicator; also an attribute.
        rank: This rank in the group.
        size: Number of ranks.
    """

    def __init__(self, libraries: Libraries, link: NCCLLink, rank: int, size: int) -> None:
        self._nccl = libraries.nccl
        self._calls = libraries.calls
        self.link = link
        self._rank = rank
        self._size = size

    @property
    def _where(self) -> tuple[Any, int]:
        """The last arguments of every call."""
        return self.link.handle, int(self.link.stream.handle)

    @contextmanager
    def launch(self) -> Iterator[None]:
        """Make the calls of the block one launch."""
        with self.link.held():
            self._nccl.group_start()
            try:
                yield
            finally:
                self._nccl.group_end()

    def run(self, spec: CallSpec, memory: CallMemory) -> list[Any]:
        """Enqueue a collective; return what must stay alive until its end."""
        op = spec.op
        if op is None:
            self._move(spec, memory)
            return []
        comm = self.link.intra_node
        if comm is not None and spec.collective == "all_reduce" and len(memory.target) == 1:
            address, count = memory.target[0]
            if algorithm := comm.algorithm(memory.dtype, op, count):
                with self.link.held():
                    comm.all_reduce(algorithm, memory.dtype, address, count)
                return []
        reduction = reduction_of(memory.dtype, op)
        if reduction is None or spec.collective in _SCANS:
            return self._reduce_here(spec, memory)
        dtype, width = reduction.dtype, reduction.width
        number = self.link.op_of(reduction, memory.dtype, op.factor)
        blocks = self._blocks(spec, memory)
        with self.launch():
            if spec.collective == "reduce_scatter" and blocks is not None:
                for root, (address, count) in enumerate(blocks):
                    to = memory.target[0].address if root == self._rank else address
                    if count:
                        self._calls.reduce(
                            address, to, count * width, dtype, number, root, *self._where
                        )
                return []
            for i, (address, count) in enumerate(memory.target):
                if not count:
                    continue
                how = (count * width, dtype, number)
                if spec.collective == "all_reduce":
                    self._calls.all_reduce(address, address, *how, *self._where)
                elif spec.collective == "reduce":
                    self._calls.reduce(address, address, *how, spec.root, *self._where)
                else:
                    source = memory.source[i].address
                    self._calls.reduce_scatter(source, address, *how, *self._where)
        return []

    def _blocks(self, spec: CallSpec, memory: CallMemory) -> list[Piece] | None:
        """Return the blocks of a reduce_scatter that are a list, or that differ in size."""
        if spec.collective != "reduce_scatter":
            return None
        sizes = spec.splits.sizes if isinstance(spec.splits, Blocks) else None
        if sizes is None and len(memory.source) == len(memory.target):
            return None
        even = (memory.target[0].elements,) * self._size
        return cut(memory.source, sizes or even, memory.dtype.itemsize)

    def _move(self, spec: CallSpec, memory: CallMemory) -> None:
        """Enqueue a collective without a reduction."""
        itemsize = memory.dtype.itemsize
        source, target = memory.source, memory.target
        listed = isinstance(spec.splits, Blocks) or len(target) != len(source)
        if spec.collective == "broadcast":
            with self.launch():
                for address, count in target:
                    if count:
                        self._calls.broadcast(
                            address, address, count * itemsize, BYTES, spec.root, *self._where
                        )
        elif spec.collective == "all_gather" and not listed:
            with self.launch():
                for (address, count), whole in zip(source, target, strict=True):
                    if count:
                        self._calls.all_gather(
                            address, whole.address, count * itemsize, BYTES, *self._where
                        )
        else:
            sends, receives = self._messages(spec, memory)
            self.exchange(sends, receives, itemsize)

    def _messages(
        self, spec: CallSpec, memory: CallMemory
    ) -> tuple[list[SentPiece], list[SentPiece]]:
        """Return the messages of a call that has no call of NCCL."""
        source, target, splits = memory.source, memory.target, spec.splits
        itemsize, ranks = memory.dtype.itemsize, range(self._size)
        is_root = self._rank == spec.root
        if isinstance(splits, MessageSizes):
            sent, taken = splits.links.sent_by(self._rank), splits.links.received_by(self._rank)
            # All messages in the order of the table, on both sides.
            rows = {(*row[:4],): row for row in splits.links.table.tolist()}
            order = {key: at for at, key in enumerate(rows)}
            return (
                _ordered(source, sent.tolist(), 2, order),
                _ordered(target, taken.tolist(), 0, order),
            )
        if isinstance(splits, Splits):
            given = cut(source, splits.sent, itemsize)
            room = cut(target, splits.received, itemsize)
            return list(zip(given, ranks, strict=True)), list(zip(room, ranks, strict=True))
        if spec.collective == "gather":
            receives = list(zip(target, ranks, strict=True)) if is_root else []
            return [(source[0], spec.root)], receives
        if spec.collective == "scatter":
            sends = list(zip(source, ranks, strict=True)) if is_root else []
            return sends, [(target[0], spec.root)]
        # all_gather into a list, of uneven blocks, or of several arrays
        if len(target) == 1:
            assert isinstance(splits, Blocks)
            target = cut(target, splits.sizes, itemsize)
        each = len(target) // self._size
        sends = [(piece, rank) for rank in ranks for piece in source]
        return sends, [(piece, at // each) for at, piece in enumerate(target)]

    def exchange(
        self, sends: Iterable[SentPiece], receives: Iterable[SentPiece], itemsize: int
    ) -> None:
        """Enqueue messages as one launch; messages from a rank to itself are copies."""
        me, gpu, stream = self._rank, self.link.gpu, self.link.stream
        sends, receives = list(sends), list(receives)
        mine = [piece for piece, peer in sends if peer == me]
        for piece, into in zip(mine, (p for p, peer in receives if peer == me), strict=True):
            gpu.copy(into.address, piece.address, piece.elements * itemsize, stream)
        with self.launch():
            for call, messages in ((self._calls.send, sends), (self._calls.recv, receives)):
                for (address, count), peer in messages:
                    if count and peer != me:
                        call(address, count * itemsize, BYTES, peer, *self._where)

    # ---- reductions that NCCL lacks -------------------------------------------------------

    def _needs(self, spec: CallSpec, rank: int) -> range:
        """Return the ranks that contribute to the result of a rank."""
        everyone = range(self._size)
        match spec.collective:
            case "reduce":
                return everyone if rank == spec.root else range(0)
            case "scan":
                return range(rank + 1)
            case "exscan":
                return range(rank)
        return everyone

    def _reduce_here(self, spec: CallSpec, memory: CallMemory) -> list[Any]:
        """Gather the contributions, and reduce them in rank order; return the memory used."""
        assert spec.op is not None
        dtype, library, op = memory.dtype, memory.library, spec.op
        gpu, stream, itemsize = self.link.gpu, self.link.stream, memory.dtype.itemsize
        kept: list[Any] = []

        def room(count: int) -> Piece:
            kept.append(gpu.allocate(max(1, count) * itemsize, stream))
            return Piece(int(kept[-1].handle), count)

        source = memory.source or memory.target
        if op.factor is not None:
            scaled = [room(piece.elements) for piece in source]
            for piece, copy in zip(source, scaled, strict=True):
                gpu.copy(copy.address, piece.address, piece.elements * itemsize, stream)
                if copy.elements:
                    library.scale(library.at(*copy, dtype, gpu.index), op.factor)
            source = scaled
        for target, blocks in self._by_result(spec, memory, source):
            needed = self._needs(spec, self._rank)
            rows = [room(target.elements) for _ in needed]
            sends = [
                (blocks[rank], rank)
                for rank in range(self._size)
                if self._rank in self._needs(spec, rank)
            ]
            self.exchange(sends, zip(rows, needed, strict=True), itemsize)
            self.link.settle(memory.check)
            if not needed or not target.elements:
                continue
            total = library.at(*rows[0], dtype, gpu.index)
            for row in rows[1:]:
                library.reduce(op.op, total, library.at(*row, dtype, gpu.index))
            if op.op is RedOpType.AVG:
                library.divide(total, spec.members or self._size)
            gpu.copy(target.address, rows[0].address, target.elements * itemsize, stream)
        return kept

    def _by_result(
        self, spec: CallSpec, memory: CallMemory, source: list[Piece]
    ) -> Iterator[tuple[Piece, list[Piece]]]:
        """Yield each array of the result, with the part of the source for each rank."""
        itemsize = memory.dtype.itemsize
        if spec.collective != "reduce_scatter":
            for target, piece in zip(memory.target, source, strict=True):
                yield target, [piece] * self._size
        elif len(source) == len(memory.target):
            sizes = spec.splits.sizes if isinstance(spec.splits, Blocks) else None
            for target, whole in zip(memory.target, source, strict=True):
                yield target, cut([whole], sizes or [target.elements] * self._size, itemsize)
        else:
            yield memory.target[0], source


def _ordered(
    pieces: list[Piece], rows: list[list[int]], peer: int, order: dict[Any, int]
) -> list[SentPiece]:
    """Return the messages of rows in the order of the whole table; `peer`: the peer's column."""
    made = [(order[(*row[:4],)], piece, row[peer]) for piece, row in zip(pieces, rows, strict=True)]
    return [(piece, rank) for _, piece, rank in sorted(made)]
