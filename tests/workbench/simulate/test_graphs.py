"""Networks of single links: routes, times against formulas, and bounds that no algorithm beats."""

import numpy as np
import pytest

from unisono.core.schedules import available, build
from unisono.errors import InvalidArgumentError
from unisono.workbench.cli.simulate import machine_of
from unisono.workbench.simulate import Costs, Graph, LinkSpec, Torus, machine, simulate
from unisono.workbench.simulate.bounds import least_us

SPEC = LinkSpec(1_000_000, 10)


def ring_of(p):
    return {(a, b % p): SPEC for a in range(p) for b in (a + 1, a - 1 + p)}


def test_a_ring_of_links_is_the_ring():
    for name in ("ring", "bruck", "linear"):
        schedule = build("all_gather", name, 5)
        network, torus = Graph(5, ring_of(5)), Torus(5, 1, SPEC)
        assert simulate(schedule, 5000, network).last_us == simulate(schedule, 5000, torus).last_us
    assert network.link_name(0) == "link 0 to 1 0"


def test_a_message_takes_the_fewest_links_and_of_these_the_fastest():
    slow = LinkSpec(9_000_000, 10)
    links = {(0, 1): slow, (1, 3): SPEC, (0, 2): SPEC, (2, 3): SPEC, (3, 0): SPEC}
    network, ends = Graph(4, links), list(links)
    assert network.routes(np.array([0]), np.array([3])).tolist() == [
        [ends.index((0, 2)), ends.index((2, 3)), -1]
    ]


def test_the_bound_of_two_halves():
    """A half of the blocks crosses the link between the hosts: 16 MB / 2 at 12.5 GB/s."""
    network = machine_of("ndv2-2").network("", 16)
    assert least_us("all_gather", 16_000_000, network, Costs()) == pytest.approx(640.7)
    dgx = machine_of("dgx-1").network("", 8)
    assert least_us("all_gather", 8_000_000, dgx, Costs()) == pytest.approx(7e6 / 150e3 + 0.7)


@pytest.mark.parametrize("net", ["dgx-1", "ndv2-2"])
@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "broadcast", "all_to_all", "gather"])
def test_no_algorithm_beats_the_bound(net, op):
    p = 8 if net == "dgx-1" else 16
    network, root = machine_of(net).network("", p), 1 if op in ("broadcast", "gather") else -1
    bound_us = least_us(op, 1 << 20, network, Costs(), root=root)
    for name in available(op, p):
        assert simulate(build(op, name, p, root), 1 << 20, network).last_us >= bound_us


@pytest.mark.parametrize(
    "links",
    [
        "[[0, 0]]",
        "[[0]]",
        "[[0, 1], [0, 1]]",
        "[[0, true]]",
        "[[0, 1, 1, 1, 1]]",
        "[3]",
        "[[-1, 0]]",
    ],
)
def test_wrong_links(links):
    net = machine("mine", f'topology = "graph"\nlinks = {links}')
    with pytest.raises(InvalidArgumentError) as raised:
        net.network("", 2)
    kinds = (
        ", expected [from, to], [from, to, GB/s] or [from, to, GB/s, us], each pair of ranks once"
    )
    assert raised.value.what.startswith("mine: links has ")
    assert kinds in raised.value.what
    with pytest.raises(InvalidArgumentError, match=r"mine: gbps is -1"):
        machine("mine", 'topology = "graph"\nlinks = [[0, 1, -1]]').network("", 2)


def test_ranks_without_links():
    with pytest.raises(InvalidArgumentError, match=r"^the links of the network join 5 ranks, and "):
        Graph(4, ring_of(5))
    with pytest.raises(
        InvalidArgumentError, match=r"^no route of the network's links leads from rank 0 to 2"
    ):
        Graph(3, {(0, 1): SPEC, (1, 0): SPEC, (2, 0): SPEC})
