"""Memory that all ranks of a group share, if they are on one host.

The first rank of the group makes the memory. The other ranks open it through the process id of the
first rank and compare a nonce, which proves that it is the same memory. If one of them cannot open
it (in another process namespace, for example), no rank of the group uses it.
"""

from __future__ import annotations

import errno
import logging
import os
import struct
import uuid
from typing import Any

import numpy as np

from unisono.core.base import config
from unisono.core.base.buffers import as_bytes
from unisono.core.base.log import get_logger, log_once
from unisono.core.base.seam import cpp as _engine
from unisono.core.base.seam import is_native_built, is_wanted
from unisono.core.engines.api import Communicator
from unisono.core.engines.reference import TaskRun
from unisono.core.platform.machine import boot_and_processes

_log = get_logger("engines.native")

BUILT_IN = ("auto", "native", "reference")
"""The names of engines that no package adds."""

SLOT_BYTES = 512 * 1024
"""What a rank can post per piece. Two slots per rank, which move: 2 ranks take 5 MiB, 8 take 11."""

_APART = (
    "cannot share memory with another rank of this host (%s): groups with both use messages, "
    "which are slower"
)

_INVITATION = struct.Struct("<iii16s")
"""errno of making the memory (0: made), process id, file descriptor, nonce."""


def host_id(kind: str | None = None) -> str:
    """Return a text that is equal on ranks that can share memory; "" if this rank cannot.

    The part before the first "/" is equal on ranks whose C++ engines understand each other. There
    is no "/" on a rank without C++: the text is "", or "+" and the name of another package's
    engine. It is unique on a rank that must not share memory. So the other ranks learn of all.

    Args:
        kind: The engine that was asked for; UNISONO_ENGINE if None.
    """
    kind = kind or config.get("UNISONO_ENGINE")
    other = "" if kind in BUILT_IN else f"+{kind}"
    is_there = is_wanted() if other else is_native_built() and kind != "reference"
    memory = memory_host() if is_there else ""
    return f"{_engine.ABI}{other}/{memory}" if memory else other


def memory_host() -> str:
    """Return a text that is equal on processes that may open each other's memory; "" if unknown.

    It is unique on a rank that must not share memory.
    """
    if (known := boot_and_processes()) is None:
        return ""
    # Memory is opened through a process id. Each container numbers its own processes, so two
    # containers on one machine count as two hosts.
    boot, container = known
    alone = "" if config.get_flag("UNISONO_SHARED_MEMORY") else f"/{uuid.uuid4().hex}"
    return f"{boot}/{container}{alone}"


def share_memory(comm: Communicator, run: TaskRun) -> tuple[Any, list[int]] | None:
    """Make or open the memory of a group.

    Args:
        comm: The group; its ranks have one host.
        run: Sends and receives for this rank.

    Returns:
        The segment and the process ids of all ranks. None, on all ranks, if one rank cannot open
        the memory.
    """
    segment, pids, shared = _make(comm, run) if comm.rank == 0 else _open(comm, run)
    return (segment, pids) if shared else None


def _make(comm: Communicator, run: TaskRun) -> tuple[Any, list[int], bool]:
    size, nonce = comm.size, os.urandom(16)
    error, segment = _engine.Segment.create(size, SLOT_BYTES, nonce)
    others = range(1, size)
    pids = np.full(size, os.getpid(), np.int32)
    for transfer in [run.recv(r, as_bytes(pids[r : r + 1])) for r in others]:
        run.wait(transfer)
    invitation = _INVITATION.pack(error, os.getpid(), segment.fd(), nonce) + pids.tobytes()
    for rank in others:
        run.send(rank, memoryview(invitation))
    answers = np.full(size, error == 0, np.uint8)
    for transfer in [run.recv(r, as_bytes(answers[r : r + 1])) for r in others]:
        run.wait(transfer)
    shared = bool(answers.all())
    for rank in others:
        run.send(rank, memoryview(bytes([shared])))
    run.wait_for_sends()
    segment.close_fd()
    return segment, pids.tolist(), shared


def _open(comm: Communicator, run: TaskRun) -> tuple[Any, list[int], bool]:
    size = comm.size
    run.send(0, memoryview(struct.pack("<i", os.getpid())))
    invitation = bytearray(_INVITATION.size + 4 * size)
    run.wait(run.recv(0, memoryview(invitation)))
    error, pid, fd, nonce = _INVITATION.unpack_from(invitation)
    pids = np.frombuffer(invitation, np.int32, offset=_INVITATION.size)
    segment = None
    if error == 0:
        error, segment = _engine.Segment.attach(pid, fd, nonce)
    if error:
        reason = "it is not the same" if error == errno.EXDEV else os.strerror(error)
        log_once(_log, logging.WARNING, _APART, reason)
    run.send(0, memoryview(bytes([error == 0])))
    shared = bytearray(1)
    run.wait(run.recv(0, memoryview(shared)))
    run.wait_for_sends()
    return segment, pids.tolist(), bool(shared[0])
