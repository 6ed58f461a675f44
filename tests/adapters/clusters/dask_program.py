"""What unisono.dask must do, in a Dask cluster of this host."""

import importlib.util
import logging
import sys
import threading
import time

import numpy as np
from distributed import Client, LocalCluster, get_worker

import unisono as dist
import unisono.dask
from tests.adapters.clusters import program, ranks
from unisono.adapters.clusters import meeting
from unisono.errors import (
    ArgumentTypeError,
    CollectiveMismatchError,
    InvalidArgumentError,
    PeerLostError,
    RendezvousError,
    UnsupportedError,
    UsageError,
    WorkerFailedError,
)

run = unisono.dask.run


def addresses(client):
    return sorted(client.scheduler_info(n_workers=-1)["workers"])


def groups_of_2_and_3(client):
    assert run(client, ranks.summed, 2.0) == ranks.expected(3, 2.0)
    workers = addresses(client)
    for chosen in (workers[:2], workers[::-1]):
        size = len(chosen)
        assert run(client, ranks.summed, 3.0, workers=chosen) == ranks.expected(size, 3.0)
        assert run(client, lambda: get_worker().address, workers=chosen) == chosen
    # In the order of their addresses, if none are given; by their names, too.
    assert run(client, lambda: get_worker().address) == workers
    names = run(client, lambda: get_worker().name)
    assert run(client, lambda: get_worker().name, workers=names[:2]) == names[:2]
    # A future becomes its result.
    future = client.submit(np.arange, 5)
    assert run(client, lambda x: int(x.sum()), future) == [10] * 3


def token_is_not_in_the_environment(client):
    assert run(client, ranks.token, timeout=50) == [("", 1800.0)] * 3


def former_group_is_replaced(client):
    client.run(ranks.left_over)
    assert run(client, ranks.summed, 1.0) == ranks.expected(3, 1.0)


def mismatch_is_named(client):
    with program.error(CollectiveMismatchError, "all_reduce #1", "float64[4]", "worker tcp://"):
        run(client, ranks.mismatched)


def first_error_is_raised(client):
    with program.error(KeyError, "of rank 1", addresses(client)[1], rank=1):
        run(client, ranks.raising, 1)
    with program.error(KeyError, "ranks [0, 1] had not ended 2 s later", rank=2):
        run(client, ranks.working, 3, 2)
    # Raised when Dask pickles the result.
    with program.error(TypeError, "pickle", rank=0):
        run(client, threading.Lock, workers=addresses(client)[:1])


def unknown_backend_ends_the_start(client):
    with program.error(InvalidArgumentError, "unknown backend 'none'"):
        run(client, ranks.summed, 1.0, backend="none")


def lost_rank_is_named(client):
    before = addresses(client)
    with program.error(PeerLostError, f"rank 1 (worker {before[1]}", peers=(1,)):
        run(client, ranks.dying, 1, 7)
    client.wait_for_workers(3, timeout=60)
    assert run(client, ranks.summed, 1.0) == ranks.expected(3, 1.0)
    # A task that is pinned to a dead worker stays pending; the others do not communicate. Dask does
    # not replace a worker that dies soon after its own start, so the new worker must not die.
    old = before[0]
    workers = [old, *(address for address in addresses(client) if address != old)]
    with program.error(
        PeerLostError, f"rank 0 of 3 (worker {old}) was lost: the scheduler lost", peers=(0,)
    ):
        run(client, ranks.dying_alone, 0, workers=workers)
    client.wait_for_workers(3, timeout=60)
    assert run(client, ranks.summed, 1.0) == ranks.expected(3, 1.0)


def worker_that_is_busy_is_named(client):
    worker = addresses(client)[1]
    blocks = client.submit(time.sleep, 3, workers=[worker], pure=False)
    with program.error(
        RendezvousError, f"1 of 3 ranks had not started after 1 s: rank 1 (worker {worker}",
        peers=(1,),
    ):  # fmt: skip
        run(client, ranks.summed, 1.0, timeout=1)
    blocks.result()
    assert run(client, ranks.summed, 1.0) == ranks.expected(3, 1.0)


