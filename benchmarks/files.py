"""Write a distributed array to one file: `write_block` beside a gather to rank 0.

Run from the repository root: `python benchmarks/files.py [--mib 1024] [--ranks 2 4] [FOLDER ...]`.
The ways take turns; a row has medians of the slowest rank's seconds. Both ways store the file with
fsync. The gather needs memory for the whole array on rank 0, and `numpy.ndarray.tofile` writes it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time

import numpy as np

import unisono as dist

ROWS = 1024


def together(mine: np.ndarray, path: str) -> None:
    """Write the block of each rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    with dist.open_file(path, "w") as file:
        file.write_block(mine, (size * len(mine), mine.shape[1]), (rank * len(mine), 0))


def by_rank_0(mine: np.ndarray, path: str) -> None:
    """Gather the blocks on rank 0, which writes them."""
    size = dist.get_world_size()
    if dist.get_rank() > 0:
        dist.gather(mine)
    else:
        whole = np.empty((size, *mine.shape))
        dist.gather(mine, list(whole))
        with open(path, "wb") as file:
            whole.tofile(file)
            os.fsync(file.fileno())
    dist.barrier()


def measure(rank: int, path: str, mib: int, rounds: int) -> list[list[float]]:
    """Return the seconds of each round and way; all ranks run this."""
    dist.init_process_group()
    mine = np.full((ROWS, mib * 2**20 // 8 // ROWS // dist.get_world_size()), float(rank))
    seconds = []
    for _ in range(rounds):
        row = []
        for write in (together, by_rank_0):
            dist.barrier()
            began_s = time.perf_counter()
            write(mine, path)
            row.append(time.perf_counter() - began_s)
            dist.barrier()
            if rank == 0:
                size, ends = os.path.getsize(path), np.fromfile(path, count=1)
                assert (size, ends) == (mine.nbytes * dist.get_world_size(), 0.0)
                os.unlink(path)
        seconds.append(row)
    dist.destroy_process_group()
    return seconds


def main() -> None:
    """Print a row for each folder and number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="*", default=[tempfile.gettempdir(), "/dev/shm"])
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    print("| folder | ranks | write_block, s | gather, s | ratio |\n|---|---|---|---|---|")
    for folder in asked.folders:
        for ranks in asked.ranks:
            with tempfile.TemporaryDirectory(dir=folder) as inside:
                results = dist.launch(
                    measure, args=(f"{inside}/x", asked.mib, asked.rounds), nprocs=ranks
                )
            slowest = np.max(results, axis=0)
            ours, theirs = (statistics.median(column) for column in slowest.T)
            print(f"| {folder} | {ranks} | {ours:.2f} | {theirs:.2f} | {theirs / ours:.2f} |")


if __name__ == "__main__":
    main()
