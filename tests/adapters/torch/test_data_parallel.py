"""DistributedDataParallel against formulas, and in its corners."""

import contextlib
import threading
import warnings

import numpy as np
import pytest

import unisono as dist
from unisono.core.operations.work import Future
from unisono.errors import (
    ArgumentTypeError,
    CollectiveMismatchError,
    InvalidArgumentError,
    UnsupportedError,
    UsageError,
)

torch = pytest.importorskip("torch")

from unisono.beyond.parallel.buckets import assign_buckets  # noqa: E402
from unisono.beyond.parallel.hooks import all_reduce_hook  # noqa: E402
from unisono.parallel import (  # noqa: E402
    DistributedDataParallel,
    PowerSGDState,
    bf16_compress_hook,
    fp16_compress_hook,
    power_sgd_hook,
)

pytestmark = pytest.mark.usefixtures("forked_with_torch")

RANKS = 3


def on_ranks(function):
    """Call a test on 3 ranks: as threads or as processes, with --all as both."""
    return pytest.mark.sweep(1)(pytest.mark.ranks(RANKS, kind="both")(function))


# Tests of errors end with a barrier, because a rank that leaves fails the calls of other ranks.


def gathered(value):
    """Return the value of every rank."""
    values = [None] * RANKS
    dist.all_gather_object(values, value)
    return values


class Branches(torch.nn.Module):
    """Uses some of its layers."""

    def __init__(self, width=2):
        super().__init__()
        layers = [torch.nn.Linear(width, width, bias=False) for _ in range(3)]
        self.layers = torch.nn.ModuleList(layers)

    def forward(self, x, which):
        return {"out": [sum(self.layers[i](x) for i in which)]}


@on_ranks
def test_unused_parameters(rank):
    """Layer 0 on rank 0, layer 1 on the others, layer 2 nowhere."""
    third, two_thirds = [[np.float32(1 / 3).item()] * 2] * 2, [[2 / 3] * 2] * 2
    for width in (2, 1040):  # the larger parameters share no bucket
        model = DistributedDataParallel(Branches(width), find_unused_parameters=True)
        for _ in range(2):
            model.zero_grad()
            out = model(torch.ones(1, width), [0] if rank == 0 else [1])["out"][0]
            out.sum().backward()
            first, second, nowhere = [layer.weight.grad for layer in model.module.layers]
            assert first[:2, -2:].tolist() == third
            assert np.allclose(second[:2, -2:].tolist(), two_thirds)
            assert nowhere is None


@on_ranks
def test_unused_by_mistake_is_named(rank):
    model = DistributedDataParallel(Branches())
    model(torch.ones(1, 2), [0, 2])["out"][0].sum().backward()
    with pytest.raises(UsageError, match="find_unused_parameters=True") as caught:
        model(torch.ones(1, 2), [0, 1, 2])
    assert "1 of 3 parameters got no gradient: layers.1.weight" in str(caught.value)
    dist.barrier()


@on_ranks
def test_large_gradients_are_reduced_where_they_are(rank):
    """Gradients of 4 MiB and more, one of them not contiguous, which `zero_grad` must free."""
    wide = [
        torch.nn.Parameter(torch.zeros(1040, 1041)),
        torch.nn.Parameter(torch.zeros(1060, 1000).t()),
    ]
    module = torch.nn.Module()
    module.forward = lambda factor: sum((p * factor).sum() for p in wide)
    for i, p in enumerate(wide):
        module.register_parameter(f"p{i}", p)
    model = DistributedDataParallel(module)
    for step in range(3):
        if step != 1:
            module.zero_grad()
        with model.no_sync():
            model(float(rank)).backward()
        before = [p.grad.clone() for p in wide]
        model(float(rank + step)).backward()
        for p, own in zip(wide, before, strict=True):
            wanted = own - rank + sum(2 * r + step for r in range(RANKS)) / RANKS
            assert float((p.grad - wanted).abs().max()) < 1e-5
    assert [_uses(p.grad) for p in wide] == [_uses(torch.zeros(1))] * 2


def _uses(tensor):
    """Return how many tensors have this memory."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


class Viewed(torch.nn.Module):
    """Backward gives each parameter a view of what it has to read for another one afterwards."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(1))
        self.first = torch.nn.Parameter(torch.zeros(1040 * 1041))
        self.second = torch.nn.Parameter(torch.zeros(1040 * 1041))

    def forward(self, x):
        return x * self.scale + (self.first.view(x.shape) + self.second.view(x.shape))


