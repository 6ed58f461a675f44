"""Lower a schedule for memory that all ranks of a host can read: a post gets a place in a slot.

A rank posts data by copying it into its slot, and other ranks read it there. A result may instead
go to the place from which the rank read the last operand (`_places`). Slots have a fixed size, so a
call is cut into *pieces*. A piece is the same schedule on a part of every chunk. The engine runs
the pieces one after another. With two slots per rank it can write the next piece while other ranks
read the previous piece.

SEND and POST are the same here, and so are RECV and READ: a message is a post with one reader.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np

from unisono.core.schedules.ir import Buf, IntArray, Op, Schedule
from unisono.core.schedules.lowering.layout import Layout, buffer_bounds, even_ends
from unisono.core.schedules.lowering.program import Program, bases_of, lower, lower_all

# Posts begin at multiples of this number of elements, and so at a cache line for any element type.
ALIGN = 64

# Bytes that a rank posts per piece, if its slot is not smaller. Larger: a piece leaves the L2 cache
# before its readers read it. Smaller: the time to wake other ranks dominates. MPICH uses 8 KiB
# cells, xhc 16 KiB, DeepSpeed 32 MiB. 256 KiB was fastest on a machine with 1-2 MiB of L2.
PIECE_BYTES = 256 * 1024

_GIVES = (Op.SEND, Op.POST)
_REDUCES = (Op.RECV_REDUCE, Op.READ_REDUCE)
_TAKES = (Op.RECV, Op.READ, *_REDUCES)


class SharedProgram(Program):
    """One rank's part of a call, as messages and in the form for shared memory.

    The attributes of `Program` are the call with messages, made for ranks that share no memory.

    Attributes:
        messages: Returns the call with messages.
        pieces: int64 [n, 11]: the columns of `Program.steps`, with (slot, offset, stage) of the
            post before the last. `slot` is the rank that owns the slot, `offset` is in elements.
            Readers wait until the posting rank has reached `stage`. A READ_REDUCE with a source is
            dst = src (op) the post.
        loops: int64 [m, 5]: (first, end, repeats, input_shift, output_shift). Rows [first, end) of
            `pieces` run `repeats` times. After each run the offsets into INPUT and OUTPUT grow by
            the shifts.
        pieces_scratch: Elements of SCRATCH for one piece.
    """

    def __init__(
        self,
        messages: Callable[[], Program],
        pieces: IntArray,
        loops: IntArray,
        pieces_scratch: int = 0,
    ) -> None:
        self.messages = messages
        self.pieces = pieces
        self.loops = loops
        self.pieces_scratch = pieces_scratch

    @property
    def steps(self) -> IntArray:
        return self.messages().steps

    @property
    def scratch_count(self) -> int:
        return self.messages().scratch_count


@lru_cache(maxsize=1024)
def lower_shared(
    schedule: Schedule, rank: int, count: int, itemsize: int, slot_bytes: int
) -> SharedProgram | None:
    """Return the program of `rank`; None if the call cannot be cut into pieces that fit slots.

    All ranks get the same pieces. `count` is as in `layout`.
    """
    messages = partial(lower, schedule, rank, Layout(count))
    if schedule.collective == "barrier":
        # No rank leaves the agreement on a call before all ranks have entered it.
        nothing, once = np.empty((0, 11), np.int64), np.array([[0, 0, 1, 0, 0]])
        return SharedProgram(messages, nothing, once)
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
    table = np.ascontiguousarray(np.concatenate(steps))
    return SharedProgram(messages, table, np.array(loops, np.int64), scratch)


def _piece_count(schedule: Schedule, count: int, itemsize: int, slot_bytes: int) -> int | None:
    """Return the elements of the vector, or of each block, in one piece; None if none fits."""
    limit = min(slot_bytes, PIECE_BYTES) // itemsize
    size = count
    while True:
        used = _slots(schedule, size)[1]
        if used <= limit or (size == count and used * itemsize <= slot_bytes):
            break
        if size <= 1:
            return None
        # The size of a rank's posts grows with the piece, apart from the rounding of each post.
        size = max(1, min(size - 1, size * limit // used // ALIGN * ALIGN or size // 2))
    if size < count and not _outline(schedule, _units(schedule, size)).separable:
        return None
    return size


def _units(schedule: Schedule, size: int) -> int:
    """Return the number of units of the outline for a piece of `size` elements.

    An outline is a piece in which each chunk is one element, a unit, so offsets are numbers of
    chunks. All pieces without an empty chunk have the same outline. A smaller piece has its own.
    """
    return min(size, schedule.block_chunks)


@dataclass(frozen=True, eq=False)
class _Outline:
    """The rows of all ranks that pieces of all sizes have in common; see `_units`.

    Posts are numbered rank by rank. Units are numbered through all buffers, in the order of `Buf`.

    Attributes:
        rows: int64 [n, 11]: as in `SharedProgram.pieces`, rank by rank. The offset in the slot is
            the number of the post whose place the row uses; see `_places`.
        begins: int64 [p + 1]: the first row of each rank.
        firsts: int64 [m]: the first post of the rank of each post.
        units: int64 [2, m]: the first unit of each post, and the unit after its last unit. Both are
            equal if the post uses the place of another post.
        separable: Whether no step moves several blocks. In a piece the parts of two blocks are
            not contiguous, so such a step could not move them.
    """

    rows: IntArray
    begins: IntArray
    firsts: IntArray
    units: IntArray
    separable: bool


# Few, because an outline has the rows of all ranks: 262,000 of a two_shot of 256 ranks.
@lru_cache(maxsize=32)
def _outline(schedule: Schedule, units: int) -> _Outline:
    """Return the outline of `units` units; the same on all ranks, so that they agree on places."""
    steps, ranks = lower_all(schedule, Layout(units))
    begins = np.searchsorted(ranks, np.arange(schedule.world_size + 1))
    gives, takes = np.isin(steps[:, 0], _GIVES), np.isin(steps[:, 0], _TAKES)
    posts, reads = np.flatnonzero(gives), np.flatnonzero(takes)
    # The first of consecutive posts of a rank begins a stage.
    begun = gives.copy()
    begun[1:] &= ~gives[:-1] | (ranks[1:] != ranks[:-1])
    stages = np.append(0, np.cumsum(begun))
    stages = stages[posts + 1] - stages[begins[ranks[posts]]]
    readers, posters = steps[posts, 1], ranks[posts]
    if schedule.world_size == 2:
        readers = 1 - posters
    used = _posts_read(readers, posters, steps[reads, 1], ranks[reads], schedule.world_size)
    number = np.arange(len(posts))
    first = _bases(schedule, units)[steps[posts, 2]] + steps[posts, 3]
    once = _first_of_equals(posters, stages, first, steps[posts, 6])
    alone = (readers[used] == ranks[reads]) & (np.bincount(once, minlength=1)[once] == 1)[used]
    used = once[used]
    results = alone & np.isin(steps[reads, 0], _REDUCES)
    places = _places(steps, ranks, posts, reads[results], used[results], _bases(schedule, units))
    rows = np.concatenate([steps[:, :7], np.full((len(steps), 3), -1), steps[:, 7:]], axis=1)
    for at, post in ((posts, number), (reads, used)):
        rows[at, 7:10] = np.stack([ranks[posts[places[post]]], places[post], stages[post]], axis=1)
    last = np.where((places == number) & (once == number), first + steps[posts, 6], first)
    separable = not schedule.input_chunks or int(steps[:, 6].max(initial=0)) <= units
    firsts = np.searchsorted(posts, begins[ranks[posts]])
    kept = np.delete(np.arange(len(rows)), posts[once != number])
    begins = np.searchsorted(ranks[kept], np.arange(schedule.world_size + 1))
    return _Outline(rows[kept], begins, firsts, np.stack([first, last]), separable)


def _first_of_equals(*columns: IntArray) -> IntArray:
    """Return for each post the first post that is equal in all columns.

    What a rank posts for several ranks in one stage it copies once, for all of them.
    """
    order = np.lexsort(columns)
    begins = (np.diff(np.stack(columns)[:, order], prepend=-1) != 0).any(axis=0)
    once: IntArray = np.empty_like(order)
    once[order] = order[np.maximum.accumulate(np.where(begins, np.arange(len(order)), 0))]
    return once


def _posts_read(
    readers: IntArray, posters: IntArray, peers: IntArray, ranks: IntArray, p: int
) -> IntArray:
    """Return the number of the post that each read reads.

    Args:
        readers: The rank for which each post is; -1 for all other ranks.
        posters: The rank of each post.
        peers: The rank whose post each read reads.
        ranks: The rank of each read.
        p: World size.
    """
    single, to_all = np.flatnonzero(readers >= 0), np.flatnonzero(readers < 0)
    numbers = np.concatenate([single, np.repeat(to_all, p)])
    reader = np.concatenate([readers[single], np.tile(np.arange(p), len(to_all))])
    is_other = posters[numbers] != reader
    numbers, reader = numbers[is_other], reader[is_other]
    # The n-th read of a rank from a peer reads the n-th post of this peer for the rank.
    given = numbers[np.lexsort((numbers, posters[numbers] * p + reader))]
    used: IntArray = np.empty_like(given)
    used[np.argsort(peers * p + ranks, kind="stable")] = given
    return used


def _places(
    steps: IntArray,
    ranks: IntArray,
    posts: IntArray,
    results: IntArray,
    operands: IntArray,
    bases: IntArray,
) -> IntArray:
    """Return the number of the post whose place each post uses.

    A result goes to the place from which its last operand was read, if no other rank reads this
    operand. The cache of this rank has those cache lines already. The lines of the post's own place
    are in the caches of its previous readers. To fetch them back takes a fifth of the time of a
    large all_reduce. See docs/decisions/0027.

    Args:
        steps: The steps of all ranks.
        ranks: The rank of each step.
        posts: The rows of the posts.
        results: The rows that reduce an operand that no other rank reads.
        operands: The number of each such operand, a post.
        bases: The first unit of each buffer.
    """
    own = np.arange(len(posts))
    # A result may go to the place of its operand until a post takes this place.
    at = np.concatenate([results, posts])
    operands = np.concatenate([operands, np.full(len(posts), -1)])
    buf = np.where(operands < 0, 2, 4)
    first = bases[steps[at, buf]] + steps[at, buf + 1]
    order = np.lexsort((at, steps[at, 6], first, ranks[at]))
    same = np.diff(np.stack([ranks[at], first, steps[at, 6]])[:, order]) == 0
    before, after = order[:-1], order[1:]
    taken = same.all(axis=0) & (operands[before] >= 0) & (operands[after] < 0)
    places = own.copy()
    places[after[taken] - len(results)] = operands[before[taken]]
    # A post that uses the place of another post has no place that a third post could use.
    is_at_home = places == own
    return np.where(is_at_home[places], places, own)


@lru_cache(maxsize=256)
def _bases(schedule: Schedule, units: int) -> IntArray:
    """Return the index in `_ends` of the first bound of each buffer, and the index of the -1."""
    if units == schedule.block_chunks:
        return bases_of(schedule)
    bounds = buffer_bounds(schedule, 0, Layout(units))
    return np.cumsum([0, *(int(bounds[buf].max(initial=-1)) + 1 for buf in Buf)])


def _ends(schedule: Schedule, size: int) -> IntArray:
    """Return the bounds of the units of INPUT, OUTPUT and SCRATCH; then -1."""
    if size >= schedule.block_chunks:
        return even_ends(schedule, size)
    lengths = np.diff(_bases(schedule, size))
    return np.concatenate([*map(np.arange, lengths), [-1]])


@lru_cache(maxsize=256)
def _slots(schedule: Schedule, size: int) -> tuple[IntArray, int]:
    """Return the offset of each post's place in its slot, then -1; then the most used of a slot."""
    outline = _outline(schedule, _units(schedule, size))
    first, last = _ends(schedule, size)[outline.units]
    room = -(-(last - first) // ALIGN) * ALIGN
    begin = np.cumsum(room) - room
    begin -= begin[outline.firsts]
    return np.append(begin, -1), int((begin + room).max(initial=0))


class _UnitPiece(NamedTuple):
    """One rank's rows of a piece, with the indices from which their offsets are computed.

    Attributes:
        rows: As in `_Outline.rows`, in units.
        src: Index in `_ends` of the begin of each row's source.
        dst: Index in `_ends` of the begin of each row's destination.
        scratch: Index in `_ends` of the end of the SCRATCH that is used.
    """

    rows: IntArray
    src: IntArray
    dst: IntArray
    scratch: int


@lru_cache(maxsize=1024)
def _unit_piece(schedule: Schedule, rank: int, units: int) -> _UnitPiece:
    """Return the rows of one piece of `units` units."""
    outline = _outline(schedule, units)
    first, end = outline.begins[rank : rank + 2]
    steps = outline.rows[first:end]
    rows = _join_rows(_move_posts_first(steps), rank)
    bases = _bases(schedule, units)
    scratch, bufs = 0, rows[:, (2, 4)]
    places = np.where(bufs < 0, bases[-1], bases[bufs] + rows[:, (3, 5)])
    if int(Buf.SCRATCH) in bufs:
        aside = steps[:, (2, 4)] == Buf.SCRATCH
        scratch = int((steps[:, (3, 5)] + steps[:, 6:7])[aside].max())
    return _UnitPiece(rows, places[:, 0], places[:, 1], int(bases[Buf.SCRATCH]) + scratch)


def _piece(schedule: Schedule, rank: int, size: int, count: int) -> tuple[IntArray, int]:
    """Return the rows of a piece of `size` elements per block of `count`, and its SCRATCH size."""
    units = _units(schedule, size)
    piece = _unit_piece(schedule, rank, units)
    ends = places = _ends(schedule, size)
    if schedule.input_chunks and 0 < size < count:
        blocks = _bases(schedule, units)[Buf.SCRATCH]
        places = ends.copy()
        places[:blocks] = ends[:blocks] // size * count + ends[:blocks] % size
    rows = piece.rows.copy()
    rows[:, 3], rows[:, 5] = places[piece.src], places[piece.dst]
    begin = np.minimum(piece.src, piece.dst)
    rows[:, 6] = ends[begin + rows[:, 6]] - ends[begin]
    rows[:, 8] = _slots(schedule, size)[0][rows[:, 8]]
    return rows, int(ends[piece.scratch])


def _move_posts_first(rows: IntArray) -> IntArray:
    """Move the first posts before the copies of own blocks that precede them.

    The agreement travels with a post that is the first row; after a copy it needs a round of its
    own. Only posts of INPUT move, because no copy changes INPUT. If INPUT lies inside OUTPUT, it is
    the block that is copied onto itself.
    """
    ops, sources = rows[:, 0], rows[:, 2]
    copies = int(np.argmax(np.append(ops != Op.COPY, True)))
    posts = int(np.argmax(np.append(~np.isin(ops[copies:], (Op.SEND, Op.POST)), True)))
    end = copies + posts
    if (rows[:copies, 4] != Buf.OUTPUT).any() or (sources[copies:end] != Buf.INPUT).any():
        return rows
    return np.concatenate([rows[copies:end], rows[:copies], rows[end:]])


def _join_rows(rows: IntArray, rank: int) -> IntArray:
    """Join consecutive rows that pass over the same elements.

    A COPY to the destination of the next READ_REDUCE becomes the source of this READ_REDUCE.
    Three rows become a RECV_REDUCE:

    - COPY a value to SCRATCH.
    - READ a lower rank's value into the place of the first value.
    - REDUCE the copy into that place.
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
                row = [Op.RECV_REDUCE, *taken[1:10], row[10]]
        joined.append(row)
    return np.array(joined, np.int64).reshape(-1, 11)
