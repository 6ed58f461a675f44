"""Fit a line with a parameter server: workers read the weights and add to them at any time.

    unisono run --nproc-per-node 4 examples/parameter_server.py

Rank 0 has the weights in its window, and only waits until all have finished. Each rank has points
of its own. It reads the weights, computes a gradient, and adds its step, without waiting for the
other ranks (Hogwild). The result does not depend on their order, except for its last digits.
"""

import sys

import numpy as np

import unisono as dist

SLOPE, OFFSET = 3.0, -1.0
STEPS, RATE = 400, 0.05


def main() -> None:
    """Fit the points of all ranks."""
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    weights = dist.new_window(np.zeros(2))

    x = np.random.default_rng(rank).uniform(-1, 1, 100)
    y = SLOPE * x + OFFSET
    mine = np.empty(2)
    for _ in range(STEPS):
        weights.get(mine, 0)
        error = mine[0] * x + mine[1] - y
        gradient = np.array([(error * x).mean(), error.mean()])
        weights.accumulate(-RATE / size * 2 * gradient, 0)
    weights.flush()
    if rank > 0:
        weights.signal(0)
    else:
        for worker in range(1, size):
            weights.wait_signal(worker)
        slope, offset = weights.local
        print(f"{size} ranks: y = {slope:.2f} x + {offset:.2f}")
        if abs(slope - SLOPE) > 0.01 or abs(offset - OFFSET) > 0.01:
            sys.exit("WRONG: this is another line")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
