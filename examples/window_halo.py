"""Exchange the borders of a rod by windows: no receive has to match a send.

    unisono run --nproc-per-node 4 examples/window_halo.py

Each rank has a part of a rod whose left end is hot. In each step a point becomes the mean of its
neighbours. A rank writes its outer points into the windows of the ranks beside it, and signals. In
the end rank 0 repeats the work alone, and compares.
"""

import sys

import numpy as np

import unisono as dist

POINTS, STEPS = 120, 300


def step(rod: np.ndarray) -> None:
    """Replace each inner point by the mean of its neighbours."""
    rod[1:-1] = (rod[:-2] + rod[2:]) / 2


def main() -> None:
    """Compute with all ranks and alone, and compare."""
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    start, stop = POINTS * rank // size, POINTS * (rank + 1) // size
    rod = np.zeros(stop - start + 2)
    rod[0] = rank == 0

    # What the ranks on the left and on the right have written, for even and for odd steps: a rank
    # may be one step ahead of its neighbour.
    halo = dist.new_window(np.zeros((2, 2)))
    beside = [(0, rank - 1), (1, rank + 1)]
    for number in range(STEPS):
        at = 2 * (number % 2)
        for side, other in beside:
            if 0 <= other < size:
                halo.put(rod[1:2] if side == 0 else rod[-2:-1], other, at + 1 - side)
                halo.signal(other)
        for side, other in beside:
            if 0 <= other < size:
                halo.wait_signal(other)
                rod[-side] = halo.local[number % 2, side]
        step(rod)

    parts = [None] * size
    dist.all_gather_object(parts, rod[1:-1])
    if rank == 0:
        whole = np.zeros(POINTS + 2)
        whole[0] = 1
        for _ in range(STEPS):
            step(whole)
        found = np.concatenate(parts)
        print(f"{size} ranks: mean {found.mean():.9f}")
        if not np.array_equal(found, whole[1:-1]):
            sys.exit("WRONG: the parts differ from the whole")
    halo.tensor_deregister()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
