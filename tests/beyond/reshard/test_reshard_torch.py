"""DTensors and tensors of torch as arrays of a reshard, against torch's own functions."""

import contextlib

import numpy as np
import pytest

import unisono as dist
from tests.support.calls import check_usable, fails
from unisono.beyond.boxes import placed_boxes, whole
from unisono.beyond.reshard.parts import as_sharded
from unisono.errors import UnsupportedError, UsageError
from unisono.testing import run

torch = pytest.importorskip("torch")
tensor = pytest.importorskip("torch.distributed.tensor")

import torch.distributed as td  # noqa: E402
from torch.distributed.tensor import DeviceMesh, Replicate, Shard  # noqa: E402
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset  # noqa: E402
from torch.distributed.tensor.placement_types import _StridedShard  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402


@contextlib.contextmanager
def torch_rank(rank, size):
    """A rank of torch that moves nothing."""
    td.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        td.destroy_process_group()


@pytest.mark.parametrize("rank", range(4))
def test_a_dtensor_is_where_torch_says(rank):
    full = torch.arange(70.0).reshape(7, 10)
    with torch_rank(rank, 4):
        for grid, placements in (
            (torch.arange(4).reshape(2, 2), [Shard(0), Shard(1)]),
            (torch.tensor([[3, 1], [0, 2]]), [Shard(1), Replicate()]),
            (torch.tensor([2, 1]), [Shard(0)]),
        ):
            mesh = DeviceMesh("cpu", grid)
            made = tensor.distribute_tensor(full, mesh, placements, src_data_rank=None)
            # The number of this rank in the group of the reshard has nothing to do with torch's.
            parts = as_sharded(made).parts(9, write=False)
            if mesh.get_coordinate() is None:
                assert (parts.boxes, parts.views) == ([], [])
                continue
            (box,) = parts.boxes
            np.testing.assert_array_equal(parts.views[0], full.numpy()[box.within(whole((7, 10)))])


def publishes(rank, folder):
    dist.Publisher(folder).publish({"w": np.arange(24, dtype=np.float32).reshape(6, 4)})


def test_a_subscriber_without_a_group(tmp_path):
    run(publishes, 1, args=(str(tmp_path),))
    with torch_rank(1, 2):
        mesh = DeviceMesh("cpu", [0, 1])
        half = tensor.distribute_tensor(torch.zeros(6, 4), mesh, [Shard(0)], src_data_rank=None)
        assert dist.Subscriber(tmp_path).take({"w": half}) == 1
        assert half.to_local()[:, 0].tolist() == [12, 16, 20]
    x = np.zeros((3, 4), np.float32)
    plain = dist.Sharded(x, (6, 4), mesh=[0, 1], placements=[0])
    with fails(UsageError, "without a group a rank has no place in a mesh of ranks"):
        dist.Subscriber(tmp_path).take({"w": plain})


def of_boxes(n, sizes, placements, place):
    mesh = np.arange(int(np.prod(sizes))).reshape(sizes)
    boxes = placed_boxes((n,), mesh, placements, int(mesh[place]))
    return [k for box, _ in boxes for k in range(box.begins[0], box.ends[0])]


@pytest.mark.parametrize("sizes", [(2, 2), (3, 4), (4, 3), (2, 8)])
def test_fsdp2_cuts_what_tensor_parallelism_has_cut(sizes):
    placements = [_StridedShard(0, split_factor=sizes[1]), Shard(0)]
    for n in range(40):
        for i, j in np.ndindex(*sizes):
            inner = Shard._custom_chunk(torch.arange(n), sizes[1], dim=0)[j]
            wanted = Shard._custom_chunk(inner, sizes[0], dim=0)[i].tolist()
            assert of_boxes(n, sizes, placements, (i, j)) == wanted, (n, i, j)
            if n % (sizes[0] * sizes[1]) == 0:
                left = placements[0]._split_tensor(torch.arange(n), sizes[0], with_padding=False)[
                    0
                ][i]
                assert Shard._custom_chunk(left, sizes[1], dim=0)[j].tolist() == wanted
                shape, offset = _compute_local_shape_and_global_offset(
                    (n,), sizes, [i, j], placements
                )
                assert (shape[0], offset[0] if wanted else 0) == (len(wanted), (wanted or [0])[0])


