"""Kill a random rank with SIGKILL at a random moment, again and again.

    python -m tests.adapters.clusters.chaos ray|dask|spark [ROUNDS] [SEED]

In each round 3 ranks start a group and reduce without end. A rank dies while the group starts or
later. The caller must raise PeerLostError with that rank within 5 s of its death, and the next
group, with the rank replaced, must work. The last line has the number of rounds and the longest
time; the exit code is 1 if a round failed.
"""

import logging
import os
import random
import sys
import tempfile
import threading
import time
from contextlib import contextmanager

from tests.adapters.clusters import ranks
from unisono.errors import PeerLostError

SIZE = 3
LIMIT_S = 5.0
# A start takes some 20 to 500 ms, so that half of the ranks die early.
LATEST_S = (0.05, 0.5)

# From the death of a rank to the error, in each round.
took_s = []


class Bomb:
    """An argument that ends the process of one Spark task, some time after it was unpickled.

    Args:
        victim: The rank.
        after_s: The time.
        path: File to which the task writes the moment of its death.
    """

    def __init__(self, victim, after_s, path):
        self.about = victim, after_s, path

    def __reduce__(self):
        return light, self.about


def light(victim, after_s, path):
    from pyspark import BarrierTaskContext

    def end():
        time.sleep(after_s)
        if BarrierTaskContext.get().partitionId() == victim:
            with open(path, "w") as file:
                file.write(str(time.monotonic()))
            os.kill(os.getpid(), 9)

    threading.Thread(target=end, daemon=True).start()
    return Bomb(victim, after_s, path)


def reduce_without_end(*_):
    ranks.dying(None, None)


def summed(*_):
    return ranks.summed(1.0)


@contextmanager
def ray():
    import ray

    import unisono.ray

    @ray.remote(num_cpus=1)
    class Worker:
        def pid(self):
            return os.getpid()

    ray.init(
        num_cpus=SIZE + 1, include_dashboard=False, object_store_memory=100 * 2**20,
        log_to_driver=False, logging_level="ERROR",
    )  # fmt: skip
    actors = [Worker.remote() for _ in range(SIZE)]

    def attack(victim, after_s):
        pid = ray.get(actors[victim].pid.remote())
        try:
            with killing(pid, after_s):
                unisono.ray.init_group(actors).run(reduce_without_end)
        finally:
            actors[victim] = Worker.remote()
            ray.get(actors[victim].pid.remote())

    def check():
        with unisono.ray.init_group(actors) as group:
            return group.run(summed)

    try:
        yield attack, check
    finally:
        ray.shutdown()


@contextmanager
def dask_workers():
    import dask.config
    from distributed import Client, LocalCluster

    import unisono.dask

    # On a busy machine a worker takes longer than the 15 s after which Dask would close it.
    dask.config.set({"distributed.deploy.lost-worker-timeout": "300s"})
    how = {"n_workers": SIZE, "threads_per_worker": 1, "dashboard_address": None}
    with LocalCluster(**how, silence_logs=logging.CRITICAL) as cluster, Client(cluster) as client:

        def workers():
            """Return 3 workers; Dask does not replace a worker that dies soon after its start."""
            while True:
                there = sorted(client.scheduler_info(n_workers=-1)["workers"])[:SIZE]
                if len(there) == SIZE:
                    return there
                try:
                    client.wait_for_workers(SIZE, timeout=60)
                except TimeoutError:
                    cluster.scale(len(cluster.worker_spec) + 1)

        def attack(victim, after_s):
            chosen = workers()
            pid = client.run(os.getpid)[chosen[victim]]
            try:
                with killing(pid, after_s):
                    unisono.dask.run(client, reduce_without_end, workers=chosen)
            finally:
                while chosen[victim] in client.scheduler_info(n_workers=-1)["workers"]:
                    time.sleep(0.05)

        def check():
            return unisono.dask.run(client, summed, workers=workers())

        yield attack, check


@contextmanager
def spark():
    from pyspark.sql import SparkSession

    import unisono.spark

    os.environ["PYSPARK_PYTHON"] = sys.executable
    build = SparkSession.builder.master(f"local[{SIZE}]").config("spark.ui.enabled", "false")
    session = build.getOrCreate()
    session.sparkContext.setLogLevel("OFF")

    def attack(victim, after_s):
        with tempfile.TemporaryDirectory() as folder:
            path = f"{folder}/death"
            try:
                unisono.spark.run(session, reduce_without_end, SIZE, Bomb(victim, after_s, path))
            finally:
                ended_s = time.monotonic()
                with open(path) as file:
                    took_s.append(ended_s - float(file.read()))

    try:
        yield attack, lambda: unisono.spark.run(session, summed, SIZE)
    finally:
        session.stop()


@contextmanager
def killing(pid, after_s):
    """Kill a process some time after the start of the block; add to `took_s` until its end."""
    killed_s = 0.0

    def kill():
        nonlocal killed_s
        killed_s = time.monotonic()
        os.kill(pid, 9)

    timer = threading.Timer(after_s, kill)
    timer.start()
    try:
        yield
    finally:
        ended_s = time.monotonic()
        timer.join()
        took_s.append(ended_s - killed_s)


def play(attack, check, source):
    """Play a round; return a line about it."""
    victim, after_s = source.randrange(SIZE), source.uniform(0, source.choice(LATEST_S))
    try:
        attack(victim, after_s)
    except Exception as error:
        found = error
    named = isinstance(found, PeerLostError) and found.context.peers == (victim,)
    works = check() == ranks.expected(SIZE, 1.0)
    line = f"rank {victim} after {after_s:.3f} s: {took_s[-1]:.2f} s, {str(found).splitlines()[0]}"
    if named and works and took_s[-1] < LIMIT_S:
        return line
    return f"FAILED {line} {getattr(found, '__notes__', '')}"


def main(name, rounds=100, seed=1):
    """Play the rounds."""
    source = random.Random(int(seed))
    failed = 0
    with {"ray": ray, "dask": dask_workers, "spark": spark}[name]() as (attack, check):
        check()
        for number in range(int(rounds)):
            line = play(attack, check, source)
            failed += line.startswith("FAILED")
            print(f"{number}: {line}", flush=True)
    print(f"{name}: {rounds} rounds, {failed} failed, longest {max(took_s):.2f} s")
    return failed != 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
