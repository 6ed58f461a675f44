"""Switches that reduce: proved, counted, and timed against formulas."""

from fractions import Fraction

import numpy as np
import pytest

from unisono.core.schedules import build
from unisono.core.schedules.ir import Op
from unisono.core.schedules.verify import verify
from unisono.errors import InvalidArgumentError
from unisono.workbench.simulate import FullyConnected, LinkSpec, Switch, nvls, sharp, simulate


@pytest.mark.parametrize(
    ("hosts", "radix", "switches"), [(1, 2, 1), (4, 2, 3), (5, 2, 6), (9, 3, 4), (128, 16, 9)]
)
def test_a_tree_of_switches_is_an_all_reduce(hosts, radix, switches):
    for pipeline in (1, 3):
        schedule = sharp(hosts, radix, pipeline)
        assert schedule.world_size == hosts + switches
        verify(schedule)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_one_switch_with_parts_is_an_all_reduce(ranks):
    verify(nvls(ranks))
    verify(nvls(ranks, 5))


def moved(schedule, rank, op):
    """Return the part of the vector that a rank sends or receives."""
    rows = np.concatenate([schedule.steps(k, np.array([rank])) for k in range(schedule.stages)])
    return Fraction(int(rows[np.isin(rows[:, 1], op), 7].sum()), schedule.output_chunks)


def test_hosts_send_and_receive_the_vector_once():
    receives = (Op.RECV, Op.RECV_REDUCE)
    for rank in (0, 77, 127):
        assert moved(sharp(128, 16, 4), rank, Op.SEND) == 1
        assert moved(sharp(128, 16, 4), rank, receives) == 1
    assert moved(nvls(8), 3, Op.SEND) == moved(nvls(8), 3, receives) == 1 + Fraction(1, 8)


def test_time_is_latencies_and_one_vector():
    """2 levels up and 2 down; a pipeline of m chunks adds m - 1 times the time of a chunk.

    A host takes results before it sends the next chunk, so it may wait for some latencies more.
    """
    schedule, nbytes = sharp(128, 16, 8), 8_000_000
    network = FullyConnected(schedule.world_size, LinkSpec(600_000, 12.5))
    found = simulate(schedule, nbytes, network)
    chunk_us = nbytes / 8 / 12.5e3
    shortest = 4 * (0.6 + chunk_us) + 7 * chunk_us
    assert shortest <= found.last_us <= shortest + 7 * 0.6


def test_the_gain_over_hosts_is_in_the_published_range():
    """Graham et al., ISC 2020: 2 to 5 times for large data."""
    schedule = sharp(128, 16, 128)
    spec = LinkSpec(600_000, 12.5)
    with_switches = simulate(schedule, 1 << 26, FullyConnected(schedule.world_size, spec))
    hosts = [
        simulate(build("all_reduce", name, 128), 1 << 26, Switch(128, spec), itemsize=4).last_us
        for name in ("ring", "halving_doubling", "swing")
    ]
    assert 1.9 < min(hosts) / with_switches.last_us < 5


def test_impossible_switches_are_refused():
    with pytest.raises(InvalidArgumentError, match="hosts, radix 1; expected 1, 2 or more"):
        sharp(4, 1)
    with pytest.raises(InvalidArgumentError, match="nvls: 0 ranks, expected 1 or more"):
        nvls(0)
