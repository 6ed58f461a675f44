"""Choose the engine of a group, and report the engine of this process.

An engine from another package is found by the entry-point group "unisono.engines", whose entries
are callables without arguments that call `register_engine`.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from typing import NamedTuple

from unisono.core.base import config
from unisono.core.base.deadline import Deadline
from unisono.core.base.log import get_logger, log_once
from unisono.core.base.net.tls import protection
from unisono.core.base.registry import Registry
from unisono.core.base.seam import cpp, why_absent
from unisono.core.engines.api import Communicator, Engine
from unisono.core.engines.native_engine import NativeEngine
from unisono.core.engines.reference import ReferenceEngine
from unisono.core.engines.shared_memory import BUILT_IN, host_id
from unisono.core.platform.machine import usable_cores
from unisono.core.platform.memory import memory_kind
from unisono.core.stores import Store
from unisono.core.transports.threads import threads_text
from unisono.errors import InvalidArgumentError, UnisonoError, UnsupportedError

_log = get_logger("engines")


class EngineKind(NamedTuple):
    """An engine from another package.

    Attributes:
        make: Returns the engine of one group.
        join: Called as join(store, rank, size, deadline) on all ranks that get links of their own;
            returns the rank that each has in the engine's own world.
        why_absent: Returns why this process cannot use the engine, or "".
        title: Returns what runs the collectives, as "MPICH 5.0.2".
    """

    make: Callable[[Communicator], Engine]
    join: Callable[[Store, int, int, Deadline], tuple[int, ...]]
    why_absent: Callable[[], str]
    title: Callable[[], str]


_kinds: Registry[EngineKind | None] = Registry("engine", "unisono.engines", dict.fromkeys(BUILT_IN))


def register_engine(name: str, kind: EngineKind) -> None:
    """Make an engine known, under a lower-case name for UNISONO_ENGINE and `CPUOptions`."""
    _kinds.add(name, kind)


def other_engine(name: str) -> EngineKind | None:
    """Return the kind of a wanted engine if another package registers it, else None.

    Raises:
        InvalidArgumentError: The name is unknown.
    """
    return _kinds.get(name)


_SLOW = "collectives run on the reference engine, in Python, which is slow: %s"


def make_engine(comm: Communicator, kind: str | None = None) -> Engine:
    """Return the engine of one group; all its ranks come to the same choice.

    Args:
        comm: The group.
        kind: "auto", "native", "reference" or a registered name; UNISONO_ENGINE if None.

    Raises:
        UnsupportedError: The requested engine cannot be used; the text gives the reason.
    """
    kind = kind or config.get("UNISONO_ENGINE")
    if (other := other_engine(kind)) is not None:
        return other.make(comm)
    if kind == "reference":
        return ReferenceEngine(comm)
    hosts = [comm.transport.hosts[rank] for rank in comm.ranks]
    if all(hosts):
        log_once(_log, logging.INFO, "collectives run on the %s", _info("native", "it is built"))
        return NativeEngine(comm, crowded=comm.transport.is_crowded)
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
        engine: "native" (C++), "reference" (Python), "mpi", or "?" if UNISONO_ENGINE is unknown.
        why: The reason for this engine.
        isa: Instruction set of the native reductions; "" without them.
        isas: Instruction sets of this machine, slowest first.
        shared_memory: "memfd", or the reason why ranks cannot share memory.
        cores: Cores that this process may use. With more ranks than cores on a host, waits do not
            spin.
        build: Compiler of the extension module; "" without it.
        nccl: State of the backend for GPUs, or the reason why it cannot be used.
        encryption: What protects connections to other hosts, or the reason why nothing does.
        threads: Number of threads that share the loops of a rank's large calls, or what is wrong
            with UNISONO_THREADS.
    """

    engine: str
    why: str
    isa: str
    isas: tuple[str, ...]
    shared_memory: str
    cores: int
    build: str
    nccl: str = ""
    encryption: str = ""
    threads: str = ""

    def __str__(self) -> str:
        parts = [f"{self.engine} engine ({self.why})", f"shared memory: {self.shared_memory}"]
        if self.isa:
            parts.append(f"instruction set {self.isa} of {', '.join(self.isas)}; {self.build}")
        parts += [f"{self.cores} cores", f"threads: {self.threads}"]
        parts += [f"encryption between hosts: {self.encryption}"]
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
    wish = config.get("UNISONO_ENGINE")
    try:
        other = other_engine(wish)
    except InvalidArgumentError as error:
        return _info("?", error.what)
    if other is not None:
        engine, why = wish, other.why_absent() or other.title()
    elif why_absent:
        engine, why = "reference", why_absent
    elif wish == "reference":
        engine, why = wish, "UNISONO_ENGINE=reference"
    elif not host_id() or memory_kind() != "memfd":
        engine, why = "reference", "ranks cannot share memory here"
    else:
        engine, why = "native", "UNISONO_ENGINE=native" if wish == "native" else "it is built"
    return _info(engine, why)


def _info(engine: str, why: str) -> EngineInfo:
    return EngineInfo(
        engine,
        why,
        cpp.isa() and (config.get("UNISONO_CPU") or cpp.isa()),
        tuple(cpp.isas()),
        memory_kind(),
        usable_cores(),
        cpp.BUILD,
        why_no_nccl() or f"experimental: run on a single GPU only; IntraNodeComm {_intra_node()}",
        _encryption(),
        threads_text(),
    )


def _intra_node() -> str:
    # torch's variable, which the backend reads, too.
    wanted = config.is_true("ENABLE_INTRA_NODE_COMM")
    return "on, never run on a GPU" if wanted else "off"


def _encryption() -> str:
    try:
        return protection(config.get("UNISONO_TOKEN"))
    except UnisonoError as error:
        return error.what
