"""Links against ASTRA-sim, SimGrid and formulas."""

import dataclasses

import numpy as np
import pytest

from unisono.core.schedules import build
from unisono.errors import InvalidArgumentError
from unisono.workbench.simulate import (
    Costs,
    FullyConnected,
    Hosts,
    LinkSpec,
    Pods,
    Switch,
    Torus,
    Traffic,
    machine,
    simulate,
)
from unisono.workbench.simulate.evaluators.links import run
from unisono.workbench.simulate.evaluators.traffic import RECV, SEND, TrafficRows

US = 1_000_000
NS = 1000
MIB = 1 << 20


def ring(size, spec, **options):
    return Torus(size, 1, spec, **options)


NETWORKS = {"Switch": Switch, "FullyConnected": FullyConnected, "Ring": ring}


def gib_per_s(gib, latency_ns):
    """ASTRA-sim's link: its GB is 2**30 bytes, and durations are whole nanoseconds."""
    return LinkSpec(latency_ns * NS, gib * 2**30 / 1e9, whole=True)


def messages(pairs, nbytes):
    """Rows in which all ranks send first, then receive."""
    rows = [(a, SEND, b) for a, b in pairs] + [(b, RECV, a) for a, b in pairs]
    rows.sort(key=lambda row: row[:2])
    rank, kind, peer = np.array(rows).T
    none = np.zeros(len(rows), np.int64)
    return TrafficRows(rank, kind, peer, np.full(len(rows), nbytes), none > 0, none)


def last_ns(network, pairs=((1, 4),), *, contended=True):
    result = run(messages(pairs, MIB), network, Costs(), contended=contended)
    assert sum(result.causes_ps.values()) == result.last_ps
    return result.last_ps / NS


def test_unit_tests_of_astra_sim():
    spec = gib_per_s(50, 500)
    everyone = [(a, b) for a in range(16) for b in range(16) if a != b]
    assert last_ns(FullyConnected(16, spec, cut_through=False)) == 20_031
    assert last_ns(ring(16, spec, cut_through=False)) == 60_093
    assert last_ns(Switch(16, spec, cut_through=False)) == 40_062
    assert last_ns(ring(16, spec, cut_through=False), everyone) == 704_116
    # The backend without congestion is cut-through.
    assert last_ns(ring(16, spec), contended=False) == 21_031
    assert last_ns(FullyConnected(16, spec), contended=False) == 20_031
    assert last_ns(Switch(16, spec), contended=False) == 20_531
    # Its three dimensions, 2 x 8 x 4: a message goes along one of them.
    assert last_ns(ring(2, gib_per_s(200, 50)), [(0, 1)]) == 4_932
    assert last_ns(FullyConnected(8, gib_per_s(100, 500)), [(2, 4)]) == 10_265
    assert last_ns(Switch(4, gib_per_s(50, 2000)), [(1, 2)]) == 23_531


def schedule_of(case):
    root, pipeline = case.get("root", -1), case.get("pipeline", 1)
    size = case.get("p", case.get("npus"))
    return build(case["collective"], case["algorithm"], size, root, pipeline, case.get("local", 1))


@pytest.mark.golden("astra_network")
def test_every_rank_ends_as_on_the_links_of_astra_sim(case):
    spec = gib_per_s(case["GBps_2_30"], case["latency_ns"])
    network = NETWORKS[case["topology"]](case["p"], spec, cut_through=False)
    result = simulate(schedule_of(case), case["nbytes"], network, method="events")
    assert (result.finish_ps / NS).tolist() == case["finish_ns"]


@pytest.mark.golden("astra_sim_full")
def test_whole_runs_of_astra_sim(case):
    spec = gib_per_s(case["GBps"], case["latency_ns"])
    network = NETWORKS[case["topology"]](case["npus"], spec, cut_through=False)
    delay_ps = case["endpoint_delay"] * NS
    costs = Costs(
        recv_ps=delay_ps, start_ps=delay_ps, reduction=LinkSpec(gbps=1600, whole=True), passes=3
    )
    for method in ("events", "stages"):
        result = simulate(schedule_of(case), case["nbytes"], network, costs, method=method)
        assert result.last_ps / NS == case["astra_sim"]


