"""Groups in Ray actors, Dask workers and Spark tasks: times to start, and all_reduce in Ray.

    pip install ray distributed pyspark torch
    python benchmarks/frameworks.py [ray dask spark]

Start: a group of 3 running actors, workers or tasks, in milliseconds.

- "first" includes the import of unisono in each of them; "next" is the median of 10 more.
- For Dask and Spark these are whole calls of an empty function.
- "without" is a call of an empty function in the framework, without a group.

all_reduce: 2 actors, float32, in place. unisono and `ray.util.collective` with GLOO (torch) take
turns in 15 rounds of the same actors. A round is a barrier and a loop of calls. The figure is the
median of the slower actor.
"""

from __future__ import annotations

import logging
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

import unisono as dist

STARTS, ROUNDS = 10, 15
# Bytes of the array and calls of a round.
SIZES = ((8, 500), (16 << 20, 5))


def clocked(call: Callable[[], Any]) -> float:
    """Return the milliseconds that a call takes."""
    began_s = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - began_s)


def report(name: str, start: Callable[[], Any], bare: Callable[[], Any]) -> None:
    """Print how long the first and the next groups take to start."""
    first = clocked(start)
    following = statistics.median(clocked(start) for _ in range(STARTS))
    without = statistics.median(clocked(bare) for _ in range(STARTS))
    print(f"{name}: first {first:.0f} ms, next {following:.0f} ms, without {without:.0f} ms")


def nothing(*_: Any) -> None:
    """Return at once."""


@contextmanager
def ray_actors(count: int) -> Iterator[list[Any]]:
    """Start Ray and actors."""
    import ray

    @ray.remote(num_cpus=1)
    class Worker:
        def ready(self) -> None:
            pass

        def join(self, size: int, rank: int) -> None:
            from ray.util import collective

            collective.init_collective_group(size, rank, "GLOO")

    ray.init(
        num_cpus=count, include_dashboard=False, object_store_memory=100 << 20,
        log_to_driver=False, logging_level="ERROR",
    )  # fmt: skip
    try:
        actors = [Worker.remote() for _ in range(count)]
        ray.get([actor.ready.remote() for actor in actors])
        yield actors
    finally:
        ray.shutdown()


def loops(_: Any, nbytes: int, calls: int) -> list[tuple[float, float]]:
    """Return the microseconds of a call of unisono and of Gloo, in each round."""
    from ray.util import collective

    x = np.zeros(nbytes // 4, np.float32)
    found = []
    for number in range(ROUNDS):
        took = {}
        ways = [("unisono", dist.all_reduce), ("gloo", collective.allreduce)]
        for name, all_reduce in ways[:: 1 if number % 2 else -1]:
            all_reduce(x)
            dist.barrier()
            began_s = time.perf_counter()
            for _ in range(calls):
                all_reduce(x)
            took[name] = 1e6 * (time.perf_counter() - began_s) / calls
        found.append((took["unisono"], took["gloo"]))
    return found


def ray_figures() -> None:
    """Print the figures of Ray."""
    import ray

    import unisono.ray

    with ray_actors(3) as actors:
        report(
            "Ray, start",
            lambda: unisono.ray.init_group(actors),
            lambda: ray.get([actor.ready.remote() for actor in actors]),
        )
    with ray_actors(2) as actors:
        took = clocked(
            lambda: ray.get([actor.join.remote(2, rank) for rank, actor in enumerate(actors)])
        )
        print(f"ray.util.collective, GLOO, start of 2: {took:.0f} ms")
        with unisono.ray.init_group(actors) as group:
            for nbytes, calls in SIZES:
                rounds = np.max(group.run(loops, nbytes, calls), axis=0)
                ours, gloo = np.median(rounds, axis=0)
                print(
                    f"Ray, all_reduce of {nbytes} bytes: {ours:.1f} us, GLOO {gloo:.1f} us, "
                    f"ratio {ours / gloo:.3f}"
                )


def dask_figures() -> None:
    """Print the figures of Dask."""
    from distributed import Client, LocalCluster

    import unisono.dask

    how = {"n_workers": 3, "threads_per_worker": 1, "dashboard_address": None}
    with LocalCluster(**how, silence_logs=logging.CRITICAL) as cluster, Client(cluster) as client:
        report(
            "Dask, a call",
            lambda: unisono.dask.run(client, nothing),
            lambda: client.gather(client.map(nothing, range(3), pure=False)),
        )


def spark_figures() -> None:
    """Print the figures of Spark."""
    from pyspark.sql import SparkSession

    import unisono.spark

    os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = SparkSession.builder.master("local[3]").config("spark.ui.enabled", "false")
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    rows = spark.sparkContext.parallelize(range(3), 3).barrier().mapPartitions(list)
    # Its processes are running then, as the actors and workers are.
    rows.collect()
    report("Spark, a call", lambda: unisono.spark.run(spark, nothing, 3), rows.collect)
    spark.stop()


def main() -> None:
    """Print the figures of the frameworks that the command line names; of all by default."""
    figures = {"ray": ray_figures, "dask": dask_figures, "spark": spark_figures}
    for name in sys.argv[1:] or figures:
        figures[name]()


if __name__ == "__main__":
    main()
