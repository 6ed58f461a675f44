"""The memory of a window: each rank makes its own, and maps that of the other ranks of its host."""

from __future__ import annotations

import contextlib
import logging
import math
import mmap
import uuid
from typing import Any, NamedTuple

import numpy as np

from unisono.beyond.shared_arrays import host_of, made_memory, opened_memory
from unisono.beyond.windows.part import LINE_BYTES, Elements, make_part
from unisono.core.base.host import reason_of
from unisono.core.base.log import get_logger, log_once
from unisono.core.base.types import DType, dtype_of_numpy
from unisono.core.c10d.objects.call import ObjectCall
from unisono.core.engines import Communicator
from unisono.core.groups.process_group import ProcessGroup
from unisono.core.platform.memory import has_memory_files
from unisono.core.recorder import number_of_kind

_log = get_logger("windows")

_APART = (
    "cannot open the window of another rank of this host (%s): this rank uses messages, which are "
    "slower"
)


# The calls that C++ records, in its order, and whether they move elements.
_KINDS = [("put", 1), ("signal", 0), ("wait_signal", 0), ("get", 1), ("fetch_add", 1)]

_ELSEWHERE = "it is on another host, or UNISONO_SHARED_MEMORY is 0"
_ONE_WAY = "that rank cannot open the window of this rank"
_PYTHON = "ranks without the C++ engine share none"


class WindowMemory(NamedTuple):
    """What a rank knows of all parts of a window.

    Attributes:
        parts: By rank, the parts that this rank can reach in memory; its own is one of them.
        data: By rank, [count] the elements of these parts.
        shapes: Of each rank's part.
        dtype: Of the elements.
        is_crowded: Whether this host has more ranks than cores.
        apart: By rank, why this rank exchanges messages with it.
    """

    parts: dict[int, Any]
    data: dict[int, Elements]
    shapes: list[tuple[int, ...]]
    dtype: DType
    is_crowded: bool
    apart: dict[int, str]


def share(
    pg: ProcessGroup, comm: Communicator, call: ObjectCall, shape: tuple[int, ...], dtype: DType
) -> WindowMemory:
    """Make this rank's part, and map those of other ranks; a collective call."""
    me, size = pg.rank(), pg.size()
    native = bool(comm.transport.hosts[comm.transport.rank])
    failed = f"no memory for a window of shape {list(shape)}"

    def nbytes_of(shape: tuple[int, ...]) -> int:
        return _start(size) + math.prod(shape) * dtype.itemsize

    kinds = [number_of_kind(op, dtype if moves else None, route="messages") for op, moves in _KINDS]
    with contextlib.ExitStack() as stack:

        def make() -> tuple[str, tuple[int, ...], Any]:
            if not (native and has_memory_files()):
                return uuid.uuid4().hex, shape, None
            return host_of(pg), shape, made_memory(nbytes_of(shape), stack, "window")

        rows = call.on_all(make, failed)
        parts: dict[int, Any] = {}
        data: dict[int, Elements] = {}
        apart: dict[int, str] = {}

        def attach() -> list[int]:
            for rank, (host, its, made) in enumerate(rows):
                if rank == me and made is None:
                    memory = mmap.mmap(-1, nbytes_of(shape))
                elif host == rows[me][0]:
                    try:
                        fd = made[1] if rank == me else opened_memory(made, stack)
                        memory = mmap.mmap(fd, nbytes_of(its))
                    except OSError as error:
                        if rank == me:
                            raise
                        apart[rank] = reason_of(error)
                        log_once(_log, logging.WARNING, _APART, apart[rank])
                        continue
                else:
                    apart[rank] = _ELSEWHERE if native else _PYTHON
                    continue
                lines = np.ndarray((size, LINE_BYTES), np.uint8, memory)
                data[rank] = np.ndarray(math.prod(its), dtype.storage, memory, _start(size))
                parts[rank] = make_part(lines, data[rank], dtype, native=native)
                if native and comm.trace is not None:
                    parts[rank].set_recorder(comm.trace.recorder, rank, kinds)
            return list(parts)

        # The files stay open until all ranks have opened them.
        mapped = call.on_all(attach, failed)
    # In both directions or in none: what a rank sends last must not come after its end.
    for rank in [rank for rank in parts if me not in mapped[rank]]:
        del parts[rank], data[rank]
        apart[rank] = _ONE_WAY
    shapes = [row[1] for row in rows]
    return WindowMemory(parts, data, shapes, dtype, comm.transport.is_crowded, apart)


def shared_part(pg: ProcessGroup, op: str, count: int) -> Any:
    """Return a part of `count` int64, zeros, that all ranks of a group map; a collective call.

    None on all ranks if a rank cannot map it, for example on another host, or without C++.
    """
    cpu: Any = pg.backends.get("cpu")
    if not hasattr(cpu, "comm") or cpu.broken() is not None:
        return None
    me, size, nbytes = pg.rank(), pg.size(), _start(pg.size()) + 8 * count
    native = bool(cpu.comm.transport.hosts[cpu.comm.transport.rank]) and has_memory_files()
    parts: list[Any] = []
    with ObjectCall(pg, op, None, None) as call, contextlib.ExitStack() as stack:

        def make() -> Any:
            with contextlib.suppress(OSError):
                return made_memory(nbytes, stack, op) if native and me == 0 else None

        def attach() -> bool:
            if made is None or len(set(hosts)) > 1:
                return False
            with contextlib.suppress(OSError):
                fd = made[1] if me == 0 else opened_memory(made, stack)
                memory = mmap.mmap(fd, nbytes)
                lines = np.ndarray((size, LINE_BYTES), np.uint8, memory)
                data = np.ndarray(count, np.int64, memory, _start(size))
                parts.append(make_part(lines, data, dtype_of_numpy(data.dtype), native=True))
            return bool(parts)

        failed = "no memory"
        hosts = call.on_all(lambda: host_of(pg) if native else uuid.uuid4().hex, failed)
        made = call.on_all(make, failed)[0]
        return parts[0] if all(call.on_all(attach, failed)) else None


def _start(size: int) -> int:
    """Return where the elements begin: on a page, behind the lines of signals."""
    return -(-size * LINE_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE
