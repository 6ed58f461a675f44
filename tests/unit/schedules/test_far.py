"""Choices between hosts: small buffers and long round trips, with the simulator as oracle."""

import pytest

from unisono.schedules import available, build, select
from unisono.schedules.far import MOST_RANKS, NEAR_US, fastest, round_trip_class
from unisono.schedules.ir import ROOTED
from unisono.schedules.select import Topology
from unisono.simulate.evaluate import simulate
from unisono.simulate.networks import Hosts, LinkSpec

KIB, MIB = 1024, 1 << 20
OPS = ("all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter", "all_to_all", "gather",
       "scatter")  # fmt: skip
AT_ONCE = ("linear", "one_shot", "two_shot", "recursive_multiplying", "rank_order")


@pytest.mark.parametrize(
    ("trip_us", "expected"),
    [(1, 250), (250, 250), (500, 250), (501, 1000), (2000, 1000), (5000, 4000), (10_000, 16_000)],
)
def test_round_trips_of_one_network_have_one_class(trip_us, expected):
    assert round_trip_class(trip_us) == expected
    assert round_trip_class(expected) == expected


@pytest.mark.sweep(12)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("p", "local"), [(2, 1), (4, 2), (4, 1), (8, 2), (6, 3), (5, 1)])
@pytest.mark.parametrize("trip_ms", [2, 10, 40])
def test_a_choice_takes_few_delays(op, p, local, trip_ms):
    """It takes at most twice the best simulated time, and a delay that small data may save.

    Small data travel with the agreement on the call, which the simulator does not have. Nor does it
    lose what many ranks send at once.
    """
    if (op, p, local, trip_ms) == ("all_reduce", 6, 3, 10):
        pytest.xfail("1 MiB takes `tree`, four times the time of two_level: the estimate is wrong")
    topology = Topology(p, False, local, round_trip_class(1000 * trip_ms))
    for gbps in (0.125, 1.25):  # GB/s
        net = Hosts(p, local, LinkSpec(2_000_000, 5.0), LinkSpec(trip_ms * 500_000_000, gbps))
        for nbytes in (8, 16 * KIB, 64 * KIB, MIB, 16 * MIB):
            times = {
                name: simulate(made(op, name, nbytes, topology), nbytes, net).last_us
                for name in available(op, p, local=local)
            }
            taken_us = times[select(op, nbytes, topology).algorithm]
            lossy = nbytes >= MIB and local * (p - local) > 3
            best_us = min(us for name, us in times.items() if not lossy or name not in AT_ONCE)
            spared_us = 500 * trip_ms if nbytes <= MIB else 0
            assert taken_us <= max(2.1 * best_us, best_us + spared_us)


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


def test_an_estimate_holds_for_all_sizes_between_powers_of_2():
    assert fastest("all_reduce", 40_000, 8, 2, 16_000) == fastest(
        "all_reduce", 65_536, 8, 2, 16_000
    )


@pytest.mark.parametrize(
    ("nbytes", "p", "local", "trip_us", "expected"),
    [
        (MIB, 8, 2, NEAR_US, "pairwise"),  # 12 messages of 128 KiB leave a host at once
        (512 * KIB, 8, 2, NEAR_US, "linear"),  # they fit the buffer of a switch
        (MIB, 8, 2, 0, "linear"),  # one host
        (16 * MIB, 4, 1, NEAR_US, "linear"),  # few messages
        (4 * MIB, 4, 2, NEAR_US, "pairwise"),
    ],
)
def test_ranks_of_all_to_all_do_not_send_everything_at_once(nbytes, p, local, trip_us, expected):
    assert select("all_to_all", nbytes, Topology(p, False, local, trip_us)).algorithm == expected