@on_ranks
def test_large_gradients_in_memory_of_others(rank):
    module = Viewed()
    model = DistributedDataParallel(module)
    (model(torch.ones(1040, 1041)) * float(rank)).sum().backward()
    scale, first, second = [float(p.grad.double().mean()) for p in module.parameters()]
    assert scale == pytest.approx(1040 * 1041)
    assert (first, second) == (pytest.approx(1), pytest.approx(1))


@on_ranks
def test_hooks(rank):
    """One step on a known gradient."""
    exact = np.arange(50) / 7 + 1
    for hook, digits in ((all_reduce_hook, 24), (fp16_compress_hook, 11), (bf16_compress_hook, 8)):
        model = DistributedDataParallel(torch.nn.Linear(50, 1, bias=False))
        model.register_comm_hook(dist.group.WORLD, hook)
        model(torch.arange(50.0).reshape(1, 50) / 7 + rank).sum().backward()
        error = np.abs(model.module.weight.grad[0].numpy() - exact) / exact
        # Each share is rounded, and so are the sums.
        assert error.max() <= 3 * 2.0**-digits
        assert digits == 24 or error.max() > 2.0**-22
        with pytest.raises(UsageError, match="registered already"):
            model.register_comm_hook(None, hook)


@on_ranks
def test_power_sgd(rank):
    """Gradients of rank 2 (exact with r=2), then of full rank with error feedback."""
    model = DistributedDataParallel(torch.nn.Linear(40, 30))
    state = PowerSGDState(dist.group.WORLD, 4, start_power_sgd_iter=1, min_compression_rate=1)
    model.register_comm_hook(state, power_sgd_hook)
    generator = torch.Generator().manual_seed(5)
    xs = [torch.randn(2, 40, generator=generator) for _ in range(RANKS)]
    for _ in range(3):
        model.zero_grad()
        model(xs[rank]).sum().backward()
    wanted = sum(x.sum(0) for x in xs) / RANKS
    assert float((model.module.weight.grad - wanted).abs().max()) < 1e-5
    assert float((model.module.bias.grad - 2).abs().max()) == 0
    targets = torch.randn(RANKS, 30, 40, generator=generator)
    total, norm = torch.zeros(30, 40), float(targets.mean(0).norm())
    distance = []
    for step in range(30):
        model.zero_grad()
        out = model(torch.zeros(1, 40))
        ((model.module.weight * targets[rank]).sum() + out.sum()).backward()
        total += model.module.weight.grad
        distance.append(float((total / (step + 1) - targets.mean(0)).norm()) / norm)
    # One approximation of rank 4 is far off, but later approximations correct it.
    assert distance[0] > 0.4
    assert distance[-1] < 0.25 * distance[0]
    assert sorted(tuple(q.shape) for q in state.factors.values()) == [(40, 4)]
    bits = model.module.weight.grad.numpy().tobytes()
    assert gathered(bits) == [bits] * RANKS


def test_power_sgd_arguments():
    with pytest.raises(InvalidArgumentError, match="matrix_approximation_rank=0"):
        PowerSGDState(None, 0)
    assert not PowerSGDState(None, 4).compresses(1, 1000)


@on_ranks
def test_reductions_begin_while_backward_runs(rank):
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
    model[0].register_full_backward_hook(lambda *_: events.append("first layer"))
    wrapped(torch.ones(1, 8, requires_grad=True)).sum().backward()
    assert [e for e in events if e != "first layer"] == [0, 1, 2, 3]
    assert events.index("first layer") > events.index(1)


@on_ranks
def test_a_failing_hook_fails_backward_and_the_next_step(rank):
    model = DistributedDataParallel(torch.nn.Linear(2, 2))

    def hook(state, bucket):
        failed = Future()
        failed.set_exception(RuntimeError("the hook failed"))
        return failed

    model.register_comm_hook(None, hook)
    unfinished = "the last backward pass of DistributedDataParallel was not finished: "
    for line in ("the hook failed", unfinished + "its reduction failed"):
        with pytest.raises(RuntimeError) as caught:
            model(torch.ones(1, 2)).sum().backward()
        assert str(caught.value).splitlines()[0] == line
    dist.barrier()


@on_ranks
def test_different_modules_are_a_mismatch(rank):
    with pytest.raises(CollectiveMismatchError) as caught:
        DistributedDataParallel(torch.nn.Linear(2, 3 if rank == 1 else 2))
    assert "float32[2, 2]" in str(caught.value)
    assert "float32[3, 2]" in str(caught.value)
    dist.barrier()


@on_ranks
def test_sparse_gradients_are_refused(rank):
    model = DistributedDataParallel(torch.nn.Embedding(4, 2, sparse=True))
    with pytest.raises(UnsupportedError, match="sparse=False") as caught:
        model(torch.tensor([1])).sum().backward()
    text = str(caught.value)
    assert text.startswith("the gradient of 'weight' is torch.sparse_coo; ")
    assert "; DistributedDataParallel reduces dense gradients" in text
    dist.barrier()


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