@pytest.mark.golden("simgrid")
def test_simgrid_where_messages_share_no_link(case):
    network = Switch(case["p"], LinkSpec(round(case["latency_s"] * US * US / 2), 12.5))
    result = simulate(schedule_of(case), case["nbytes"], network, itemsize=case["itemsize"])
    assert result.last_us == pytest.approx(case["last_s"] * US, rel=1e-9)


def test_simgrid_with_its_factors_of_tcp():
    """100 kB over 10 ms and 1 Mb/s, the example of SimGrid's documentation: 0.996079 s."""
    spec = LinkSpec(10_000 * US, 1.25e-4)
    rows = messages([(0, 1)], 100_000)
    for link, seconds in ((spec.as_tcp(), 0.996079), (spec, 0.81)):
        result = run(rows, FullyConnected(2, link), Costs())
        assert result.last_us / US == pytest.approx(seconds, abs=5e-7)


# The prototype computed in floating point, where rounding decided which of two equal times came
# first. With integers, two ranks of halving_doubling take an interface in the other order: if the
# message whose arrival was determined last went first, the result would be the prototype's.
ENDS_BY_ROUNDING = {"halving_doubling": 526.66208}
# The prototype had one fast link per pod in place of the lanes of 4.
ENDS_IN_LANES = {"pairwise": 306.81904}


@pytest.mark.golden("links")
def test_hosts_whose_ranks_share_interfaces(case):
    if case["net"] == "Hosts" and "16, 4.0" in case["args"]:
        pods = Pods(16, 4.0, round(0.3 * US))
        network = Hosts(64, 1, LinkSpec(), LinkSpec(round(1.6 * US), 12.5), pods=pods)
    else:
        per_host = 4 if case["p"] == 16 else 8
        inside, between = LinkSpec(round(0.6 * US), 100), LinkSpec(round(2.2 * US), 12.5)
        network = Hosts(case["p"], per_host, inside, between)
    costs = Costs(300_000, 300_000, reduction=LinkSpec(gbps=40))
    result = simulate(schedule_of(case), case["nbytes"], network, costs, itemsize=4)
    expected = ENDS_BY_ROUNDING.get(case["algorithm"], case["last_us"])
    if case["net"] == "Hosts" and "16, 4.0" in case["args"]:
        expected = ENDS_IN_LANES.get(case["algorithm"], expected)
    assert result.last_us == pytest.approx(expected, rel=1e-9)
    assert result.exact
    assert sum(result.causes_ps.values()) == result.last_ps
    ((_, busy_ps),) = result.busiest()
    assert busy_ps / US == pytest.approx(case["busiest_link_us"], rel=1e-9)


def test_ranks_move_the_bytes_of_messages_and_sleep_until_they_come():
    """8 kB at 2 GB/s take 4 us on both ranks; rank 1 sleeps first, and does not if it is late."""
    network, rows = FullyConnected(2, LinkSpec(100)), messages([(0, 1)], 8000)
    moves = Costs(recv_ps=10, messages=LinkSpec(gbps=2))
    assert run(rows, network, moves).last_ps == 2 * 4 * US + 110
    sleeps = dataclasses.replace(moves, cores=1, wake_ps=500)
    assert run(rows, network, sleeps).last_ps == 2 * 4 * US + 610
    schedule = build("all_reduce", "one_shot", 64)
    for costs, free in ((Costs(), True), (moves, False), (Costs(recv_ps=1), False)):
        assert costs.receives_free == free
    found = simulate(schedule, 8000, Switch(64, LinkSpec(1)), moves, method="stages")
    assert found.last_ps == 2 * 63 * 4 * US + 63 * 10 + 2


@pytest.mark.golden("alpha_beta_at_scale")
def test_24576_ranks_without_contention(case):
    gbps = 1 / (case["beta"] * 1000) if case["beta"] else float("inf")
    inside = LinkSpec(round(case["alpha_intra"] * US), gbps)
    between = LinkSpec(round(case["alpha_inter"] * US), gbps)
    network = Hosts(case["p"], case["ranks_per_node"], inside, between)
    if case["collective"] == "broadcast":
        case = {**case, "root": 0}
    schedule = schedule_of(case)
    result = simulate(schedule, case["nbytes"], network, itemsize=case["itemsize"], contended=False)
    assert result.last_us == pytest.approx(case["last"], rel=1e-9)
    assert result.first_ps / US == pytest.approx(case["first"], rel=1e-9)
    assert result.exact


def brute_force_torus(width, height, source, target):
    """Walk from rank to rank, the shorter way around each ring, right and up on ties."""
    x, y = source % width, source // width
    hops = []
    for axis, length, end in ((0, width, target % width), (1, height, target // width)):
        here = (x, y)[axis]
        up = 2 * ((end - here) % length) <= length
        while here != end:
            hops.append((y * width + x, (("right", "left"), ("up", "down"))[axis][0 if up else 1]))
            here = (here + (1 if up else -1)) % length
            x, y = (here, y) if axis == 0 else (x, here)
    return [f"rank {rank} {way}" for rank, way in hops]


@pytest.mark.parametrize(("width", "height"), [(5, 1), (4, 1), (3, 4), (4, 5), (1, 3)])
def test_routes_of_a_torus(width, height):
    network = Torus(width, height, LinkSpec(1, 1.0))
    size = width * height
    source, target = np.divmod(np.arange(size * size), size)
    for a, b, links in zip(
        source.tolist(), target.tolist(), network.routes(source, target).tolist(), strict=True
    ):
        expected = brute_force_torus(width, height, a, b)
        # The events stop at the first -1.
        used, rest = links[: len(expected)], links[len(expected) :]
        assert [network.link_name(link) for link in used] == expected
        assert set(rest) <= {-1}


def names(network, source, target):
    links = network.routes(np.array([source]), np.array([target]))[0].tolist()
    return [network.link_name(link) for link in links if link >= 0]


def test_routes_of_hosts_with_two_interfaces_and_pods():
    spec = LinkSpec(1, 10.0)
    network = Hosts(16, 2, spec, spec, interfaces=2, pods=Pods(4))
    assert names(network, 0, 1) == ["rank 0 to memory", "rank 1 from memory"]
    assert names(network, 0, 3) == ["interface 0 out", "interface 3 in"]
    assert names(network, 1, 14) == ["interface 1 out", "pod 0 up", "pod 1 down", "interface 14 in"]
    dragonfly = Hosts(16, 2, spec, spec, pods=Pods(2, 2.0, dragonfly=True, hashed=True))
    assert names(dragonfly, 0, 15) == [
        "interface 0 out", "link 3 of pairs of pods", "interface 7 in"
    ]  # fmt: skip
    part = Hosts(10, 2, spec, spec, pods=Pods(4))
    assert names(part, 0, 9) == ["interface 0 out", "pod 0 up", "pod 1 down", "interface 4 in"]
    # 2 interfaces of 10 GB/s per pod, oversubscribed 2 to 1, for 3 other pods.
    assert dragonfly.groups[-1].spec.gbps == pytest.approx(10 / 3)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: LinkSpec(-1), "a latency >= 0"),
        (lambda: LinkSpec(0, 0.0), "a bandwidth > 0"),
        (lambda: Switch(0, LinkSpec()), "a network has 1 rank or more, got"),
        (lambda: LinkSpec(0, float("nan")), "a bandwidth > 0"),
        (lambda: LinkSpec(float("nan")), "a latency >= 0"),
        (lambda: Costs(send_ps=-5), "costs: send_ps is -5, expected 0 or more"),
        (lambda: Costs(agreement_bytes=-1), "costs: agreement_bytes is -1, expected 0 or more"),
        (
            lambda: Hosts(10, 0, LinkSpec(), LinkSpec()),
            "ranks on hosts of 0 with 1 interfaces: expected 1 rank and 1 interface or more",
        ),
        (lambda: Hosts(8, 2, LinkSpec(), LinkSpec(), pods=Pods(0)), "pods of 0 hosts"),
        (lambda: Hosts(8, 2, LinkSpec(), LinkSpec(), pods=Pods(2, 0.0)), "oversubscription > 0"),
    ],
)
def test_impossible_networks_are_refused(make, expected):
    with pytest.raises(InvalidArgumentError, match=expected):
        make()


