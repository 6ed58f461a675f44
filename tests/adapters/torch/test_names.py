"""The name and the time-out that torch's groups have, and what the environment says of both."""

import sys
import types
from datetime import timedelta

import pytest

from unisono.errors import CollectiveTimeoutError, InvalidArgumentError

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")

from tests.support.programs import python  # noqa: E402
from unisono.adapters.torch import name as names  # noqa: E402  needs torch

CPU = torch.device("cpu")


@pytest.fixture
def world(request):
    """A world of one rank; its parameter has further arguments of `init_process_group`."""
    store = dist.HashStore()
    dist.init_process_group("unisono", store=store, rank=0, world_size=1, **request.param)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def told(monkeypatch):
    monkeypatch.setenv("UNISONO_TORCH_NAME", "gloo")


@pytest.fixture
def ignite(monkeypatch):
    """A module, loaded now, that decides like Ignite's: it is silent if it does not know a name."""
    module = types.ModuleType("ignite.distributed")

    def auto_model(model):
        if dist.get_world_size() and dist.get_backend() in ("nccl", "gloo", "mpi"):
            return torch.nn.parallel.DistributedDataParallel(model)
        return model

    module.auto_model = auto_model
    monkeypatch.setattr(names, "_warned", set())
    monkeypatch.setitem(sys.modules, "ignite.distributed", module)
    return module


@pytest.mark.parametrize("world", [{}], indirect=True)
def test_libraries_get_the_name_that_the_user_wants(told, world):
    backend = world._get_backend(CPU)
    asked = [dist.get_backend(), dist.distributed_c10d.get_backend(world), world.name()]
    asked += [backend.name(), world._get_backend_name(), str(dist.Backend(dist.get_backend()))]
    assert asked == ["gloo"] * 6
    assert dist.get_backend() == dist.Backend.GLOO
    # Torch makes sub-groups by the true name.
    assert dist.get_backend_config() == "cpu:unisono"
    assert type(dist.new_group([0])) is type(world)
    assert dist.new_group([0], backend="gloo").name() == "gloo"


@pytest.mark.parametrize("backend", ["", "cpu:", "cpu:X,cuda:"])
def test_a_library_gets_what_it_would_get_of_gloo(backend, told):
    got = []
    for name in ("gloo", "unisono"):
        config = f"{backend}{name}".replace("X", name)
        dist.init_process_group(config, store=dist.HashStore(), rank=0, world_size=1)
        got.append(dist.get_backend())
        dist.destroy_process_group()
    assert got[0] == got[1]


@pytest.mark.parametrize("world", [{}], indirect=True)
def test_without_the_variable_the_name_is_true(world):
    assert [dist.get_backend(), world.name(), world._get_backend(CPU).name()] == ["unisono"] * 3


def test_another_name_is_refused(monkeypatch):
    monkeypatch.setenv("UNISONO_TORCH_NAME", "mpi")
    with pytest.raises(InvalidArgumentError, match="'mpi' is neither 'unisono' nor 'gloo'"):
        dist.init_process_group("unisono", store=dist.HashStore(), rank=0, world_size=1)


@pytest.mark.parametrize("world", [{}], indirect=True)
def test_a_model_that_a_library_leaves_alone_is_a_warning(world, ignite, caplog):
    net = torch.nn.Linear(2, 1)
    assert ignite.auto_model(net) is net
    assert ignite.auto_model(net) is net
    (record,) = caplog.records
    assert "each rank trains alone" in record.getMessage()
    assert "UNISONO_TORCH_NAME=gloo" in record.getMessage()


@pytest.mark.parametrize("world", [{}], indirect=True)
def test_with_the_name_the_library_wraps_the_model(told, world, ignite, caplog):
    wrapped = ignite.auto_model(torch.nn.Linear(2, 1))
    assert isinstance(wrapped, torch.nn.parallel.DistributedDataParallel)
    assert not caplog.records


TAKEN_BEFORE = """
import os
os.environ["UNISONO_TORCH_NAME"] = "gloo"
import torch.distributed as dist
import unisono.torch
from torch.distributed import get_backend
dist.init_process_group("unisono", store=dist.HashStore(), rank=0, world_size=1)
print(get_backend(), dist.get_backend())
dist.destroy_process_group()
"""


def test_a_function_taken_out_of_torch_before_the_first_group():
    assert python("-c", TAKEN_BEFORE, check=True, limit_s=120.0).stdout.split() == ["gloo"] * 2


# ---- time-outs ----------------------------------------------------------------------------

OWN = {"timeout": timedelta(seconds=9)}


@pytest.mark.parametrize(
    ("variable", "world", "expected"),
    [(None, {}, 1800), ("7", {}, 7), ("7", OWN, 9), (None, OWN, 9)],
    indirect=["world"],
)
def test_the_variable_is_the_default_and_no_more(variable, world, expected, monkeypatch):
    """The fixture has no environment, so this test makes groups; the world's is checked below."""
    if variable is not None:
        monkeypatch.setenv("UNISONO_TIMEOUT", variable)
    assert dist.new_group([0]).unisono.timeout_s == float(variable or 1800)
    given = dist.new_group([0], timeout=timedelta(seconds=11))
    assert given.unisono.timeout_s == 11
    assert given._get_backend(CPU).options._timeout == timedelta(seconds=11)
    given.set_timeout(timedelta(seconds=12))
    assert given._get_backend(CPU).options._timeout == timedelta(seconds=12)
    again = dist.new_group([0], pg_options=given._get_backend(CPU).options)
    dist.all_reduce(torch.ones(1), group=again)
    assert world.unisono.timeout_s == (9 if expected == 9 else 1800)


@pytest.mark.usefixtures("forked_with_torch")
@pytest.mark.ranks(2, kind="processes")
def test_the_variable_ends_a_wait_for_a_rank_that_does_not_call(rank, tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UNISONO_TIMEOUT", "0.3")
        url = f"file://{tmp_path}/store"
        dist.init_process_group("unisono", init_method=url, rank=rank, world_size=2)
        other = dist.new_group([0, 1], timeout=timedelta(seconds=60))
        assert dist.group.WORLD.unisono.timeout_s == 0.3
        if rank == 0:
            with pytest.raises(CollectiveTimeoutError, match=r"after 0\.3 s"):
                dist.all_reduce(torch.ones(1))
        dist.barrier(group=other)
        dist.destroy_process_group()
