"""Schedules of two levels: proved for many worlds, and what they send between hosts."""

import numpy as np
import pytest

from unisono.core.schedules import Topology, available, build, select
from unisono.core.schedules.ir import ROOTED, Buf, Op
from unisono.core.schedules.lowering.layout import layout_for
from unisono.core.schedules.verify import verify
from unisono.errors import InvalidArgumentError

PIPELINED = ("all_reduce", "broadcast", "reduce")
COLLECTIVES = (*PIPELINED, "all_gather", "reduce_scatter", "all_to_all")
WORLDS = [(2, 2), (2, 3), (3, 2), (3, 3), (4, 2), (5, 4), (8, 2), (2, 8)]


def schedules(collective, hosts, local):
    roots = (0, local - 1, hosts * local - 1) if collective in ROOTED else (-1,)
    depths = (1, 2, 5) if collective in PIPELINED else (1,)
    for root in sorted(set(roots)):
        for depth in depths:
            yield build(collective, "two_level", hosts * local, root, depth, local)


@pytest.mark.parametrize(("hosts", "local"), WORLDS)
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_proved(collective, hosts, local):
    for schedule in schedules(collective, hosts, local):
        verify(schedule)


@pytest.mark.parametrize(("hosts", "local"), WORLDS)
def test_reduce_leaves_the_vectors_of_others_alone(hosts, local):
    for schedule in schedules("reduce", hosts, local):
        others = np.delete(np.arange(hosts * local), schedule.root)
        for k in range(schedule.stages):
            assert not (schedule.steps(k, others)[:, 5] == Buf.OUTPUT).any()


@pytest.mark.parametrize("collective", ["all_gather", "reduce_scatter"])
def test_proved_in_place(collective):
    verify(build(collective, "two_level", 6, local=2), in_place=True)


@pytest.mark.parametrize("local", [2, 3])
def test_exchange_equals_numpy(local, execute):
    p, count = 6, 5
    schedule = build("all_to_all", "two_level", p, local=local)
    given = np.random.default_rng(4).integers(0, 1000, (p, p, count))
    outputs = list(np.full((p, p * count), -1))
    execute(schedule, [layout_for(schedule, count)] * p, list(given.reshape(p, -1)), outputs)
    assert (np.reshape(outputs, given.shape) == given.swapaxes(0, 1)).all()


def between(schedule, local):
    """Return the chunks that the busiest host sends to others, as a part of the whole data."""
    p = schedule.world_size
    rows = np.concatenate([schedule.steps(k, np.arange(p)) for k in range(schedule.stages)])
    rows = rows[(rows[:, 1] == Op.SEND) & (rows[:, 0] // local != rows[:, 2] // local)]
    sent = np.bincount(rows[:, 0] // local, rows[:, 7], p // local)
    return sent.max() / schedule.work_chunks


@pytest.mark.parametrize(("hosts", "local"), WORLDS)
def test_hosts_send_as_little_as_one_rank_of_a_ring_would(hosts, local):
    def sent(collective, *arguments):
        return between(build(collective, "two_level", hosts * local, *arguments, local), local)

    assert sent("all_reduce", -1, 3) == pytest.approx(2 * (hosts - 1) / hosts)
    assert sent("all_gather", -1, 1) == pytest.approx((hosts - 1) / hosts)
    assert sent("reduce_scatter", -1, 1) == pytest.approx((hosts - 1) / hosts)
    assert sent("reduce", 1, 2) == 1


@pytest.mark.parametrize(("p", "local"), [(4, 1), (4, 4), (6, 4), (1, 1)])
def test_worlds_without_two_levels(p, local):
    assert "two_level" not in available("all_reduce", p, local=local)
    with pytest.raises(InvalidArgumentError, match="needs several hosts with equally many ranks"):
        build("all_reduce", "two_level", p, local=local)


def test_selected_where_it_saves_traffic():
    hosts = Topology(8, local=4)
    assert select("all_reduce", 8, hosts).algorithm == "recursive_doubling"
    assert select("all_reduce", 1 << 20, hosts).algorithm == "two_level"
    assert select("all_reduce", 1 << 26, hosts) == ("two_level", 32)
    assert select("all_reduce", 1 << 20, Topology(6)).algorithm == "ring"
    assert select("all_reduce", 1 << 20, hosts, "ring").algorithm == "ring"
    # Packing costs time, and no measurement shows a gain yet.
    assert select("all_to_all", 1 << 10, hosts).algorithm == "linear"
    with pytest.raises(InvalidArgumentError, match="needs several hosts"):
        select("all_reduce", 1 << 20, Topology(8), "two_level")
