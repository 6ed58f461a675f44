"""Reduce torch tensors without torch.distributed.

    unisono run --nproc-per-node 4 examples/torch_tensors.py

Any CPU tensor works, also bfloat16 and views that are not contiguous. The results are written into
the tensors themselves. Without torch the example prints one line and ends.
"""

import importlib.util
import sys

import unisono as dist


def main() -> None:
    """Reduce and gather torch tensors, and compare with torch's own arithmetic."""
    if importlib.util.find_spec("torch") is None:
        print("skipped: torch is not installed")
        return
    import torch

    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()

    gradient = torch.full((3, 4), rank + 1, dtype=torch.bfloat16)
    dist.all_reduce(gradient, dist.ReduceOp.AVG)

    # A column is a view with a stride. Only its elements may change.
    table = torch.zeros(4, 3, dtype=torch.int64)
    table[:, 1] = rank
    dist.all_reduce(table[:, 1])

    gathered = torch.empty(size, 2)
    dist.all_gather_into_tensor(gathered, torch.tensor([rank, rank**2], dtype=torch.float32))

    print(f"rank {rank}: mean {gradient[0, 0].item()}, column {table[:, 1].tolist()}")
    expected_table = torch.zeros_like(table)
    expected_table[:, 1] = sum(range(size))
    ranks = torch.arange(size, dtype=torch.float32)
    checks = {
        # Exact: these means fit into the 8 bits of bfloat16's significand.
        "all_reduce of bfloat16": torch.equal(gradient, torch.full_like(gradient, (size + 1) / 2)),
        "all_reduce of a column": torch.equal(table, expected_table),
        "all_gather": torch.equal(gathered, torch.stack([ranks, ranks**2], dim=1)),
    }
    if wrong := [name for name, right in checks.items() if not right]:
        sys.exit(f"WRONG on rank {rank}: {', '.join(wrong)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
