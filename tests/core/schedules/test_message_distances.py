"""The distances and sizes of messages of far_first, swing and bine, against their papers."""

import numpy as np
import pytest

from unisono.core.schedules import build
from unisono.core.schedules.ir import Op


def sent(schedule, k, rank=0):
    """Return the peers and the chunks of the messages of one round."""
    rows = schedule.steps(k, np.array([rank]))
    rows = rows[np.isin(rows[:, 1], (Op.SEND, Op.POST))]
    return list(zip(rows[:, 2].tolist(), rows[:, 7].tolist(), strict=True))


def test_swing_alternates_sides_and_sends_most_to_the_nearest():
    p = 64
    schedule = build("all_reduce", "swing", p)
    distances = [1, -1, 3, -5, 11, -21]  # De Sensi et al. 2024, section 3
    halves = [32, 16, 8, 4, 2, 1]
    for rank, way in ((0, 1), (7, -1), (30, 1)):
        ahead = [sent(schedule, k, rank) for k in range(6)]
        assert ahead == [
            [((rank + way * d) % p, n)] for d, n in zip(distances, halves, strict=True)
        ]
        back = [sent(schedule, k, rank) for k in range(6, 12)]
        assert back == ahead[::-1]


def test_bine_broadcast_goes_to_the_farthest_first():
    schedule = build("broadcast", "bine", 16, 0)
    assert [sent(schedule, k) for k in range(4)] == [[(11, 1)], [(3, 1)], [(15, 1)], [(1, 1)]]
    moved = build("broadcast", "bine", 16, 5)
    assert [sent(moved, k, 5) for k in range(4)] == [[(0, 1)], [(8, 1)], [(4, 1)], [(6, 1)]]


@pytest.mark.parametrize("p", [13, 16, 17, 24])
def test_far_first_sends_fewest_blocks_to_the_farthest(p):
    gather, scatter = (build(c, "far_first", p) for c in ("all_gather", "reduce_scatter"))
    rounds = gather.rounds
    for k, distance in enumerate([1 << j for j in range(rounds)][::-1]):
        held = len(range(0, p, 2 * distance))
        ((peer, blocks),) = sent(gather, k)
        assert peer == distance
        assert blocks == len([o for o in range(0, p, 2 * distance) if o + distance < p])
        assert held - 1 <= blocks <= held
        assert sent(scatter, rounds - 1 - k) == [(p - peer, blocks)]


def test_far_first_crosses_pods_less_often_than_bruck():
    """Bytes between pods of 16 of 64 ranks: the reason for the order."""

    def crossing(algorithm):
        schedule = build("all_gather", algorithm, 64)
        rows = np.concatenate([schedule.steps(k, np.arange(64)) for k in range(schedule.rounds)])
        rows = rows[rows[:, 1] == Op.SEND]
        return int(rows[rows[:, 0] // 16 != rows[:, 2] // 16][:, 7].sum())

    assert crossing("far_first") < 0.5 * crossing("bruck")
    assert crossing("far_first") < 0.5 * crossing("recursive_doubling")


def test_recursive_multiplying_has_groups_of_four():
    schedule = build("all_reduce", "recursive_multiplying", 32)
    peers = [[peer for peer, _ in sent(schedule, k, 5)] for k in range(3)]
    assert peers == [[6, 7, 4], [9, 13, 1], [21]]
