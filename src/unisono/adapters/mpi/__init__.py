"""Collectives of an MPI library, for groups whose ranks are processes of one MPI world.

    library    the MPI library of this process: found, initialised, finalised
    world      from the ranks of a group to ranks of MPI_COMM_WORLD
    engine     the collectives, on data that the ranks have agreed on
    calls      one collective as a call of the library, for C++
    ops        reduce ops of MPI for each element type
    start      `unisono run --mpi`: make the workers one MPI world, then run the script

Only `library` imports mpi4py.
"""

from __future__ import annotations

from dataclasses import replace

from unisono.core.backends import (
    CPUBackend,
    CPUOptions,
    DeviceBackend,
    GroupSpec,
    register_backend,
)
from unisono.core.engines import EngineKind, register_engine
from unisono.errors import InvalidArgumentError, UnsupportedError


def add_backend() -> None:
    """Register the backend "mpi"; an entry point of unisono."""
    register_backend("mpi", _backend)


def add_engine() -> None:
    """Register the engine "mpi"; an entry point of unisono."""
    # Imported here, because the name of the backend needs none of it.
    from unisono.adapters.mpi.engine import MPIEngine
    from unisono.adapters.mpi.library import library, why_absent
    from unisono.adapters.mpi.world import join

    register_engine("mpi", EngineKind(MPIEngine, join, why_absent, lambda: library().name))


def _backend(spec: GroupSpec, device: str) -> DeviceBackend:
    options = CPUOptions() if spec.options is None else spec.options
    if device != "cpu":
        raise UnsupportedError(f"backend 'mpi' serves device 'cpu' only, not {device!r}")
    if not isinstance(options, CPUOptions) or options.engine not in (None, "mpi"):
        raise InvalidArgumentError(f"backend 'mpi' has the engine 'mpi', but pg_options={options}")
    return CPUBackend(replace(spec, options=replace(options, engine="mpi")))
