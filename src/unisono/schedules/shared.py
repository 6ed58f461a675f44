"""Lowering for memory that all ranks of a host can read: posts get a place in their rank's slot.

A rank posts by copying into its slot; the others read there. So that slots of fixed size serve any
amount of data, a call is cut into *pieces*: each is the same schedule on a part of every chunk,
and the engine runs them one after another (two slots per rank let it write the next piece while
the previous one is read).

SEND and POST mean the same here, and so do RECV and READ: a message is a post with one reader.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from unisono.schedules.ir import Buf, IntArray, Op, Schedule
from unisono.schedules.layout import Layout, layout_for
from unisono.schedules.program import Program, lower

__all__ = ["ALIGN", "PIECE_BYTES", "SharedProgram", "lower_shared"]

# Posts begin at multiples of this many elements, hence of a cache line for any element type.
ALIGN = 64

# Bytes a rank posts per piece, if its slot is not smaller. Larger: a piece falls out of the L2
# cache between writer and reader. Smaller: waking each other dominates. MPICH uses 8 KiB cells,
# xhc 16 KiB, DeepSpeed 32 MiB; 256 KiB was fastest on a machine with 1-2 MiB of L2.
PIECE_BYTES = 256 * 1024


@dataclass(frozen=True, eq=False)
class SharedProgram(Program):
    """One rank's part of a call, with its form for shared memory.

    As a `Program` it is the same call with messages, for ranks that turn out to share no memory.

    Attributes:
        pieces: int64 [n, 9]: the columns of `Program.steps`, then the offset in the poster's slot
            (elements) and the poster's stage, which its readers wait for. A READ_REDUCE with a
            source is dst = src (op) the post.
        loops: int64 [m, 5]: (first, end, repeats, input_shift, output_shift): rows [first, end) of
            `pieces` run `repeats` times; INPUT and OUTPUT move on by the shifts after each.
        pieces_scratch: Elements of SCRATCH that one piece needs.
    """

    pieces: IntArray
    loops: IntArray
    pieces_scratch: int


@lru_cache(maxsize=1024)
def lower_shared(
    schedule: Schedule, rank: int, count: int, itemsize: int, slot_bytes: int
) -> SharedProgram | None:
    """Return the program of `rank`; None if the schedule cannot be cut so that slots hold it.

    All ranks get the same pieces. `count` is as in `layout`.
    """
    piece = _piece_count(schedule, count, itemsize, slot_bytes)
    if piece is None:
        return None
    whole, rest = divmod(count, piece) if count else (0, 0)
    parts = [(piece, whole)] if whole else []
    if rest or not whole:
        parts.append((rest, 1))
    steps: list[IntArray] = []
    loops: list[list[int]] = []
    first = 0
    scratch = 0
    for size, repeats in parts:
        rows, used = _piece(schedule, rank, size, count)
        shifts = [size if schedule.input_chunks else 0, size]
        loops.append([first, first + len(rows), repeats, *shifts])
        first += len(rows)
        scratch = max(scratch, used)
        steps.append(rows)
    messages = lower(schedule, rank, layout_for(schedule, count))
    table = np.ascontiguousarray(np.concatenate(steps))
    return SharedProgram(
        messages.steps, messages.scratch_count, table, np.array(loops, np.int64), scratch
    )


def _piece_count(schedule: Schedule, count: int, itemsize: int, slot_bytes: int) -> int | None:
    """Return how many elements of the vector, or of each block, go into one piece."""
    limit = min(slot_bytes, PIECE_BYTES) // itemsize
    size = count
    while True:
        used = max(_posts(schedule, rank, size)[1] for rank in range(schedule.world_size))
        if used <= limit or (size == count and used * itemsize <= slot_bytes):
            break
        if size <= 1:
            return None
        # What a rank posts grows with the piece, up to the rounding of each post.
        size = max(1, min(size - 1, size * limit // used // ALIGN * ALIGN or size // 2))
    if size < count and not _separable(schedule, size):
        return None
    return size


@lru_cache(maxsize=4096)
def _posts(schedule: Schedule, rank: int, size: int) -> tuple[IntArray, int]:
    """Return [n, 4]: (row, peer, slot offset, stage) of a rank's posts, and its slot's use."""
    rows = lower(schedule, rank, layout_for(schedule, size)).steps
    posts = []
    used = stage = 0
    posting = False
    for at, (op, peer, *_, count) in enumerate(rows.tolist()):
        sends = op in (Op.SEND, Op.POST)
        if sends:
            stage += not posting
            posts.append((at, peer, used, stage))
            used += -(-count // ALIGN) * ALIGN
        posting = sends
    return np.array(posts, np.int64).reshape(-1, 4), used


def _separable(schedule: Schedule, size: int) -> bool:
    """Whether no step joins several blocks, which lie apart when only a part of each is taken."""
    if not schedule.input_chunks:
        return True
    layout = layout_for(schedule, size)
    return all(
        int(lower(schedule, rank, layout).steps[:, 6].max(initial=0)) <= size
        for rank in range(schedule.world_size)
    )


def _piece(schedule: Schedule, rank: int, size: int, count: int) -> tuple[IntArray, int]:
    """Return the rows of one piece of `size` elements per block of `count`, and its SCRATCH."""
    layout: Layout = layout_for(schedule, size)
    program = lower(schedule, rank, layout)
    rows = np.concatenate([program.steps, np.full((len(program.steps), 2), -1)], axis=1)
    own, _ = _posts(schedule, rank, size)
    rows[own[:, 0], 7:] = own[:, 2:]
    reads: dict[int, int] = {}
    for row in rows:
        if row[0] in (Op.RECV, Op.RECV_REDUCE, Op.READ, Op.READ_REDUCE):
            peer = int(row[1])
            posts, _ = _posts(schedule, peer, size)
            mine = posts[(posts[:, 1] == rank) | (posts[:, 1] == -1)]
            row[7:] = mine[reads.get(peer, 0), 2:]
            reads[peer] = reads.get(peer, 0) + 1
    if schedule.input_chunks and 0 < size < count:
        for buf, off in ((2, 3), (4, 5)):
            blocks = (rows[:, buf] == Buf.INPUT) | (rows[:, buf] == Buf.OUTPUT)
            rows[blocks, off] = rows[blocks, off] // size * count + rows[blocks, off] % size
    rows = _joined(_posts_first(rows), rank)
    scratch = int(Buf.SCRATCH) in rows[:, (2, 4)]
    return rows, program.scratch_count if scratch else 0


def _posts_first(rows: IntArray) -> IntArray:
    """Move the first posts before the copies of own blocks that they follow.

    The agreement travels with a post that comes first; behind a copy it is a round of its own. Only
    posts of INPUT move, which no copy changes: an INPUT inside OUTPUT is the very block that is
    copied onto itself.
    """
    ops, sources = rows[:, 0], rows[:, 2]
    copies = int(np.argmax(np.append(ops != Op.COPY, True)))
    posts = int(np.argmax(np.append(~np.isin(ops[copies:], (Op.SEND, Op.POST)), True)))
    end = copies + posts
    if (rows[:copies, 4] != Buf.OUTPUT).any() or (sources[copies:end] != Buf.INPUT).any():
        return rows
    return np.concatenate([rows[copies:end], rows[:copies], rows[end:]])


def _joined(rows: IntArray, rank: int) -> IntArray:
    """Join rows that pass over the same elements one after another.

    COPY to where the next row reduces is the source of that READ_REDUCE. A value that is set aside
    while a lower rank's takes its place, to be reduced into that, is what RECV_REDUCE does.
    """
    joined: list[list[int]] = []
    for at, row in enumerate(rows.tolist()):
        if row[0] == Op.READ_REDUCE and joined:
            copy = joined[-1]
            if copy[0] == Op.COPY and copy[4:7] == row[4:7]:
                row[2:4] = joined.pop()[2:4]
        elif row[0] == Op.REDUCE and len(joined) > 1:
            copy, taken = joined[-2:]
            aside = [Op.COPY, -1, *row[4:6], *row[2:4], row[6]]
            into = [Op.READ, *row[4:7]]
            kept = row[2] != Buf.SCRATCH or Buf.SCRATCH in rows[at + 1 :, 2]
            found = copy[:7] == aside and [taken[0], *taken[4:7]] == into
            if found and taken[1] < rank and not kept:
                del joined[-2:]
                row = [Op.RECV_REDUCE, *taken[1:]]
        joined.append(row)
    return np.array(joined, np.int64).reshape(-1, 9)
