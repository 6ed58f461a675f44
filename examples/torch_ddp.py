"""Train a torch module with torch's DistributedDataParallel on unisono.

    unisono run --nproc-per-node 2 examples/torch_ddp.py
    torchrun --nproc-per-node 2 examples/torch_ddp.py

Each rank sees its own part of the data; gradients are averaged while backward() still runs. At the
end every rank must hold the same parameters, to the bit.
"""

import hashlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import unisono.torch  # noqa: F401  not needed where unisono is installed: torch finds it

STEPS, BATCH, WIDTH = 200, 64, 32


def digest(model: nn.Module) -> str:
    """Return a short digest of the bits of all parameters."""
    content = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    return hashlib.sha256(content).hexdigest()[:12]


def main() -> None:
    """Train, and check that all ranks hold the same parameters."""
    dist.init_process_group("unisono")
    rank, size = dist.get_rank(), dist.get_world_size()

    # Different on every rank until DDP broadcasts those of rank 0.
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(8, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(ddp.parameters(), lr=1e-2)

    for step in range(STEPS):
        x = torch.randn(BATCH, 8)
        loss = (ddp(x) - x[:, :2].sum(dim=1, keepdim=True).sin()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 49:
            mean = loss.detach().clone()
            dist.all_reduce(mean, dist.ReduceOp.AVG)
            if rank == 0:
                print(f"step {step + 1}: loss {mean.item():.3f}", flush=True)

    words: list[str] = [""] * size
    dist.all_gather_object(words, digest(model))
    if len(set(words)) != 1:
        raise SystemExit(f"WRONG: parameters differ: {words}")
    if rank == 0:
        print(f"all {size} ranks hold the same parameters", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
