"""The native engine: programs executed in C++ over shared memory, without the interpreter lock.

Order, threads and errors are the reference engine's; only the execution of a task differs. The
memory of a group is made when its first call runs: the group's first rank makes it, the others
open it through its process id and prove by a nonce that it is the same memory. If one of them
cannot (another host, another process namespace), the whole group stays with messages.
"""

from __future__ import annotations

import os
import struct
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from unisono.base.buffers import as_bytes
from unisono.base.log import get_logger
from unisono.base.types import DType, ReduceOp
from unisono.engines.api import Communicator, Task
from unisono.engines.reference import ReferenceEngine, Run
from unisono.errors import InternalError
from unisono.schedules import Layout, Program, Schedule, SharedProgram, build, lower_shared
from unisono.transports import LinkDown

try:
    _engine: Any = import_module("unisono._engine")
except ImportError:
    _engine = None

__all__ = ["NativeEngine", "host_word", "is_native_available"]

_log = get_logger("engines.native")

# Two slots per rank: 8 ranks take 8 MiB. A slot holds what a rank posts per piece.
SLOT_BYTES = 512 * 1024

_INVITATION = struct.Struct("<iii16s")
"""errno of making the memory (0: made), process id, file descriptor, nonce."""

# How often a wait looks at a flag before it gives the core away: some microseconds, which is what
# a peer that runs needs. With more ranks than cores the peer may be waiting for this very core.
_SPIN = 2000
_SPIN_CROWDED = 50


def is_native_available() -> bool:
    """Whether the extension module was built and this system has what it needs."""
    return _engine is not None


def host_word() -> str:
    """Return a word that is equal on ranks that may be able to share memory."""
    if _engine is None:
        return "-"
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "-"
    return f"{boot}/{_engine.abi()}"


class NativeEngine(ReferenceEngine):
    """Runs tasks over shared memory; messages remain for whatever does not fit it."""

    name = "native"

    def __init__(self, comm: Communicator, *, crowded: bool) -> None:
        super().__init__(comm)
        self._spin = _SPIN_CROWDED if crowded else _SPIN
        self._group: Any = None
        self._connected = False

    @property
    def shares_memory(self) -> bool:
        return True

    def lower(self, schedule: Schedule, layout: Layout, itemsize: int) -> Program | SharedProgram:
        messages = super().lower(schedule, layout, itemsize)
        if layout.in_splits is not None or layout.out_splits is not None:
            return messages
        shared = lower_shared(schedule, self.comm.rank, layout.count, itemsize, SLOT_BYTES)
        return messages if shared is None else shared

    def close(self) -> None:
        super().close()
        if self._group is not None:
            self._group.leave()

    def perform(self, task: Task, run: Run) -> None:
        if not self._connected:
            self._connect(run)
        if self._group is None:
            super().perform(task, run)
            return
        program = task.program
        word = task.call.fingerprint
        if task.exchange is not None:
            even = self._check(*self._group.agree(word, task.exchange.even, _ns(task)), run)
            word = 0
            if even == 0:
                task.exchange.check(task.call, self._gather(task.exchange.mine, task, run))
                program = task.exchange.program
        if isinstance(program, SharedProgram):
            self._execute(program, task.input, task.output, task.dtype, task.op, word, task, run)
            return
        if word:
            self._check(*self._group.agree(word, 1, _ns(task)), run)
        run.execute(program)

    def _execute(
        self,
        program: SharedProgram,
        source: Any,
        target: Any,
        dtype: DType,
        op: ReduceOp,
        word: int,
        task: Task,
        run: Run,
    ) -> None:
        scratch = np.empty(program.scratch_count, dtype.storage)
        code, peer = self._group.run(
            program.steps.ctypes.data,
            program.loops.ctypes.data,
            len(program.loops),
            0 if source is None else source.ctypes.data,
            0 if target is None else target.ctypes.data,
            scratch.ctypes.data,
            dtype.itemsize,
            dtype.name if dtype.kind != "x" else "uint8",
            op.op.name,
            word,
            _ns(task),
        )
        self._check(code, peer, 1, run)

    def _gather(self, mine: Any, task: Task, run: Run) -> Any:
        """Return [world_size, k]: the numbers of all ranks."""
        comm = self.comm
        table = np.empty((comm.size, mine.size), np.int64)
        schedule = build("all_gather", "one_shot", comm.size)
        program = lower_shared(schedule, comm.rank, mine.size, 8, SLOT_BYTES)
        assert program is not None
        int64 = run.dtype_int64
        self._execute(program, mine, table.reshape(-1), int64, ReduceOp.SUM, 0, task, run)
        return table

    def _check(self, code: int, peer: int, even: int, run: Run) -> int:
        """Turn a status of the engine into what the reference engine raises; return `even`."""
        if code == _engine.OK:
            return even
        if code == _engine.MISMATCH:
            raise run.mismatch()
        if code == _engine.LOST:
            raise LinkDown(self.comm.ranks[peer], "its process ended, or closed the group")
        if code == _engine.TIMEOUT:
            raise run.expired()
        if code == _engine.ABORTED:
            failure = self.comm.transport.failure(self.comm.context)
            if failure is not None:
                raise failure
        raise InternalError(f"the native engine returned status {code}")

    # ---- setting up -----------------------------------------------------------------------

    def _connect(self, run: Run) -> None:
        """Make or open the group's memory; all ranks come to the same verdict."""
        comm = self.comm
        if comm.rank == 0:
            segment = self._invite(run)
        else:
            segment = self._accept(run)
        self._connected = True
        if segment is None:
            return
        pids = self._pids
        self._group = _engine.Group(segment, comm.rank, pids, self._spin)
        comm.transport.on_failure(comm.context, lambda failure: self._group.abort())