def arguments_are_checked(client):
    first = addresses(client)[0]
    with program.error(InvalidArgumentError, f"worker {first} is given twice: each rank needs a"):
        run(client, ranks.summed, 1.0, workers=[first, first])
    with program.error(InvalidArgumentError, " is no worker of this cluster (workers: tcp"):
        run(client, ranks.summed, 1.0, workers=["tcp://127.0.0.1:1"])
    with program.error(ArgumentTypeError, "client must be a Client of Dask, got str"):
        run("client", ranks.summed)


def client_must_be_synchronous(client):
    async def ask():
        async with Client(client.scheduler.address, asynchronous=True) as other:
            with program.error(UnsupportedError, "needs a synchronous client: it would block"):
                run(other, ranks.summed, 1.0)

    client.sync(ask)


def threads_are_refused(client):
    for protocol, text in [
        ("inproc", " is a thread: each rank needs a process of its own"),
        ("tcp", "are threads of one process"),
    ]:
        with (
            LocalCluster(
                n_workers=2, processes=False, protocol=protocol, dashboard_address=None
            ) as cluster,
            Client(cluster) as other,
            program.error(UsageError, text),
        ):
            run(other, ranks.summed, 1.0)


def second_call_in_a_worker_is_refused(client):
    """A worker with 2 threads may run 2 calls, but a process has 1 default group."""
    with (
        LocalCluster(n_workers=1, threads_per_worker=2, dashboard_address=None) as cluster,
        Client(cluster) as other,
    ):
        thread = threading.Thread(target=run, args=(other, ranks.hold))
        thread.start()
        try:
            while not other.run(ranks.is_held).popitem()[1]:
                time.sleep(0.05)
            with program.error(UsageError, "still runs an earlier call as rank 0"):
                run(other, ranks.summed, 1.0)
        finally:
            other.run(ranks.release)
            thread.join()


def stores_on_the_scheduler(dask_scheduler=None):
    return len(meeting._stores)


def store_of_a_killed_client_is_closed(client):
    other = Client(client.scheduler.address, set_as_default=False)
    other.run_on_scheduler(unisono.adapters.clusters.dask._open, other.id, 1, 60, None)
    assert client.run_on_scheduler(stores_on_the_scheduler) == 1
    other.close()
    assert run(client, ranks.summed, 1.0) == ranks.expected(3, 1.0)
    assert client.run_on_scheduler(stores_on_the_scheduler) == 0


def end_of_a_rank_does_not_end_the_caller(client):
    with program.error(WorkerFailedError, "rank 1 of 3 raised SystemExit: 0", rank=1):
        run(client, lambda: sys.exit(0) if dist.get_rank() == 1 else dist.barrier())


def modules_train(client):
    if importlib.util.find_spec("torch"):
        for found in run(client, ranks.trained, 2, workers=addresses(client)[:2]):
            for ours, numpy in zip(found, ranks.expected_training(2), strict=True):
                np.testing.assert_allclose(ours, numpy, rtol=1e-5)


CASES = [
    groups_of_2_and_3,
    token_is_not_in_the_environment,
    former_group_is_replaced,
    mismatch_is_named,
    first_error_is_raised,
    unknown_backend_ends_the_start,
    lost_rank_is_named,
    worker_that_is_busy_is_named,
    arguments_are_checked,
    client_must_be_synchronous,
    threads_are_refused,
    second_call_in_a_worker_is_refused,
    store_of_a_killed_client_is_closed,
    end_of_a_rank_does_not_end_the_caller,
    modules_train,
]

if __name__ == "__main__":
    with (
        LocalCluster(
            n_workers=3,
            threads_per_worker=1,
            processes=True,
            dashboard_address=None,
            silence_logs=logging.CRITICAL,
        ) as cluster,
        Client(cluster) as client,
    ):
        program.main(CASES, client)
