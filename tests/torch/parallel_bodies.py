"""torch's parallel wrappers on a backend: what they compute, as numbers that can be compared."""

import copy
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
)
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch_world import torch_world


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
    return numbers(p for p in model.parameters() if p.numel())


def ddp(rank, **options):
    return trained(
        DistributedDataParallel(Net(options.get("find_unused_parameters")), **options), rank
    )


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
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Join([model]):
        for step in range(2 + 2 * rank):
            optimizer.zero_grad()
            model(batch(rank, step)).pow(2).sum().backward()
            optimizer.step()
    return numbers(model.parameters())


def powersgd(rank):
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=0.5
    )
    model = DistributedDataParallel(Net())
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return trained(model, rank, steps=4)


def post_local(rank):
    # A sub-group of one: after two steps every rank trains for itself.
    alone = [dist.new_group([r]) for r in range(dist.get_world_size())][rank]
    state = post_localSGD_hook.PostLocalSGDState(None, alone, 2)
    return ddp_with_hook(rank, state, post_localSGD_hook.post_localSGD_hook)


def zero(rank):
    model = DistributedDataParallel(Net())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    result = trained(model, rank, optimizer=optimizer)
    optimizer.consolidate_state_dict(to=0)
    return result


def fsdp1(rank):
    model = FullyShardedDataParallel(Net(), use_orig_params=True, device_id=torch.device("cpu"))
    trained(model, rank)
    with FullyShardedDataParallel.summon_full_params(model):
        return numbers(model.parameters())


def fsdp2(rank):
    model = Net()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (model.first, model.second):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        optimizer.zero_grad()
        model(batch(rank, step)).pow(2).sum().backward()
        optimizer.step()
    return numbers(p.full_tensor() for p in model.parameters())


def hybrid_fsdp(rank):
    model = Net()
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("copies", "parts"))
    fully_shard(model, mesh=mesh)
    model(batch(rank, 0)).sum().backward()
    return numbers(p.grad.full_tensor() for p in model.parameters())


def dtensor(rank):
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
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {"first": ColwiseParallel(), "second": RowwiseParallel()}
    model = parallelize_module(Net(), mesh, plan)
    out = model(batch(0, 0))
    out.sum().backward()
    return numbers(
        [out, model.first.weight.grad.full_tensor(), model.second.weight.grad.full_tensor()]
    )


def pipeline(rank):
    size = dist.get_world_size()
    torch.manual_seed(2)
    layers = [nn.Linear(8, 8) for _ in range(size)]
    stage = PipelineStage(layers[rank], rank, size, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=nn.MSELoss())
    x, losses = batch(0, 0), []
    if rank == 0:
        schedule.step(x)
    elif rank == size - 1:
        out = schedule.step(target=torch.ones(4, 8), losses=losses)
        return numbers([out, layers[rank].weight.grad])
    else:
        schedule.step()
    return numbers([layers[rank].weight.grad])


def saved(rank, path):
    model = DistributedDataParallel(Net())
    expected = trained(model, rank)
    checkpoint.save({"model": model.module.state_dict()}, checkpoint_id=path)
    again = {"model": copy.deepcopy(Net().state_dict())}
    checkpoint.load(again, checkpoint_id=path)
    got = numbers(again["model"][name] for name, _ in model.module.named_parameters())
    checkpoint.async_save({"model": model.module.state_dict()}, checkpoint_id=f"{path}-2").result()
    assert got == expected
    assert list(Path(f"{path}-2").glob("*.distcp"))
    return got


def compiled(rank):
    @torch.compile(backend="eager", fullgraph=True)
    def reduced(x):
        dist.all_reduce(x)
        return 2 * x

    return numbers([reduced(torch.full((3,), 1.0 + rank))])


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
        "zero": zero,
        "fsdp1": fsdp1,
        "fsdp2": fsdp2,
        "hybrid fsdp2": hybrid_fsdp,
        "dtensor": dtensor,
        "tensor parallel": tensor_parallel,
        "pipeline": pipeline,
        "checkpoint": lambda rank: saved(rank, path),
        "compiled": compiled,
        "compiled ddp": compiled_ddp,
    }


def on(backend, rank, path):
    results = {}
    with torch_world(backend, path):
        folder = [tempfile.mkdtemp() if rank == 0 else None]
        dist.broadcast_object_list(folder, src=0)
        for name, body in bodies(folder[0]).items():
            results[name] = body(rank)
    return results


def both(rank, path):
    return on("gloo", rank, path), on("unisono", rank, path)
