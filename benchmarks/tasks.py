"""`pool` beside multiprocessing.Pool and joblib (if installed): tasks, arguments, iterations.

Run from the repository root: `python benchmarks/tasks.py [ROUNDS]`. Each has 2 processes. They take
turns in each round, and a row has medians in milliseconds. Tasks are small, or have an array of
64 MiB. k-means runs 5 iterations over 100,000 points in 32 dimensions. The ranks of unisono keep
their points and call all_reduce. The others get the points and return sums in each iteration.
"""

from __future__ import annotations

import importlib
import itertools
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np

import unisono as dist

joblib: Any = importlib.import_module("joblib") if find_spec("joblib") else None

ROUNDS = int(sys.argv[1]) if len(sys.argv) > 1 else 5
RANKS, CENTRES, ITERATIONS = 2, 16, 5
ROWS = ("start", "200 tasks", "4 tasks, 64 MiB", "k-means")


def small(x: int) -> int:
    """Return the square."""
    return x * x


def large(x: Any) -> float:
    """Return a sum over few of the elements, so that mainly the way of the array counts."""
    return float(x[::65536].sum())


def sums(points: Any, centres: Any) -> Any:
    """Return the sum of the points nearest to each centre, and their number."""
    nearest = (points @ centres.T - (centres**2).sum(1) / 2).argmax(1)
    found = np.zeros((len(centres), points.shape[1] + 1))
    for centre in range(len(centres)):
        mine = points[nearest == centre]
        found[centre, :-1], found[centre, -1] = mine.sum(0), len(mine)
    return found


def fit(points: Any, centres: Any) -> Any:
    """Run k-means as one of several ranks, each with its points."""
    for _ in range(ITERATIONS):
        found = sums(points, centres)
        dist.all_reduce(found)
        centres = moved(found)
    return centres


def moved(found: Any) -> Any:
    """Return the means."""
    return found[:, :-1] / np.maximum(found[:, -1:], 1)


class Unisono:
    """`unisono.pool`."""

    def __init__(self) -> None:
        self.ranks = dist.pool(RANKS)
        self.close: Callable[..., Any] = self.ranks.close

    def map(self, fn: Any, tasks: Any) -> Any:
        """Call a function with each task, in chunks as multiprocessing.Pool makes them itself."""
        chunk = -(-len(tasks) // (4 * RANKS))
        return self.ranks.map(fn, tasks, chunksize=chunk)

    def fit(self, shares: Any, centres: Any) -> Any:
        """Run k-means on the ranks."""
        return self.ranks.run(fit_share, shares, centres)[0]


def fit_share(shares: Any, centres: Any) -> Any:
    """Run `fit` with this rank's share."""
    return fit(shares[dist.get_rank()], centres)


class StandardPool:
    """multiprocessing.Pool."""

    def __init__(self) -> None:
        self.pool = multiprocessing.get_context("spawn").Pool(RANKS)
        self.map: Callable[..., Any] = self.pool.map

    def fit(self, shares: Any, centres: Any) -> Any:
        """Run k-means here, with sums from the processes."""
        for _ in range(ITERATIONS):
            parts = self.pool.starmap(sums, [(share, centres) for share in shares])
            centres = moved(sum(parts))
        return centres

    def close(self) -> None:
        """End the processes."""
        self.pool.terminate()
        self.pool.join()


class Joblib:
    """joblib.Parallel with its processes (loky)."""

    def __init__(self) -> None:
        self.parallel = joblib.Parallel(RANKS)

    def map(self, fn: Any, tasks: Any) -> Any:
        """Call a function with each task."""
        return self.parallel(joblib.delayed(fn)(task) for task in tasks)

    def fit(self, shares: Any, centres: Any) -> Any:
        """Run k-means here, with sums from the processes."""
        for _ in range(ITERATIONS):
            parts = self.parallel(joblib.delayed(sums)(share, centres) for share in shares)
            centres = moved(sum(parts))
        return centres

    def close(self) -> None:
        """End the processes."""
        joblib.externals.loky.get_reusable_executor().shutdown(wait=True)


def measure(make: Callable[[], Any], shares: Any, centres: Any) -> tuple[list[float], Any]:
    """Return the milliseconds of each row, and the centres."""
    times = [time.perf_counter()]

    def lap() -> None:
        times.append(time.perf_counter())

    pool = make()
    list(pool.map(small, range(RANKS)))
    lap()
    assert list(pool.map(small, range(200))) == [x * x for x in range(200)]
    lap()
    array = np.ones(8 << 20)
    assert list(pool.map(large, [array] * 4)) == [128.0] * 4
    lap()
    found = pool.fit(shares, centres)
    lap()
    pool.close()
    return [1e3 * (after - before) for before, after in itertools.pairwise(times)], found


def main() -> None:
    """Print the table."""
    data = np.random.default_rng(0).normal(size=(100_000, 32))
    shares, centres = np.array_split(data, RANKS), data[:CENTRES]
    kinds: dict[str, Callable[[], Any]] = {
        "unisono.pool": Unisono,
        "multiprocessing.Pool": StandardPool,
    }
    if joblib:
        kinds["joblib"] = Joblib
    found: dict[str, list[list[float]]] = {name: [] for name in kinds}
    for _ in range(ROUNDS):
        results = []
        for name, make in kinds.items():
            times, result = measure(make, shares, centres)
            found[name].append(times)
            results.append(result)
        assert all(np.allclose(result, results[0]) for result in results)
    print("| ms |", " | ".join(kinds), "|")
    print("|---|", "|".join("---:" for _ in kinds), "|", sep="")
    for row, name in enumerate(ROWS):
        medians = [statistics.median(each[row] for each in found[kind]) for kind in kinds]
        print(f"| {name} |", " | ".join(f"{value:.0f}" for value in medians), "|")


if __name__ == "__main__":
    main()
