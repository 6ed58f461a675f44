"""DDP, FSDP, DTensor and the like compute on the plug-in what they compute on Gloo, to the bit.

With two ranks there is only one order in which contributions can be added.
"""

import copy
import threading
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")

import torch.distributed._functional_collectives as functional  # noqa: E402  needs torch
import torch.distributed.nn.functional as autograd  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.algorithms.ddp_comm_hooks import (  # noqa: E402
    DDPCommHookType,
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    register_ddp_comm_hook,
)
from torch.distributed.algorithms.join import Join  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from tests.adapters.torch.torch_world import torch_world  # noqa: E402

# Bodies import the other parts of torch: that takes 2 s, which a collection of tests must not pay.
pytestmark = pytest.mark.usefixtures("forked_with_torch")


class Net(nn.Module):
    """Two layers, one of which may be left unused, and a buffer."""

    def __init__(self, unused=False):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)
        self.third = nn.Linear(16, 4) if unused else None
        self.register_buffer("steps", torch.zeros(1))

    def forward(self, x):
        self.steps += 1
        return self.second(torch.relu(self.first(x)))


def batch(rank, step):
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(4, 8, generator=generator)


def numbers(tensors):
    return [t.detach().float().reshape(-1).tolist() for t in tensors]


def trained(model, rank, steps=3, optimizer=None):
    """Train and return the parameters."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        model(batch(rank, step)).pow(2).sum().backward()
        optimizer.step()
    # A sharded parameter is one rank's part of it.
    return numbers(getattr(p, "_local_tensor", p) for p in model.parameters() if p.numel())


def ddp(rank, **options):
    model = DistributedDataParallel(Net(options.get("find_unused_parameters")), **options)
    result = trained(model, rank)
    # Without a hook in Python no thread runs what is chained to futures.
    assert not [t.name for t in threading.enumerate() if t.name.startswith("unisono-callbacks")]
    return result


def ddp_with_hook(rank, state, hook):
    # Small buckets, so that there are several.
    model = DistributedDataParallel(Net(), bucket_cap_mb=0.0005)
    model.register_comm_hook(state, hook)
    return trained(model, rank)


def ddp_builtin(rank, kind):
    model = DistributedDataParallel(Net())
    model._register_builtin_comm_hook(kind)
    return trained(model, rank)


def ddp_no_sync(rank):
    model = DistributedDataParallel(Net(), gradient_as_bucket_view=True)
    with model.no_sync():
        model(batch(rank, 0)).sum().backward()
    model(batch(rank, 1)).sum().backward()
    return numbers(p.grad for p in model.parameters())


def ddp_sparse(rank):
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Embedding(6, 3, sparse=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.tensor([rank, 2])).sum().backward()
    optimizer.step()
    return numbers(model.parameters())


def ddp_join(rank):
    model = DistributedDataParallel(Net())
    with Join([model]):
        return trained(model, rank, steps=2 + 2 * rank)


def powersgd(rank):
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=0.5
    )
    model = DistributedDataParallel(Net())
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return trained(model, rank, steps=4)


def hooks_by_name(rank):
    """Train with every hook that torch has a name for; some it refuses on a CPU."""
    results = []
    for kind in DDPCommHookType:
        model = DistributedDataParallel(Net())
        try:
            register_ddp_comm_hook(kind, model)
            results += [[kind.name], *trained(model, rank)]
        except (TypeError, RuntimeError) as error:
            results.append([kind.name, type(error).__name__, str(error).partition("\n")[0]])
    return results


def post_local(rank):
    # A sub-group of one: after two steps every rank trains for itself.
    alone = [dist.new_group([r]) for r in range(dist.get_world_size())][rank]
    state = post_localSGD_hook.PostLocalSGDState(None, alone, 2)
    return ddp_with_hook(rank, state, post_localSGD_hook.post_localSGD_hook)


def zero(rank):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(Net())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    result = trained(model, rank, optimizer=optimizer)
    optimizer.consolidate_state_dict(to=0)
    return result


def zero_in_hook(rank, **options):
    """Step in DDP's hook. torch refuses that for Gloo: a plain optimizer is compared with it there.

    torch's hook makes no step before it knows the layout of DDP's buckets.
    """
    from torch.distributed.algorithms.ddp_comm_hooks import ddp_zero_hook
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(Net(), bucket_cap_mb=0.0005, **options)
    settings = {"lr": 0.01, "momentum": 0.9}
    optimizer, first = torch.optim.SGD(model.parameters(), **settings), 2 + len(options)
    if dist.get_backend() != "gloo":
        zero = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.SGD, overlap_with_ddp=True, **settings
        )
        hook = ddp_zero_hook.hook_with_zero_step(default_hooks.allreduce_hook, model, zero)
        model.register_comm_hook(None, hook)
        first = 7
    for step in range(7):
        model.zero_grad()
        model(batch(rank, step)).pow(2).sum().backward()
        if step >= first:
            optimizer.step()
    return numbers(model.parameters())


def fsdp1(rank):
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(Net(), use_orig_params=True, device_id=torch.device("cpu"))
    trained(model, rank)
    with FullyShardedDataParallel.summon_full_params(model):
        return numbers(model.parameters())


def fsdp2(rank):
    from torch.distributed.fsdp import fully_shard

    model = Net()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (model.first, model.second):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    trained(model, rank)
    return numbers(p.full_tensor() for p in model.parameters())


def hybrid_fsdp(rank):
    from torch.distributed.fsdp import fully_shard

    model = Net()
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("copies", "parts"))
    fully_shard(model, mesh=mesh)
    model(batch(rank, 0)).sum().backward()
    return numbers(p.grad.full_tensor() for p in model.parameters())


def dtensor(rank):
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(3)
    whole = torch.randn(6, 4)
    rows = distribute_tensor(whole, mesh, [Shard(0)])
    columns = rows.redistribute(mesh, [Shard(1)])
    part = DTensor.from_local(torch.full((2, 2), 1.0 + rank), mesh, [Partial()])
    return numbers(
        [
            rows.full_tensor(),
            columns.full_tensor(),
            (rows @ distribute_tensor(whole.t(), mesh, [Replicate()])).full_tensor(),
            part.redistribute(mesh, [Replicate()]).to_local(),
            part.redistribute(mesh, [Shard(0)]).full_tensor(),
        ]
    )


def tensor_parallel(rank):
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {"first": ColwiseParallel(), "second": RowwiseParallel()}
    model = parallelize_module(Net(), mesh, plan)
    out = model(batch(0, 0))
    out.sum().backward()
    return numbers(
        [out, model.first.weight.grad.full_tensor(), model.second.weight.grad.full_tensor()]
    )


def sequence_parallel(rank):
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor import parallel as tp

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(2)
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 6), nn.Linear(6, 4))
    plan = {
        "0": tp.SequenceParallel(),
        "1": tp.ColwiseParallel(input_layouts=Shard(1)),
        "2": tp.RowwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    tp.parallelize_module(model, mesh, plan)
    out = model(torch.randn(2, 6, 8)).reshape(-1, 4)
    with tp.loss_parallel():
        loss = nn.functional.cross_entropy(out, torch.arange(len(out)) % 4)
        loss.backward()
    return numbers([loss.full_tensor(), *(p.grad.full_tensor() for p in model.parameters())])


def two_dimensions(rank):
    """FSDP over one dimension of a mesh, tensor parallel over the other."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    names = ("data", "tensor")
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=names)
    plan = {"first": ColwiseParallel(), "second": RowwiseParallel()}
    model = parallelize_module(Net(), mesh["tensor"], plan)
    fully_shard(model, mesh=mesh["data"])
    model(batch(0, 0)).pow(2).sum().backward()
    x = torch.full((2,), 1.0 + rank)
    dist.all_reduce(x, group=mesh["data", "tensor"]._flatten("all").get_group())
    return numbers([x, *(p.grad.full_tensor() for p in model.parameters())])


