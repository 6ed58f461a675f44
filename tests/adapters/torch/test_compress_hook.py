"""Gradients as codes with error feedback, in DDP of unisono and of torch."""

import pickle

import pytest

import unisono as dist
from unisono.errors import (
    ArgumentTypeError,
    InvalidArgumentError,
    NotInGroupError,
    UnsupportedError,
)
from unisono.testing import run

torch = pytest.importorskip("torch")

from tests.adapters.torch.torch_world import torch_world  # noqa: E402
from unisono.parallel import (  # noqa: E402
    Bucket,
    CompressState,
    DistributedDataParallel,
    PowerSGDState,
    all_reduce_hook,
    compress_hook,
    fp16_compress_hook,
    power_sgd_hook,
)

pytestmark = pytest.mark.usefixtures("forked_with_torch")

RANKS, STEPS = 3, 12


class Weights(torch.nn.Module):
    """Its gradient in each step is what it is called with."""

    def __init__(self):
        super().__init__()
        self.small, self.large = (torch.nn.Parameter(torch.zeros(n)) for n in (100, 5000))

    def forward(self, target):
        return (torch.cat([self.small, self.large]) * target).sum()


def distances(rank, model, state):
    """Return how far the sum of the gradients of 1, 2, ... steps is from the true one."""
    generator = torch.Generator().manual_seed(5)
    targets = torch.randn(RANKS, 5100, generator=generator) * torch.logspace(-2, 1, 5100)
    model.register_comm_hook(state, compress_hook)
    total, found = torch.zeros(5100), []
    for step in range(1, STEPS + 1):
        model.zero_grad()
        model(targets[rank]).backward()
        total += torch.cat([p.grad for p in model.module.parameters()])
        found.append(float((total - step * targets.mean(0)).abs().max()))
    grads = [p.grad.numpy().tobytes() for p in model.module.parameters()]
    every = [None] * RANKS
    dist.all_gather_object(every, grads)
    assert every == [grads] * RANKS
    return found


def check(made):
    """What is lost once is made good later; without feedback it adds up."""
    for kind, first in (("int8", 0.3), ("fp8", 3.0), ("bf16", 0.3)):
        kept = made(CompressState(compress=kind))
        lost = made(CompressState(compress=kind, error_feedback=False))
        assert 0 < kept[0] == lost[0] < first
        assert max(kept) < 3 * kept[0]
        assert lost[-1] == pytest.approx(STEPS * lost[0], rel=1e-3)


@pytest.mark.ranks(RANKS, kind="both")
def test_feedback_in_our_class(rank):
    check(lambda state: distances(rank, DistributedDataParallel(Weights()), state))


def test_feedback_in_torchs_class(tmp_path):
    def ranks(rank):
        with torch_world("unisono", tmp_path) as group:

            def made(state):
                state.group = group
                model = torch.nn.parallel.DistributedDataParallel(Weights())
                return distances(rank, model, state)

            check(made)

    run(ranks, RANKS, ranks="processes")


def test_the_other_hooks_in_torchs_class(tmp_path):
    def ranks(rank):
        generator = torch.Generator().manual_seed(5)
        targets = torch.randn(RANKS, 40, 30, generator=generator)
        mean = targets.mean(0)

        def gradients(state, hook, steps):
            weight = torch.nn.Linear(30, 40, bias=False)
            weight.forward = lambda target: (weight.weight * target).sum()
            model = torch.nn.parallel.DistributedDataParallel(weight)
            model.register_comm_hook(state, hook)
            for _ in range(steps):
                model.zero_grad()
                model(targets[rank]).backward()
                yield weight.weight.grad.clone()

        with torch_world("unisono", tmp_path) as world:
            for group in (world, None, world.unisono):
                [got] = gradients(group, all_reduce_hook, 1)
                torch.testing.assert_close(got, mean)
                [got] = gradients(group, fp16_compress_hook, 1)
                assert 0 < (got - mean).abs().max() < 3 * 2.0**-10 * targets.abs().max()
            state = PowerSGDState(world, 2, start_power_sgd_iter=0, min_compression_rate=1)
            first, second, *later = gradients(state, power_sgd_hook, 40)
            torch.testing.assert_close(first, mean)
            torch.testing.assert_close(second, mean)
            assert torch.linalg.matrix_rank(later[0]) == 2
            # What one approximation lacks comes later.
            far = [(got - mean).norm() / mean.norm() for got in (later[0], sum(later) / 38)]
            assert far[0] > 0.5
            assert far[1] < 0.4 * far[0]
            with pytest.raises(
                ArgumentTypeError,
                match="the state of compress_hook must be a CompressState, got NoneType",
            ) as caught:
                next(gradients(None, compress_hook, 1))
            assert 'CompressState(compress="int8")' in caught.value.hint
            state = CompressState(world, "bf16" if rank else "int8")
            with pytest.raises(RuntimeError, match=r"all_reduce.* #\d+ .* does not match"):
                next(gradients(state, compress_hook, 1))

    run(ranks, RANKS, ranks="processes")


@pytest.mark.ranks(2)
def test_other_parameters_get_no_old_error_and_errors_arrive(rank):
    state = CompressState()
    for n in (300, 300, 200):
        model = DistributedDataParallel(torch.nn.Linear(n, 1, bias=False))
        model.register_comm_hook(state, compress_hook)
        model(torch.full((1, n), 1.0 + rank)).sum().backward()
        torch.testing.assert_close(model.module.weight.grad, torch.full((1, n), 1.5))
    assert state.lost[0][1].numel() == 200
    # A new parameter often gets the id of the one before, which is freed.
    found = []
    for _ in range(20):
        bucket = Bucket(0, [torch.nn.Parameter(torch.zeros(300))], True)
        bucket.set_buffer(torch.linspace(0, 1 + rank, 300))
        found.append(compress_hook(state, bucket).wait())
        assert state.lost[0][1].abs().max() > 1e-4
        del bucket
    assert all(torch.equal(each, found[0]) for each in found)
    assert pickle.loads(pickle.dumps(state)).lost == {}
    with pytest.raises(InvalidArgumentError, match="compress='int4', expected one of int8"):
        CompressState(compress="int4")
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(torch.ones(3, dtype=torch.complex64))
    module.forward = lambda: module.weight.abs().sum()
    model = DistributedDataParallel(module)
    model.register_comm_hook(state, compress_hook)
    with pytest.raises(UnsupportedError, match="compress of complex64"):
        model().backward()
    outside = CompressState(dist.GroupMember.NON_GROUP_MEMBER)
    with pytest.raises(NotInGroupError, match="compress_hook on a rank outside its process group"):
        compress_hook(outside, Bucket(0, [*Weights().parameters()], True))
    dist.barrier()
