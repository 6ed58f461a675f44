"""wait_any and wait_all."""

import pytest

from tests.worlds import waiting_bodies
from unisono.testing import run

PAIRS = [
    waiting_bodies.in_the_order_of_arrival,
    waiting_bodies.limits,
    waiting_bodies.own_time_outs,
]


@pytest.mark.parametrize("body", PAIRS, ids=lambda body: body.__name__)
def test_with_messages(world, body):
    first, second = world(body, 2)
    assert first == second


@pytest.mark.parametrize("body", waiting_bodies.BODIES, ids=lambda body: body.__name__)
@pytest.mark.parametrize("size", [1, 3])
def test_with_collectives(body, size):
    run(body, size)
