"""Share out tasks of different sizes: each rank takes the next one when it is free.

    unisono run --nproc-per-node 4 examples/work_queue.py

The number of the next task is an integer in the window of rank 0. `fetch_add` takes a number
without the help of rank 0, which works on tasks like the others. The results are added up in its
window, too.
"""

import sys

import numpy as np

import unisono as dist

TASKS = 200


def collatz_steps(n: int) -> int:
    """Return after how many steps n gets to 1: half of even numbers, else 3 n + 1."""
    steps = 0
    while n != 1:
        n, steps = (n // 2 if n % 2 == 0 else 3 * n + 1), steps + 1
    return steps


def main() -> None:
    """Work on all tasks together, and check the sum."""
    dist.init_process_group()
    rank = dist.get_rank()
    following, total = 0, 1
    shared = dist.new_window(np.zeros(2, np.int64))

    done = 0
    while (task := shared.fetch_add(1, 0, following)) < TASKS:
        shared.fetch_add(collatz_steps(task + 1), 0, total)
        done += 1
    shared.fence()
    counts = [None] * dist.get_world_size()
    dist.all_gather_object(counts, done)

    if rank == 0:
        print(f"{sum(counts)} tasks, {shared.local[total]} steps")
        if shared.local[total] != sum(collatz_steps(n + 1) for n in range(TASKS)):
            sys.exit("WRONG: the steps of all tasks have another sum")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
