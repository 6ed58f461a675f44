"""Choices between hosts: small buffers and long round trips, with the simulator as oracle."""

import pytest

from unisono.core.schedules import available, build, select
from unisono.core.schedules.choice import far
from unisono.core.schedules.choice.far import MOST_RANKS, NEAR_US, fastest, round_trip_class
from unisono.core.schedules.choice.select import Topology
from unisono.core.schedules.ir import ROOTED
from unisono.workbench.simulate.evaluators.evaluate import simulate
from unisono.workbench.simulate.networks import Hosts, LinkSpec

KIB, MIB = 1024, 1 << 20
OPS = ("all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter", "all_to_all", "gather",
       "scatter")  # fmt: skip


@pytest.mark.parametrize(
    ("trip_us", "expected"),
    [(1, 250), (250, 250), (500, 250), (501, 1000), (2000, 1000), (5000, 4000), (10_000, 16_000)],
)
def test_round_trips_of_one_network_have_one_class(trip_us, expected):
    assert round_trip_class(trip_us) == expected
    assert round_trip_class(expected) == expected


@pytest.mark.sweep(16)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("p", "local"), [(2, 1), (4, 2), (4, 1), (8, 2), (6, 3), (5, 1), (8, 4)])
@pytest.mark.parametrize("trip_ms", [1, 4, 16])
def test_a_choice_is_fast(op, p, local, trip_ms):
    """It takes at most 1.3 times the best simulated time at the rate that the choice assumes.

    At 1 and 10 Gb/s it takes at most twice that time. The simulator has no agreement, with which
    small data travel, and loses nothing of what many ranks send at once.
    """
    topology = Topology(p, False, local, round_trip_class(1000 * trip_ms))
    for gbps, most in ((0.125, 2.0), (0.3125, 1.3), (1.25, 2.0)):  # GB/s
        net = Hosts(p, local, LinkSpec(2_000_000, 5.0), LinkSpec(trip_ms * 500_000_000, gbps))
        for nbytes in (8, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 16 * MIB):
            names = available(op, p, local=local)
            # If all candidates may lose data, the fastest of them counts.
            names = [each for each in names if not loses(op, each, nbytes, topology)] or names
            times = {each: simulated_us(op, each, nbytes, topology, net) for each in names}
            name = select(op, nbytes, topology).algorithm
            assert times[name] <= most * min(times.values()), (name, nbytes, gbps, times)


def loses(op, name, nbytes, topology):
    """Return whether a switch may lose data of an algorithm."""
    schedule = made(op, name, nbytes, topology)
    burst = far.run(schedule, topology.local, 1.0, 1.0)[1] * nbytes / schedule.work_chunks
    is_pipeline = select(op, nbytes, topology, name).pipeline > 1
    return not is_pipeline and far.overflows(4, int(burst))


def simulated_us(op, name, nbytes, topology, net):
    """Return the time with the delay of the agreement, unless the data travel with it."""
    schedule = made(op, name, nbytes, topology)
    first = far.first_chunks(schedule, topology.local) * nbytes / schedule.work_chunks
    agreed_us = 0 if 0 < first <= far.EARLY_BYTES else net.groups[2].spec.latency_ps / 1e6
    return simulate(schedule, nbytes, net).last_us + agreed_us


def made(op, name, nbytes, topology):
    depth = select(op, nbytes, topology, name).pipeline
    p, root = topology.world_size, 0 if op in ROOTED else -1
    return build(op, name, p, root, depth, topology.local)


def test_a_short_round_trip_and_many_ranks_keep_the_rule():
    near, unknown = (Topology(8, False, 2, trip) for trip in (NEAR_US, 0))
    many, far = (Topology(2 * MOST_RANKS, False, 2, trip) for trip in (NEAR_US, 16_000))
    for nbytes in (8, 64 * KIB, MIB):
        assert select("all_reduce", nbytes, near) == select("all_reduce", nbytes, unknown)
        assert select("all_reduce", nbytes, far).algorithm == (
            select("all_reduce", nbytes, many).algorithm
        )


def test_rounds_of_a_tree_with_one_chunk_do_not_overlap():
    topology = Topology(6, False, 3, 16_000)
    net = Hosts(6, 3, LinkSpec(2_000_000, 5.0), LinkSpec(8_000_000_000, 0.125))
    tree_us, taken_us = (
        simulated_us("all_reduce", name, MIB, topology, net)
        for name in ("tree", select("all_reduce", MIB, topology).algorithm)
    )
    assert taken_us < tree_us / 2


def test_an_estimate_holds_for_all_sizes_between_powers_of_2():
    assert fastest("all_reduce", 40_000, 8, 2, 16_000) == fastest(
        "all_reduce", 65_536, 8, 2, 16_000
    )


@pytest.mark.parametrize(
    ("op", "nbytes", "p", "local", "trip_us", "expected"),
    [
        # 12 messages of 128 KiB leave a host at once
        ("all_to_all", MIB, 8, 2, NEAR_US, "pairwise"),
        ("all_to_all", 512 * KIB, 8, 2, NEAR_US, "linear"),  # they fit the buffer of a switch
        ("all_to_all", MIB, 8, 2, 0, "linear"),  # one host
        ("all_to_all", 16 * MIB, 4, 1, NEAR_US, "linear"),  # few messages
        ("all_to_all", 4 * MIB, 4, 2, NEAR_US, "pairwise"),
        ("gather", 2 * MIB, 8, 2, NEAR_US, "pairwise"),
        ("gather", MIB, 8, 2, NEAR_US, "linear"),
        ("gather", 16 * MIB, 8, 2, 0, "linear"),
        ("gather", 16 * MIB, 4, 1, NEAR_US, "linear"),
        ("gather", 16 * MIB, 8, 2, 4000, "pairwise"),
        ("gather", 64 * KIB, 8, 2, 16_000, "linear"),
        ("scatter", 2 * MIB, 8, 1, NEAR_US, "pairwise"),
        ("scatter", 16 * MIB, 8, 2, 4000, "pairwise"),
    ],
)
def test_ranks_do_not_send_everything_at_once(op, nbytes, p, local, trip_us, expected):
    assert select(op, nbytes, Topology(p, False, local, trip_us)).algorithm == expected
