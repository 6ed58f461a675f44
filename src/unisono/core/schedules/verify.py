"""Prove by symbolic execution that a schedule computes the result of its collective.

All ranks run on symbols instead of numbers: a chunk's value is an expression over the
contributions of the ranks. Equal expressions are one object (hash-consing), so a world is checked
in about a microsecond per step and chunk.

A reduction is modelled as commutative but *not* associative, like a floating-point sum. The proof
of `rank_order` models it as not commutative, too. An accumulation that goes on is another value
than one that has ended, which is rounded.
Chunks with the same expression on two ranks hold the same bits for all numbers. The condition is
that an engine's a (op) b has the bits of b (op) a. Many processors break it for NaNs with different
payloads, and for the minimum of +0 and -0.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from unisono.core.schedules.ir import (
    REDUCE_OPS,
    REDUCING,
    VECTOR_COLLECTIVES,
    Buf,
    Op,
    Schedule,
    sums_on,
)
from unisono.errors import Context, ScheduleError

_PUTS = (Op.SEND, Op.POST)
_LOCAL = (Op.COPY, Op.REDUCE)
_TAKES = (Op.RECV, Op.RECV_REDUCE, Op.READ, Op.READ_REDUCE)
_POSTED = (Op.POST, Op.READ, Op.READ_REDUCE)

Chunk = tuple[int, int]
CheckedRow = tuple[int, int, int, int, int, int, int, int]


def verify(schedule: Schedule, *, in_place: bool = False, rank_order: bool = False) -> None:
    """Prove the schedule right for every element count, or raise an error that names the fault.

    The proof covers:

    - Every required output chunk holds each contribution exactly once. If the collective does
      not reduce, the chunk holds exactly the right block.
    - An all_reduce gives the same bits on all ranks.
    - Messages match in kind and size, and none is left over.
    - A message is received in the round in which it is sent.
    - No rank deadlocks, writes INPUT, or reads an undefined chunk.

    Args:
        schedule: The schedule to prove.
        in_place: Prove a call in which the buffer of one block is the rank's own block of the
            buffer of p blocks, as in `all_gather_into_tensor(out, out[rank])`.
        rank_order: Prove also that every result is ((x_0 (op) x_1) (op) x_2) (op) ..., with the
            operands in this order. It is one accumulation; a prefix is rounded on each rank.

    Raises:
        ScheduleError: The schedule is wrong. The text names the rank, the step and the chunk.
    """
    world = _SymbolicWorld(schedule, in_place, rank_order)
    world.run()
    world.check_results()


def contributions(schedule: Schedule) -> list[list[list[int]]]:
    """Return how many ranks have contributed to each chunk of OUTPUT, by stage, rank and chunk.

    The first entry is the state before the first stage; 0 is an undefined chunk. A rank without
    OUTPUT has an empty list.

    Raises:
        ScheduleError: The schedule cannot be executed.
    """
    world = _OutputRecorder(schedule)
    world.run()
    chunks = range(schedule.output_chunks)
    has_output = [_buffer_chunks(schedule, r)[Buf.OUTPUT] for r in range(schedule.world_size)]
    now = [[world.before[rank].get(c, 0) for c in chunks] for rank in range(schedule.world_size)]
    states = []
    for stage in range(-1, schedule.stages):
        for rank, chunk, count in world.written.get(stage, ()):
            now[rank][chunk] = count
        states.append([row.copy() if has else [] for row, has in zip(now, has_output, strict=True)])
    return states


@dataclass(frozen=True)
class _ChunkValue:
    """The value of a chunk: data item `item`, reduced over the ranks in the bit set `ranks`.

    `key` is the number of the expression. Equal keys mean equal bits.
    """

    key: int
    item: Chunk
    ranks: int


@dataclass(frozen=True)
class _SentData:
    values: list[_ChunkValue]
    sizes: list[object]
    posted: bool
    stage: int


class _SymbolicWorld:
    """All ranks of a schedule, which execute it on symbols."""

    def __init__(self, schedule: Schedule, in_place: bool, rank_order: bool):
        self.rank_order = rank_order
        self.schedule = schedule
        self.in_place = in_place
        self.memory: list[dict[Chunk, _ChunkValue]] = [{} for _ in range(schedule.world_size)]
        self.queues: dict[tuple[int, int], deque[_SentData]] = defaultdict(deque)
        self.expressions: dict[tuple[object, ...], int] = {}
        self.todo, self.stage_of = _programs(schedule)
        self.goes_on = [_sums_on(schedule, rows) for rows in self.todo]
        self.next = [0] * schedule.world_size
        self.written_in: dict[tuple[int, Chunk], int] = {}
        for rank in range(schedule.world_size):
            for chunk, item in _initial(schedule, rank).items():
                self.memory[rank][self.place(rank, chunk)] = self.leaf(item, rank)

    # --- values ---------------------------------------------------------------------------

    def place(self, rank: int, chunk: Chunk) -> Chunk:
        """Return the chunk that stores `chunk`; in an in-place call some chunks have two names."""
        s, (buf, index) = self.schedule, chunk
        own = rank * s.block_chunks + index
        if self.in_place and s.collective in ("all_gather", "gather") and buf == Buf.INPUT:
            return (Buf.OUTPUT, own)
        if self.in_place and s.collective in ("reduce_scatter", "scatter") and buf == Buf.OUTPUT:
            return (Buf.INPUT, own)
        return chunk

    def leaf(self, item: Chunk, rank: int) -> _ChunkValue:
        return _ChunkValue(self.key("leaf", item, rank), item, 1 << rank)

    def key(self, *expression: object) -> int:
        return self.expressions.setdefault(expression, len(self.expressions))

    def combine(
        self, rank: int, mine: _ChunkValue, theirs: _ChunkValue, chunk: Chunk, *, swapped: bool
    ) -> _ChunkValue:
        if mine.item != theirs.item:
            self.fail(rank, f"{_name(chunk)} reduces data {mine.item} with data {theirs.item}")
        if twice := mine.ranks & theirs.ranks:
            of = f"rank{'s' * (twice.bit_count() > 1)} {_ranks(twice)}"
            self.fail(rank, f"{_name(chunk)} gets the contribution of {of} twice")
        pair = (theirs.key, mine.key) if swapped else (mine.key, theirs.key)
        if not self.rank_order:
            pair = (min(pair), max(pair))
        goes_on = self.goes_on[rank][self.next[rank]]
        key = self.key("unrounded", *pair) if goes_on else self.key(*pair)
        return _ChunkValue(key, mine.item, mine.ranks | theirs.ranks)

    # --- execution ------------------------------------------------------------------------

    def run(self) -> None:
        """Run every rank until it ends or waits for a message that is never sent."""
        runnable = deque(range(self.schedule.world_size))
        while runnable:
            rank = runnable.popleft()
            # A rank that waits becomes runnable when a peer sends to it.
            for woken in self.advance(rank):
                if woken not in runnable:
                    runnable.append(woken)
        stuck = [r for r, steps in enumerate(self.todo) if self.next[r] < len(steps)]
        if stuck:
            peers = [self.todo[r][self.next[r]][2] for r in stuck]
            pairs = list(zip(stuck, peers, strict=True))
            waits = ", ".join(f"{r} for {q}" for r, q in pairs[:8])
            later = [self.sends_later(q, r) for r, q in pairs]
            when = "are sent after receives that wait" if all(later) else "never come"
            order = "a rank executes its rows in order: put the sends of a round first"
            hint = order if any(later) else None
            self.fail(stuck[0], f"deadlock: ranks wait for messages that {when}: {waits}", hint)
        for (src, dst), queue in self.queues.items():
            if queue:
                text = f"rank {src} sends {len(queue)} messages more than {dst} takes"
                raise self.error(text, src)

    def sends_later(self, rank: int, peer: int) -> bool:
        """Return whether a rank that waits has a send to `peer` left in its round."""
        at = range(self.next[rank], len(self.todo[rank]))
        rows = [self.todo[rank][i] for i in at if self.stage_of[rank][i] == self.stage(rank)]
        return any(row[1] in _PUTS and row[2] in (peer, -1) for row in rows)

    def advance(self, rank: int) -> set[int]:
        """Run `rank` until it ends or waits; return the ranks that got messages."""
        touched = set()
        steps = self.todo[rank]
        while self.next[rank] < len(steps):
            row = steps[self.next[rank]]
            op, peer = row[1], row[2]
            if op in _PUTS:
                touched |= self.put(rank, row)
            elif op in _TAKES:
                if not 0 <= peer < self.schedule.world_size or peer == rank:
                    self.fail(rank, f"{Op(op).name} from rank {peer}, expected {self.others(rank)}")
                if not self.queues[peer, rank]:
                    return touched
                self.take(rank, row)
            elif op in _LOCAL:
                self.move(rank, row)
            else:
                self.fail(rank, f"unknown op {op}")
            self.next[rank] += 1
        return touched

    def put(self, rank: int, row: CheckedRow) -> set[int]:
        op, peer, p = row[1], row[2], self.schedule.world_size
        to_all = op == Op.POST and peer == -1
        peers = set(range(p)) - {rank} if to_all else {peer}
        if not to_all and (peer == rank or not 0 <= peer < p):
            self.fail(rank, f"{Op(op).name} to rank {peer}, expected {self.others(rank)}")
        values, sizes = self.load(rank, row)
        message = _SentData(values, sizes, op == Op.POST, self.stage(rank))
        for destination in peers:
            self.queues[rank, destination].append(message)
        return peers

    def take(self, rank: int, row: CheckedRow) -> None:
        op, peer = Op(row[1]), row[2]
        message = self.queues[peer, rank].popleft()
        if message.posted != (op in _POSTED):
            kind = "post" if message.posted else "message"
            self.fail(rank, f"{op.name} from rank {peer} meets a {kind}")
        if message.stage != self.stage(rank):
            self.fail(rank, f"takes a message that rank {peer} sent in round {message.stage + 1}")
        self.store(rank, row, message.values, message.sizes)

    def move(self, rank: int, row: CheckedRow) -> None:
        _, op, _, src_buf, src, dst_buf, dst, n = row
        if src_buf == dst_buf and abs(src - dst) < n:
            # The result would depend on the direction in which the engine copies.
            self.fail(rank, f"{Op(op).name} within {Buf(src_buf).name}: places overlap")
        values, sizes = self.load(rank, row)
        self.store(rank, row, values, sizes)

    def load(self, rank: int, row: CheckedRow) -> tuple[list[_ChunkValue], list[object]]:
        chunks = self.chunks(rank, row[3], row[4], row[7])
        values = [self.get(rank, chunk, "reads") for chunk in chunks]
        return values, [_size(self.schedule, rank, chunk) for chunk in chunks]

    def store(
        self, rank: int, row: CheckedRow, values: list[_ChunkValue], sizes: list[object]
    ) -> None:
        chunks = self.chunks(rank, row[5], row[6], row[7])
        if row[5] == Buf.INPUT:
            self.fail(rank, f"writes {_name(chunks[0])}: INPUT is read-only")
        here = [_size(self.schedule, rank, chunk) for chunk in chunks]
        if here != sizes:
            self.fail(rank, f"{_name(chunks[0])}: sizes {here} here, {sizes} at the source")
        for chunk, value in zip(chunks, values, strict=True):
            if self.schedule.collective == "barrier":
                # A barrier moves no data. The value is the set of ranks that have entered it.
                known = self.get(rank, chunk, "writes").ranks | value.ranks
                value = _ChunkValue(0, value.item, known)
            elif row[1] in REDUCE_OPS:
                mine = self.get(rank, chunk, "reduces into")
                swapped = row[1] == Op.RECV_REDUCE and row[2] < rank
                value = self.combine(rank, mine, value, chunk, swapped=swapped)
            self.memory[rank][self.place(rank, chunk)] = value
            self.written_in[rank, self.place(rank, chunk)] = self.stage(rank)

    def get(self, rank: int, chunk: Chunk, verb: str) -> _ChunkValue:
        value = self.memory[rank].get(self.place(rank, chunk))
        if value is None:
            hint = None
            if _buffer_chunks(self.schedule, rank)[Buf.INPUT] and chunk[0] == Buf.OUTPUT:
                hint = "the data of the call is in INPUT: send that, or copy it in before="
            self.fail(rank, f"{verb} {_name(chunk)}, which is undefined", hint)
        return value

    def chunks(self, rank: int, buf: int, first: int, n: int) -> list[Chunk]:
        has = _buffer_chunks(self.schedule, rank)
        limit = has.get(buf, 0)
        if n < 0 or first < 0 or first + n > limit:
            name, hint = Buf(buf).name if buf in has else f"buffer {buf}", None
            if buf == Buf.INPUT and not self.schedule.input_chunks:
                hint = "the data of the call is in OUTPUT, if input_chunks= is 0"
            elif getattr(self.schedule, given := f"{name.lower()}_chunks", -1) == limit:
                hint = f"{given}= of the Schedule is {limit}"
            self.fail(rank, f"chunks [{first}, {first + n}) of {name}, which has {limit}", hint)
        return [(buf, chunk) for chunk in range(first, first + n)]

    # --- results --------------------------------------------------------------------------

    def check_results(self) -> None:
        """Compare the final chunks of every rank with the result of the collective."""
        s = self.schedule
        reducing = s.collective in REDUCING or s.collective == "barrier"
        for rank in range(s.world_size):
            for chunk, (item, source) in _required(s, rank).items():
                value = self.memory[rank].get(self.place(rank, chunk))
                at = f"at the end {_name(chunk)} of rank {rank}"
                last = self.written_in.get((rank, self.place(rank, chunk)))
                when = "never written" if last is None else f"last written in round {last + 1}"
                if value is None:
                    raise self.error(f"{at} is undefined; {when}", rank)
                if value.item != item:
                    raise self.error(f"{at} holds data {value.item}, expected {item}; {when}", rank)
                expected = _contributors(s, rank) if reducing else 1 << source
                if value.ranks != expected:
                    got, want = _ranks(value.ranks), _ranks(expected)
                    raise self.error(
                        f"{at} has contributions of {got}, expected {want}; {when}", rank
                    )
                if self.rank_order and reducing and value.key != self.fold(item, expected):
                    raise self.error(f"{at} is not reduced in the order of ranks", rank)
                first = self.memory[0].get(chunk)
                if s.collective == "all_reduce" and first and value.key != first.key:
                    raise self.error(f"{at} is reduced in another order than on rank 0", rank)

    def fold(self, item: Chunk, ranks: int) -> int:
        """Return the key of an item's contributions by `ranks`, reduced in their order."""
        first, *others = [self.leaf(item, r).key for r in range(ranks.bit_length())]
        is_rounded = not self.schedule.accumulates or self.schedule.collective in ("scan", "exscan")
        for other in others:
            last = is_rounded or other == others[-1]
            first = self.key(first, other) if last else self.key("unrounded", first, other)
        return first

    def others(self, rank: int) -> str:
        return f"0..{self.schedule.world_size - 1} without {rank}"

    def stage(self, rank: int) -> int:
        return self.stage_of[rank][self.next[rank]]

    def fail(self, rank: int, what: str, hint: str | None = None) -> NoReturn:
        """Raise an error for the current step of `rank`."""
        step, k = self.next[rank], self.stage(rank)
        text = f"rank {rank}, round {k + 1} (k={k}), step {step}: {what}"
        raise self.error(text, rank, step, hint)

    def error(
        self, what: str, rank: int, step: int | None = None, hint: str | None = None
    ) -> ScheduleError:
        s = self.schedule
        where = Context(rank=rank, world_size=s.world_size, op=s.collective, step=step)
        return ScheduleError(f"{s.collective} ({s.algorithm}): {what}", context=where, hint=hint)


