"""DistributedDataParallel has the bits of torch's own on Gloo."""

import copy
import warnings

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402  needs torch
from torch.utils.checkpoint import checkpoint  # noqa: E402

from tests.adapters.torch.torch_world import loss_of, make_model, torch_world  # noqa: E402
from unisono.parallel import DistributedDataParallel  # noqa: E402

pytestmark = pytest.mark.usefixtures("forked_with_torch")


def train(model, rank):
    """Train; return the gradients of every step, and the final state."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    history = []
    for step in range(3):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        loss_of(model, rank, step).backward()
        history += [p.grad.clone() for p in model.parameters()]
        optimizer.step()
    return [*history, *model.state_dict().values()]


@pytest.mark.ranks(2, 3, kind="processes")
def test_convolutions(rank, tmp_path):
    ours = train(DistributedDataParallel(make_model(rank, wide=True), bucket_cap_mb=0.5), rank)
    with torch_world("gloo", tmp_path) as world:
        other = nn.parallel.DistributedDataParallel(make_model(rank, wide=True))
        theirs = train(other, rank)
        size = world.size()
    worst = [float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True)]
    assert len(worst) == 43
    # Sums of 3 ranks in another order, over three steps; the values are below 4.
    assert max(worst) <= (0 if size == 2 else 1e-5)


class Tied(nn.Module):
    """Two layers with one parameter."""

    def __init__(self):
        super().__init__()
        self.words, self.out = nn.Embedding(10, 6), nn.Linear(6, 10, bias=False)
        self.out.weight = self.words.weight

    def forward(self, x):
        return self.out(self.words(x.abs().long() % 10))


class Recurrent(nn.Module):
    """An LSTM's last output."""

    def __init__(self):
        super().__init__()
        self.inner, self.out = nn.LSTM(4, 8, 2, batch_first=True), nn.Linear(8, 2)

    def forward(self, x):
        return self.out(self.inner(x.reshape(2, 4, 4))[0][:, -1])


class Recomputed(nn.Module):
    """Forgets an activation and computes it again in backward."""

    def __init__(self):
        super().__init__()
        self.first, self.rest = nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh())

    def forward(self, x):
        return checkpoint(self.rest, self.first(x), use_reentrant=False)


class ComplexAndReal(nn.Module):
    """Parameters of three types, one without shape and one without elements."""

    def __init__(self):
        super().__init__()
        self.turn = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))
        self.scale, self.none = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.empty(0, 3))
        self.exact = nn.Linear(4, 2).double()

    def forward(self, x):
        turned = (x.to(torch.complex64) @ self.turn).abs() * self.scale
        return self.exact(turned.double()) + self.none.sum()


def frozen():
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    model[0].requires_grad_(False)
    return model


def perceptron():
    return nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))


def plain(model, x):
    return model(x)


def twice(model, x):
    return model(x) + model(x * 2)


def in_bfloat16(model, x):
    with torch.autocast("cpu", torch.bfloat16):
        return model(x).float()


def attention():
    return nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)


SHAPES = {
    "tied": (Tied, plain), "recurrent": (Recurrent, plain), "recomputed": (Recomputed, plain),
    "complex and real": (ComplexAndReal, plain), "frozen part": (frozen, plain),
    "two forward passes": (perceptron, twice), "autocast": (perceptron, in_bfloat16),
    "attention": (attention, plain),
}  # fmt: skip


def trained(model, wrap, forward, rank):
    """Train with accumulation, loss scaling and clipping; return gradients and the final state."""
    wrapped = wrap(model)
    wanted = [p for p in model.parameters() if p.requires_grad]
    # The scaler has no kernel for complex gradients.
    scaled = not any(p.is_complex() for p in wanted)
    optimizer = torch.optim.AdamW(wanted, lr=0.01, fused=scaled)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, enabled=scaled)
    seen = []
    for step in range(3):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(10 * step + rank)
        x, y = torch.randn(2, 8, 4, generator=generator)
        with wrapped.no_sync():
            scaler.scale(forward(wrapped, y).pow(2).mean()).backward()
        scaler.scale(forward(wrapped, x).pow(2).mean()).backward()
        scaler.unscale_(optimizer)
        seen.append(nn.utils.clip_grad_norm_(wanted, 0.5))
        seen += [p.grad.clone() for p in wanted]
        scaler.step(optimizer)
        scaler.update()
    return [*seen, *model.state_dict().values()]


@pytest.mark.ranks(2, kind="processes", timeout=120)
def test_models_of_many_shapes(rank, tmp_path):
    warnings.simplefilter("ignore")
    with torch_world("gloo", tmp_path):
        for name, (make, forward) in SHAPES.items():
            torch.manual_seed(rank)
            model = make()
            ours = trained(copy.deepcopy(model), DistributedDataParallel, forward, rank)
            theirs = trained(model, nn.parallel.DistributedDataParallel, forward, rank)
            same = [a.equal(b) for a, b in zip(ours, theirs, strict=True)]
            assert len(same) > 6
            assert all(same), f"{name}: {same.count(False)} of {len(same)} tensors differ"
