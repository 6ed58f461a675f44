"""Stages and followed ranks against the events, for all algorithms."""

import random

import numpy as np
import pytest

from unisono.core.schedules import build
from unisono.core.schedules.ir import COLLECTIVES, ROOTED
from unisono.core.schedules.registry import available, entry
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
    simulate,
)
from unisono.workbench.simulate.evaluators import alike, links, stages, traffic
from unisono.workbench.simulate.evaluators import symmetry as images
from unisono.workbench.simulate.evaluators.evaluate import all_rows
from unisono.workbench.simulate.networks import Network

SIZES = range(2, 17)


def drawn_call(collective, algorithm, size, seed):
    """Return a schedule, a number of bytes, and ranks per host."""
    rng = random.Random(f"{collective} {algorithm} {size} {seed}")
    local = rng.choice([n for n in range(2, size) if size % n == 0] or [1])
    if algorithm not in available(collective, size, local=local):
        return None
    root = rng.randrange(size) if collective in ROOTED else -1
    pipeline = rng.randint(1, 3) if entry(collective, algorithm).pipelined else 1
    schedule = build(collective, algorithm, size, root, pipeline, local)
    return schedule, rng.choice([rng.randint(1, 40), rng.randint(1, 100_000)]), local


def cases(seed, sizes):
    for collective in COLLECTIVES:
        for size in sizes:
            for algorithm in available(collective, size, local=2 if size > 3 else 1):
                found = drawn_call(collective, algorithm, size, seed)
                if found:
                    yield found


COSTS = Costs(310, 170, 40, LinkSpec(gbps=7.3), LinkSpec(gbps=3.1), agreement_bytes=8)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("seed", range(4))
def test_stages_equal_the_events_where_links_are_not_shared(seed, drawn):
    for schedule, nbytes, local in cases(seed, drawn(SIZES, 5)):
        size = schedule.world_size
        network = NETWORKS["hosts"](size, local)
        expected, found = (
            simulate(schedule, nbytes, network, COSTS, contended=False, method=method)
            for method in ("events", "stages")
        )
        assert found.finish_ps.tolist() == expected.finish_ps.tolist(), (schedule, nbytes, local)
        assert found.causes_ps == expected.causes_ps
        assert sum(found.causes_ps.values()) == found.last_ps
        assert (found.messages, found.nbytes) == (expected.messages, expected.nbytes)
        assert found.hops == expected.hops
        assert found.exact