@pytest.mark.parametrize("dragonfly", [False, True])
@pytest.mark.parametrize("method", ["events", "stages"])
def test_pods_without_oversubscription_equal_one_switch(dragonfly, method):
    spec = LinkSpec(2 * US, 12.5)
    for p, hosts in ((16, 4), (64, 8)):
        one, pods = (
            Hosts(p, 1, LinkSpec(), spec, pods=each)
            for each in (None, Pods(hosts, dragonfly=dragonfly))
        )
        for op, name in (
            ("all_reduce", "halving_doubling"), ("all_reduce", "recursive_doubling"),
            ("all_gather", "bruck"), ("all_to_all", "pairwise"), ("all_reduce", "ring"),
        ):  # fmt: skip
            schedule = build(op, name, p)
            found, expected = (
                simulate(schedule, 1 << 22, net, itemsize=4, method=method) for net in (pods, one)
            )
            assert found.finish_ps.tolist() == expected.finish_ps.tolist(), (op, name)


def test_lanes_of_a_pod_serve_messages_at_the_same_time():
    """4 hosts of a pod send 1 ms each to another pod: 2 lanes take 2 ms, 1 lane 4 ms."""
    pairs = [(rank, rank + 4) for rank in range(4)]
    spec = LinkSpec(0, 1.0)
    for oversubscription, expected in ((1.0, 1), (2.0, 2), (4.0, 4), (8.0, 8)):
        network = Hosts(8, 1, LinkSpec(), spec, pods=Pods(4, oversubscription))
        result = run(messages(pairs, 1_000_000), network, Costs())
        assert result.last_us == 1000 * expected
        # The mean over the lanes, all of which are busy.
        assert result.link_busy_ps[network.first[4]] == result.last_ps


def test_hashed_messages_collide_while_other_links_are_free():
    """ECMP: 16 flows over 16 links; some link serves several, and the lane is the flow's own."""
    spec = LinkSpec(0, 1.0)
    pods = Pods(16, hashed=True)
    network = Hosts(32, 1, LinkSpec(), spec, pods=pods)
    pairs = [(rank, rank + 16) for rank in range(16)]
    links = network.routes(*np.array(pairs).T)[:, 1:3]
    most = max(np.unique(links[:, 0], return_counts=True)[1])
    assert most > 1
    result = run(messages(pairs, 1_000_000), network, Costs())
    assert result.last_us == 1000 * most
    assert simulate(build("all_reduce", "ring", 32), 1 << 20, network).exact


def test_hosts_that_are_not_full_and_interfaces_in_blocks():
    spec = LinkSpec(1, 10.0)
    part = Hosts(10, 4, spec, spec)
    assert names(part, 9, 8) == ["rank 9 to memory", "rank 8 from memory"]
    assert names(part, 0, 9) == ["interface 0 out", "interface 2 in"]
    for p in (10, 11):
        network, schedule = Hosts(p, 4, spec, spec), build("all_reduce", "ring", p)
        events, staged = (simulate(schedule, 4096, network, method=m) for m in ("events", "stages"))
        assert staged.finish_ps.tolist() == events.finish_ps.tolist()
    turn, blocks = (Hosts(16, 8, spec, spec, interfaces=2, blocks=b) for b in (False, True))
    assert [names(turn, r, 8)[0][10] for r in range(8)] == list("01010101")
    assert [names(blocks, r, 8)[0][10] for r in range(8)] == list("00001111")


def test_messages_without_a_receiver_are_refused():
    rows = messages([(0, 1)], 8)
    with pytest.raises(InvalidArgumentError, match="messages are sent and"):
        run(rows.take(rows.kind == SEND), Switch(2, LinkSpec()), Costs())


def test_ranks_that_wait_for_each_other_are_an_error():
    rows = messages([(0, 1), (1, 0)], 8)
    backwards = rows.take(np.array([1, 0, 3, 2]))
    with pytest.raises(InvalidArgumentError, match="2 ranks wait for each other; rank 0 waits"):
        run(backwards, Switch(2, LinkSpec()), Costs())