@on_ranks
def test_gradients_whenever_calls_are_made(rank):
    x, average = 1.0 + rank, sum(1.0 + r for r in range(RANKS)) / RANKS
    for find_unused in (False, True):
        for body, (own, shared) in MOMENTS.items():
            model = DistributedDataParallel(Two(), find_unused_parameters=find_unused)
            body(model, x)
            grads = [float(weight.grad) for weight in model.module.parameters()]
            wanted = [own * x + shared * average] * 2
            assert grads == pytest.approx(wanted, abs=1e-6), (body.__name__, find_unused)


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
    def fail(gradient):
        raise ArithmeticError("no gradient")

    module.first.register_hook(fail)


CHANGED = "parameters changed after DistributedDataParallel was made: "
CHANGES = {
    frozen: CHANGED + "first (frozen or gone)",
    gone: CHANGED + "first (new, or frozen before); first (frozen or gone)",
    added: CHANGED + "third (new, or frozen before)",
    thawed: CHANGED + "fixed (new, or frozen before)",
    other_type: CHANGED + "first, second (of another dtype or shape)",
    error_in_backward: "the last backward pass of DistributedDataParallel was not "
    "finished: 1 of 2 parameters got no gradient: first",
}


def two_steps(model):
    with contextlib.suppress(ArithmeticError):
        sum(model(1.0)).backward()
    model(1.0)


@on_ranks
def test_a_changed_module_is_refused(rank):
    for passes in (0, 2):
        for change, line in CHANGES.items():
            module = Two()
            module.fixed = torch.nn.Parameter(torch.ones(()), requires_grad=False)
            model = DistributedDataParallel(module)
            for _ in range(passes):
                sum(model(1.0)).backward()
            change(module)
            with pytest.raises(UsageError) as caught:
                two_steps(model)
            assert str(caught.value).splitlines()[0] == line, (change.__name__, passes)
    dist.barrier()


@on_ranks
def test_a_frozen_module_passes_gradients_on(rank):
    """A module through which others learn; the gradients of its input and parameters."""
    module = Two()
    torch.nn.init.constant_(module.first, 3.0)
    torch.nn.init.constant_(module.second, 4.0)
    model, x = DistributedDataParallel(module), torch.tensor(2.0 + rank, requires_grad=True)
    module.requires_grad_(False)
    sum(model(x)).backward()
    module.requires_grad_(True)
    assert (float(x.grad), [p.grad for p in module.parameters()]) == (7.0, [None, None])
    sum(model(1.0 + rank)).backward()
    assert [float(p.grad) for p in module.parameters()] == [(RANKS + 1) / 2] * 2


_compiler = threading.Lock()


@on_ranks
def test_a_scripted_module_is_averaged(rank):
    """A module compiled by TorchScript inside another; the gradient of its weight."""
    # Ranks may be threads; neither the filters of warnings nor the compiler is made for several.
    with _compiler, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        inner = torch.jit.script(torch.nn.Linear(1, 1, bias=False))
    model = DistributedDataParallel(torch.nn.Sequential(inner))
    model(torch.tensor([1.0 + rank])).backward()
    assert float(inner.weight.grad) == (RANKS + 1) / 2


@on_ranks
def test_a_hook_in_backward_is_refused(rank):
    """A communication hook that comes while gradients do."""
    model = DistributedDataParallel(Two())
    hook = model.module.first.register_post_accumulate_grad_hook(
        lambda _: model.register_comm_hook(dist.group.WORLD, all_reduce_hook)
    )
    with pytest.raises(UsageError, match="during a backward pass"):
        sum(model(1.0)).backward()
    hook.remove()  # Python cannot free a circle of references through torch's C++ objects.
    dist.barrier()


def test_buckets_close_when_full_and_follow_backward():
    sizes = [100, 10, 300, 10, 10]
    parameters = [torch.zeros(n) for n in sizes]
    parameters[1] = parameters[1].double()
    assert assign_buckets(parameters, [4 * 20, 4 * 400]) == [[4, 3], [1], [2, 0]]
    assert assign_buckets(parameters, [1]) == [[4], [3], [2], [1], [0]]
    # A large gradient by itself; the others when the last of them is there.
    assert assign_buckets(parameters, [4 * 900], 4 * 300) == [[2], [1], [4, 3, 0]]


def test_arguments():
    with pytest.raises(ArgumentTypeError, match="must be a torch"):
        DistributedDataParallel(torch.zeros(1))
    with pytest.raises(dist.errors.NotInitializedError):
        DistributedDataParallel(torch.nn.Linear(1, 1))
