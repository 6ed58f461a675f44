"""Which engine a group gets."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from unisono.base import config
from unisono.base.extension import why_absent
from unisono.base.host import usable_cores
from unisono.base.log import get_logger, log_once
from unisono.engines.api import Communicator, Engine
from unisono.engines.info import engine_info
from unisono.engines.native_engine import NativeEngine, is_native_built
from unisono.engines.reference import ReferenceEngine
from unisono.errors import InvalidArgumentError, UnsupportedError
from unisono.transports.native_messages import NativeMessages

__all__ = ["make_engine"]

_log = get_logger("engines")

_SLOW = "collectives run on the reference engine, in Python, which is slow: %s"


def make_engine(comm: Communicator, kind: str | None = None) -> Engine:
    """Return the engine of one group; all its ranks come to the same choice.

    Args:
        comm: The group.
        kind: "auto", "native" or "reference"; UNISONO_ENGINE if None.

    Raises:
        UnsupportedError: "native" was asked for and cannot be had; says why.
    """
    kind = kind or config.get("UNISONO_ENGINE")
    if kind not in ("auto", "native", "reference"):
        raise InvalidArgumentError(f"unknown engine {kind!r} (known: auto, native, reference)")
    if kind == "reference":
        return ReferenceEngine(comm)
    words = [comm.transport.hosts[rank] for rank in comm.ranks]
    if all(words) and (len(set(words)) == 1 or _reach_each_other(comm, words)):
        neighbours = comm.transport.hosts.count(comm.transport.hosts[comm.transport.rank])
        log_once(_log, logging.INFO, "collectives run on the %s", str(engine_info()))
        return NativeEngine(comm, crowded=neighbours > usable_cores())
    if not is_native_built():
        why = why_absent
    else:
        why = "its ranks do not all have the same one, want it, and reach each other with it"
    if kind == "native":
        raise UnsupportedError(
            f"group '{comm.name}' on rank {comm.transport.rank} cannot use the native engine: {why}"
        )
    if comm.transport.rank == 0:
        log_once(_log, logging.WARNING, _SLOW, why)
    return ReferenceEngine(comm)


def _reach_each_other(comm: Communicator, words: Sequence[str]) -> bool:
    """Whether ranks of several hosts have messages in C++ that understand each other."""
    messages = comm.transport.messages
    versions = {word.partition("/")[0] for word in words}
    return isinstance(messages, NativeMessages) and messages.reaches_all and len(versions) == 1
