"""Helpers of the checks of transports: keys, messages, waits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from unisono.core.base.deadline import Deadline
from unisono.core.transports import Key, Transport
from unisono.core.transports.messages import Purpose
from unisono.core.transports.transfers import Transfer
from unisono.testing.expect import PATIENCE_S, equal, is_a

__all__ = ["CONTEXT", "SIZES", "MakeTransports", "fails", "key", "pattern", "room_for", "wait"]

E = TypeVar("E", bound=BaseException)
MakeTransports = Callable[[int], Sequence[Transport]]

SIZES = (0, 1, 8, 4 << 10, 1 << 20, 20 << 20)
CONTEXT = 7


def key(tag: int = 0, context: int = CONTEXT, kind: Purpose = Purpose.P2P) -> Key:
    """Return the key of a message."""
    return Key(context, kind, tag)


def pattern(nbytes: int, seed: int = 1) -> memoryview:
    """Return bytes that differ by seed."""
    pattern = bytes((seed * 31 + i * 7) % 251 for i in range(251))
    return memoryview((pattern * (nbytes // 251 + 1))[:nbytes])


def room_for(nbytes: int) -> memoryview:
    """Return writable memory with known contents."""
    return memoryview(bytearray(b"\xee" * nbytes))


def wait(*transfers: Transfer) -> None:
    """Wait for transfers and raise their errors."""
    for transfer in transfers:
        equal("done in time", transfer.wait_until(Deadline(PATIENCE_S)), True)
        if transfer.error is not None:
            raise transfer.error


def fails(what: str, transfer: Transfer, cls: type[E]) -> E:
    """Wait for a transfer and return its error, which must be of that class."""
    equal(f"{what}: done in time", transfer.wait_until(Deadline(PATIENCE_S)), True)
    return is_a(what, transfer.error, cls)
