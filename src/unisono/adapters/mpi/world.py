"""From the ranks of a group to ranks of MPI_COMM_WORLD; MPI is initialised on the way.

The ranks compare their libraries before one of them initialises MPI, and their worlds afterwards.
A rank that cannot use MPI thus ends the attempt on all ranks, with its reason.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Sequence
from typing import Any

from unisono.adapters.mpi.library import (
    MPIEnds,
    MPILibrary,
    has_launcher,
    library,
    process,
    unlink_shared_memory,
)
from unisono.core.base import config
from unisono.core.base.deadline import Deadline
from unisono.core.base.grouping import grouped
from unisono.core.base.net.unencrypted import check_unencrypted, strictest, this_host
from unisono.core.base.process_identity import new_user
from unisono.core.base.text import name_ranks
from unisono.core.engines.shared_memory import memory_host
from unisono.core.rendezvous.pmi import MPIJob, PMIServer, process_mapping
from unisono.core.stores import PrefixStore, Store
from unisono.errors import Context, RendezvousError, StoreTimeoutError, UnsupportedError

_START = "start the ranks with the library's mpiexec, or srun; with MPICH or Intel MPI also with "
_START += "`unisono run --mpi`, if the script imports mpi4py before unisono"

_PLAIN_HINT = "the links of engine='auto' are encrypted; UNISONO_TLS=off on a closed network"

_OTHER = "make the group with pg_options=CPUOptions(engine='auto'), or with another backend"


def join(store: Store, rank: int, size: int, deadline: Deadline) -> tuple[int, ...]:
    """Return the rank in MPI_COMM_WORLD of each rank of a group.

    If MPI is not initialised, this call initialises it. Without a launcher of MPI processes the
    ranks become an MPI world by PMI-1 over the store (MPICH and Intel MPI).

    Args:
        store: Shared by exactly these ranks, and used for nothing else.
        rank: This rank.
        size: Number of ranks.
        deadline: For the slowest rank.

    Raises:
        UnsupportedError: MPI is missing on a rank, the ranks have different libraries, they are not
            in one MPI world, or on several hosts with UNISONO_TLS=on or cert. All ranks raise it.
    """
    mine = _look()
    rows = _exchange(store, "library", rank, size, mine, deadline)
    _check_libraries(rank, rows)
    if len({row["place"] for row in rows}) > 1:
        mode = strictest({row["tls"] for row in rows})
        check_unencrypted("what MPI sends between hosts", _PLAIN_HINT, mode, warns=rank == 0)
    if not mine["ready"]:
        pmi, ends = _server(store, rank, rows, deadline), None
        if pmi is None:
            ends = MPIEnds(PrefixStore("end", store), rank, size, deadline.timeout_s)
        process.start(pmi, deadline, ends)
    found = library()
    if found.MPI.Query_thread() < found.MPI.THREAD_MULTIPLE:
        mine["why"] = "MPI was initialised without MPI_THREAD_MULTIPLE"
    world = found.MPI.COMM_WORLD
    mine |= {"world": _world_name(), "rank": world.rank, "size": world.size}
    rows = _exchange(store, "world", rank, size, mine, deadline)
    _check_worlds(rank, rows, found)
    if process.pmi is not None:
        unlink_shared_memory()
    return tuple(row["rank"] for row in rows)


def _look() -> dict[str, Any]:
    """Return the facts about this process that all ranks must know."""
    row = {"user": f"{new_user().split('~')[1]}/{os.getpid()}", "host": memory_host()}
    row |= {"place": this_host(), "tls": config.get("UNISONO_TLS")}
    try:
        found = library()
    except UnsupportedError as error:
        why = error.what.removeprefix("MPI cannot be used: ")
        return row | {"why": why, "hint": error.hint}
    if why := process.why_no_group():
        return row | {"why": why, "hint": _OTHER}
    ready = found.MPI.Is_initialized()
    if ready and found.MPI.Is_finalized():
        return row | {"why": "MPI was finalised in this process", "hint": None}
    return row | {
        "why": "",
        "hint": _START,
        "library": found.name,
        "openmpi": found.is_openmpi,
        "ready": ready,
        "launched": has_launcher(found),
    }


def _check_libraries(rank: int, rows: Sequence[dict[str, Any]]) -> None:
    """Raise the same error on all ranks if they cannot become, or be, one MPI world."""
    size = len(rows)
    _raise_reasons(rank, rows)
    users = [row["user"] for row in rows]
    if len(set(users)) < size:
        same = [other for other in range(size) if users.count(users[other]) > 1]
        raise _unusable(
            rank, rows, f"{name_ranks(same)} are threads of one process, and MPI needs a process "
            "for each rank", same,
        )  # fmt: skip
    names = sorted({row["library"] for row in rows})
    if len(names) > 1:
        raise _unusable(rank, rows, f"the ranks have different libraries: {', '.join(names)}")
    apart = [other for other, row in enumerate(rows) if not (row["ready"] or row["launched"])]
    if apart and len(apart) < size:
        why = "initialised MPI already, or have a launcher of MPI processes"
        raise _unusable(rank, rows, f"all ranks but {name_ranks(apart)} {why}", apart)
    if apart and rows[0]["openmpi"] and size > 1:
        raise _unusable(
            rank, rows, f"{names[0]} makes a world of several ranks only under its own mpiexec, "
            "or srun with PMIx",
        )  # fmt: skip


def _check_worlds(rank: int, rows: Sequence[dict[str, Any]], found: MPILibrary) -> None:
    _raise_reasons(rank, rows)
    names = {(row["world"], row["size"]) for row in rows}
    if len(names) == 1 and len({row["rank"] for row in rows}) == len(rows):
        return
    sizes = sorted({row["size"] for row in rows})
    text = "each process is an MPI world of its own" if sizes == [1] else (
        f"the ranks are not in one MPI world (sizes of their worlds: {sizes})"
    )  # fmt: skip
    raise _unusable(rank, rows, f"{text} in {found.name}")


def _raise_reasons(rank: int, rows: Sequence[dict[str, Any]]) -> None:
    reasons = grouped((row["why"], other) for other, row in enumerate(rows) if row["why"])
    for why, ranks in reasons.items():
        on = "" if len(ranks) == len(rows) else f"on {name_ranks(ranks)}: "
        raise _unusable(rank, [rows[ranks[0]]] * len(rows), f"{on}{why}", ranks)


def _unusable(
    rank: int, rows: Sequence[dict[str, Any]], why: str, peers: Sequence[int] = ()
) -> UnsupportedError:
    return UnsupportedError(
        f"MPI cannot be used: {why}",
        context=Context(rank=rank, world_size=len(rows), peers=tuple(peers)),
        hint=rows[0]["hint"],
    )


def _server(
    store: Store, rank: int, rows: Sequence[dict[str, Any]], deadline: Deadline
) -> PMIServer | None:
    """Return the PMI server of this process, or None if a launcher has one."""
    found = library()
    if found.is_openmpi or has_launcher(found):
        return None
    name = store.compare_set("name", "", f"unisono_{uuid.uuid4().hex}").decode()
    hosts = [row["host"] or str(other) for other, row in enumerate(rows)]
    job = MPIJob(name, rank, len(rows), process_mapping(hosts))
    return PMIServer(PrefixStore("pmi", store), job, deadline.remaining())


def _world_name() -> str:
    """Return a name that is equal on the ranks of one MPI world, as far as it is known."""
    if process.pmi is not None:
        return process.pmi.job.name
    env = config.environ()
    return env.get("PMIX_NAMESPACE") or env.get("SLURM_STEP_ID", "")


def _exchange(
    store: Store, name: str, rank: int, size: int, mine: dict[str, Any], deadline: Deadline
) -> list[dict[str, Any]]:
    """Return the facts of all ranks."""
    keys = [f"{name}/{other}" for other in range(size)]
    store.set(keys[rank], json.dumps(mine))
    try:
        store.wait(keys, deadline.remaining())
        rows = [json.loads(value) for value in store.multi_get(keys)]
        # The host of the store may close it when it raises, so all ranks must have read before.
        store.barrier(f"{name}/read", size, deadline.remaining())
    except StoreTimeoutError as error:
        missing = tuple(other for other in range(size) if not store.check([keys[other]]))
        raise RendezvousError(
            f"rank {rank} of {size} waited {deadline.timeout_s:g} s for ranks that did not ask "
            f"for MPI: {', '.join(map(str, missing)) or 'none now'}",
            context=Context(rank=rank, world_size=size, peers=missing),
            hint="give all ranks the same backend, pg_options and UNISONO_ENGINE",
        ) from error
    return rows
