"""Names of mpi4py.futures and concurrent.futures: `Executor` is mpi4py's MPIPoolExecutor, too.

`python -m unisono.futures PROGRAM`, started by `unisono run` or mpiexec, runs the program on rank
0; the other ranks are the workers of its executors.
"""

from concurrent.futures import (
    ALL_COMPLETED,
    FIRST_COMPLETED,
    FIRST_EXCEPTION,
    CancelledError,
    Future,
    TimeoutError,
    as_completed,
    wait,
)

from unisono.beyond.pool import Executor
from unisono.beyond.pool.executor import ranks_as_workers

MPIPoolExecutor = Executor
MPICommExecutor = ranks_as_workers

__all__ = [
    "ALL_COMPLETED",
    "FIRST_COMPLETED",
    "FIRST_EXCEPTION",
    "CancelledError",
    "Executor",
    "Future",
    "MPICommExecutor",
    "MPIPoolExecutor",
    "TimeoutError",
    "as_completed",
    "wait",
]
