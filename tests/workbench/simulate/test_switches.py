"""Switches that reduce: proved, counted, and timed against formulas."""

from fractions import Fraction

import numpy as np
import pytest

from unisono.core.schedules import build
from unisono.core.schedules.ir import Op
from unisono.core.schedules.verify import verify
from unisono.errors import InvalidArgumentError
from unisono.workbench.cli.simulate import machine_of
from unisono.workbench.simulate import (
    FullyConnected,
    Hosts,
    LinkSpec,
    Switch,
    nvls,
    sharp,
    simulate,
)
from unisono.workbench.simulate.switches import Switched, slices


@pytest.mark.parametrize(
    ("hosts", "radix", "switches"), [(1, 2, 1), (4, 2, 3), (5, 2, 6), (9, 3, 4), (128, 16, 9)]
)
def test_a_tree_of_switches_is_an_all_reduce(hosts, radix, switches):
    for pipeline in (1, 3):
        schedule = sharp(hosts, radix, pipeline)
        assert schedule.world_size == hosts + switches
        verify(schedule)


@pytest.mark.parametrize(
    ("ranks", "hosts"), [(1, 1), (2, 1), (3, 1), (8, 1), (4, 2), (6, 3), (12, 4), (21, 7), (5, 5)]
)
def test_switches_with_parts_are_an_all_reduce(ranks, hosts):
    for pipeline in (1, 5):
        schedule = nvls(ranks, pipeline, hosts)
        assert schedule.rounds == 2 * (hosts - 1).bit_length() + 3 + pipeline
        verify(schedule)


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
    # A rank of 4 on 16 hosts: at most 2n/4 to other hosts, besides n + n/4.
    most = max(moved(nvls(64, 2, 16), rank, Op.SEND) for rank in range(64))
    assert most == 1 + Fraction(1, 4) + Fraction(2, 4)


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


@pytest.mark.parametrize("method", ["events", "stages"])
def test_each_port_of_a_switch_is_its_own(method):
    """T = 2 inside + 2 h between, and (n + n/L) / B; all ranks send to the switch at once."""
    inside, between = LinkSpec(12_500_000, 300.0), LinkSpec(20_900_000, 50.0)
    for hosts, levels in ((1, 0), (2, 1), (8, 3)):
        network = Switched(Hosts(8 * hosts, 8, inside, between, interfaces=8))
        schedule = nvls(8 * hosts, 1, hosts)
        small = simulate(schedule, 4 * schedule.output_chunks, network, itemsize=4, method=method)
        assert small.last_us == pytest.approx(25 + 2 * levels * 20.9, abs=0.05)
    one = Switched(Hosts(8, 8, inside, between))
    n, m = 1 << 28, 64
    found = simulate(nvls(8, m), n, one, itemsize=4, method=method).last_us
    moving = n * 9 / 8 / 300e3
    assert moving < found < moving * (1 + 5 / m) + (m + 3) * 12.5
    links = one.routes(np.array([3, 8]), np.array([8, 3]))[:, 0].tolist()
    assert [one.link_name(link) for link in links] == ["rank 3 to memory", "rank 3 from memory"]


def test_slices_of_a_channel_are_as_large_as_chunks_of_nccl():
    """128 KiB, and 64 KiB from 4 hosts on, but less for small data."""
    mib = 1 << 20
    for nbytes, hosts, expected in (
        (8, 1, 1), (64 * mib, 1, 8), (256 * mib, 1, 32), (512 * mib, 1, 64), (4096 * mib, 1, 64),
        (512 * mib, 4, 64), (64 * mib, 4, 8), (4 * mib, 4, 1), (128 * mib, 2, 8),
    ):  # fmt: skip
        assert slices(nbytes, 8 * hosts, hosts, 16) == expected, (nbytes, hosts)


def test_impossible_switches_are_refused():
    machine = machine_of("dgx-h100")
    assert machine.reducing("all_reduce", 8) == ("nvls",)
    assert machine.reducing("all_reduce", 16) == ("nvls_tree",)
    for net, op, ranks in (
        ("dgx-h100", "all_reduce", 12), ("dgx-h100", "broadcast", 8), ("dgx-h100", "all_reduce", 1),
        ("dgx-a100", "all_reduce", 8),
    ):  # fmt: skip
        assert machine_of(net).reducing(op, ranks) == ()
    with pytest.raises(InvalidArgumentError, match="several full hosts"):
        machine.in_switches("nvls", 16, 8)
    with pytest.raises(InvalidArgumentError, match="hosts, radix 1; expected 1, 2 or more"):
        sharp(4, 1)
    for ranks, hosts in ((0, 1), (9, 2)):
        with pytest.raises(InvalidArgumentError, match=f"{ranks} ranks, expected 1 or more, equal"):
            nvls(ranks, hosts=hosts)
