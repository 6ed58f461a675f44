"""The C++ queue of a group: calls that it drops at its end."""

import pytest

from unisono.base.extension import extension as engine

pytestmark = pytest.mark.skipif(engine is None, reason="the C++ engine is not built")


def test_calls_that_the_end_of_the_queue_drops_are_over():
    turn, flights = engine.Turn(), [engine.Flight() for _ in range(3)]
    numbers = [turn.push(flight) for flight in flights]
    assert not any(map(turn.is_over, numbers))
    assert turn.close() == numbers[0]
    assert all(map(turn.is_over, numbers))