def test_one_core_does_the_work_of_all_ranks_one_after_another():
    schedule = build("all_reduce", "ring", 6)
    costs = Costs(100, 200, reduction=LinkSpec(gbps=1.0), cores=1)
    network = Hosts(6, 6, LinkSpec(), LinkSpec())
    result = simulate(schedule, 600, network, costs)
    # 60 messages; 30 of them are reduced, 100 bytes of 1000 ps each. Nothing else takes time.
    assert result.last_ps == 60 * 300 + 30 * 100 * 1000
    alone = simulate(schedule, 600, network, Costs(100, 200, reduction=LinkSpec(gbps=1.0)))
    many = simulate(schedule, 600, network, Costs(100, 200, reduction=LinkSpec(gbps=1.0), cores=6))
    assert many.finish_ps.tolist() == alone.finish_ps.tolist()
    slow = simulate(
        schedule, 600, network, Costs(100, 200, reduction=LinkSpec(gbps=1.0), cores=1, switch_ps=7)
    )
    assert result.last_ps < slow.last_ps <= result.last_ps + 7 * 120


def test_agreement_adds_its_rounds():
    schedule = build("all_reduce", "ring", 8)
    network = Switch(8, LinkSpec(500, 1.0))
    plain = simulate(schedule, 8000, network)
    agreed = simulate(schedule, 8000, network, Costs(agreement_bytes=8))
    # 3 rounds over 2 links of 500 ps and 1 ns per byte.
    assert agreed.last_ps - plain.last_ps == 3 * (2 * 500 + 8 * 1000)
    assert agreed.messages == plain.messages + 3 * 8


def test_local_copies_take_time():
    schedule = build("all_gather", "ring", 4)
    fast = simulate(schedule, 400, Switch(4, LinkSpec(1, 1.0)))
    slow = simulate(schedule, 400, Switch(4, LinkSpec(1, 1.0)), Costs(memory=LinkSpec(gbps=2.0)))
    assert slow.last_ps - fast.last_ps == 100 * 500  # each rank copies its own block first


def test_padded_chunks_have_the_size_of_the_largest():
    schedule = build("all_reduce", "ring", 8)
    plain, padded = Traffic(schedule, 8, 4), Traffic(schedule, 8, 4, padded=True)
    assert len(plain.all_rows().rank) < len(padded.all_rows().rank) == 2 * 8 * 14
    assert set(padded.all_rows().nbytes.tolist()) == {4}


def test_sizes_must_not_be_negative():
    with pytest.raises(InvalidArgumentError, match="expected 0 or more of 1 or more"):
        Traffic(build("all_reduce", "ring", 4), -1)


def test_rows_of_a_torus_must_be_full():
    with pytest.raises(InvalidArgumentError, match="ranks do not fill rows of"):
        machine("mine", 'topology = "torus"\nwidth = 3').network("ring", 8)
    network = machine("mine", 'topology = "torus"\nwidth = 4\nlatency_us = 2').network("ring", 8)
    assert (network.width, network.height, network.groups[0].spec.latency_ps) == (4, 2, 2 * US)


def test_two_algorithms_cross_where_the_formula_of_alpha_beta_says():
    """T = rounds alpha + bytes beta, as docs/explanation/scale.md has it."""
    network = FullyConnected(8, LinkSpec(2_000_000, 12.5))
    for nbytes in (22_000, 220_000, 2_200_000):
        times = [
            simulate(build("all_reduce", name, 8), nbytes, network, itemsize=4, contended=False)
            for name in ("ring", "recursive_doubling")
        ]
        for result, rounds, sent in zip(times, (14, 3), (1.75, 3), strict=True):
            us = rounds * 2 + sent * nbytes / 12.5e3
            assert result.last_us == pytest.approx(us, rel=1e-3)
        ring, doubling = (result.last_us for result in times)
        assert (ring < doubling) == (nbytes > 220_000) or ring == pytest.approx(doubling, rel=1e-3)
