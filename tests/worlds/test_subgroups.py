"""new_subgroups and its kin, split_group, shrink_group, monitored_barrier."""

import pytest

import unisono as dist
from tests.support import several
from tests.support.lateness import best_s
from tests.worlds import subgroup_bodies
from unisono.backends import registry
from unisono.errors import ArgumentTypeError, InvalidArgumentError
from unisono.lowlevel import DeviceBackend
from unisono.testing import run

BODIES = [
    subgroup_bodies.blocks,
    subgroup_bodies.lists,
    subgroup_bodies.split,
    subgroup_bodies.split_the_world,
    subgroup_bodies.monitored,
    subgroup_bodies.names,
]


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_on_threads(body):
    run(body, 4)


def test_on_processes():
    bodies = [body for body in BODIES if body is not subgroup_bodies.blocks]
    run(several.run_all, 4, ranks="processes", args=(bodies,))


def test_blocks_are_those_of_a_host_by_default(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    run(subgroup_bodies.blocks_of_a_host, 4)


@pytest.mark.parametrize("engine", ["native", "reference"])
def test_ranks_that_make_different_groups(engine):
    # A bound that shows that nobody sat out the time-out of 60 s.
    assert max(run(subgroup_bodies.told_differently, 3, engine=engine)) < 20


def test_ranks_that_make_different_groups_hear_so_within_a_second():
    body = subgroup_bodies.told_differently
    assert best_s(lambda: max(run(body, 3, ranks="processes")), 1.0) < 1.0


def test_shrink(world):
    world(subgroup_bodies.shrink, 4)


def test_shrink_the_world(world):
    assert world(subgroup_bodies.shrink_the_world, 4) == [0, None, 1, 2]


@pytest.mark.parametrize("victim", [0, 2])
def test_shrink_after_a_death(victim):
    results = run(
        subgroup_bodies.shrink_after_a_death, 4, ranks="processes", args=(victim,), dead={victim}
    )
    assert [r for r in results if r is not None] == [0, 1, 2]


@pytest.mark.parametrize("absent", [(2,), (1, 3), (0,)])
def test_monitored_barrier_names_who_is_missing(world, absent):
    world(subgroup_bodies.monitored_missing, 4, args=(absent,))


@pytest.mark.parametrize("victims", [(2,), (1, 3)])
def test_monitored_barrier_names_who_was_lost(victims):
    results = run(
        subgroup_bodies.monitored_killed, 4, ranks="processes", args=(victims,), dead=set(victims)
    )
    assert len({r.partition(" on rank")[2][3:] for r in results if r is not None}) == 1


def test_names_of_backends(monkeypatch):
    monkeypatch.setattr(registry, "_backends", dict(registry._backends))
    assert dist.Backend("GLOO") == dist.Backend.GLOO == "gloo"
    assert dist.Backend("Other") == "other"
    with pytest.raises(ArgumentTypeError):
        dist.Backend(3)
    with pytest.raises(AttributeError, match="no backend is named 'drums'"):
        dist.Backend.DRUMS  # noqa: B018  the access is the test
    dist.Backend.register_backend("Drums", lambda *a: None, devices=["drum", "cpu"])
    assert dist.Backend.DRUMS == "drums"
    assert dist.Backend.backend_capability["drums"] == ["drum", "cpu"]
    assert dist.Backend.default_device_backend_map == {"cpu": "unisono", "drum": "drums"}
    assert dist.get_default_backend_for_device("drum:1") == "drums"
    assert str(dist.BackendConfig("cpu:gloo,drum:drums")) == "cpu:gloo,drum:drums"
    with pytest.raises(InvalidArgumentError, match="registered already"):
        dist.Backend.register_backend("drums", lambda *a: None)
    with pytest.raises(ArgumentTypeError, match="expected a unisono"):
        dist.init_process_group("drum:drums", rank=0, world_size=1)
    assert not dist.is_initialized()


@pytest.mark.parametrize("extended", [False, True])
def test_backends_made_in_torchs_way(monkeypatch, extended):
    monkeypatch.setattr(registry, "_backends", dict(registry._backends))
    seen = []

    class Silent(DeviceBackend):
        name, device = "silent", "cpu"

        def split(self, spec):
            raise NotImplementedError

        def abort(self, reason, failed=False):
            pass

        def close(self):
            pass

    def make(*arguments):
        seen.extend(arguments)
        return Silent(arguments[0].spec if extended else None)

    dist.Backend.register_backend("silent", make, extended_api=extended, devices="cpu")
    dist.init_process_group("silent", rank=0, world_size=1, timeout=9, pg_options="mine")
    try:
        if extended:
            options, given = seen
            assert (options.group_rank, options.group_size, given) == (0, 1, "mine")
            assert (options.timeout.total_seconds(), options.global_ranks_in_group) == (9, [0])
        else:
            assert (seen[1:3], seen[3].total_seconds()) == ([0, 1], 9)
        assert dist.get_backend() == "silent"
    finally:
        dist.destroy_process_group()