class _OutputRecorder(_SymbolicWorld):
    """A world that keeps what each stage writes to OUTPUT: rank, chunk, number of ranks in it."""

    def __init__(self, schedule: Schedule):
        super().__init__(schedule, in_place=False, rank_order=False)
        self.before = [
            {chunk[1]: value.ranks.bit_count() for chunk, value in memory.items()
             if chunk[0] == Buf.OUTPUT}
            for memory in self.memory
        ]  # fmt: skip
        self.written: dict[int, list[tuple[int, int, int]]] = defaultdict(list)

    def store(
        self, rank: int, row: CheckedRow, values: list[_ChunkValue], sizes: list[object]
    ) -> None:
        super().store(rank, row, values, sizes)
        for chunk in self.chunks(rank, row[5], row[6], row[7]):
            if chunk[0] == Buf.OUTPUT:
                count = self.memory[rank][chunk].ranks.bit_count()
                self.written[self.stage(rank)].append((rank, chunk[1], count))


def _programs(schedule: Schedule) -> tuple[list[list[CheckedRow]], list[list[int]]]:
    """Return every rank's rows in order, and the stage of each."""
    programs: list[list[CheckedRow]] = [[] for _ in range(schedule.world_size)]
    stages: list[list[int]] = [[] for _ in range(schedule.world_size)]
    everyone = np.arange(schedule.world_size)
    for k in range(schedule.stages):
        for row in schedule.steps(k, everyone).tolist():
            programs[row[0]].append(tuple(row))
            stages[row[0]].append(k)
    return programs, stages


