"""Arrays in huge pages, which ranks of a host read where they lie."""

import pytest

from tests.worlds import huge_bodies
from unisono.testing import run


@pytest.mark.parametrize("ranks", ["threads", "processes"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_large_moves(world_size, ranks):
    run(huge_bodies.moves, world_size, ranks=ranks, args=(600_000,))


@pytest.mark.parametrize("ranks", ["threads", "processes"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_messages(world_size, ranks):
    run(huge_bodies.messages, world_size, ranks=ranks, args=(400_000,))
