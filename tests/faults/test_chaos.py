"""A few rounds of tests/faults/chaos.py."""

import pytest

from tests.faults import chaos


@pytest.mark.sweep(3)
@pytest.mark.parametrize("way", list(chaos.ENDS))
@pytest.mark.parametrize("seed", [3, 10])
def test_a_rank_ends_at_a_random_moment(tmp_path, seed, way):
    chaos.one_round(tmp_path, seed, way)
