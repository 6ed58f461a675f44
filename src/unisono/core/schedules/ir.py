"""The step language: a collective algorithm as rows of integers.

A schedule holds the steps of every rank in every round. In round `k` a rank executes its rows in
order. A row moves `nchunks` contiguous chunks of a buffer to or from one peer, or between two
buffers of the rank.

    SEND         send the current value to `peer`; never blocks
    RECV         dst = the next message from `peer`
    RECV_REDUCE  dst = dst (op) the next message from `peer`
    COPY         dst = src
    REDUCE       dst = dst (op) src
    POST         make the current value readable by `peer` (-1: by every other rank)
    READ         dst = the next post of `peer`
    READ_REDUCE  dst = dst (op) the next post of `peer`

`dst` is the first operand of a reduction. Only RECV_REDUCE takes the lower rank's value first, so
that two ranks that exchange and reduce compute the same expression.

Consecutive reductions of a rank into the same chunks are one *accumulation* (`sums_on`). If the op
adds, float16 and bfloat16 are added in float32, and rounded at its end.

Messages from one rank to another are matched first in, first out, and both ranks give the same
size. Each rank that a post is meant for reads it exactly once. An engine without shared memory may
therefore execute POST as SEND, READ as RECV and READ_REDUCE as RECV_REDUCE. A message is received
in the round in which it is sent, so `rounds` is the number of latencies on the critical path.
Within one round a rank sends before it receives, so no order of arrival deadlocks.
A message of 0 chunks moves nothing: its receiver does not go on before the sender has come there.

Buffers. INPUT is never written. A *vector* collective (all_reduce, broadcast, reduce, scan, exscan)
works in place on OUTPUT, cut into chunks of balanced size. In the others a buffer is one block or
`p` blocks, and block b is the chunks [b*m, (b+1)*m):

    all_gather, gather   INPUT 1 block   OUTPUT p blocks (gather: on the root only)
    reduce_scatter       INPUT p blocks  OUTPUT 1 block
    scatter              INPUT p blocks on the root only, OUTPUT 1 block
    all_to_all           INPUT p blocks  OUTPUT p blocks
    barrier              OUTPUT one chunk of size 0; its messages are sent, too

All functions here are vectorised over ranks. They take arrays of ranks, peers and chunks, broadcast
them, and return a row per element. The rows of 24,576 ranks thus cost one NumPy call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from typing import Any

import numpy as np

# Written out, because importing numpy.typing costs more than the rest of this package.
IntArray = np.ndarray[Any, np.dtype[np.int64]]
BoolArray = np.ndarray[Any, np.dtype[np.bool_]]
ExchangeRule = Callable[[int, IntArray], Iterable[IntArray]]
Local = Callable[[IntArray], Iterable[IntArray]]

VECTOR_COLLECTIVES = ("all_reduce", "broadcast", "reduce", "scan", "exscan")
BLOCK_COLLECTIVES = ("all_gather", "gather", "reduce_scatter", "scatter", "all_to_all")
COLLECTIVES = (*VECTOR_COLLECTIVES, *BLOCK_COLLECTIVES, "barrier")
REDUCING = frozenset({"all_reduce", "reduce", "reduce_scatter", "scan", "exscan"})
ROOTED = frozenset({"broadcast", "reduce", "gather", "scatter"})


_NO_ROWS: IntArray = np.empty((8, 0), np.int64).T


class Op(IntEnum):
    """The kind of a step; the module's docstring defines each."""

    SEND = 0
    RECV = 1
    RECV_REDUCE = 2
    COPY = 3
    REDUCE = 4
    POST = 5
    READ = 6
    READ_REDUCE = 7


REDUCE_OPS = (Op.RECV_REDUCE, Op.REDUCE, Op.READ_REDUCE)


class Buf(IntEnum):
    """A buffer of a rank, as a step names it."""

    INPUT = 0
    OUTPUT = 1
    SCRATCH = 2


def _nothing(ranks: IntArray) -> Iterable[IntArray]:
    return ()


