"""Choose the engine of a group, and report the engine of this process."""

from __future__ import annotations

import importlib.util
import logging
from typing import NamedTuple

from unisono.base import config
from unisono.base.log import get_logger, log_once
from unisono.base.seam import cpp, why_absent
from unisono.engines.api import Communicator, Engine
from unisono.engines.mpi_engine import MPIEngine
from unisono.engines.mpi_library import library
from unisono.engines.mpi_library import why_absent as why_no_mpi
from unisono.engines.native_engine import NativeEngine
from unisono.engines.reference import ENGINES, ReferenceEngine
from unisono.engines.shared_memory import host_id
from unisono.errors import InvalidArgumentError, UnsupportedError
from unisono.platform.machine import usable_cores
from unisono.platform.memory import memory_kind

_log = get_logger("engines")

KINDS = ("auto", *ENGINES)

_SLOW = "collectives run on the reference engine, in Python, which is slow: %s"


def make_engine(comm: Communicator, kind: str | None = None) -> Engine:
    """Return the engine of one group; all its ranks come to the same choice.

    Args:
        comm: The group.
        kind: "auto", "native", "reference" or "mpi"; UNISONO_ENGINE if None.

    Raises:
        UnsupportedError: "native" or "mpi" was requested but cannot be used; the text gives the
            reason.
    """
    kind = kind or config.get("UNISONO_ENGINE")
    if kind not in KINDS:
        raise InvalidArgumentError(f"unknown engine {kind!r} (known: {', '.join(KINDS)})")
    if kind == "mpi":
        return MPIEngine(comm)
    if kind == "reference":
        return ReferenceEngine(comm)
    hosts = [comm.transport.hosts[rank] for rank in comm.ranks]
    if all(hosts):
        neighbours = comm.transport.hosts.count(comm.transport.hosts[comm.transport.rank])
        log_once(_log, logging.INFO, "collectives run on the %s", str(engine_info()))
        return NativeEngine(comm, crowded=neighbours > usable_cores())
    if why_absent:
        why = why_absent
    elif not comm.transport.allows_cpp:
        why = f"the transport {comm.transport.name!r} does not let C++ carry the messages"
    else:
        why = "its ranks do not all have the same one, want it, and reach each other with it"
    if kind == "native":
        raise UnsupportedError(
            f"group '{comm.name}' on rank {comm.transport.rank} cannot use the native engine: {why}"
        )
    if comm.transport.rank == 0:
        log_once(_log, logging.WARNING, _SLOW, why)
    return ReferenceEngine(comm)


class EngineInfo(NamedTuple):
    """The engine that executes collectives in the groups of this process.

    Attributes:
        engine: "native" (C++), "reference" (Python) or "mpi".
        why: The reason for this engine.
        isa: Instruction set of the native reductions; "" without them.
        isas: Instruction sets of this machine, slowest first.
        shared_memory: "memfd", or the reason why ranks cannot share memory.
        cores: Cores that this process may use. With more ranks than cores on a host, waits do not
            spin.
        build: Compiler of the extension module; "" without it.
        nccl: State of the backend for GPUs, or the reason why it cannot be used.
    """

    engine: str
    why: str
    isa: str
    isas: tuple[str, ...]
    shared_memory: str
    cores: int
    build: str
    nccl: str = ""

    def __str__(self) -> str:
        parts = [f"{self.engine} engine ({self.why})", f"shared memory: {self.shared_memory}"]
        if self.isa:
            parts.append(f"instruction set {self.isa} of {', '.join(self.isas)}; {self.build}")
        parts.append(f"{self.cores} cores")
        if not why_no_nccl():
            parts.append(f"NCCL: {self.nccl}")
        return "; ".join(parts)


def why_no_nccl() -> str:
    """Return why NCCL cannot be used here, "" if it may; imports and initialises nothing."""
    for name in ("nccl", "cuda"):
        if importlib.util.find_spec(name) is None:
            return f"nccl4py is not installed: there is no module {name!r}"
    return ""


def engine_info() -> EngineInfo:
    """Return the engine that groups of this process get, as far as one process can know.

    All ranks of a world must have the native engine, or none of them. `repr(group)` and the log
    show the engine of a group.
    """
    memory = memory_kind()
    wish = config.get("UNISONO_ENGINE")
    if wish == "mpi":
        engine, why = wish, why_no_mpi() or library().name
    elif why_absent:
        engine, why = "reference", why_absent
    elif wish == "reference":
        engine, why = wish, "UNISONO_ENGINE=reference"
    elif not host_id() or memory != "memfd":
        engine, why = "reference", "ranks cannot share memory here"
    else:
        engine, why = "native", "UNISONO_ENGINE=native" if wish == "native" else "it is built"
    return EngineInfo(
        engine,
        why,
        cpp.isa() and (config.get("UNISONO_CPU") or cpp.isa()),
        tuple(cpp.isas()),
        memory,
        usable_cores(),
        cpp.BUILD,
        why_no_nccl() or "experimental: run on a single GPU only",
    )
