"""Training steps on ranks; torch's own DistributedDataParallel on Gloo is one of the oracles."""

from __future__ import annotations

import contextlib
import itertools
import threading
import warnings
from datetime import timedelta

import torch
import torch.distributed as torch_dist

import unisono as dist
from unisono.groups.work import Future
from unisono.parallel import (
    DistributedDataParallel,
    PowerSGDState,
    bf16_compress_hook,
    fp16_compress_hook,
    power_sgd_hook,
)
from unisono.parallel.hooks import all_reduce_hook


def make_model(seed, wide=False):
    """Convolution with batch norm (which has buffers), then layers of several sizes."""
    torch.set_num_threads(1)
    hidden = 1050 if wide else 30
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3, padding=1),
        torch.nn.BatchNorm2d(4),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(4 * 25, hidden),
        torch.nn.ReLU(),
        torch.nn.Linear(hidden, hidden),
        torch.nn.ReLU(),
        torch.nn.Linear(hidden, 3),
    )
    # Threads that act as ranks share torch's own generator.
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.data = torch.randn(p.shape, generator=generator) / 8
    return model


def batch(rank, step, n=4):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return (
        torch.randn(n, 1, 5, 5, generator=generator),
        torch.randint(0, 3, (n,), generator=generator),
    )


def loss_of(model, rank, step):
    x, target = batch(rank, step)
    return torch.nn.functional.cross_entropy(model(x), target)


def train(model, rank, steps=3):
    """Train; return the gradients of every step, and the final state."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    history = []
    for step in range(steps):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        loss_of(model, rank, step).backward()
        history.append([p.grad.clone() for p in model.parameters()])
        optimizer.step()
    return history, [t.clone() for t in model.state_dict().values()]


@contextlib.contextmanager
def gloo(rank, path):
    """Make torch's default group of all ranks, on Gloo, and destroy it."""
    torch_dist.init_process_group(
        "gloo",
        init_method=f"file://{path}",
        rank=rank,
        world_size=dist.get_world_size(),
        timeout=timedelta(seconds=60),
    )
    try:
        yield
    finally:
        torch_dist.destroy_process_group()


def against_torch(rank, path):
    """The same training with both; return the largest differences of gradients and states."""
    ours = train(DistributedDataParallel(make_model(rank, wide=True), bucket_cap_mb=0.5), rank)
    with gloo(rank, path):
        other = torch.nn.parallel.DistributedDataParallel(make_model(rank, wide=True))
        theirs = train(other, rank)
    pairs = [
        *zip(itertools.chain(*ours[0]), itertools.chain(*theirs[0]), strict=True),
        *zip(ours[1], theirs[1], strict=True),
    ]
    return max(float((a - b).abs().max()) for a, b in pairs), len(pairs)


def average_of_local(rank):
    """Gradients of one step against the average of what each rank alone would have."""
    p = dist.get_world_size()
    model = DistributedDataParallel(make_model(rank), broadcast_buffers=False)
    loss_of(model, rank, 0).backward()
    locals_ = []
    for r in range(p):
        alone = make_model(0)
        loss_of(alone, r, 0).backward()
        locals_.append([q.grad for q in alone.parameters()])
    worst = 0.0
    for i, q in enumerate(model.parameters()):
        wanted = sum(g[i].double() for g in locals_) / p
        worst = max(worst, float((q.grad.double() - wanted).abs().max()))
    bits = [q.grad.numpy().tobytes() for q in model.parameters()]
    return worst, bits


def without_sync(rank):
    """Two passes without reduction and one with: the sum of three passes, averaged."""
    p, model = dist.get_world_size(), None
    model = DistributedDataParallel(torch.nn.Linear(3, 2, bias=False))
    weight = model.module.weight
    seen = []
    for _ in range(2):
        weight.grad = None
        with model.no_sync():
            for k in range(2):
                model(torch.full((1, 3), float(rank + k))).sum().backward()
        seen.append(float(weight.grad[0, 0]) - (2 * rank + 1))
        model(torch.full((1, 3), float(rank + 2))).sum().backward()
        seen.append(float(weight.grad[1, 2]) - sum(3 * r + 3 for r in range(p)) / p)
    return seen


class Branches(torch.nn.Module):
    """Uses some of its layers."""

    def __init__(self, width=2):
        super().__init__()
        layers = [torch.nn.Linear(width, width, bias=False) for _ in range(3)]
        self.layers = torch.nn.ModuleList(layers)

    def forward(self, x, which):
        return {"out": [sum(self.layers[i](x) for i in which)]}


def unused(rank, width=2):
    """Layer 0 on rank 0, layer 1 on the others, layer 2 nowhere."""
    model = DistributedDataParallel(Branches(width), find_unused_parameters=True)
    seen = []
    for _ in range(2):
        model.zero_grad()
        out = model(torch.ones(1, width), [0] if rank == 0 else [1])["out"][0]
        out.sum().backward()
        grads = [layer.weight.grad for layer in model.module.layers]
        seen.append([None if g is None else g[:2, -2:].tolist() for g in grads])
    return seen


def unused_alone(rank):
    """The same with parameters that share no bucket."""
    return unused(rank, 1040)


def large(rank):
    """Gradients of 4 MiB and more, one of them not contiguous, which `zero_grad` must free."""
    wide = [
        torch.nn.Parameter(torch.zeros(1040, 1041)),
        torch.nn.Parameter(torch.zeros(1060, 1000).t()),
    ]
    module = torch.nn.Module()
    module.forward = lambda factor: sum((p * factor).sum() for p in wide)
    for i, p in enumerate(wide):
        module.register_parameter(f"p{i}", p)
    model, worst = DistributedDataParallel(module), 0.0
    for step in range(3):
        if step != 1:
            module.zero_grad()
        with model.no_sync():
            model(float(rank)).backward()
        before = [p.grad.clone() for p in wide]
        model(float(rank + step)).backward()
        ranks = range(dist.get_world_size())
        for p, own in zip(wide, before, strict=True):
            wanted = own - rank + sum(2 * r + step for r in ranks) / len(ranks)
            worst = max(worst, float((p.grad - wanted).abs().max()))
    return worst, [_uses(p.grad) for p in wide], _uses(torch.zeros(1))


class Viewed(torch.nn.Module):
    """Backward gives each parameter a view of what it has to read for another one afterwards."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(1))
        self.first = torch.nn.Parameter(torch.zeros(1040 * 1041))
        self.second = torch.nn.Parameter(torch.zeros(1040 * 1041))

    def forward(self, x):
        return x * self.scale + (self.first.view(x.shape) + self.second.view(x.shape))


def lent(rank):
    """Large gradients in memory that others have, too."""
    module = Viewed()
    model = DistributedDataParallel(module)
    (model(torch.ones(1040, 1041)) * float(rank)).sum().backward()
    return [float(p.grad.double().mean()) for p in module.parameters()]


def _uses(tensor):
    """Return how many tensors have this memory."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def unused_by_mistake(rank):
    model = DistributedDataParallel(Branches())
    model(torch.ones(1, 2), [0, 2])["out"][0].sum().backward()
    try:
        model(torch.ones(1, 2), [0, 1, 2])
    except dist.errors.UsageError as error:
        return str(error)
    return None


def state_of_rank_0(rank):
    """Parameters, also frozen ones, and buffers come from rank 0; buffers before each pass."""
    model = make_model(rank)
    model[0].weight.requires_grad_(False)
    model[1].running_mean.fill_(rank + 5.0)
    wrapped = DistributedDataParallel(model)
    first = [float(model[0].weight.sum()), float(model[1].running_mean[0])]
    # The first pass follows construction, which has copied them already.
    loss_of(wrapped, rank, 0).backward()
    model[1].running_mean.fill_(rank + 7.0)
    model.eval()
    with torch.no_grad():
        wrapped(batch(rank, 1)[0])
    return first, float(model[1].running_mean[0]), len(wrapped.state_dict())


def with_hook(rank, name):
    """One step on a known gradient; return the averaged one."""
    hook = {"plain": all_reduce_hook, "fp16": fp16_compress_hook, "bf16": bf16_compress_hook}[name]
    model = DistributedDataParallel(torch.nn.Linear(50, 1, bias=False))
    model.register_comm_hook(dist.group.WORLD, hook)
    x = torch.arange(50.0).reshape(1, 50) / 7 + rank
    model(x).sum().backward()
    try:
        model.register_comm_hook(None, hook)
    except dist.errors.UsageError as error:
        told = str(error)
    return model.module.weight.grad[0].tolist(), told


