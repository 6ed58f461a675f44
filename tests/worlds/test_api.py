"""The functions of the module, against torch.distributed's signatures and rules."""

import inspect

import pytest

import unisono as dist
from tests.support import several
from tests.worlds import api_bodies
from unisono.errors import NotInitializedError
from unisono.testing import run


def test_every_name_of_the_module_can_be_loaded():
    assert set(dist.__all__) <= set(dir(dist))
    for name in dist.__all__:
        assert getattr(dist, name) is not None


def test_a_second_tier_and_a_third_one_exist():
    import unisono.lowlevel

    for name in unisono.lowlevel.__all__:
        assert getattr(unisono.lowlevel, name) is not None
    assert not set(unisono.lowlevel.__all__) & set(dist.__all__), "a name in two tiers"


def test_rendezvous_is_a_function_although_a_package_has_its_name(tmp_path):
    import unisono.rendezvous  # noqa: F401

    store, rank, world_size = next(
        iter(dist.rendezvous(f"file://{tmp_path}/s?rank=0&world_size=1"))
    )
    with store:
        assert (rank, world_size) == (0, 1)
        assert isinstance(store, dist.FileStore)


@pytest.mark.parametrize("engine", [None, "reference"])
def test_calls_are_counted(engine):
    run(api_bodies.numbers, 2, engine=engine)


def test_before_init():
    assert dist.is_available()
    assert not dist.is_initialized()
    assert dist.group.WORLD is None
    for call in (
        dist.get_rank,
        dist.get_world_size,
        dist.barrier,
        dist.new_group,
        dist.get_backend,
    ):
        with pytest.raises(NotInitializedError):
            call()


BODIES = [
    (api_bodies.return_values, 3),
    (api_bodies.queries, 3),
    (api_bodies.not_a_member, 2),
    (api_bodies.racing_local_groups, 2),
    (api_bodies.timeouts, 2),
    (api_bodies.roots, 4),
    (api_bodies.disjoint_at_once, 4),
]


@pytest.mark.parametrize(("body", "size"), BODIES, ids=lambda v: getattr(v, "__name__", v))
def test_on_threads(body, size):
    run(body, size)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_on_processes(size):
    bodies = [body for body, wanted in BODIES if wanted == size]
    run(several.run_all, size, ranks="processes", args=(bodies,))


def test_return_values_alone():
    run(api_bodies.return_values, 1)


def test_groups(world):
    sets = [[0, 1, 2, 3], [3, 1], [0, 2], [2, 1, 0], [0, 1, 2, 3]]
    expected = dict(enumerate([sorted(ranks) for ranks in sets] + sets))
    for rank, seen in enumerate(world(api_bodies.groups, 4)):
        assert seen == {k: ranks for k, ranks in expected.items() if rank in ranks}


def test_groups_of_members_only(world):
    results = world(api_bodies.local_groups, 4)
    assert results == [[3.0] * 20 + [[0, 1, 2]]] * 2 + [[3.0] * 20 + [[0, 1, 2]], None]


def test_the_repr_says_that_a_group_is_broken():
    text = run(api_bodies.timeouts, 2)[0]
    assert text.startswith("<ProcessGroup '1' rank=0 size=2 cpu=unisono engine=")
    assert " broken: timed out after 0.5 s: rank 1 " in text


# Functions that wait for other ranks.
WAITING = [
    "all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object",
    "all_gather_single", "all_reduce", "all_reduce_coalesced", "all_reduce_object",
    "all_to_all", "all_to_all_single", "barrier", "batch_isend_irecv", "broadcast",
    "broadcast_object_list", "exscan", "gather", "gather_object", "init_process_group", "irecv",
    "isend", "monitored_barrier", "new_group", "new_subgroups", "new_subgroups_by_enumeration",
    "recv", "recv_object_list", "reduce", "reduce_object", "reduce_scatter",
    "reduce_scatter_single", "reduce_scatter_tensor", "rendezvous", "scan", "scatter",
    "scatter_object_list", "send", "send_object_list", "should_stop", "shrink_group",
    "split_group", "wait_all", "wait_any",
]  # fmt: skip


@pytest.mark.parametrize("name", WAITING)
def test_a_function_that_waits_for_others_takes_a_timeout(name):
    parameters = inspect.signature(getattr(dist, name)).parameters.values()
    assert any(p.name == "timeout" or p.kind is p.VAR_KEYWORD for p in parameters)
