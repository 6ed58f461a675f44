"""NCCL's trees over nodes: proved, counted, and their messages between hosts."""

from fractions import Fraction

import numpy as np
import pytest

from unisono.core.schedules import build
from unisono.core.schedules.cost import cost
from unisono.core.schedules.ir import Op
from unisono.core.schedules.verify import verify


@pytest.mark.parametrize(
    ("p", "local", "pipeline"),
    [(4, 2, 1), (6, 3, 2), (6, 2, 1), (10, 2, 3), (12, 4, 1), (21, 7, 2), (16, 4, 3), (36, 6, 1)],
)
def test_it_is_an_all_reduce(p, local, pipeline):
    verify(build("all_reduce", "node_tree", p, pipeline=pipeline, local=local))


@pytest.mark.parametrize(("p", "local", "rounds"), [(16, 4, 10), (64, 8, 20), (24576, 6, 34)])
def test_cost(p, local, rounds):
    counted = cost(build("all_reduce", "node_tree", p, local=local))
    assert (counted.rounds, counted.messages, counted.bytes_sent) == (rounds, 6, Fraction(3))


def test_only_first_ranks_send_to_other_hosts():
    schedule = build("all_reduce", "node_tree", 24, local=4)
    rows = np.concatenate([schedule.steps(k, np.arange(24)) for k in range(schedule.rounds)])
    rank, op, peer = rows[:, 0], rows[:, 1], rows[:, 2]
    away = (op == Op.SEND) & (rank // 4 != peer // 4)
    assert (rank[away] % 4 == 0).all()
    assert (peer[away] % 4 == 0).all()
    inside = (op == Op.SEND) & ~away
    assert (np.abs(rank - peer)[inside] == 1).all()
    # Each of the 2 trees over 6 hosts has 5 edges, both ways.
    assert away.sum() == 2 * 2 * 5
