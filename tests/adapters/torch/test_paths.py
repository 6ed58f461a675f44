"""torch.distributed's import paths: gradients against torch's own on Gloo, other paths by use."""

import pytest

import unisono as dist
from unisono.errors import UnsupportedError

torch = pytest.importorskip("torch")
theirs = torch.distributed
pytestmark = pytest.mark.usefixtures("forked_with_torch")


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.ranks(3, kind="processes")
def test_gradients_are_those_of_gloo(rank, tmp_path):
    import torch.distributed.nn.functional

    url = f"file://{tmp_path}/store"
    theirs.init_process_group("gloo", init_method=url, rank=rank, world_size=3)
    try:
        expected = differentiated(theirs.nn.functional, theirs.ReduceOp, theirs.group.WORLD)
    finally:
        theirs.destroy_process_group()
    found = differentiated(dist.nn.functional, dist.ReduceOp, None)
    assert found.keys() == expected.keys()
    for name, tensors in expected.items():
        for ours, other in zip(found[name], tensors, strict=True):
            torch.testing.assert_close(ours, other, msg=lambda text, name=name: f"{name}: {text}")


def differentiated(functional, ReduceOp, group):
    """Return {operation: [results, gradients, gradients of gradients]} on this rank."""
    rank, group = dist.get_rank(), {"group": group}
    calls = {
        "all_reduce": lambda x: functional.all_reduce(x, **group),
        "broadcast": lambda x: functional.broadcast(x, 1, **group),
        "all_gather": lambda x: functional.all_gather(x, **group),
        "gather": lambda x: functional.gather(x, 2, **group),
        "scatter": lambda x: functional.scatter([x, 2 * x, 3 * x], 1, **group),
        "reduce_scatter": lambda x: functional.reduce_scatter(
            torch.empty(1, 2), list(x.tensor_split(3)), **group
        ),
        "all_to_all": lambda x: functional.all_to_all(
            [torch.empty(1, 2) for _ in range(3)], list(x.tensor_split(3)), **group
        ),
        "all_to_all_single": lambda x: functional.all_to_all_single(
            torch.empty(3, 2), x, **group
        ),
        "uneven": lambda x: functional.all_to_all_single(
            torch.empty(3 * (rank == 0) + 6 * (rank == 1), 2),
            x, [1 + (rank == 1)] * 3 if rank < 2 else [0] * 3, [1, 2, 0], **group
        ),
    }  # fmt: skip
    found = {}
    for name, call in calls.items():
        # Gloo's reduce leaves the other ranks' tensors unspecified, so `reduce` is below.
        x = (torch.arange(6.0).reshape(3, 2) + 10 * rank).requires_grad_()
        y = call(x * x)
        parts = y if isinstance(y, tuple) else (y,)
        loss = sum(
            ((part + 1) ** 3 * (number + rank + 1)).sum() for number, part in enumerate(parts)
        )
        (first,) = torch.autograd.grad(loss, x, create_graph=True)
        (second,) = torch.autograd.grad((first * first).sum(), x)
        found[name] = [*(part.detach() for part in parts), first.detach(), second]
    return found


@pytest.mark.ranks(3)
def test_reductions_to_one_rank_and_averages_have_gradients(rank):
    functional, op = dist.nn.functional, dist.ReduceOp
    x = torch.full((2,), rank + 1.0, requires_grad=True)
    y = functional.reduce(x, 1)
    assert y.tolist() == ([6.0, 6.0] if rank == 1 else [0.0, 0.0])
    (y * (rank + 5)).sum().backward()
    assert x.grad.tolist() == [6.0, 6.0]
    for kind, factor in ((op.AVG, 1 / 3), (op.PREMUL_SUM(0.5), 0.5)):
        x.grad = None
        (functional.all_reduce(x, kind) * (rank + 1)).sum().backward()
        assert x.grad.tolist() == pytest.approx([6 * factor] * 2)
    y = functional.all_reduce(x, op.MAX)
    assert y.tolist() == [3.0, 3.0]
    with pytest.raises(UnsupportedError, match="a reduction by MAX has no gradient"):
        y.sum().backward()
    whole = functional._all_gather_base(torch.empty(6), x)
    assert whole.tolist() == [1.0, 1.0, 2.0, 2.0, 3.0, 3.0]


@pytest.mark.ranks(2)
def test_group_helper_of_frameworks_and_the_tables_of_the_world(rank, tmp_path):
    from unisono import distributed_c10d as c10d

    store = dist.FileStore(str(tmp_path / "store"), 2)
    pg, own = c10d._new_process_group_helper(
        2, rank, [], "gloo", store, group_name="weights", pg_options=None, timeout=60
    )
    c10d._world.pg_group_ranks[pg] = {0: 0, 1: 1}
    with pytest.raises(
        UnsupportedError, match=r"the global ranks of group 'weights' are \[0, 1\], not \[4, 5\]"
    ):
        c10d._world.pg_group_ranks[pg] = {4: 0, 5: 1}
    with pytest.raises(ValueError, match="this world has a group named 'weights' already"):
        c10d._new_process_group_helper(2, rank, [], "gloo", store, group_name="weights")
    x = torch.ones(2)
    dist.all_reduce(x, group=pg)
    assert x.tolist() == [2.0, 2.0]
    assert c10d._resolve_process_group("weights") is pg
    with pytest.raises(ValueError, match="this world has no group named 'biases'"):
        c10d._resolve_process_group("biases")
    assert c10d._world.pg_names[pg] == "weights"
    assert c10d._world.pg_map[pg] == ("gloo", pg.store)
    assert c10d._world.pg_backend_config[pg] == str(pg.config)
    assert c10d._get_pg_default_device(pg) == torch.device("cpu")
    own.set(f"key/{rank}", "value")
    assert store.check([f"weights//key/{rank}"])
    dist.destroy_process_group(pg)
    default = c10d._get_default_group()
    assert (c10d._world.default_pg, c10d._world.group_count) == (default, 1)
    assert c10d._get_default_store() is c10d._get_process_group_store(default)
    assert c10d._get_group_size(None) == len(default.ranks) == 2
    assert c10d._device_capability() == ["cpu"]
    c10d._set_pg_timeout(7)
    assert default.timeout_s == 7
    assert c10d._get_default_timeout("gloo").total_seconds() > 0
    assert c10d._group_or_default_group() is default
    if rank == 0:
        c10d._update_default_pg(default)
    only, _none = c10d._new_process_group_helper(1, 0, [0], "gloo", store, "alone")
    assert (only == dist.GroupMember.NON_GROUP_MEMBER) == (rank == 1)
    c10d._abort_process_group()
