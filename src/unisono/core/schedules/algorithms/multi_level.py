"""Several levels: the ranks of a host, then groups of hosts, groups of groups, and so on.

A rank is a number of mixed radix, with a digit per level. In a level the ranks whose other digits
are equal are a group of R. They exchange at once, or in a ring, and each keeps an R-th of its part.
docs/howto/algorithms.md builds the simplest case line by line; `unisono synthesize` searches among
all.

In the formulas n is the size of the whole data, R the radix of a level, m the pipeline depth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from math import prod
from typing import NamedTuple

import numpy as np

from unisono.core.schedules.algorithms.shared_memory.one_shot import reduce_in_rank_order
from unisono.core.schedules.blocks import backwards
from unisono.core.schedules.ir import (
    Buf,
    IntArray,
    Schedule,
    copy,
    post,
    recv,
    recv_reduce,
    send,
)
from unisono.errors import InvalidArgumentError

# Ranks that exchange at once. More: fewer rounds, more messages that meet at an interface.
_MOST = 16
WAYS = ("at once", "ring", "whole")
# An all_to_all has no pipeline.
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "all_to_all")

Rows = list[IntArray]
# The rows that send, and those that receive, of slice s for ranks r.
Stage = Callable[[int, IntArray], tuple[Rows, Rows]]


class Level(NamedTuple):
    """The ranks that are `stride` apart, `radix` of them.

    Attributes:
        radix: Ranks of a group.
        stride: Distance of neighbours in a group.
        way: "at once": 1 round, R-1 messages per rank. "ring": R-1 rounds of a message, R in an
            all_to_all. "whole": all of a rank's part to all others, at once; for all_reduce.
    """

    radix: int
    stride: int
    way: str = "at once"

    def place(self, r: IntArray) -> IntArray:
        """Return the digits of ranks."""
        return r // self.stride % self.radix

    def others(self, r: IntArray) -> tuple[IntArray, IntArray]:
        """Return the other digits of each rank's group, and their ranks, [ranks, radix - 1]."""
        own = self.place(r)[:, None]
        digits = (own + np.arange(1, self.radix)) % self.radix
        return digits, r[:, None] + (digits - own) * self.stride