def pipeline(rank, kind="ScheduleGPipe", stages=1):
    from torch.distributed import pipelining

    size = dist.get_world_size()
    torch.manual_seed(2)
    layers = [nn.Linear(8, 8) for _ in range(stages * size)]
    own = range(rank, len(layers), size)
    parts = [pipelining.PipelineStage(layers[i], i, len(layers), torch.device("cpu")) for i in own]
    schedule = getattr(pipelining, kind)(
        parts if stages > 1 else parts[0], n_microbatches=2 * size, loss_fn=nn.MSELoss()
    )
    x, losses, out = torch.cat([batch(0, 0)] * size), [], []
    if rank == 0:
        schedule.step(x)
    elif rank == size - 1:
        out = [schedule.step(target=torch.ones(4 * size, 8), losses=losses)]
    else:
        schedule.step()
    return numbers([*out, *(layers[i].weight.grad for i in own)])


def differentiated(rank):
    """Operations that autograd knows: results and gradients."""
    size, world, results = dist.get_world_size(), dist.group.WORLD, []
    for call in (
        autograd.all_reduce,
        lambda x: autograd.broadcast(x, 0),
        lambda x: torch.cat(autograd.all_gather(x)),
        lambda x: autograd.reduce_scatter(torch.empty(2), list(x.clone().chunk(size))),
        lambda x: autograd.all_to_all_single(torch.empty(2 * size), x),
        lambda x: torch.cat(autograd.gather(x, 0)),
        lambda x: autograd.scatter(list(x.chunk(size)), 0),
        lambda x: functional.all_gather_tensor_autograd(x, 0, world),
        lambda x: functional.reduce_scatter_tensor_autograd(x, "sum", 0, world),
        lambda x: functional.all_to_all_single_autograd(x, None, None, world),
    ):
        x = (torch.arange(2.0 * size) + rank + 1).requires_grad_()
        y = call(1 * x)
        y.pow(2).sum().backward()
        results += [y, x.grad]
    return numbers(results)


