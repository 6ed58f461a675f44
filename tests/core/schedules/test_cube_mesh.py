import numpy as np

from unisono.core.schedules.ir import Op
from unisono.core.schedules.registry import build

# The links of a hybrid cube mesh: two quads, and one link between opposite corners.
NEIGHBOURS = {x: ({y for y in range(8) if y // 4 == x // 4} - {x}) | {x ^ 4} for x in range(8)}


def test_only_direct_links_are_used():
    schedule = build("all_reduce", "cube_mesh", 8)
    for k in range(schedule.rounds):
        for rank, op, peer, *_ in schedule.steps(k, np.arange(8)).tolist():
            if op in (Op.POST, Op.READ, Op.READ_REDUCE):
                assert peer in NEIGHBOURS[rank]


def test_the_relay_is_the_only_neighbour_with_no_neighbour_in_common():
    schedule = build("all_reduce", "cube_mesh", 8)
    rows = schedule.steps(1, np.arange(8))
    relays = {rank: peer for rank, op, peer, *_ in rows.tolist() if op == Op.POST}
    for rank, relay in relays.items():
        disjoint = [y for y in NEIGHBOURS[rank] if not NEIGHBOURS[rank] & NEIGHBOURS[y]]
        assert disjoint == [relay]