def all_reduce(p: int, local: int) -> Schedule:
    """Reduce-scatter level by level, all-gather back.

    Use: medium data on many hosts.
    Cost: 2 rounds per level, 2n(p-1)/p sent; 2n(H-1)/p of it to other hosts, H = p / `local`.
    Source: hierarchical all-reduce, as in Horovod; the levels are mixed-radix digits of a rank.
    """
    levels = list(digits(p, [local, *_radices(p // local)]))
    return levelled("all_reduce", p, levels)


def digits(p: int, radices: Iterable[int]) -> Iterator[Level]:
    """Yield the levels of radices whose product is `p`, neighbours first."""
    stride = 1
    for radix in radices:
        yield Level(radix, stride)
        stride *= radix


def levelled(
    collective: str, p: int, levels: Sequence[Level], pipeline: int = 1, root: int = -1
) -> Schedule:
    """Return the schedule that reduces over the levels in this order, and gathers back.

    An all_gather has the way back only, a reduce_scatter the way there. A broadcast sends all data
    to the other ranks of a level; reduce is the same backwards. An all_to_all exchanges in each
    level the blocks for the other ranks, a message for each run of blocks.

    Cost: 1 or R-1 rounds per level and way, and m-1. n(p-1)/p sent each way; R-1 times the part in
        a whole level. Broadcast: n per round. all_to_all: n(R-1)/R per level.
    Source: Bruck et al. 1997; Ruefenacht, Bull and Booth 2017 (whole levels).

    Raises:
        InvalidArgumentError: The levels do not give each rank one number, a whole level comes
            before another one or not in an all_reduce, or the collective has no levels.
    """
    _check(collective, p, levels, pipeline)
    if collective in ("broadcast", "reduce"):
        stages = _rooted(levels, root, collective == "reduce")
        return _pipelined(collective, p, stages, pipeline, root=root, output_chunks=pipeline)
    if collective == "all_to_all":
        return _exchanges(p, levels)
    whole = sum(level.way == "whole" for level in levels)
    if collective == "all_reduce":
        slots = p // prod(level.radix for level in levels[len(levels) - whole :])
        chunks = slots * pipeline
        vector = _Slots(levels, slots, Buf.OUTPUT, lambda slot, s: s * slots + slot)
        stages = [stage for i in range(len(levels)) for stage in vector.reduces(i)]
        back = reversed(range(len(levels) - whole))
        stages += [stage for i in back for stage in vector.gathers(i)]
        scratch = chunks if any(each.way == "whole" and each.radix > 2 for each in levels) else 0
        return _pipelined(
            collective, p, stages, pipeline, output_chunks=chunks, scratch_chunks=scratch
        )
    plain = [level.stride for level in levels] == sorted((x.stride for x in levels), reverse=True)
    scatter = collective == "reduce_scatter"
    gathered = _gather(p, levels, pipeline, kept=scatter or not (plain or pipeline > 1))
    return backwards(gathered) if scatter else gathered


def _check(collective: str, p: int, levels: Sequence[Level], pipeline: int) -> None:
    known = COLLECTIVES if pipeline == 1 else COLLECTIVES[:-1]
    ways = [level.way for level in levels]
    whole = ways.count("whole")
    expected, wanted = sorted(levels, key=lambda level: level.stride), 1
    for level in expected:
        wanted = wanted * level.radix if level.stride == wanted and level.radix > 1 else 0
    fits = wanted == p and pipeline >= 1 and set(ways) <= set(WAYS) and collective in known
    if not fits or "whole" in ways[: len(ways) - whole] or (whole and collective != "all_reduce"):
        told = ", ".join(f"{level.radix} x {level.stride} {level.way}" for level in levels)
        raise InvalidArgumentError(
            f"levels {told} of {collective} on {p} ranks, pipeline {pipeline}: expected each digit "
            "once, and whole levels last and in an all_reduce only"
        )


class _Slots:
    """Parts of the data in the order of the levels, so that a part of a level is contiguous.

    Args:
        levels: In the order in which they reduce.
        slots: Parts of the last level.
        buf: The buffer.
        chunk: Function that returns the chunk of a slot in a slice; slots in order are contiguous
            chunks if `runs`.
        runs: Whether a part is one message.
    """

    def __init__(
        self, levels: Sequence[Level], slots: int, buf: Buf,
        chunk: Callable[[IntArray, int], IntArray], *, runs: bool = True,
    ) -> None:  # fmt: skip
        self.levels, self.buf, self.chunk, self.runs = levels, buf, chunk, runs
        products = np.cumprod([level.radix for level in levels])
        self.parts = [max(slots // int(product), 1) for product in products]

    def start(self, i: int, r: IntArray) -> IntArray:
        """Return the first slot of the part that ranks have before level `i`."""
        split = [j for j in range(i) if self.levels[j].way != "whole"]
        places = [self.levels[j].place(r) * self.parts[j] for j in split]
        return sum(places, np.zeros_like(r))

    def moved(
        self, step: Callable[..., IntArray], r: IntArray, peer: IntArray, slot: IntArray, i: int,
        s: int,
    ) -> IntArray:  # fmt: skip
        """Return rows that move a part of level `i`, from `slot` on."""
        if self.runs:
            return step(r, peer, self.buf, self.chunk(slot, s), self.parts[i])
        slots = slot[..., None] + np.arange(self.parts[i])
        return step(r[..., None], peer[..., None], self.buf, self.chunk(slots, s))

    def reduces(self, i: int) -> list[Stage]:
        """Return the stages of a level on the way there."""
        if self.levels[i].way == "whole":
            return [self._whole(i)]
        return self._stages(i, recv_reduce, back=False)

    def gathers(self, i: int) -> list[Stage]:
        """Return the stages of a level on the way back."""
        return self._stages(i, recv, back=True)

    def _stages(self, i: int, take: Callable[..., IntArray], *, back: bool) -> list[Stage]:
        level, count = self.levels[i], self.parts[i]

        def at_once(s: int, r: IntArray) -> tuple[Rows, Rows]:
            others, peers = level.others(r)
            column, first = r[:, None], self.start(i, r)[:, None]
            mine, theirs = first + level.place(r)[:, None] * count, first + others * count
            mine = np.broadcast_to(mine, theirs.shape)
            given, taken = (mine, theirs) if back else (theirs, mine)
            return (
                [self.moved(send, column, peers, given, i, s)],
                [self.moved(take, column, peers, taken, i, s)],
            )

        def ring(t: int) -> Stage:
            def stage(s: int, r: IntArray) -> tuple[Rows, Rows]:
                own, first = level.place(r), self.start(i, r)
                given = own - t if back else own - 1 - t
                right, left = ((own + way) % level.radix - own for way in (1, -1))
                slots = (first + part % level.radix * count for part in (given, given - 1))
                ends = (r + way * level.stride for way in (right, left))
                steps = zip((send, take), ends, slots, strict=True)
                gives, takes = ([self.moved(f, r, peer, x, i, s)] for f, peer, x in steps)
                return gives, takes

            return stage

        return [ring(t) for t in range(level.radix - 1)] if level.way == "ring" else [at_once]

    def _whole(self, i: int) -> Stage:
        level = self.levels[i]

        def stage(s: int, r: IntArray) -> tuple[Rows, Rows]:
            chunk = self.chunk(self.start(i, r), s)
            peers = level.others(r)[1]
            if level.radix == 2:
                peer = peers[:, 0]
                return [send(r, peer, self.buf, chunk)], [recv_reduce(r, peer, self.buf, chunk)]
            group = r[:, None] + (np.arange(level.radix) - level.place(r)[:, None]) * level.stride
            posts = post(r[:, None], peers, self.buf, chunk[:, None])
            return [posts], list(reduce_in_rank_order(r, group, chunk))

        return stage


def _gather(p: int, levels: Sequence[Level], m: int, *, kept: bool) -> Schedule:
    """Return the all_gather; `kept` if it gathers in SCRATCH, in the order of slots."""
    everyone = np.arange(p)
    slot_of = _Slots(levels, p, Buf.SCRATCH, lambda slot, s: slot).start(len(levels), everyone)
    rank_of = np.argsort(slot_of)
    buf = Buf.SCRATCH if kept else Buf.OUTPUT

    def chunk(slot: IntArray, s: int) -> IntArray:
        return (slot if kept else rank_of[slot]) * m + s

    blocks = _Slots(levels, p, buf, chunk, runs=m == 1)
    stages = [stage for i in reversed(range(len(levels))) for stage in blocks.gathers(i)]

    def before(r: IntArray) -> Iterable[IntArray]:
        yield copy(r, (Buf.INPUT, 0), (buf, (slot_of[r] if kept else r) * m), m)

    def after(r: IntArray) -> Iterable[IntArray]:
        if kept:
            yield copy(r[:, None], (buf, everyone * m), (Buf.OUTPUT, rank_of * m), m)

    return _pipelined(
        "all_gather", p, stages, m, input_chunks=m, output_chunks=p * m,
        scratch_chunks=p * m if kept else 0, before=before, after=after,
    )  # fmt: skip


def _rooted(levels: Sequence[Level], root: int, reducing: bool) -> list[Stage]:
    """Return the stages of a broadcast over the levels, or of a reduce."""

    def stage(i: int, t: int) -> Stage:
        level = levels[i]
        first = int(level.place(np.array([root]))[0])
        near, far = (recv_reduce, send) if reducing else (send, recv)

        def rows(s: int, r: IntArray) -> tuple[Rows, Rows]:
            # The ranks of groups that the levels before have reached; digits count from the root.
            active = np.ones(len(r), np.bool_)
            for other in levels[i + 1 :]:
                active &= other.place(r) == other.place(np.array([root]))
            digit = (level.place(r) - first) % level.radix
            if level.way == "ring":
                peers = [(digit + way + first) % level.radix for way in (1, -1)]
                gives, takes = active & (digit == t), active & (digit == t + 1)
                after, before = (r + (peer - level.place(r)) * level.stride for peer in peers)
                one = near(r, after, Buf.OUTPUT, s, 1, gives)
                two = far(r, before, Buf.OUTPUT, s, 1, takes)
            else:
                gives, takes = active & (digit == 0), active & (digit > 0)
                head = r + (first - level.place(r)) * level.stride
                one = near(r[:, None], level.others(r)[1], Buf.OUTPUT, s, 1, gives[:, None])
                two = far(r, head, Buf.OUTPUT, s, 1, takes)
            return ([two], [one]) if reducing else ([one], [two])

        return rows

    turns = [
        (i, t)
        for i, level in enumerate(levels)
        for t in range(level.radix - 1 if level.way == "ring" else 1)
    ]
    return [stage(i, t) for i, t in (reversed(turns) if reducing else turns)]


def _exchanges(p: int, levels: Sequence[Level]) -> Schedule:
    """Return the all_to_all: OUTPUT has the blocks for other ranks, which blocks of theirs replace.

    In a ring two ranks exchange in the round that is the sum of their digits.
    """

    def stage(level: Level, turn: int) -> Stage:
        def rows(s: int, r: IntArray) -> tuple[Rows, Rows]:
            if turn < 0:
                others, peers = level.others(r)
            else:
                others = (turn - level.place(r)[:, None]) % level.radix
                peers = r[:, None] + (others - level.place(r)[:, None]) * level.stride
            runs = np.arange(0, p, level.stride * level.radix)
            first = runs + (others * level.stride)[..., None]
            rank, peer = r[:, None, None], peers[..., None]
            moved = (rank, peer, Buf.OUTPUT, first, level.stride, peer != rank)
            return [send(*moved)], [recv(*moved)]

        return rows

    def before(r: IntArray) -> Iterable[IntArray]:
        yield copy(r, (Buf.INPUT, 0), (Buf.OUTPUT, 0), p)

    stages = []
    for level in levels:
        ring = level.way == "ring" and level.radix > 2
        stages += [stage(level, turn) for turn in (range(level.radix) if ring else [-1])]
    return _pipelined("all_to_all", p, stages, 1, input_chunks=p, output_chunks=p, before=before)


def _pipelined(
    collective: str, p: int, stages: Sequence[Stage], pipeline: int, **options: object
) -> Schedule:
    """Return the schedule in which slices pass through the stages one after another."""

    def exchange(k: int, r: IntArray) -> Iterable[IntArray]:
        # All sends first. Sends and receives are in one order of slices, so that two ranks that
        # exchange several slices in a round match the right messages.
        turns = range(max(0, k - len(stages) + 1), min(k, pipeline - 1) + 1)
        sides = [stages[k - s](s, r) for s in turns]
        return [rows for way in zip(*sides, strict=True) for rows in chain(*way)]

    rounds = len(stages) + pipeline - 1
    return Schedule(collective, "multi_level", p, rounds, exchange, **options)  # type: ignore[arg-type]


def _radices(hosts: int) -> list[int]:
    """Return factors of a number: the largest up to `_MOST` first, or prime."""
    found = []
    while hosts > 1:
        fits = [n for n in range(2, min(hosts, _MOST) + 1) if hosts % n == 0]
        found.append(max(fits, default=hosts))
        hosts //= found[-1]
    return found
