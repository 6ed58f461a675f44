"""NUMA nodes inside hosts, in virtual time."""

import numpy as np
import pytest

from unisono.core.schedules import build
from unisono.core.schedules.choice.nodes import FAR_RATE, FAR_US, LINK_RATE, NEAR_RATE, NEAR_US
from unisono.core.schedules.choice.nodes import time_us as modelled_us
from unisono.workbench.cli.main import main
from unisono.workbench.cli.simulate import machine_of
from unisono.workbench.simulate import machine, simulate

TEXT = """
ranks_per_host = 4
ranks_per_node = 2
inside_us = 1
inside_gbps = 10
node_us = 2
node_gbps = 4
far_gbps = 5
latency_us = 30
gbps = 1
"""
MIB = 1 << 20


def ends(source, target, nbytes, size=8):
    """Return the microseconds of one message."""
    network = machine("numa", TEXT).network("", size)
    each = (np.array([value]) for value in (source, target, nbytes))
    latency, moving = network.alone(*each)
    return latency[0] / 1e6, moving[0] / 1e6


def test_what_one_message_takes():
    assert ends(0, 1, 10_000) == (1, 1)  # its port: 10 B/ns
    assert ends(0, 2, 10_000) == (3, 2.5)  # the link of the node: 4 B/ns
    assert ends(3, 0, 10_000) == (3, 2.5)
    assert ends(4, 7, 10_000) == (3, 2.5)  # on the second host
    assert ends(0, 4, 10_000) == (30, 10)  # the interfaces, and no link of nodes
    assert ends(1, 6, 10_000) == (30, 10)


def test_a_far_read_is_slower_than_a_near_one():
    net = machine("numa", TEXT)
    net.values["node_gbps"] = float("inf")
    network = net.network("", 4)
    one = np.array([10_000])
    assert network.alone(one * 0, one * 0 + 2, one)[1][0] == 2_000_000  # 5 B/ns at the reader
    # The links of a route: the writer's port, those of two nodes, the reader's port.
    links = network.routes(np.array([1]), np.array([3]))
    assert [network.link_name(link) for link in links[0]] == [
        "rank 1 to memory", "node 0 out", "node 1 in", "rank 3 from memory",
    ]  # fmt: skip


def test_ranks_of_a_node_share_its_link():
    """Both ranks of node 0 send at once: the second one waits for the link."""
    schedule = build("all_reduce", "one_shot", 4)
    net = machine("numa", TEXT)
    times = {}
    for gbps in (1.0, 1000.0):
        net.values["node_gbps"] = gbps
        result = simulate(schedule, 40_000, net.network("one_shot", 4), net.costs("one_shot"))
        times[gbps] = result.last_us
    # 2 ranks of a node read 2 vectors each from the other node: 4 times 40 us.
    assert times[1.0] >= 160 > times[1000.0]


@pytest.mark.parametrize(("ranks", "most"), [(8, 0.85), (16, 0.82), (80, 0.45)])
def test_levels_gain_on_two_sockets(ranks, most):
    """In virtual time, at 1 MiB: there was no machine with several nodes."""
    net = machine_of("two-socket")
    net.set_parts(ranks, ranks // 2)
    times = {
        name: simulate(
            build("all_reduce", name, ranks, -1, 1, ranks // 2), MIB, net.network(name, ranks),
            net.costs(name),
        ).last_us
        for name in ("two_level", "two_shot")
    }  # fmt: skip
    assert times["two_level"] < most * times["two_shot"]
    # The model by which a group chooses says the same.
    model = {
        name: modelled_us("all_reduce", name, MIB, ranks, ranks // 2)
        for name in ("two_level", "two_shot")
    }
    assert model["two_level"] < model["two_shot"]


def test_one_node_has_no_links_of_nodes():
    net = machine_of("two-socket")
    net.set_parts(8, 8)
    keys = ("inside_us", "inside_gbps", "send_us", "recv_us", "reduce_gbps")
    text = "\n".join(f"{key} = {net.values[key]}" for key in keys)
    plain = machine("plain", f"ranks_per_host = 8\n{text}")
    schedule, times = build("all_reduce", "two_shot", 8), []
    for each in (net, plain):
        times.append(simulate(schedule, MIB, each.network("", 8), each.costs("")).last_us)
    assert times[0] == times[1]


def test_the_choice_has_the_numbers_of_the_network():
    values = machine_of("two-socket").values
    rates = [1000 * values[key] for key in ("inside_gbps", "far_gbps", "node_gbps")]
    assert rates == [NEAR_RATE, FAR_RATE, LINK_RATE]
    waits = [values["inside_us"], values["inside_us"] + values["node_us"]]
    assert waits == pytest.approx([NEAR_US, FAR_US])


def rows_of(text):
    return [line.split() for line in text.splitlines() if not line.startswith("#")]


def test_simulate_with_nodes(capsys):
    names = "two_level,two_shot"
    words = ["simulate", "all_reduce", "-n", "8", "--nodes", "2", "-b", "1M", "--algorithm", names]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert out.startswith("# all_reduce; net two-socket: 2 sockets of 40 cores")
    assert [row[2] for row in rows_of(out)] == ["two_level", "two_shot"]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("-n", "8", "--nodes", "3", "--algorithm", "two_level"),
         "all_reduce (two_level) needs equally many ranks on each node; 8 ranks on 3 nodes are 3 "
         "per node, and 2 on the last"),
        (("-n", "8", "--nodes", "5"), "-n 8 does not fill 5 NUMA nodes"),
        (("-n", "8,16", "--nodes", "2"), "--nodes needs one number of ranks"),
    ],
)  # fmt: skip
def test_nodes_that_do_not_fit(capsys, words, line):
    assert main(["simulate", "all_reduce", *words]) != 0
    assert line in capsys.readouterr().err
