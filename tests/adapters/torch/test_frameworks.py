"""Accelerate and Lightning train on a group of unisono, with the numbers of one process."""

import importlib.util
import json
import os
import subprocess
import sys

import numpy as np
import pytest

MISSING = [n for n in ("torch", "accelerate", "lightning") if importlib.util.find_spec(n) is None]

pytestmark = [
    pytest.mark.whole("needs accelerate and lightning, which load for 5 s"),
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {MISSING}; `make frameworks`"),
]

# Each rank prints the type of the group, and the parameters after 2 steps on 2 ranks.
MODEL = """
import json, os
import torch
import torch.distributed as dist

model = torch.nn.Linear(3, 1)
torch.nn.init.zeros_(model.weight)
torch.nn.init.zeros_(model.bias)
points = torch.arange(24.0).reshape(8, 3) / 24
data = torch.utils.data.TensorDataset(points, points.sum(1, keepdim=True))
batches = torch.utils.data.DataLoader(data, batch_size=4)

def loss_of(model, batch):
    return ((model(batch[0]) - batch[1]) ** 2).mean()

def report(model, *more):
    values = [parameter.tolist() for parameter in model.parameters()]
    group = type(dist.group.WORLD).__module__
    os.write(1, (json.dumps([group, dist.get_world_size(), values, *more]) + "\\n").encode())
"""

ACCELERATE = """
from accelerate import Accelerator

dist.init_process_group("unisono")
accelerator = Accelerator(cpu=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
for batch in [*batches, *batches]:
    optimizer.zero_grad()
    accelerator.backward(loss_of(model, batch))
    optimizer.step()
rank = torch.tensor([accelerator.process_index])
report(model, accelerator.gather(rank).tolist(), accelerator.reduce(rank).tolist())
accelerator.end_training()
"""

LIGHTNING = """
import lightning
from lightning.pytorch.strategies import DDPStrategy

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = model

    def training_step(self, batch, _):
        return loss_of(self.model, batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_train_end(self):
        report(self)

settings = dict.fromkeys(
    ["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False
)
strategy = DDPStrategy(process_group_backend="unisono")
trainer = lightning.Trainer(
    accelerator="cpu", devices=2, strategy=strategy, max_epochs=2, **settings
)
trainer.fit(Module(), batches)
"""

RUN = ["-m", "unisono", "run", "--nproc-per-node", "2"]
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]


def trained(launcher, script):
    """Return what both ranks reported; check the group, and the parameters against NumPy's."""
    done = subprocess.run(
        [sys.executable, *launcher, str(script)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=200, cwd=script.parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert len(lines) == 2
    assert lines[0] == lines[1]
    group, world_size, (weight, bias), *more = lines[0]
    assert (group, world_size) == ("unisono.adapters.torch.process_group", 2)
    # Each rank has half of the points, which Lightning shuffles, so a step is that of all points.
    x, w, b = np.arange(24.0).reshape(8, 3) / 24, np.zeros(3), 0.0
    for _ in range(2):
        error = x @ w + b - x.sum(1)
        w, b = w - 0.1 * 2 * (error @ x) / 8, b - 0.1 * 2 * error.mean()
    np.testing.assert_allclose(weight[0], w, rtol=1e-5)
    np.testing.assert_allclose(bias, [b], rtol=1e-5)
    return more


@pytest.mark.parametrize("launcher", [RUN, TORCHRUN], ids=["unisono run", "torchrun"])
def test_accelerate_with_a_group_made_before(tmp_path, launcher):
    script = tmp_path / "script.py"
    script.write_text(MODEL + ACCELERATE)
    assert trained(launcher, script) == [[0, 1], [1]]


# Without a launcher, Lightning starts the second process itself.
@pytest.mark.parametrize("launcher", [RUN, []], ids=["unisono run", "python"])
def test_lightning_with_the_name_of_the_backend(tmp_path, launcher):
    script = tmp_path / "script.py"
    script.write_text(MODEL + LIGHTNING)
    assert trained(launcher, script) == []


def test_accelerate_refuses_the_name(tmp_path):
    """If Accelerate takes the name one day, docs/howto/torch.md can show that."""
    script = tmp_path / "script.py"
    script.write_text(
        "from accelerate import Accelerator, InitProcessGroupKwargs\n"
        "Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(backend='unisono')])\n"
    )
    done = subprocess.run(
        [sys.executable, *RUN, str(script)], capture_output=True, text=True, timeout=200
    )
    assert done.returncode != 0
    assert "Your assigned backend unisono is not available" in done.stderr + done.stdout