def power_sgd(rank, steps):
    """Gradients of rank 2 (exact with r=2), then of full rank with error feedback."""
    p, result = dist.get_world_size(), {}
    model = DistributedDataParallel(torch.nn.Linear(40, 30))
    state = PowerSGDState(dist.group.WORLD, 4, start_power_sgd_iter=1, min_compression_rate=1)
    model.register_comm_hook(state, power_sgd_hook)
    generator = torch.Generator().manual_seed(5)
    xs = [torch.randn(2, 40, generator=generator) for _ in range(p)]
    for _ in range(3):
        model.zero_grad()
        model(xs[rank]).sum().backward()
        wanted = sum(x.sum(0) for x in xs) / p
        result["low rank"] = float((model.module.weight.grad - wanted).abs().max())
        result["bias"] = float((model.module.bias.grad - 2).abs().max())
    targets = torch.randn(p, 30, 40, generator=generator)
    total, norm = torch.zeros(30, 40), float(targets.mean(0).norm())
    distance = []
    for step in range(steps):
        model.zero_grad()
        (model.module.weight * 0).sum()  # no part of the graph below
        out = model(torch.zeros(1, 40))
        ((model.module.weight * targets[rank]).sum() + out.sum()).backward()
        total += model.module.weight.grad
        distance.append(float((total / (step + 1) - targets.mean(0)).norm()) / norm)
    result["distance"] = distance
    result["sent"] = sorted(tuple(q.shape) for q in state.factors.values())
    return result, model.module.weight.grad.numpy().tobytes()


def order_of_buckets(rank):
    """Reductions begin before backward ends, in one order on all ranks."""
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8, bias=False) for _ in range(4)))
    wrapped = DistributedDataParallel(model, bucket_cap_mb=8 * 8 * 4 / 2**20)
    events = []

    def hook(state, bucket):
        events.append(bucket.index())
        assert [tuple(g.shape) for g in bucket.gradients()] == [(8, 8)]
        assert bucket.is_last() == (bucket.index() == 3)
        return all_reduce_hook(dist.group.WORLD, bucket)

    wrapped.register_comm_hook(None, hook)
    x = torch.ones(1, 8, requires_grad=True)
    model[0].register_full_backward_hook(lambda *_: events.append("first layer"))
    wrapped(x).sum().backward()
    return events


def failing_hook(rank):
    """A hook's error comes out of backward; the next step is told of it, too."""
    model = DistributedDataParallel(torch.nn.Linear(2, 2))

    def hook(state, bucket):
        failed = Future()
        failed.set_exception(RuntimeError("the hook failed"))
        return failed

    model.register_comm_hook(None, hook)
    told = []
    for _ in range(2):
        try:
            model(torch.ones(1, 2)).sum().backward()
        except RuntimeError as error:
            told.append(str(error).splitlines()[0])
    return told


def other_model(rank):
    """A module of another size on one rank."""
    try:
        DistributedDataParallel(torch.nn.Linear(2, 3 if rank == 1 else 2))
    except dist.errors.CollectiveMismatchError as error:
        return str(error)
    return None


def sparse(rank):
    model = DistributedDataParallel(torch.nn.Embedding(4, 2, sparse=True))
    try:
        model(torch.tensor([1])).sum().backward()
    except dist.errors.UnsupportedError as error:
        return str(error)
    return None


