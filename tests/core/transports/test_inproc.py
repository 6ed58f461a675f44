"""Ranks that are threads: a frame arrives inside the call that sends it."""

import pytest

from tests.support.transport_worlds import KINDS, connected
from unisono.core.transports import InprocTransport
from unisono.core.transports.messages import Failure


class ClosedLinks(InprocTransport):
    """Reports the end of its links when it closes them, as the guide permits."""

    def shut(self):
        linked = self.linked()
        super().shut()
        for peer in linked:
            self.ended(peer, "its connection was closed")


@pytest.fixture
def make_world(monkeypatch):
    monkeypatch.setitem(KINDS, "closed links", ClosedLinks)
    made = []

    def make(size, kind="inproc"):
        made.extend(world := connected(kind, size))
        for transport in world:
            transport.watch_neighbours()
        return world

    yield make
    for transport in made:
        transport.close()


def test_a_failure_reaches_200_ranks(make_world):
    """If each rank passed it on, the calls would be as deep as there are ranks."""
    world = make_world(200)
    world[0].fail(1, Failure("lost", "rank 199 was lost", [199], 0), range(200))
    assert {transport.failure(1).peers for transport in world} == {(199,)}


def test_a_crash_reaches_all_ranks(make_world):
    world = make_world(40)
    watching = [each for each in world if 39 in each.linked()]
    assert len(watching) == 10
    for each in watching:
        each.ended(39, "it crashed")
    assert [each.down(39).reason for each in world[:39]] == ["it crashed"] * 39


def test_a_rank_outside_the_group_knows_why_a_member_ends(make_world):
    world = make_world(40)
    # No links between the ranks 0, 5 and 18.
    world[0].fail(1, Failure("failed", "rank 0 raised", [0], 0), [5])
    assert world[5].failure(1).peers == (0,)
    assert world[18].failure(1) is None
    world[18].watch(5)
    world[5].close()
    assert world[18].explain(world[18].down(5), 0.0, (5, 18)).peers == (0,)


def test_a_rank_that_leaves_reports_no_crash(make_world):
    world = make_world(8, "closed links")
    linked = world[0].linked()
    world[0].close()
    assert {world[rank].down(0).left for rank in linked} == {True}
    assert not [each.rank for each in world[1:] if any(map(each.down, range(1, 8)))]
