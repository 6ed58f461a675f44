"""Trees on links that are given one by one: a random search step by step.

In a step each link carries as many chunks as its bandwidth and the length of the step allow. A rank
passes on only what it had before the step. Of the chunks that a rank misses, it gets as many
as its links can carry, those that few ranks have first. So the copies of a chunk are a tree.

Source: the steps and rounds are those of Cai et al., "Synthesizing Optimal Collective Algorithms",
PPoPP 2021, which solves them exactly; the matching is like that of Won et al., "TACOS", MICRO 2024.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from random import Random
from typing import NamedTuple

import numpy as np

from unisono.core.schedules.blocks import backwards
from unisono.core.schedules.ir import Buf, IntArray, Op, Schedule, copy

Edges = Mapping[tuple[int, int], int]
# Steps of (source, target, chunk).
Moves = list[list[tuple[int, int, int]]]


class Copies(NamedTuple):
    """How the chunks of all owners come to all ranks.

    Attributes:
        moves: The copies of each step.
        rounds: Chunks that a link of the least bandwidth carries in all steps together.
    """

    moves: Moves
    rounds: int


def spread(
    ranks: int, edges: Edges, owners: Sequence[int], lengths: Sequence[int], random: Random
) -> Copies | None:
    """Return copies of each chunk to all ranks, or None if no link leads on.

    Args:
        ranks: Number of ranks.
        edges: Chunks that each link carries in a round.
        owners: The rank that has each chunk first.
        lengths: Rounds of each step; further steps have those of the last.
        random: Source of random numbers.
    """
    into = defaultdict(list)
    for (source, target), lanes in edges.items():
        into[target].append((source, lanes))
    held = [{c for c, owner in enumerate(owners) if owner == rank} for rank in range(ranks)]
    moves: Moves = []
    copies, rounds = [1] * len(owners), 0
    while any(len(own) < len(owners) for own in held):
        length = lengths[min(len(moves), len(lengths) - 1)]
        step: list[tuple[int, int, int]] = []
        order = list(range(ranks))
        random.shuffle(order)
        for target in order:
            missing = [c for c in range(len(owners)) if c not in held[target]]
            missing.sort(key=lambda c: (copies[c], random.random()))
            places = [s for s, lanes in into[target] for _ in range(lanes * length)]
            random.shuffle(places)
            for chunk, source in _match(places, missing, held).items():
                step.append((source, target, chunk))
                copies[chunk] += 1
        if not step:
            return None
        for _, target, chunk in step:
            held[target].add(chunk)
        moves.append(step)
        rounds += length
    return Copies(moves, rounds)


def _match(places: list[int], missing: list[int], held: list[set[int]]) -> dict[int, int]:
    """Return a source for as many chunks as possible; a place is a source that sends a chunk."""
    at: dict[int, int] = {}
    wanted = {source: [c for c in missing if c in held[source]] for source in set(places)}

    def place(index: int, seen: set[int]) -> bool:
        for chunk in wanted[places[index]]:
            if chunk not in seen:
                seen.add(chunk)
                if chunk not in at or place(at[chunk], seen):
                    at[chunk] = index
                    return True
        return False

    for index in range(len(places)):
        if not place(index, set()) and len(at) == len(missing):
            break
    return {chunk: places[index] for chunk, index in at.items()}


def schedule_of(collective: str, ranks: int, pieces: int, found: Copies, root: int) -> Schedule:
    """Return the schedule of copies; each rank, or the root, owns `pieces` chunks."""
    if collective in ("broadcast", "reduce"):
        steps = _steps(found.moves, Buf.OUTPUT)
        steps = _turned(steps) if collective == "reduce" else steps
        return _schedule(collective, ranks, steps, root=root, output_chunks=pieces)
    chunks = ranks * pieces
    if collective == "all_reduce":
        steps = _steps(found.moves, Buf.OUTPUT)
        return _schedule(collective, ranks, [*_turned(steps), *steps], output_chunks=chunks)
    scatter = collective == "reduce_scatter"
    buf = Buf.SCRATCH if scatter else Buf.OUTPUT

    def before(r: IntArray) -> Iterable[IntArray]:
        yield copy(r, (Buf.INPUT, 0), (buf, r * pieces), pieces)

    def after(r: IntArray) -> Iterable[IntArray]:
        if scatter:
            yield copy(r, (buf, 0), (Buf.OUTPUT, 0), chunks)

    gathered = _schedule(
        "all_gather", ranks, _steps(found.moves, buf), input_chunks=pieces, output_chunks=chunks,
        scratch_chunks=chunks if scatter else 0, before=before, after=after,
    )  # fmt: skip
    return backwards(gathered) if scatter else gathered


def _steps(moves: Moves, buf: Buf) -> list[IntArray]:
    """Return the rows of each step, sends first."""
    steps = []
    for step in moves:
        sends = [(a, Op.SEND, b, buf, c, -1, -1, 1) for a, b, c in step]
        takes = [(b, Op.RECV, a, -1, -1, buf, c, 1) for a, b, c in step]
        steps.append(np.array(sends + takes))
    return steps


def _turned(steps: list[IntArray]) -> list[IntArray]:
    """Return the steps backwards: what was sent is received and reduced."""
    turned = []
    for rows in reversed(steps):
        rank, op, peer, src_buf, src, dst_buf, dst, n = rows[::-1].T
        ops = np.where(op == Op.SEND, Op.RECV_REDUCE, Op.SEND)
        turned.append(np.stack([rank, ops, peer, dst_buf, dst, src_buf, src, n], axis=1))
    return turned


def _schedule(collective: str, ranks: int, steps: list[IntArray], **options: object) -> Schedule:
    def exchange(k: int, r: IntArray) -> Iterable[IntArray]:
        rows = steps[k][np.isin(steps[k][:, 0], r)]
        # In two parts, because `backwards` turns the order of the parts.
        sends = rows[:, 1] == Op.SEND
        yield from (rows[sends], rows[~sends])

    return Schedule(collective, "trees", ranks, len(steps), exchange, **options)  # type: ignore[arg-type]
