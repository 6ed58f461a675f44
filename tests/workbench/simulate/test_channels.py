"""Channels: each is the algorithm on ranks in another order; timed against formulas."""

from dataclasses import replace

import numpy as np
import pytest

from unisono.core.schedules import build
from unisono.errors import InvalidArgumentError
from unisono.workbench.simulate import Channels, Hosts, LinkSpec, in_channels, machine, simulate

MIB = 1 << 20


@pytest.mark.parametrize("algorithm", ["ring", "tree", "node_tree", "two_level"])
def test_each_channel_is_the_algorithm_on_other_ranks(algorithm):
    whole = build("all_reduce", algorithm, 8, local=4)
    schedule = in_channels(whole, 3, 4)
    chunks = 0
    for c in range(3):
        # Place i of a host is held by its rank i + c.
        held = np.array([r - r % 4 + (r % 4 + c) % 4 for r in range(8)])
        for k in range(whole.stages):
            for place in range(8):
                expected = whole.steps(k, np.array([place]))
                rows = schedule.steps(k, held[[place]] * 3 + c)
                assert rows[:, [1, 3, 5, 7]].tolist() == expected[:, [1, 3, 5, 7]].tolist()
                peers = np.where(expected[:, 2] < 0, -1, held[expected[:, 2]] * 3 + c)
                assert rows[:, 2].tolist() == peers.tolist()
                output = expected[:, 5] == 1
                moved = rows[output, 6] - expected[output, 6]
                assert set(moved.tolist()) <= {c * whole.output_chunks}
                chunks += len(moved)
    assert chunks > 0


@pytest.mark.parametrize("channels", [1, 2, 4, 8])
def test_each_channel_has_an_interface_of_its_own(channels):
    """A ring enters and leaves a host once, so c channels use c interfaces at the same time."""
    hosts, per_host, gbps = 4, 4, 10.0
    ranks = hosts * per_host
    alone = Hosts(ranks, per_host, LinkSpec(), LinkSpec(0, gbps), interfaces=4)
    ring = in_channels(build("all_reduce", "ring", ranks), channels, per_host)
    # Each interface serves 2 (p-1) messages of each of its channels.
    times = 2 * (ranks - 1) * max(channels // 4, 1)
    for cap in (float("inf"), gbps / 5):
        network = Channels(alone, channels, LinkSpec(0, cap))
        result = simulate(ring, 64 * MIB, network, itemsize=4)
        message_us = 64 * MIB / ranks / channels / 1000
        bound = max(times * message_us / gbps, 2 * (ranks - 1) * message_us / cap)
        assert bound * 0.999 <= result.last_us <= 1.15 * bound
        outs = result.link_busy_ps[network.first[2] : network.first[3]]
        assert np.count_nonzero(outs) == hosts * min(channels, 4)


def test_a_machine_has_channels():
    net = machine("two", "ranks_per_host = 2\ninterfaces = 2\nchannels = 2\ngbps = 1")
    schedule, network = net.in_channels(build("all_reduce", "ring", 4), 2)
    assert (schedule.world_size, network.size) == (8, 8)
    two = simulate(schedule, 1000 * 4, network).last_us
    net.values["channels"] = 1
    schedule, network = net.in_channels(build("all_reduce", "ring", 4), 2)
    assert (schedule.world_size, network.size) == (4, 4)
    assert simulate(schedule, 1000 * 4, network).last_us == pytest.approx(2 * two)


@pytest.mark.parametrize("collective", ["all_gather", "reduce_scatter"])
def test_each_channel_moves_a_part_of_each_block(collective):
    """p-1 messages per rank, each of 1/C of a block; C interfaces are C times as fast."""
    net = machine("c", "ranks_per_host = 4\ninterfaces = 4\nchannels = 4\ngbps = 1\n")
    schedule, network = net.in_channels(build(collective, "ring", 8), 4)
    found = simulate(schedule, 8 * 4000, network)
    assert (found.messages, found.nbytes) == (4 * 8 * 7, 8 * 7 * 4000)
    net.values["channels"] = 1
    one = simulate(build(collective, "ring", 8), 8 * 4000, net.network("ring", 8))
    assert one.last_us == pytest.approx(4 * found.last_us)


@pytest.mark.parametrize("root", [0, 5])
@pytest.mark.parametrize("collective", ["broadcast", "reduce"])
def test_a_root_keeps_its_place_and_its_data(collective, root):
    """Only channels of the root send first, and each host but its own uses all its interfaces."""
    channels, hosts, per_host = 4, 3, 4
    ring = build(collective, "ring", hosts * per_host, root, 8)
    schedule = in_channels(ring, channels, per_host)
    everyone = np.arange(schedule.world_size)
    rows = schedule.steps(0 if collective == "broadcast" else schedule.stages - 1, everyone)
    ends = rows[rows[:, 1] == (0 if collective == "broadcast" else 2), 0]
    assert set(ends // channels) == {root}
    assert schedule.root // channels == root
    alone = Hosts(12, per_host, LinkSpec(), LinkSpec(0, 1.0), interfaces=4)
    result = simulate(schedule, 4096 * 96, Channels(alone, channels, LinkSpec()), itemsize=4)
    one = simulate(ring, 4096 * 96, alone, itemsize=4)
    # The other 3 ranks of the root's host share 4 channels.
    assert result.last_us < 0.6 * one.last_us
    assert result.nbytes == one.nbytes == 11 * 4096 * 96


@pytest.mark.parametrize("op", ["all_to_all", "gather", "scatter", "barrier", "scan"])
def test_other_operations_are_single_messages(op):
    net = machine("c", "ranks_per_host = 4\ninterfaces = 4\nchannels = 4\ngbps = 1\n")
    schedule = build(op, "linear", 8, 0 if op in ("gather", "scatter") else -1)
    assert net.in_channels(schedule, 4)[0] is schedule


def test_only_some_collectives_have_channels():
    gather, posts = build("gather", "linear", 4, 0), build("all_reduce", "one_shot", 4)
    ring = build("all_reduce", "ring", 4)
    for schedule, channels, per_host in (
        (gather, 2, 2), (posts, 2, 2), (ring, 0, 2), (ring, 2, 3),
    ):  # fmt: skip
        with pytest.raises(
            InvalidArgumentError, match=" without posts to all, whole hosts, and 1 channel or more"
        ):
            in_channels(schedule, channels, per_host)


def test_a_post_to_all_in_a_later_round_is_refused_at_once():
    ring = build("all_reduce", "ring", 4)
    post = np.array([[0, 5, -1, 1, 0, 1, 0, 1]])

    def exchange(k, ranks):
        yield ring.steps(k, ranks) if k < 3 else post[np.isin(post[:, 0], ranks)]

    later = replace(ring, exchange=exchange, before=lambda ranks: (), after=lambda ranks: ())
    with pytest.raises(InvalidArgumentError, match="without posts to all"):
        in_channels(later, 2, 4)
