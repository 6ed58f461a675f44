"""Names of mpi4py.futures and concurrent.futures: `Executor` is mpi4py's MPIPoolExecutor, too."""

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

MPIPoolExecutor = Executor

__all__ = [
    "ALL_COMPLETED",
    "FIRST_COMPLETED",
    "FIRST_EXCEPTION",
    "CancelledError",
    "Executor",
    "Future",
    "MPIPoolExecutor",
    "TimeoutError",
    "as_completed",
    "wait",
]
