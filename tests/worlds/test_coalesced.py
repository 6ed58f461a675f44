"""Collectives of several tensors as one message."""

import pytest

from tests.worlds import coalesced_bodies
from unisono.testing import run


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_against_numpy(size):
    assert all(run(coalesced_bodies.coalesced, size))


def test_with_messages():
    assert all(run(coalesced_bodies.coalesced, 3, engine="reference"))
