"""Lowering for memory that all ranks of a host can read: posts get a place in a slot.

A rank posts by copying into its slot, or a result to where it read the last operand (`_places`);
the others read there. So that slots of fixed size serve any amount of data, a call is cut into
*pieces*: each is the same schedule on a part of every chunk, and the engine runs them one after
another (two slots per rank let it write the next piece while the previous one is read).

SEND and POST mean the same here, and so do RECV and READ: a message is a post with one reader.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from unisono.schedules.ir import Buf, IntArray, Op, Schedule
from unisono.schedules.layout import buffer_bounds, buffer_ends, layout_for
from unisono.schedules.program import Program, lower

__all__ = ["ALIGN", "PIECE_BYTES", "SharedProgram", "lower_shared"]

# Posts begin at multiples of this many elements, hence of a cache line for any element type.
ALIGN = 64

# Bytes a rank posts per piece, if its slot is not smaller. Larger: a piece falls out of the L2
# cache between writer and reader. Smaller: waking each other dominates. MPICH uses 8 KiB cells,
# xhc 16 KiB, DeepSpeed 32 MiB; 256 KiB was fastest on a machine with 1-2 MiB of L2.
PIECE_BYTES = 256 * 1024

_GIVES = frozenset({Op.SEND, Op.POST})
_REDUCES = frozenset({Op.RECV_REDUCE, Op.READ_REDUCE})
_TAKES = frozenset({Op.RECV, Op.READ}) | _REDUCES


@dataclass(frozen=True, eq=False)
class SharedProgram(Program):
    """One rank's part of a call, with its form for shared memory.

    As a `Program` it is the same call with messages, for ranks that turn out to share no memory.

    Attributes:
        pieces: int64 [n, 10]: the columns of `Program.steps`, then whose slot the post lies in, its
            offset there (elements) and the poster's stage, which its readers wait for. A
            READ_REDUCE with a source is dst = src (op) the post.
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
        used = _slots(schedule, size)[1]
        if used <= limit or (size == count and used * itemsize <= slot_bytes):
            break
        if size <= 1:
            return None
        # What a rank posts grows with the piece, up to the rounding of each post.
        size = max(1, min(size - 1, size * limit // used // ALIGN * ALIGN or size // 2))
    if size < count and not _outline(schedule, _units(schedule, size)).separable:
        return None
    return size


def _units(schedule: Schedule, size: int) -> int:
    """Return the size of the outline that serves a piece of `size` elements.

    An outline is a piece in which each chunk is one element, a unit: offsets are then numbers of
    chunks. All sizes in which no chunk is empty have these rows; smaller ones have their own.
    """
    return min(size, schedule.block_chunks)


@dataclass(frozen=True, eq=False)
class _Outline:
    """What pieces of all sizes have in common; see `_units`.

    Attributes:
        posts: Per rank int64 [n, 4]: (row, peer, number of the post, stage).
        reads: Per rank int64 [n, 4]: (row, peer, number of the peer's post, its stage).
        places: See `_places`.
        first: int64 [p, n]: the unit with which a rank's n-th post begins, `Buf` by `Buf`.
        last: int64 [p, n]: the unit behind its last one; equal to `first` where there is no post,
            or one that has another's place.
        separable: Whether no step joins several blocks, which lie apart when only a part of each
            is taken.
    """

    posts: tuple[IntArray, ...]
    reads: tuple[IntArray, ...]
    places: IntArray
    first: IntArray
    last: IntArray
    separable: bool


@lru_cache(maxsize=256)
def _outline(schedule: Schedule, units: int) -> _Outline:
    """Return what the ranks post in a piece of so many units."""
    layout = layout_for(schedule, units)
    bases = _bases(schedule, units)
    programs = [lower(schedule, rank, layout).steps for rank in range(schedule.world_size)]
    posts = tuple(_posts(steps) for steps in programs)
    first = np.zeros((schedule.world_size, max(map(len, posts))), np.int64)
    last = first.copy()
    for rank, (steps, own) in enumerate(zip(programs, posts, strict=True)):
        posted = steps[own[:, 0]]
        first[rank, : len(own)] = bases[posted[:, 2]] + posted[:, 3]
        last[rank, : len(own)] = first[rank, : len(own)] + posted[:, 6]
    reads = tuple(_reads(steps, rank, posts) for rank, steps in enumerate(programs))
    places = _places(programs, posts, reads)
    elsewhere = places != np.arange(places.size).reshape(places.shape)
    last[elsewhere] = first[elsewhere]
    longest = max(int(steps[:, 6].max(initial=0)) for steps in programs)
    return _Outline(
        posts, reads, places, first, last, not schedule.input_chunks or longest <= units
    )


def _posts(steps: IntArray) -> IntArray:
    """Return [n, 4]: (row, peer, number, stage) of the posts of one rank."""
    posts: list[tuple[int, int, int, int]] = []
    stage = 0
    posting = False
    for at, (op, peer, *_) in enumerate(steps.tolist()):
        sends = op in _GIVES
        if sends:
            stage += not posting
            posts.append((at, peer, len(posts), stage))
        posting = sends
    return np.array(posts, np.int64).reshape(-1, 4)


def _reads(steps: IntArray, rank: int, posts: tuple[IntArray, ...]) -> IntArray:
    """Return [n, 4]: (row, peer, number, stage) of the posts that one rank reads."""
    reads: list[list[int]] = []
    coming: dict[int, Iterator[list[int]]] = {}
    for at, (op, peer, *_) in enumerate(steps.tolist()):
        if op in _TAKES:
            if peer not in coming:
                theirs = posts[peer]
                mine = (theirs[:, 1] == rank) | (theirs[:, 1] == -1)
                coming[peer] = iter(theirs[mine, 2:].tolist())
            reads.append([at, peer, *next(coming[peer])])
    return np.array(reads, np.int64).reshape(-1, 4)


def _places(
    programs: list[IntArray], posts: tuple[IntArray, ...], reads: tuple[IntArray, ...]
) -> IntArray:
    """Return [p, n]: whose place each post has; posts are numbered rank by rank, n for each.

    A result goes where its last operand was read, if that was for this rank only. Those cache lines
    are here; a place of its own is where its readers of last time have it, and to take it back from
    them costs a fifth of a large all_reduce. See docs/decisions/0027.
    """
    width = max(map(len, posts))
    own = np.arange(len(posts) * width).reshape(len(posts), width)
    places = own.copy()
    for rank, steps in enumerate(programs):
        read = {row: (peer, number) for row, peer, number, _ in reads[rank].tolist()}
        numbers = {row: number for row, _, number, _ in posts[rank].tolist()}
        free: dict[tuple[int, ...], int] = {}
        for row, (op, _, *source, dst, dst_off, count) in enumerate(steps.tolist()):
            if op in _REDUCES:
                poster, number = read[row]
                if len(programs) == 2 or posts[poster][number, 1] == rank:
                    free[dst, dst_off, count] = int(own[poster, number])
            elif op in _GIVES:
                places[rank, numbers[row]] = free.pop((*source, count), own[rank, numbers[row]])
    # A post that has gone elsewhere itself has left no place.
    is_at_home = (places == own).ravel()
    return np.where(is_at_home[places], places, own)


@lru_cache(maxsize=256)
def _bases(schedule: Schedule, units: int) -> IntArray:
    """Return where the ends of each buffer begin in `_ends`, and where its -1 is."""
    bounds = buffer_bounds(schedule, 0, layout_for(schedule, units))
    if units == schedule.block_chunks:
        return np.cumsum([0, *(len(bounds[buf]) for buf in Buf)])
    return np.cumsum([0, *(int(bounds[buf].max(initial=-1)) + 1 for buf in Buf)])


def _ends(schedule: Schedule, size: int) -> IntArray:
    """Return where each unit of INPUT, OUTPUT, SCRATCH begins and the last one ends; then -1."""
    if size >= schedule.block_chunks:
        return buffer_ends(schedule, 0, layout_for(schedule, size))
    lengths = np.diff(_bases(schedule, size))
    return np.concatenate([*map(np.arange, lengths), [-1]])


@lru_cache(maxsize=256)
def _slots(schedule: Schedule, size: int) -> tuple[IntArray, int]:
    """Return where in its slot each place is, and the most that one rank uses of its slot.

    Rank by rank, as many for each; then -1. Which place a post has: `_places`.
    """
    outline = _outline(schedule, _units(schedule, size))
    ends = _ends(schedule, size)
    room = -(-(ends[outline.last] - ends[outline.first]) // ALIGN) * ALIGN
    filled = np.cumsum(room, axis=1)
    return np.append(filled - room, -1), int(filled.max(initial=0))


class _UnitPiece(NamedTuple):
    """One rank's rows of a piece, with what gives them their offsets.

    Attributes:
        rows: As in `SharedProgram`, without offsets and counts.
        src, dst: Places in `_ends` where the rows' chunks begin.
        begin, end: Places between which lies what a row moves.
        post: Place in `_slots`.
        scratch: Place where the SCRATCH that is used ends.
    """

    rows: IntArray
    src: IntArray
    dst: IntArray
    begin: IntArray
    end: IntArray
    post: IntArray
    scratch: int


@lru_cache(maxsize=1024)
def _unit_piece(schedule: Schedule, rank: int, units: int) -> _UnitPiece:
    """Return the rows of one piece of so many units."""
    outline = _outline(schedule, units)
    program = lower(schedule, rank, layout_for(schedule, units))
    rows = np.concatenate([program.steps, np.full((len(program.steps), 3), -1)], axis=1)
    own, places = outline.posts[rank].copy(), outline.places
    own[:, 1] = rank
    for at, peer, number, stage in (*own.tolist(), *outline.reads[rank].tolist()):
        place = places[peer, number]
        rows[at, 7:] = place // places.shape[1], place, stage
    rows = _joined(_posts_first(rows), rank)
    bases = _bases(schedule, units)
    src, dst = (
        np.where(rows[:, buf] < 0, bases[-1], bases[rows[:, buf]] + rows[:, off])
        for buf, off in ((2, 3), (4, 5))
    )
    begin = np.minimum(src, dst)
    scratch = program.scratch_count if int(Buf.SCRATCH) in rows[:, (2, 4)] else 0
    return _UnitPiece(
        rows, src, dst, begin, begin + rows[:, 6], rows[:, 8], int(bases[Buf.SCRATCH]) + scratch
    )


def _piece(schedule: Schedule, rank: int, size: int, count: int) -> tuple[IntArray, int]:
    """Return the rows of one piece of `size` elements per block of `count`, and its SCRATCH."""
    units = _units(schedule, size)
    piece = _unit_piece(schedule, rank, units)
    ends = places = _ends(schedule, size)
    if schedule.input_chunks and 0 < size < count:
        blocks = _bases(schedule, units)[Buf.SCRATCH]
        places = ends.copy()
        places[:blocks] = ends[:blocks] // size * count + ends[:blocks] % size
    rows = piece.rows.copy()
    rows[:, 3], rows[:, 5] = places[piece.src], places[piece.dst]
    rows[:, 6] = ends[piece.end] - ends[piece.begin]
    rows[:, 8] = _slots(schedule, size)[0][piece.post]
    return rows, int(ends[piece.scratch])


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
    return np.array(joined, np.int64).reshape(-1, 10)
