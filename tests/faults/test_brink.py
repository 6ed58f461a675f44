"""A call that its time-out ends at any moment: right numbers or an error, on every rank."""

from __future__ import annotations

import pytest

from tests.faults import brink_bodies
from unisono.testing import run

ROUNDS = 6


@pytest.mark.parametrize("per_host", ["1", ""])
@pytest.mark.parametrize("ranks", ["threads", "processes"])
def test_whoever_gets_a_result_gets_the_right_one(monkeypatch, ranks, per_host):
    monkeypatch.setenv("UNISONO_RANKS_PER_HOST", per_host)
    ends = run(brink_bodies.at_the_brink, 3, ranks=ranks, args=(1, ROUNDS), timeout=120.0)
    assert all(ended["well"] >= ROUNDS >= ended["badly"] for ended in ends)
