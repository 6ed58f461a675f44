"""Find clusters in a Dask array by k-means, without moving its partitions.

    pip install '.[dask]'
    python examples/dask_kmeans.py

The ranks are the workers that hold partitions of the array. Each rank reads its partitions from the
memory of its worker. In each round one all_reduce adds up the sums and counts of all ranks. Without
unisono, each round would be a task graph with a result in the scheduler's hands. At the end the
client computes the same centres alone.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Sequence

import dask.array
import numpy as np
from dask.distributed import Client, LocalCluster, futures_of, get_worker, wait
from perceptron import load_images

import unisono as dist
import unisono.dask

CLUSTERS, ROUNDS = 10, 20


def sums_and_counts(rows: np.ndarray, centres: np.ndarray) -> np.ndarray:
    """Return, for each centre, the sum of the rows nearest to it, and their number."""
    nearest = ((rows[:, None] - centres) ** 2).sum(axis=2).argmin(axis=1)
    table = np.zeros((len(centres), rows.shape[1] + 1))
    np.add.at(table, nearest, np.hstack([rows, np.ones((len(rows), 1))]))
    return table


def move(centres: np.ndarray, table: np.ndarray) -> None:
    """Move each centre to the mean of its rows."""
    used = table[:, -1] > 0
    centres[used] = table[used, :-1] / table[used, -1:]


def k_means(parts: Sequence[Sequence[Hashable]], centres: np.ndarray) -> tuple[int, np.ndarray]:
    """Return the number of rows of this rank, and the centres of the rows of all ranks."""
    data = get_worker().data
    rows = np.concatenate([data[key] for key in parts[dist.get_rank()]])
    centres = centres.copy()
    for _ in range(ROUNDS):
        table = sums_and_counts(rows, centres)
        dist.all_reduce(table)
        move(centres, table)
    return len(rows), centres


def by_worker(client: Client, array: dask.array.Array) -> dict[str, list[Hashable]]:
    """Return the keys of the partitions in the memory of each worker, each key once."""
    wait(array)
    parts: dict[str, list[Hashable]] = {}
    for key, holders in client.who_has(futures_of(array)).items():
        parts.setdefault(sorted(holders)[0], []).append(key)
    return dict(sorted(parts.items()))


def main() -> None:
    """Cluster the images of digits on 2 workers."""
    pixels = load_images()[0].pixels
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        array = client.persist(dask.array.from_array(pixels, chunks=(100, -1)))
        parts = by_worker(client, array)
        results = unisono.dask.run(
            client, k_means, list(parts.values()), pixels[:CLUSTERS], workers=list(parts)
        )
    alone = pixels[:CLUSTERS].copy()
    for _ in range(ROUNDS):
        move(alone, sums_and_counts(pixels, alone))
    for rank, (count, centres) in enumerate(results):
        difference = np.abs(centres - alone).max()
        print(f"rank {rank}: {count} rows, largest difference to one process {difference:.0e}")
        if difference > 1e-9:
            sys.exit("WRONG: the centres differ")
    if sum(count for count, _ in results) != len(pixels):
        sys.exit("WRONG: rows are missing")


if __name__ == "__main__":
    main()
