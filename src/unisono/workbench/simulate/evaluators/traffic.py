"""One reading of a schedule for all evaluators: messages and local work, stage by stage, in bytes.

A row is one of three things that a rank does: it sends a message, receives a message, or works on
its own data. Rows come for any subset of ranks, from `Schedule.steps`. The programs of all ranks
are never lowered, because 24,576 of them would not fit in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from unisono.core.schedules.ir import (
    VECTOR_COLLECTIVES,
    BoolArray,
    Buf,
    IntArray,
    Op,
    Schedule,
)
from unisono.core.schedules.lowering.layout import buffer_bounds, layout_for
from unisono.errors import InvalidArgumentError

SEND, RECV, WORK = 0, 1, 2

# Sums of more bytes, and their times, have more than 64 bits.
MOST_BYTES = 1 << 50

# Bytes, below DEFAULT_MMAP_THRESHOLD_MAX of glibc, which is 32 MiB.
_LARGEST_MAP = 31 << 20

# Steps that are read at once: 256 MB. Fewer ranks never have so many.
_STEPS, _MANY_RANKS = 1 << 22, 2048

# Per `Op`: the kind of its row.
_KIND = np.array([SEND, RECV, RECV, WORK, WORK, SEND, RECV, RECV])
_REDUCES = np.array([op in (Op.RECV_REDUCE, Op.REDUCE, Op.READ_REDUCE) for op in Op])


class TrafficRows(NamedTuple):
    """Rows of some ranks; the rows of one rank are in the order of execution.

    Attributes:
        rank: int64 [n].
        kind: SEND, RECV or WORK [n].
        peer: The other rank of a message [n]; -1 for WORK.
        nbytes: Bytes that the row moves [n].
        reduces: Whether the rank reduces these bytes [n], if it does not store them.
        stage: The row's stage [n].
    """

    rank: IntArray
    kind: IntArray
    peer: IntArray
    nbytes: IntArray
    reduces: BoolArray
    stage: IntArray

    def take(self, index: IntArray | BoolArray | slice) -> TrafficRows:
        """Return the rows at some indices."""
        return TrafficRows._make(column[index] for column in self)


@dataclass(frozen=True, eq=False)
class Traffic:
    """The rows of a schedule for data of one size.

    A post to all ranks is p-1 messages. Rows without bytes are left out, as `lower` does, except
    in a barrier.

    Attributes:
        schedule: The algorithm.
        nbytes: Size of the whole data: the vector, or all p blocks.
        itemsize: Bytes per element; chunks are whole elements.
        padded: Give each chunk the size of the largest chunk, one element at least. NCCL sends
            all messages of its ring, whatever the size of the data is.
        work: Whether local copies and reductions have rows.
        message_bytes: Bytes of each message of a barrier.
    """

    schedule: Schedule
    nbytes: int
    itemsize: int = 1
    padded: bool = False
    work: bool = True
    message_bytes: int = 0

    def __post_init__(self) -> None:
        """Compute the bounds of all chunks in bytes.

        Raises:
            InvalidArgumentError: A size is negative or too large.
        """
        schedule = self.schedule
        if not 0 <= self.nbytes <= MOST_BYTES or self.itemsize < 1:
            raise InvalidArgumentError(
                f"simulate {schedule.collective}: {self.nbytes} bytes of elements of "
                f"{self.itemsize} bytes, expected 0 or more of 1 or more, and at most {MOST_BYTES}"
            )
        count = self.nbytes // self.itemsize
        if self.padded:
            count = max(1, -(-count // schedule.work_chunks)) * schedule.work_chunks
        if schedule.collective not in VECTOR_COLLECTIVES:
            count //= schedule.world_size
        bounds = buffer_bounds(schedule, 0, layout_for(schedule, count))
        *bases, _ = np.cumsum([0, *(len(bounds[buf]) for buf in Buf)])
        ends = np.concatenate([bounds[buf] for buf in Buf]) * self.itemsize
        sizes = np.concatenate([np.diff(bounds[buf]) for buf in Buf])
        chunk = int(sizes[0]) * self.itemsize if (sizes == sizes[0]).all() else 0
        object.__setattr__(self, "_bases", np.array(bases))
        object.__setattr__(self, "_ends", ends)
        object.__setattr__(self, "_chunk", chunk)
        # glibc gives freed arrays back to the system, and new arrays then cost page faults, most
        # of the time of a simulation. When the largest array that it maps is freed, it raises its
        # limits. The memory of this array is never touched.
        np.empty(_LARGEST_MAP, np.uint8)

    _bases: IntArray = None  # type: ignore[assignment]
    _ends: IntArray = None  # type: ignore[assignment]
    # Bytes of each chunk, if all chunks have the same.
    _chunk: int = 0

    @property
    def stages(self) -> int:
        """Number of stages."""
        return self.schedule.stages

    def rows(self, first: int, ranks: Sequence[IntArray]) -> TrafficRows:
        """Return the rows of the stages from `first` on: of `ranks[i]` in stage `first` + i."""
        if len(ranks) == 1 and (pieces := self._pieces(first, ranks[0])) > 1:
            few = np.array_split(ranks[0], pieces)
            return _appended([self.rows(first, [some]) for some in few])
        blocks = [self.schedule.steps(k, chosen) for k, chosen in enumerate(ranks, first)]
        steps = blocks[0] if len(blocks) == 1 else np.concatenate(blocks)
        stage = np.repeat(np.arange(first, first + len(ranks)), [len(block) for block in blocks])
        return self._read(np.ascontiguousarray(steps.T), stage)

    def _pieces(self, k: int, ranks: IntArray) -> int:
        """Return in how many pieces steps are read: most may have no bytes, and fill the memory."""
        if len(ranks) <= _MANY_RANKS:
            return 1
        return 1 + len(ranks) * len(self.schedule.steps(k, ranks[-1:])) // _STEPS

    def count(self, k: int) -> int:
        """Return about how many rows a stage has on all ranks, from the rows of 8 ranks."""
        p = self.schedule.world_size
        ranks: IntArray = np.unique(np.linspace(0, p - 1, min(p, 8)).astype(np.int64))
        counts: list[int] = np.bincount(self.rows(k, [ranks]).rank, minlength=p)[ranks].tolist()
        *others, most = sorted(counts)
        # One rank, the root, may have more rows than all others.
        return most + (p - 1) * sum(others) // max(len(others), 1)

    def _read(self, steps: IntArray, stage: IntArray) -> TrafficRows:
        """Return the columns of `Schedule.steps` as messages and work in bytes."""
        rank, op, peer, src_buf, src, dst_buf, dst, count = steps
        # `take` is faster than an index.
        kind = _KIND.take(op)
        if self._chunk:
            nbytes = count * self._chunk
        else:
            named = kind != RECV
            first = self._bases[np.where(named, src_buf, dst_buf)] + np.where(named, src, dst)
            nbytes = self._ends[first + count] - self._ends[first]
        barrier = self.schedule.collective == "barrier"
        if barrier:
            nbytes = np.full_like(nbytes, self.message_bytes)
        rows = TrafficRows(rank, kind, peer, nbytes, _REDUCES.take(op), stage)
        keep = (nbytes > 0) | (count == 0) | barrier
        if not self.work:
            keep &= kind != WORK
        if not keep.all():
            rows = rows.take(keep)
        to_all = (rows.kind == SEND) & (rows.peer < 0)
        return self._spread(rows, to_all) if to_all.any() else rows

    def _spread(self, rows: TrafficRows, to_all: BoolArray) -> TrafficRows:
        """Return the rows with each post to all ranks as p-1 messages, to the next rank first."""
        p = self.schedule.world_size
        blocks, done = [], 0
        for at in np.flatnonzero(to_all).tolist():
            post = TrafficRows._make(np.broadcast_to(column[at], p - 1) for column in rows)
            peer = post.rank + np.arange(1, p)
            # Without a division, which takes several times as long.
            post = post._replace(peer=np.where(peer < p, peer, peer - p))
            blocks += [rows.take(slice(done, at)), post]
            done = at + 1
        blocks.append(rows.take(slice(done, None)))
        return TrafficRows._make(np.concatenate(columns) for columns in zip(*blocks, strict=True))

    def all_rows(self) -> TrafficRows:
        """Return the rows of all stages and ranks, rank by rank; for small worlds."""
        everyone = np.arange(self.schedule.world_size)
        if len(everyone) <= _MANY_RANKS:
            return joined([self.rows(0, [everyone] * self.stages)])
        return joined([self.rows(k, [everyone]) for k in range(self.stages)])


def sum_of(nbytes: IntArray) -> int:
    """Return a sum that may have more than 64 bits."""
    high, low = nbytes >> 32, nbytes & 0xFFFFFFFF
    return (int(high.sum()) << 32) + int(low.sum())


def joined(tables: Sequence[TrafficRows]) -> TrafficRows:
    """Return the rows of tables one after another, rank by rank."""
    rows = _appended(tables)
    return rows.take(np.argsort(rows.rank, kind="stable"))


def _appended(tables: Sequence[TrafficRows]) -> TrafficRows:
    return TrafficRows._make(np.concatenate(columns) for columns in zip(*tables, strict=True))
