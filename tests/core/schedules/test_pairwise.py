"""A root exchanges with few ranks at once, however long it or they take."""

from collections import Counter, deque

import numpy as np
import pytest

from unisono.core.schedules import build, layout_for, lower
from unisono.core.schedules.algorithms.pairwise import AT_ONCE
from unisono.core.schedules.ir import Op


def most_under_way(schedule, sizes, slow):
    """Return the most messages with elements that were sent and not received at any time.

    Each rank goes on as far as it can, and the ranks in `slow` only if no other rank can.
    """
    key = "out_splits" if schedule.collective == "gather" else "in_splits"
    layout, p = layout_for(schedule, 0, **{key: sizes}), schedule.world_size
    steps = [deque(lower(schedule, rank, layout).steps.tolist()) for rank in range(p)]
    queued, under_way, most = Counter(), 0, 0
    while any(steps):
        able = [r for r in range(p) if steps[r] and can_go_on(r, steps[r][0], queued)]
        assert able, "no rank can go on"
        rank = next((r for r in able if r not in slow), able[0])
        op, peer, *_, count, _ = steps[rank].popleft()
        if op == Op.SEND:
            queued[rank, peer] += 1
            under_way += count > 0
        elif op == Op.RECV:
            queued[peer, rank] -= 1
            under_way -= count > 0
        most = max(most, under_way)
    return most


def can_go_on(rank, step, queued):
    return step[0] != Op.RECV or queued[step[1], rank] > 0


@pytest.mark.parametrize("collective", ["gather", "scatter"])
@pytest.mark.parametrize("p", [2, 3, 4, 5, 8, 13])
def test_few_blocks_are_under_way(collective, p):
    for root in (0, p - 1):
        schedule = build(collective, "pairwise", p, root)
        others = [rank for rank in range(p) if rank != root]
        slow = [root] if collective == "gather" else others
        assert most_under_way(schedule, [8] * p, slow) == min(AT_ONCE, p - 1)
        everything = build(collective, "linear", p, root)
        assert most_under_way(everything, [8] * p, slow) == p - 1
        # An empty block is not sent, and holds nobody back for ever.
        for seed in range(5):
            sizes = np.random.default_rng(seed).integers(0, 3, p).tolist()
            assert most_under_way(schedule, sizes, slow) <= AT_ONCE
