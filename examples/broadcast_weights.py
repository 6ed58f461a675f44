"""Broadcast the weights of one rank to all ranks.

    unisono run --nproc-per-node 4 examples/broadcast_weights.py

The last rank acts as if it had read a checkpoint. The other ranks know names, shapes and types, and
hold zeros. At the end a digest shows that all ranks have the same weights.
"""

import hashlib
import sys

import numpy as np

import unisono as dist

SHAPES = {
    "embedding": ((1000, 64), np.float32),
    "projection": ((64, 10), np.float64),
    "half": ((64, 64), np.float16),
    "seen_batches": ((), np.int64),
}


def digest(weights: dict[str, np.ndarray]) -> np.ndarray:
    """Return 32 bytes that change with any bit of the weights."""
    hasher = hashlib.sha256()
    for name, weight in weights.items():
        hasher.update(name.encode() + weight.tobytes())
    return np.frombuffer(hasher.digest(), np.uint8)


def main() -> None:
    """Broadcast the weights of the last rank."""
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    source = size - 1

    weights = {name: np.zeros(shape, dtype) for name, (shape, dtype) in SHAPES.items()}
    if rank == source:
        rng = np.random.default_rng()
        for weight in weights.values():
            weight[...] = 1000 * rng.random(weight.shape)
    before = digest(weights)

    for weight in weights.values():
        dist.broadcast(weight, src=source)

    after = digest(weights)
    digests = [np.empty_like(after) for _ in range(size)]
    dist.all_gather(digests, after)
    print(f"rank {rank}: {before.tobytes().hex()[:12]} became {after.tobytes().hex()[:12]}")
    if any(not np.array_equal(after, other) for other in digests):
        sys.exit("WRONG: the weights are not the same on all ranks")
    if rank == source and not np.array_equal(before, after):
        sys.exit("WRONG: the broadcast changed the weights of its source")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