@dataclass(frozen=True)
class Schedule:
    """A collective algorithm for one world size, as data.

    Attributes:
        collective: "all_reduce", "broadcast", ...; see `COLLECTIVES`.
        algorithm: The family's name, "ring", ...; see `registry`.
        world_size: Number of ranks that take part.
        rounds: Communication rounds: the number of message latencies on the critical path.
        exchange: `exchange(k, ranks)` returns the rows of communication round `k`, the sends first.
        root: The root's rank; -1 if the collective has none.
        input_chunks: Chunks of INPUT; 0 if the collective works in place.
        output_chunks: Chunks of OUTPUT.
        scratch_chunks: Chunks of SCRATCH. Chunk j is as large as chunk j mod N of the
            collective's N work chunks; see `layout`.
        uneven_ok: Whether the blocks may differ in size.
        before: Local steps before the first round.
        after: Local steps after the last round.
        accumulates: Whether it has accumulations.
    """

    collective: str
    algorithm: str
    world_size: int
    rounds: int
    exchange: ExchangeRule = field(repr=False)
    root: int = -1
    input_chunks: int = 0
    output_chunks: int = 1
    scratch_chunks: int = 0
    uneven_ok: bool = False
    before: Local = field(default=_nothing, repr=False)
    after: Local = field(default=_nothing, repr=False)
    accumulates: bool = True

    @property
    def stages(self) -> int:
        """Number of values of `k` that the method `steps` takes.

        A stage is a round. A world of one rank has no round, but one stage, of local steps.
        """
        return max(self.rounds, 1)

    @functools.cached_property
    def block_chunks(self) -> int:
        """Chunks per block, m. A vector collective's OUTPUT is one block."""
        if self.collective in ("reduce_scatter", "scatter"):
            return self.output_chunks
        if self.collective in ("all_to_all", "reshard"):
            return self.output_chunks // self.world_size
        return self.input_chunks or self.output_chunks

    @functools.cached_property
    def work_chunks(self) -> int:
        """Chunks N of the whole data: the vector's, or those of all p blocks."""
        return max(self.input_chunks, self.output_chunks)

    def steps(self, k: int, ranks: IntArray) -> IntArray:
        """Return the rows of stage `k` for `ranks`.

        Local steps are part of the first and of the last stage and are not counted as rounds.

        Returns:
            int64 [rows, 8]: (rank, op, peer, src_buf, src_chunk, dst_buf, dst_chunk, nchunks),
            unused fields -1, column by column in memory. The rows of one rank are in the order of
            execution.
        """
        blocks: list[IntArray] = [_NO_ROWS]
        if k == 0:
            blocks += self.before(ranks)
        if k < self.rounds:
            blocks += self.exchange(k, ranks)
        if k == self.stages - 1:
            blocks += self.after(ranks)
        return np.concatenate([block.T for block in blocks], axis=1).T


def make_rows(
    op: IntArray | int,
    ranks: IntArray,
    peer: IntArray | int,
    src: tuple[IntArray | int, IntArray | int],
    dst: tuple[IntArray | int, IntArray | int],
    n: IntArray | int,
    where: BoolArray | bool = True,
) -> IntArray:
    """Return rows of these columns, broadcast; `src` and `dst` are (buffer, chunk).

    A row for which `where` is false is left out.
    """
    columns: tuple[IntArray | int, ...] = (ranks, op, peer, *src, *dst, n)
    if where is not True:
        # Keep the active ranks only, before there are rows.
        shape = np.broadcast(*columns, where).shape
        at = np.nonzero(_spread(where, shape))
        if not at[0].size:
            return _NO_ROWS
        columns = tuple(
            [column if np.ndim(column) == 0 else _spread(column, shape)[at] for column in columns]
        )
    # Column by column in memory: rows one after another would take several times as long.
    rows = np.empty((8, *np.broadcast(*columns).shape), np.int64)
    for index, column in enumerate(columns):
        rows[index] = column
    return rows.reshape(8, -1).T