def saved(rank, path):
    from torch.distributed import checkpoint
    from torch.distributed.tensor import Shard, distribute_tensor

    model = DistributedDataParallel(Net())
    expected = trained(model, rank)
    checkpoint.save({"model": model.module.state_dict()}, checkpoint_id=path)
    again = {"model": copy.deepcopy(Net().state_dict())}
    checkpoint.load(again, checkpoint_id=path)
    got = numbers(again["model"][name] for name, _ in model.module.named_parameters())
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(24.0).reshape(4, 6)
    checkpoint.save({"x": distribute_tensor(whole, mesh, [Shard(0)])}, checkpoint_id=f"{path}-3")
    columns = {"x": distribute_tensor(torch.zeros(4, 6), mesh, [Shard(1)])}
    checkpoint.load(columns, checkpoint_id=f"{path}-3")
    assert columns["x"].full_tensor().equal(whole)
    checkpoint.async_save({"model": model.module.state_dict()}, checkpoint_id=f"{path}-2").result()
    assert got == expected
    assert list(Path(f"{path}-2").glob("*.distcp"))
    return got


def compiled(rank):
    @torch.compile(backend="eager", fullgraph=True)
    def reduced(x):
        dist.all_reduce(x)
        return 2 * x

    @torch.compile(backend="eager", fullgraph=True)
    def moved(x):
        size = dist.get_world_size()
        whole, mine = torch.empty(size * x.numel()), torch.empty_like(x)
        dist.all_gather_single(whole, x)
        dist.reduce_scatter_single(mine, whole)
        swapped = torch.empty_like(whole)
        dist.all_to_all_single(swapped, whole)
        return whole, mine, swapped

    return numbers([reduced(torch.full((3,), 1.0 + rank)), *moved(torch.arange(3.0) + rank)])


def compiled_ddp(rank):
    return trained(torch.compile(DistributedDataParallel(Net()), backend="eager"), rank)


def bodies(path):
    hooks = default_hooks
    kinds = dist.BuiltinCommHookType
    return {
        "ddp": ddp,
        "ddp static graph": lambda rank: ddp(rank, static_graph=True),
        "ddp unused": lambda rank: ddp(rank, find_unused_parameters=True),
        "ddp views": lambda rank: ddp(rank, gradient_as_bucket_view=True),
        "ddp no_sync": ddp_no_sync,
        "ddp sparse": ddp_sparse,
        "ddp join": ddp_join,
        "hook all_reduce": lambda rank: ddp_with_hook(rank, None, hooks.allreduce_hook),
        "hook fp16": lambda rank: ddp_with_hook(rank, None, hooks.fp16_compress_hook),
        "hook fp16 wrapper": lambda rank: ddp_with_hook(
            rank, None, hooks.fp16_compress_wrapper(hooks.allreduce_hook)
        ),
        "builtin all_reduce": lambda rank: ddp_builtin(rank, kinds.ALLREDUCE),
        "builtin fp16": lambda rank: ddp_builtin(rank, kinds.FP16_COMPRESS),
        "powersgd": powersgd,
        "hook post-local": post_local,
        "hooks by name": hooks_by_name,
        "zero": zero,
        "zero in a hook": zero_in_hook,
        "zero in a hook, static graph": lambda rank: zero_in_hook(rank, static_graph=True),
        "fsdp1": fsdp1,
        "fsdp2": fsdp2,
        "hybrid fsdp2": hybrid_fsdp,
        "dtensor": dtensor,
        "tensor parallel": tensor_parallel,
        "sequence parallel": sequence_parallel,
        "two dimensions": two_dimensions,
        "pipeline": pipeline,
        "pipeline 1F1B": lambda rank: pipeline(rank, "Schedule1F1B"),
        "pipeline zero bubble": lambda rank: pipeline(rank, "ScheduleInterleavedZeroBubble", 2),
        "autograd": differentiated,
        "checkpoint": lambda rank: saved(rank, path),
        "compiled": compiled,
        "compiled ddp": compiled_ddp,
    }


@pytest.fixture
def names(drawn):
    return drawn(bodies(None), 11)


@pytest.mark.ranks(2, kind="processes", timeout=100)
def test_wrappers_compute_what_they_compute_on_gloo(rank, tmp_path, names):
    found = {}
    for backend in ("gloo", "unisono"):
        with torch_world(backend, tmp_path):
            all_bodies = bodies(tmp_path / f"saved-{backend}")
            found[backend] = {name: all_bodies[name](rank) for name in names}
    gloo, ours = found["gloo"], found["unisono"]
    assert [name for name in gloo if ours[name] != gloo[name]] == []
    assert [name for name in ours if not any(map(any, ours[name]))] == []
