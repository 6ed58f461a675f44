"""Hand out parts of a table with scatter, and collect the results with gather.

    unisono run --nproc-per-node 4 examples/scatter.py

Only rank 0 has the table. Every rank gets the same number of rows, and returns their sums.
"""

import sys

import numpy as np

import unisono as dist

ROWS, COLUMNS = 3, 1000


def main() -> None:
    """Sum the rows of a table on all ranks."""
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()

    table = parts = gathered = None
    if rank == 0:
        table = np.random.default_rng(0).integers(0, 1_000_000, (size * ROWS, COLUMNS))
        parts = np.split(table, size)
        gathered = [np.empty(ROWS, np.int64) for _ in range(size)]

    rows = np.empty((ROWS, COLUMNS), np.int64)
    dist.scatter(rows, parts, src=0)
    sums = rows.sum(axis=1)
    print(f"rank {rank}: the sums of my {ROWS} rows are {sums.tolist()}")
    dist.gather(sums, gathered, dst=0)

    if rank == 0 and not np.array_equal(np.concatenate(gathered), table.sum(axis=1)):
        sys.exit(f"WRONG: the sums of all rows are {table.sum(axis=1).tolist()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