def _spread(column: Any, shape: tuple[int, ...]) -> IntArray:
    # broadcast_to takes longer than the rest of a row of one rank.
    return column if np.shape(column) == shape else np.broadcast_to(column, shape)


def _transfer(
    op: Op,
    ranks: IntArray,
    peer: IntArray | int,
    buf: Buf,
    chunk: IntArray | int,
    n: IntArray | int = 1,
    where: BoolArray | bool = True,
) -> IntArray:
    """Return rows in which each rank moves `n` chunks of its `buf`, beginning at `chunk`.

    A rank for which `where` is false gets no row.
    """
    place, none = (buf, chunk), (-1, -1)
    src, dst = (place, none) if op in (Op.SEND, Op.POST) else (none, place)
    return make_rows(op, ranks, peer, src, dst, n, where)


def send(
    ranks: IntArray,
    peer: IntArray | int,
    buf: Buf,
    chunk: IntArray | int,
    n: IntArray | int = 1,
    where: BoolArray | bool = True,
) -> IntArray:
    """Return rows in which each rank sends `n` chunks of its `buf`, from `chunk` on, to `peer`."""
    return _transfer(Op.SEND, ranks, peer, buf, chunk, n, where)


def recv(
    ranks: IntArray,
    peer: IntArray | int,
    buf: Buf,
    chunk: IntArray | int,
    n: IntArray | int = 1,
    where: BoolArray | bool = True,
) -> IntArray:
    """Return rows in which each rank stores the next message of `peer`; see `send`."""
    return _transfer(Op.RECV, ranks, peer, buf, chunk, n, where)


def recv_reduce(
    ranks: IntArray,
    peer: IntArray | int,
    buf: Buf,
    chunk: IntArray | int,
    n: IntArray | int = 1,
    where: BoolArray | bool = True,
) -> IntArray:
    """Return rows in which each rank reduces the next message of `peer` into its chunks."""
    return _transfer(Op.RECV_REDUCE, ranks, peer, buf, chunk, n, where)


post, read, read_reduce = (partial(_transfer, op) for op in (Op.POST, Op.READ, Op.READ_REDUCE))


def copy(
    ranks: IntArray,
    src: tuple[Buf, IntArray | int],
    dst: tuple[Buf, IntArray | int],
    n: IntArray | int = 1,
    where: BoolArray | bool = True,
) -> IntArray:
    """Return rows in which each rank copies `n` chunks from `src` = (buffer, chunk) to `dst`."""
    return make_rows(Op.COPY, ranks, -1, src, dst, n, where)


def reduce(
    ranks: IntArray,
    src: tuple[Buf, IntArray | int],
    dst: tuple[Buf, IntArray | int],
    n: IntArray | int = 1,
    where: BoolArray | bool = True,
) -> IntArray:
    """Return rows in which each rank reduces `n` chunks of `src` = (buffer, chunk) into `dst`."""
    return make_rows(Op.REDUCE, ranks, -1, src, dst, n, where)


def sums_on(schedule: Schedule, op: IntArray, target: IntArray) -> BoolArray:
    """Return which rows are reductions that the next row continues.

    Args:
        schedule: Of the rows; without accumulations no row is continued.
        op: [n] the ops of one rank, in the order of execution.
        target: [n, k] what names the destination of each row, its number of chunks last.
    """
    reduces = schedule.accumulates & np.isin(op, REDUCE_OPS) & (target[:, -1] > 0)
    goes_on = np.zeros(len(op), np.bool_)
    goes_on[:-1] = reduces[:-1] & reduces[1:] & (target[:-1] == target[1:]).all(axis=1)
    return goes_on


def is_power_of_two(n: int) -> bool:
    """Return whether `n` is 1, 2, 4, 8, ..."""
    return n > 0 and n & (n - 1) == 0


def ceil_log2(n: int) -> int:
    """Return the smallest k with 2**k >= n, for n >= 1."""
    return (n - 1).bit_length()