INSIDE, BETWEEN = LinkSpec(600, 100.0), LinkSpec(2200, 12.5)
NETWORKS = {
    "switch": lambda size, local: Switch(size, LinkSpec(600, 10.0)),
    "hosts": lambda size, local: Hosts(size, local, INSIDE, BETWEEN),
    "ring": lambda size, local: Torus(size, 1, LinkSpec(100, 10.0), cut_through=False),
    "pods": lambda size, local: Hosts(size, local, INSIDE, BETWEEN, pods=Pods(2, 2.0, 90)),
    "torus": lambda size, local: Torus(size // 2, 2, LinkSpec(700, 10)),
    "dragonfly": lambda size, local: Hosts(
        size, local, INSIDE, BETWEEN, pods=Pods(2, 2.0, 90, dragonfly=True)
    ),
    "full": lambda size, local: FullyConnected(size, LinkSpec(700, 10)),
    "hashed": lambda size, local: Hosts(
        size, local, INSIDE, BETWEEN, pods=Pods(2, 2.0, 90, dragonfly=True, hashed=True)
    ),
    "equal pods": lambda size, local: Hosts(
        size, local, INSIDE, BETWEEN, pods=Pods(2, latency_ps=900)
    ),
}


@pytest.mark.parametrize("kind", ["switch", "hosts", "ring", "torus", "pods", "hashed"])
def test_stages_know_when_they_are_exact(kind):
    exact = 0
    for schedule, nbytes, local in cases(0, (2, 4, 6, 10 if kind == "torus" else 9)):
        network = NETWORKS[kind](schedule.world_size, local)
        expected, found = (
            simulate(schedule, nbytes, network, COSTS, method=method)
            for method in ("events", "stages")
        )
        assert found.link_busy_ps.tolist() == expected.link_busy_ps.tolist()
        assert sum(found.causes_ps.values()) == found.last_ps
        if found.exact:
            exact += 1
            assert found.finish_ps.tolist() == expected.finish_ps.tolist(), (schedule, nbytes)
    assert exact > 60


def compare_images(kind, sizes, costs, run, run_all, **options):
    """Compare the runs of a few ranks and of all; return (what was compared, algorithms)."""
    compared, followed = [], set()
    for schedule, nbytes, local in cases(1, sizes):
        size = schedule.world_size
        traffic = Traffic(schedule, nbytes * size * 3, work=costs.works)
        network = NETWORKS[kind](size, local)
        found = images.find_images([traffic], network, **options)
        if found is None:
            continue
        result, expected = run([traffic], network, costs, found), run_all(traffic, network, costs)
        assert result is not None
        compared.append((result, expected))
        followed.add((schedule.algorithm, found.flips))
        assert result.finish_ps.tolist() == expected.finish_ps.tolist(), (schedule, nbytes, local)
        assert (result.messages, result.nbytes) == (expected.messages, expected.nbytes)
    assert {("ring", False), ("linear", False)} <= followed
    if kind == "hosts":
        assert {("pairwise", True), ("two_level", False)} <= followed
    return compared, followed


@pytest.mark.parametrize("kind", ["hosts", "ring", "torus", "equal pods"])
def test_a_few_ranks_stand_for_all(kind):
    def run_all(traffic, network, costs):
        return stages.run([traffic], network, costs, contended=False)

    for result, _ in compare_images(kind, (4, 6, 8, 12), COSTS, images.run, run_all)[0]:
        assert sum(result.causes_ps.values()) == result.last_ps


@pytest.mark.parametrize("unordered", [False, True])
@pytest.mark.parametrize("kind", ["hosts", "ring", "torus", "equal pods", "dragonfly", "full"])
def test_a_few_ranks_stand_for_all_where_links_are_shared(kind, unordered):
    def run_all(traffic, network, costs):
        return links.run(traffic.all_rows(), network, costs)

    costs = Costs(310, start_ps=40) if unordered else COSTS
    how = (4, 8, 12), costs, images.run_shared, run_all
    compared, followed = compare_images(kind, *how, unordered=unordered)
    for result, expected in compared:
        assert result.link_busy_ps.tolist() == expected.link_busy_ps.tolist()
        assert result.causes_ps == expected.causes_ps
    assert (("rank_order", False) in followed) == unordered


def test_the_order_of_receives_counts_if_they_take_time():
    p, recv_ps = 2048, 1000
    schedule = build("all_reduce", "one_shot", p)
    network = Switch(p, LinkSpec(1, 12.5))
    few = f"events of 1 of {p} ranks"
    assert simulate(schedule, p * 4, network).method == few
    result = simulate(schedule, 4, network, Costs(recv_ps=recv_ps))
    assert result.method == few + ", then rank by rank"
    # Links never wait: a message of distance d leaves after d - 1 others, of 320 ps each.
    for rank in (0, 1, 77, p - 1):
        ends = 0
        for source in (*range(rank), *range(rank + 1, p)):
            ends = max(ends, (rank - source) % p * 320 + 2) + recv_ps
        assert result.finish_ps[rank] == ends
    assert result.exact
    assert sum(result.causes_ps.values()) == result.last_ps


# Algorithms in which all ranks send alike in their first stage, which may be large.
ALIKE = [
    ("all_reduce", "one_shot"),
    ("reduce_scatter", "rank_order"),
    ("reduce", "rank_order"),
    ("reduce", "two_shot"),
]


def run_alike(monkeypatch, schedule, nbytes, network, costs):
    """Return the result of the first stage as a large stage, and that of the events."""
    parts = [Traffic(schedule, nbytes, work=costs.works)]
    if costs.agreement_bytes:
        agreement = build("barrier", "dissemination", schedule.world_size)
        parts.insert(0, Traffic(agreement, 0, message_bytes=costs.agreement_bytes))
    with monkeypatch.context() as patched:
        patched.setattr(stages, "LARGE", parts[-1].count(0) - 1)
        found = alike.run(parts, network, costs)
    return found, links.run(all_rows(parts), network, costs)


@pytest.mark.parametrize("kind", ["switch", "hosts", "full", "equal pods", "pods", "dragonfly"])
def test_a_large_stage_on_shared_links_equals_the_events(kind, monkeypatch):
    rng = random.Random(kind)
    compared, approximate = set(), 0
    for size in (3, 8, 12, 24, 60):
        for algorithm in ALIKE:
            local = rng.choice([n for n in (1, 2, 3, 4, 6) if size % (2 * n) == 0] or [1])
            root = rng.randrange(size) if algorithm[0] == "reduce" else -1
            schedule, network = build(*algorithm, size, root), NETWORKS[kind](size, local)
            nbytes = size * rng.choice([1, 100, 4096])
            for costs in (Costs(), Costs(310, 170, 40), COSTS):
                found, expected = run_alike(monkeypatch, schedule, nbytes, network, costs)
                if found is None:
                    # Its pods are not all alike.
                    assert size % network.period or size == network.period
                    continue
                assert (found.messages, found.nbytes) == (expected.messages, expected.nbytes)
                assert found.link_busy_ps.tolist() == expected.link_busy_ps.tolist()
                assert sum(found.causes_ps.values()) == found.last_ps
                if found.exact:
                    same = found.finish_ps.tolist() == expected.finish_ps.tolist()
                    assert same, (schedule, network.period, nbytes, costs)
                    compared.add(algorithm)
                else:
                    approximate += 1
                    assert found.last_ps == pytest.approx(expected.last_ps, rel=0.05)
    assert compared == set(ALIKE)
    # Over more links, messages of the second stage overtake those of the first.
    assert (approximate > 0) == (kind in ("pods", "dragonfly"))


def test_a_large_stage_is_given_up_if_ranks_do_not_send_alike(monkeypatch):
    network = Hosts(12, 2, INSIDE, BETWEEN)
    ordered = build("reduce", "rank_order", 12, 0)
    pipelined = build("all_reduce", "rank_order", 12, pipeline=2)
    assert run_alike(monkeypatch, ordered, 12 * 8, network, COSTS)[0] is not None
    for schedule, nbytes in (
        (ordered, 12 * 8 + 1),  # Chunks of two sizes.
        (build("reduce", "linear", 12, 0), 12 * 8),
        (pipelined, 12 * 8),  # All stages are large.
    ):
        assert run_alike(monkeypatch, schedule, nbytes, network, COSTS)[0] is None


def test_a_schedule_with_a_root_has_no_images():
    traffic = Traffic(build("broadcast", "binomial", 64, 0), 640)
    assert images.find_images([traffic], Switch(64, LinkSpec())) is None


def test_a_claim_that_fails_in_a_later_stage_is_given_up():
    """The sampled stages of this schedule look the same from all ranks, another one does not."""
    whole = build("all_reduce", "ring", 512)
    stage = next(k for k in range(whole.rounds) if k not in images._sample(whole.rounds))

    def traffic(senders):
        """Return the traffic if only some ranks have rows in that stage."""

        def exchange(k, ranks):
            for rows in whole.exchange(k, ranks):
                yield rows[rows[:, 0] < senders] if k == stage else rows

        schedule = type(whole)(
            "all_reduce", "broken", 512, whole.rounds, exchange, output_chunks=512
        )
        return [Traffic(schedule, 512 * 4)]

    network = Switch(512, LinkSpec(100, 1.0))
    found = images.find_images(traffic(0), network)
    assert found is not None
    # Without rows in one stage all ranks still look the same.
    assert images.run(traffic(0), network, Costs(), found) is not None
    results = [
        images.run(traffic(256), network, Costs(), found._replace(followed=followed))
        for followed in (1, 256)
    ]
    assert None in results


def test_the_largest_schedules_are_refused_before_they_take_the_memory():
    schedule = build("all_reduce", "rank_order", 2048)
    with pytest.raises(InvalidArgumentError, match="a stage takes about ") as caught:
        simulate(schedule, 2048 * 4, Switch(2048, LinkSpec(1)), Costs(recv_ps=1))
    assert " rows (limit " in str(caught.value)


@pytest.mark.parametrize("kind", ["switch", "pods"])
def test_a_stage_rank_by_rank_equals_the_whole(kind, monkeypatch):
    """Above `LARGE` rows per stage no table has the rows of all ranks."""
    alike = set()
    for schedule, nbytes, local in cases(2, (2, 5, 8, 12)):
        network = NETWORKS[kind](schedule.world_size, local)
        parts = [Traffic(schedule, nbytes)]
        whole = stages.run(parts, network, COSTS, contended=False)
        with monkeypatch.context() as patched:
            patched.setattr(stages, "LARGE", 3 * schedule.world_size)
            found = stages.run(parts, network, COSTS, contended=False, large=True)
        if found is None:
            continue
        alike.add((schedule.collective, schedule.algorithm))
        assert found.finish_ps.tolist() == whole.finish_ps.tolist(), (schedule, nbytes)
        assert found.causes_ps == whole.causes_ps
        assert (found.messages, found.nbytes) == (whole.messages, whole.nbytes)
        assert found.hops == whole.hops
    assert {("all_reduce", "one_shot"), ("reduce_scatter", "rank_order")} <= alike
    assert {("all_to_all", "linear"), ("reduce", "two_shot")} <= alike


def test_impossible_calls_are_refused():
    with pytest.raises(InvalidArgumentError, match=": the network has "):
        simulate(build("barrier", "linear", 4), 0, Switch(8, LinkSpec()))
    with pytest.raises(InvalidArgumentError, match="method must be"):
        simulate(build("barrier", "linear", 4), 0, Switch(4, LinkSpec()), method="fast")
    rows = Traffic(build("all_reduce", "ring", 4), 64).rows(0, [np.arange(4)])
    state = stages._StageState(Switch(4, LinkSpec()), Costs(), contended=True)
    with pytest.raises(InvalidArgumentError, match=" messages of a stage do not match its "):
        state.advance(rows.take(rows.rank > 0))
    times = np.arange(8) << 59
    with pytest.raises(InvalidArgumentError, match=" ps are too many for one stage"):
        state._serve(np.arange(8), times, times * 0)


@pytest.mark.parametrize(
    ("algorithm", "network", "options"),
    [
        # A rank that stands for all, events, and stages.
        (("all_reduce", "ring"), Switch(2048, LinkSpec(1000, 0.2)), {}),
        (("all_reduce", "ring"), Switch(2048, LinkSpec(1000, 0.2)), {"contended": False}),
        (("all_reduce", "ring"), Switch(2048, LinkSpec(1000, 0.2)), {"method": "stages"}),
        (("reduce", "linear"), Switch(2048, LinkSpec(1000, 125)), {"method": "events"}),
        (("reduce", "linear"), Switch(2048, LinkSpec(1000, 125)), {"method": "stages"}),
    ],
)
def test_times_that_add_up_to_more_than_64_bits_are_refused(algorithm, network, options):
    """Each message takes less than 10,000 s."""
    root = 0 if algorithm[0] == "reduce" else -1
    schedule = build(*algorithm, 2048, root)
    with pytest.raises(InvalidArgumentError, match=r"simulate: times add up to .* at most 4000000"):
        simulate(schedule, 1 << 50, network, itemsize=4, **options)


def test_bytes_that_add_up_to_more_than_64_bits_are_right():
    schedule = build("all_reduce", "one_shot", 128)
    for method in ("events", "stages"):
        result = simulate(schedule, 1 << 50, Switch(128, LinkSpec(1000, 125)), method=method)
        assert result.nbytes == 128 * 127 << 50
        # All send as fast as their links can.
        assert result.last_us == pytest.approx(127 * 2**50 / 125e3, rel=1e-3)


def test_passes_of_a_reduction_have_times_that_fit():
    schedule, network = build("all_reduce", "ring", 4), Switch(4, LinkSpec(1000, 125))
    costs = Costs(reduction=LinkSpec(0, 10.0), passes=10**9)
    with pytest.raises(InvalidArgumentError, match=r"takes .* s on a link, expected at most 10000"):
        simulate(schedule, 1 << 40, network, costs)


def test_a_network_computes_the_same_for_messages_alone_and_on_links():
    for network in (Switch(6, LinkSpec(7, 3.0)), Hosts(6, 2, LinkSpec(5, 9.0), LinkSpec(11, 2.0))):
        source, target = np.divmod(np.arange(36), 6)
        keep = source != target
        source, target = source[keep], target[keep]
        nbytes = np.arange(1, 1 + len(source))
        for ours, expected in zip(
            network.alone(source, target, nbytes),
            Network.alone(network, source, target, nbytes),
            strict=True,
        ):
            assert ours.tolist() == expected.tolist()


@pytest.mark.parametrize("name", ["two_shot", "ring"])
def test_steps_that_are_read_in_pieces_are_the_same(monkeypatch, name):
    """Of most chunks of 8 bytes on many ranks nothing is left; all their steps fill the memory."""
    whole = Traffic(build("all_reduce", name, 24), 8, 4).all_rows()
    monkeypatch.setattr(traffic, "_MANY_RANKS", 4)
    monkeypatch.setattr(traffic, "_STEPS", 64)
    pieces = Traffic(build("all_reduce", name, 24), 8, 4).all_rows()
    assert [column.tolist() for column in pieces] == [column.tolist() for column in whole]


@pytest.mark.parametrize(
    ("schedule", "nbytes", "text"),
    [
        ("ring", 8, "simulate: schedule is 'ring', expected a Schedule"),
        (build("all_reduce", "ring", 4), "1M", "nbytes is '1M', expected a number of bytes"),
        (build("all_reduce", "ring", 4), -1, "nbytes is -1, expected a number of bytes"),
    ],
)
def test_arguments_that_are_none_are_named(schedule, nbytes, text):
    with pytest.raises(InvalidArgumentError, match=text):
        simulate(schedule, nbytes, Switch(4, LinkSpec(0, 1.0)))