def _sums_on(schedule: Schedule, rows: list[CheckedRow]) -> list[bool]:
    """Return which rows the next one continues as an accumulation."""
    table = np.array(rows, np.int64).reshape(-1, 8)
    goes_on: list[bool] = sums_on(schedule, table[:, 1], table[:, 5:]).tolist()
    return goes_on


def _buffer_chunks(s: Schedule, rank: int) -> dict[int, int]:
    """Return the number of chunks of each buffer on `rank`."""
    elsewhere = rank != s.root
    return {
        Buf.INPUT: 0 if s.collective == "scatter" and elsewhere else s.input_chunks,
        Buf.OUTPUT: 0 if s.collective == "gather" and elsewhere else s.output_chunks,
        Buf.SCRATCH: s.scratch_chunks,
    }


def _initial(s: Schedule, rank: int) -> dict[Chunk, Chunk]:
    """Return the chunks that are defined at the start: chunk -> data item.

    An item is (block, chunk in the block) of the collective's data. Blocks of several ranks for one
    destination are the same item. Their values differ in the rank that contributes them.
    """
    m = s.block_chunks
    if s.collective == "broadcast" and rank != s.root:
        return {}
    if s.collective in (*VECTOR_COLLECTIVES, "barrier"):
        return {(Buf.OUTPUT, c): (0, c) for c in range(s.output_chunks)}
    block = rank if s.collective in ("all_gather", "gather") else 0
    inputs = _buffer_chunks(s, rank)[Buf.INPUT]
    return {(Buf.INPUT, c): (block + c // m, c % m) for c in range(inputs)}


def _required(s: Schedule, rank: int) -> dict[Chunk, tuple[Chunk, int]]:
    """Return the required OUTPUT: chunk -> (data item, the rank that contributes it)."""
    m = s.block_chunks
    if s.collective == "reduce" and rank != s.root:
        return {}
    outputs = range(_buffer_chunks(s, rank)[Buf.OUTPUT])
    if s.collective in (*VECTOR_COLLECTIVES, "barrier"):
        return {(Buf.OUTPUT, c): ((0, c), s.root) for c in outputs}
    if s.collective in ("all_gather", "gather"):
        return {(Buf.OUTPUT, c): ((c // m, c % m), c // m) for c in outputs}
    if s.collective == "all_to_all":
        return {(Buf.OUTPUT, c): ((rank, c % m), c // m) for c in outputs}
    return {(Buf.OUTPUT, c): ((rank, c % m), s.root) for c in outputs}


def _contributors(s: Schedule, rank: int) -> int:
    """Return the ranks that contribute to a result on `rank`, as a bit set."""
    count = {"scan": rank + 1, "exscan": max(rank, 1)}.get(s.collective, s.world_size)
    return (1 << count) - 1


def _size(s: Schedule, rank: int, chunk: Chunk) -> object:
    """Return a symbol for the size of a chunk; equal symbols mean equal sizes at every count."""
    buf, index = chunk
    m = s.block_chunks
    if buf == Buf.SCRATCH:
        index %= s.work_chunks
    if not s.uneven_ok:
        # All blocks are equal. The chunks of a block differ in size.
        return index % m
    if s.collective == "all_to_all":
        pair = (rank, index // m) if buf == Buf.INPUT else (index // m, rank)
        return (*pair, index % m)
    own = Buf.INPUT if s.collective in ("all_gather", "gather") else Buf.OUTPUT
    return (rank if buf == own else index // m, index % m)


def _name(chunk: Chunk) -> str:
    return f"{Buf(chunk[0]).name}[{chunk[1]}]"


def _ranks(bits: int) -> str:
    """Return "0,1,3", or "0-63" for more than eight in a row."""
    parts: list[str] = []
    i = 0
    while bits >> i:
        length = (~(bits >> i) & (bits >> i) + 1).bit_length() - 1
        run = range(i, i + length)
        parts += [f"{run[0]}-{run[-1]}"] if length > 8 else map(str, run)
        i += length + 1
    return ",".join(parts) or "none"