class Two(torch.nn.Module):
    """Two outputs with a weight each; the gradient of a weight is what its output was made of."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Parameter(torch.zeros(()))
        self.second = torch.nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return self.first * x, self.second * x


def hook_before_backward(model, x):
    a, b = model(x)
    model.register_comm_hook(None, lambda _, bucket: all_reduce_hook(dist.group.WORLD, bucket))
    (a + b).backward()


def no_sync_around_backward(model, x):
    a, b = model(x)
    with model.no_sync():
        (a + b).backward()


def two_forwards_one_backward(model, x):
    a, b = model(x)
    c, d = model(2 * x)
    (a + b + c + d).backward()


def two_forwards_two_backwards(model, x):
    a, b = model(x)
    c, d = model(2 * x)
    (a + b).backward()
    (c + d).backward()


def one_backward_twice(model, x):
    a, b = model(x)
    (a + b).backward(retain_graph=True)
    (a + b).backward()


def a_backward_for_each_output(model, x):
    a, b = model(x)
    b.backward()
    a.backward()


def no_sync_in_between(model, x):
    a, b = model(x)
    with model.no_sync():
        c, d = model(x)
    (a + b).backward()
    (c + d).backward()


def past_the_wrapper(model, x):
    a, b = model(x)
    (a + b).backward()
    (model.module.first * x + model.module.second * x).backward()


def after_a_dropped_forward(model, x):
    model(x)
    with model.no_sync():
        sum(model(x)).backward()


# By what each rank's x and the average of all of them count in the gradient of both weights.
MOMENTS = {
    hook_before_backward: (0, 1),
    no_sync_around_backward: (0, 1),
    two_forwards_one_backward: (0, 3),
    two_forwards_two_backwards: (0, 3),
    one_backward_twice: (0, 2),
    a_backward_for_each_output: (0, 1),
    no_sync_in_between: (1, 1),
    past_the_wrapper: (1, 1),
    after_a_dropped_forward: (1, 0),
}


def moments(rank):
    """Calls at odd moments; by name, by how much the gradients are wrong."""
    p, wrong = dist.get_world_size(), {}
    x, average = 1.0 + rank, sum(1.0 + r for r in range(p)) / p
    for find_unused in (False, True):
        for body, (own, shared) in MOMENTS.items():
            model = DistributedDataParallel(Two(), find_unused_parameters=find_unused)
            body(model, x)
            wanted = own * x + shared * average
            grads = [float(weight.grad) for weight in model.module.parameters()]
            wrong[body.__name__, find_unused] = max(abs(grad - wanted) for grad in grads)
    return wrong


def refused(rank):
    """What each change of a wrapped module is told."""

    def frozen(module):
        module.first.requires_grad_(False)

    def gone(module):
        module.first = torch.nn.Parameter(torch.ones(()))

    def added(module):
        module.third = torch.nn.Parameter(torch.ones(()))

    def thawed(module):
        module.fixed.requires_grad_(True)

    def other_type(module):
        module.double()

    def error_in_backward(module):
        module.first.register_hook(_fail)

    changes = (frozen, gone, added, thawed, other_type, error_in_backward)
    return [_refused(changes, passes) for passes in (0, 2)]


def _refused(changes, passes):
    told = {}
    for change in changes:
        module = Two()
        module.fixed = torch.nn.Parameter(torch.ones(()), requires_grad=False)
        model = DistributedDataParallel(module)
        for _ in range(passes):
            sum(model(1.0)).backward()
        change(module)
        try:
            with contextlib.suppress(ArithmeticError):
                sum(model(1.0)).backward()
            model(1.0)
        except dist.errors.UsageError as error:
            told[change.__name__] = str(error).splitlines()[0]
    return told


def frozen_for_a_while(rank):
    """A module through which others learn; the gradients of its input and parameters."""
    module = Two()
    torch.nn.init.constant_(module.first, 3.0)
    torch.nn.init.constant_(module.second, 4.0)
    model, x = DistributedDataParallel(module), torch.tensor(2.0 + rank, requires_grad=True)
    module.requires_grad_(False)
    sum(model(x)).backward()
    module.requires_grad_(True)
    came = [float(x.grad), [p.grad for p in module.parameters()]]
    sum(model(1.0 + rank)).backward()
    return came, [float(p.grad) for p in module.parameters()]


_compiler = threading.Lock()


def scripted(rank):
    """A module compiled by TorchScript inside another; the gradient of its weight."""
    # Ranks may be threads; neither the filters of warnings nor the compiler is made for several.
    with _compiler, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        inner = torch.jit.script(torch.nn.Linear(1, 1, bias=False))
    model = DistributedDataParallel(torch.nn.Sequential(inner))
    model(torch.tensor([1.0 + rank])).backward()
    return float(inner.weight.grad)


def _fail(gradient):
    raise ArithmeticError("no gradient")


def hook_in_backward(rank):
    """A communication hook that comes while gradients do."""
    model = DistributedDataParallel(Two())
    model.module.first.register_post_accumulate_grad_hook(
        lambda _: model.register_comm_hook(dist.group.WORLD, all_reduce_hook)
    )
    try:
        sum(model(1.0)).backward()
    except dist.errors.UsageError as error:
        return str(error)
    return None


def everything(rank):
    """All of the above in one world, since starting processes with torch takes seconds."""
    bodies = {
        body.__name__: body
        for body in (
            average_of_local,
            without_sync,
            unused,
            unused_alone,
            large,
            lent,
            unused_by_mistake,
            state_of_rank_0,
            order_of_buckets,
            failing_hook,
            other_model,
            sparse,
            moments,
            refused,
            frozen_for_a_while,
            scripted,
            hook_in_backward,
        )
    }
    results = {name: body(rank) for name, body in bodies.items()}
    for name in ("plain", "fp16", "bf16"):
        results[name] = with_hook(rank, name)
    results["power_sgd"] = power_sgd(rank, 30)
    return results