def test_a_parameter_of_fsdp2_and_tensor_parallelism():
    # torch keeps a mesh of a process for all its worlds.
    run(has_a_parameter, 3, ranks="processes")


def has_a_parameter(number):
    from torch.distributed.fsdp import fully_shard

    rank = (5, 9, 11)[number]
    data = torch.arange(27.0 * 2).reshape(27, 2)
    with torch_rank(rank, 12):
        mesh = td.init_device_mesh("cpu", (3, 4), mesh_dim_names=("dp", "tp"))
        layer = torch.nn.Linear(2, 27, bias=False)
        half = tensor.distribute_tensor(data, mesh["tp"], [Shard(0)], src_data_rank=None)
        layer.weight = torch.nn.Parameter(half)
        fully_shard(layer, mesh=mesh["dp"])
        parts = as_sharded(layer.weight).parts(0, write=False)
        got = [data.numpy()[box.within(whole((27, 2)))] for box in parts.boxes]
        local = layer.weight.to_local().detach().numpy()
        assert sum(each.size for each in got) == local.size
        assert not got or np.array_equal(np.concatenate(got), local)


def test_a_strided_placement_of_two_meanings():
    odd = [_StridedShard(0, split_factor=3), Shard(0)]
    with fails(
        UnsupportedError,
        "of 13 indices in 2 pieces: torch has more than one layout for it",
    ):
        placed_boxes((13,), np.arange(4).reshape(2, 2), odd, 0)
    for i, j in np.ndindex(2, 2):
        left = odd[0]._split_tensor(torch.arange(24), 2, with_padding=False)[0][i]
        wanted = odd[1]._split_tensor(left, 2, with_padding=False)[0][j].tolist()
        assert of_boxes(24, (2, 2), odd, (i, j)) == wanted


@pytest.mark.ranks(2)
def test_lazy_conjugates(rank):
    x = torch.tensor([1 + 1j, 2 + 2j])
    y = torch.zeros(2, dtype=torch.complex64)
    plan = dist.reshard(x.conj() if rank == 0 else None, y)
    for turn in (1, 2):
        x *= turn
        plan.run()
        wanted = turn * torch.tensor([1 - 1j, 2 - 2j])
        assert torch.equal(y, wanted), y
        dist.barrier()
    z = torch.zeros(2, dtype=torch.complex64)
    for lazy in (z.conj(), z.conj().imag):
        with pytest.raises(Exception, match="lazy conjugate") as caught:
            dist.reshard(None, lazy if rank else None)
        text = "array is a lazy conjugate or negative of torch, which has no memory of its own"
        assert text in caught.value.what
        assert isinstance(caught.value, UnsupportedError) == (rank == 1)
    check_usable()


@pytest.mark.ranks(2)
def test_a_tensor_with_other_memory(rank):
    for change in ("data", "resize"):
        t, y = torch.ones(1000), np.zeros(1000, np.float32)
        plan = dist.reshard({"w": t} if rank == 0 else None, {"w": y})
        plan.run()
        dist.barrier()
        if change == "data":
            t.data = torch.full((1000,), 2.0)
        else:
            t.untyped_storage().resize_(0)
        text = "array 'w' has other memory than when the plan was made"
        with pytest.raises(Exception, match="other memory") as caught:
            plan.run(timeout=20)
        assert text in caught.value.what
        assert isinstance(caught.value, UsageError) == (rank == 0)
        np.testing.assert_array_equal(y, 1)
        check_usable()


def test_a_relay_sends_the_dtype_of_the_targets(monkeypatch):
    monkeypatch.setenv("UNISONO_RANKS_PER_HOST", "2")
    run(relays, 4, ranks="processes")


def relays(rank):
    for given, wanted in (
        (torch.tensor([65504.0, 1.0], dtype=torch.float16), torch.bfloat16),
        (torch.tensor([-5, 100], dtype=torch.int8), torch.int64),
        (torch.tensor([1e-3, 7.0], dtype=torch.bfloat16), torch.float64),
    ):
        y = torch.zeros(2, dtype=wanted)
        plan = dist.reshard(given if rank == 0 else None, y if rank >= 2 else None)
        assert "relayed" in str(plan)
        plan.run(timeout=20)
        assert rank < 2 or torch.equal(y, given.to(wanted)), y
