"""all_to_all with uneven blocks over memory that all ranks of a host can read.

Every rank has all block sizes, so no schedule is needed. In each piece a rank posts a part of its
block for every other rank. Then it reads the parts that the other ranks posted for it.

In the formula n is the data that a rank sends, p the world size.
"""

from __future__ import annotations

import numpy as np

from unisono.core.schedules.ir import Buf, IntArray, Op
from unisono.core.schedules.lowering.program import Program
from unisono.core.schedules.lowering.shared import ALIGN, PIECE_BYTES, SharedProgram


def lower_uneven(
    messages: Program, counts: IntArray, rank: int, itemsize: int, slot_bytes: int
) -> SharedProgram | None:
    """Return the program of `rank`; None if a slot is too small for a part per rank.

    Args:
        messages: The program of the same call with messages.
        counts: [p, p] elements that each rank (row) sends to each rank (column).
        rank: This rank.
        itemsize: Bytes per element.
        slot_bytes: Bytes that a rank can post at once.

    Cost: n copied into shared memory, n copied out of it.
    """
    p = len(counts)
    part = min(slot_bytes, PIECE_BYTES) // itemsize // max(p - 1, 1) // ALIGN * ALIGN
    if part == 0:
        return None
    sent, received = counts[rank], counts[:, rank]
    from_at, to_at = np.cumsum(sent) - sent, np.cumsum(received) - received
    others = counts[~np.eye(p, dtype=bool)]
    pieces = max(1, -(-int(others.max(initial=0)) // part))
    rows: list[list[int]] = []
    loops: list[list[int]] = []
    for start in range(0, pieces * part, part):
        first = len(rows)
        for peer in _others(rank, p):
            count = min(int(sent[peer]) - start, part)
            if count > 0:
                slot = (peer - (peer > rank)) * part
                source = int(from_at[peer]) + start
                rows.append([Op.SEND, peer, Buf.INPUT, source, -1, -1, count, rank, slot, 1, 0])
        if not start:
            at, to, count = int(from_at[rank]), int(to_at[rank]), int(sent[rank])
            rows.append([Op.COPY, -1, Buf.INPUT, at, Buf.OUTPUT, to, count, -1, -1, -1, 0])
        for peer in _others(rank, p):
            count = min(int(received[peer]) - start, part)
            if count > 0:
                slot = (rank - (rank > peer)) * part
                target = int(to_at[peer]) + start
                rows.append([Op.RECV, peer, -1, -1, Buf.OUTPUT, target, count, peer, slot, 1, 0])
        loops.append([first, len(rows), 1, 0, 0])
    table = np.array(rows, np.int64)
    return SharedProgram(lambda: messages, table, np.array(loops, np.int64))


def _others(rank: int, p: int) -> list[int]:
    """Return the other ranks from the right neighbour on; each rank begins with another rank."""
    return [(rank + i) % p for i in range(1, p)]
