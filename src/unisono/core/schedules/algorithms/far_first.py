"""All-gather and reduce-scatter that send one block to the farthest rank, many to the nearest.

The rounds are Bruck's in reverse. In an all_gather, distances halve while the number of blocks
doubles. So few bytes cross the slow levels of a network whose ranks are numbered by place.

In the formulas n is the size of all p blocks, p the world size, lg the logarithm to base 2.

Source: Jeaugey, "PAT: a new algorithm for all-gather and reduce-scatter operations at scale",
arXiv 2506.20252, with one message per round (full aggregation); NCCL's PAT.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from unisono.core.schedules.blocks import backwards, block_schedule
from unisono.core.schedules.ir import Buf, IntArray, Schedule, ceil_log2, copy, recv, send

INPUT, OUTPUT, SCRATCH = Buf.INPUT, Buf.OUTPUT, Buf.SCRATCH
NAME = "far_first"


def all_gather(p: int) -> Schedule:
    """Pass all blocks gathered so far ..., 4, 2, 1 ranks to the right.

    Use: small data where distant ranks share slow links.
    Cost: ceil(lg p) rounds, n(p-1)/p sent; the first rounds send the fewest blocks.
    Source: as the module.
    """
    places, rounds = _places(p)

    def own(r: IntArray) -> Iterable[IntArray]:
        yield copy(r, (INPUT, 0), (SCRATCH, places[0]))

    def exchange(k: int, r: IntArray) -> Iterable[IntArray]:
        distance, given, taken, n = rounds[k]
        yield send(r, (r + distance) % p, SCRATCH, given, n)
        yield recv(r, (r - distance) % p, SCRATCH, taken, n)

    def sort(r: IntArray) -> Iterable[IntArray]:
        column, block = r[:, None], np.arange(p)
        yield copy(column, (SCRATCH, places[(column - block) % p]), (OUTPUT, block))

    return block_schedule(
        "all_gather", NAME, p, len(rounds), exchange, scratch_chunks=p, before=own, after=sort
    )


def reduce_scatter(p: int) -> Schedule:
    """Pass partial sums 1, 2, 4, ... ranks to the left; the last rounds send the fewest blocks.

    Cost: ceil(lg p) rounds, n(p-1)/p sent and reduced.
    Source: as the module, the all_gather in reverse.
    """
    return backwards(all_gather(p))


def _places(p: int) -> tuple[IntArray, list[tuple[int, int, int, int]]]:
    """Return the places of blocks in SCRATCH, and the rounds of the all_gather.

    A block is named by its offset, the distance that it travels. Before the round with distance d a
    rank has the multiples of 2d below p. It sends those whose offset plus d is below p. Only the
    largest may not be. Offsets are placed such that every message is one range: those received
    follow those sent, or, if the largest stays behind, precede all.

    Returns:
        places: The place of each offset [p].
        rounds: Distance, place of the first block sent, of the first received, and their number.
    """
    held, rounds = [0], []
    for d in [1 << j for j in range(ceil_log2(p))][::-1]:
        sent = [offset for offset in held if offset + d < p]
        behind = len(sent) < len(held)
        rounds.append((d, behind, len(sent)))
        moved = [offset + d for offset in sent]
        held = moved + held if behind else held + moved
    places = np.argsort(held)
    # The held blocks begin at the place of the first, which blocks before it move up.
    first, table = int(places[0]), []
    for d, behind, n in rounds:
        table.append((d, first, first - n if behind else first + n, n))
        first -= n if behind else 0
    return places, table
