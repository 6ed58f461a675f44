"""State dicts of FSDP2 on real ranks, into plain and tensor-parallel state dicts on others."""

import pytest

import unisono

torch = pytest.importorskip("torch")

from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor import (  # noqa: E402
    DeviceMesh,
    DTensor,
    Replicate,
    Shard,
    distribute_tensor,
)

from tests.adapters.torch.torch_world import torch_world  # noqa: E402

WAYS = {
    "up.weight": Shard(0),
    "up.bias": Shard(0),
    "down.weight": Shard(1),
    "down.bias": Replicate(),
}


class Net(torch.nn.Module):
    """Two layers, of which FSDP2 cuts 7 rows unevenly."""

    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(6, 8), torch.nn.Linear(8, 7)

    def forward(self, x):
        return self.down(self.up(x).relu())


@pytest.mark.usefixtures("forked_with_torch")
@pytest.mark.ranks(4, kind="processes")
def test_fsdp2_trains_and_others_serve(rank, tmp_path):
    with torch_world("unisono", tmp_path):
        # Ranks 0 and 1 train; 2 and 3 serve, each a whole model and together a cut one.
        trainers, engines = (DeviceMesh("cpu", ranks) for ranks in ([0, 1], [2, 3]))
        torch.manual_seed(0)
        model, whole, cut = Net(), Net(), {}
        if rank in (0, 1):
            for layer in (model.up, model.down, model):
                fully_shard(layer, mesh=trainers)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        else:
            for name, x in whole.state_dict().items():
                empty = torch.zeros_like(x)
                cut[name] = distribute_tensor(empty, engines, [WAYS[name]], src_data_rank=None)
        given = model.state_dict() if rank in (0, 1) else None
        assert given is None or all(isinstance(x, DTensor) for x in given.values())
        plain = unisono.reshard(given, whole.state_dict() if rank in (2, 3) else None)
        parallel = unisono.reshard(given, cut or None)
        x = torch.arange(12.0).reshape(2, 6) / 10
        for _ in range(2):
            if rank in (0, 1):
                optimizer.zero_grad()
                model(x).square().sum().backward()
                optimizer.step()
            plain.run()
            parallel.run()
            # Every rank has the trainers' answer: torch gathers there what reshard moves here.
            with torch.no_grad():
                y = model(x) if rank in (0, 1) else whole(x)
                answers = [None] * 4
                unisono.all_gather_object(answers, y.tolist())
                torch.testing.assert_close(torch.tensor(answers[2]), torch.tensor(answers[0]))
            for name, each in cut.items():
                assert torch.equal(each.full_tensor(), whole.state_dict()[name]), name
