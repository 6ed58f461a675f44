"""The columns of the ring in which a group's calls are recorded.

A record has 88 bytes and fixed columns, so writing it takes no memory and no lock. Names are
numbers: a *kind* stands for operation, dtype, algorithm and route.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

import numpy as np

from unisono.core.base.types import DType

RECORDS = 2048
"""Records of a ring; a power of 2, as in C++."""

RECORD = np.dtype(
    [
        *[("number", "u8"), ("seq", "u8"), ("word", "u8"), ("count", "i8")],
        *[("enqueued", "u8"), ("started", "u8"), ("ended", "u8"), ("waited", "u8")],
        *[("kind", "u4"), ("peer", "i4"), ("waited_for", "i4"), ("site", "u4")],
        *[("offset", "i4"), ("outcome", "u4")],
    ]
)
"""The columns of native/core/recorder.hpp. Times are in ticks; 0: not yet.

A collective has no peer. There the column is `BLOCKING`, or how long after the call its caller
begins to wait, in 2**`WAIT_SHIFT` ticks; `NO_WAIT`: not yet.
"""

BLOCKING, NO_WAIT, MOST_WAIT, WAIT_SHIFT = -1, 0, (1 << 31) - 1, 10

TOTAL = np.dtype([("calls", "u8"), ("elements", "u8"), ("ticks", "u8"), ("worst", "u8")])
"""All calls of one kind."""

KINDS = 8192
"""Kinds of a process. The names of operations, dtypes and algorithms make some dozens."""

DROPPED = 0xFFFFFFFF
"""Outcome of a record that stands for no call."""


class RecordKind(NamedTuple):
    """The columns that many records share.

    Attributes:
        op: Name of the function that the caller used.
        dtype: Name of the elements' type; "" without memory.
        itemsize: Bytes of an element.
        algorithm: Name of the algorithm; "" for a message.
        route: "shared memory" or "messages".
    """

    op: str
    dtype: str = ""
    itemsize: int = 0
    algorithm: str = ""
    route: str = ""


_kinds: list[RecordKind] = [RecordKind("other")]
_kind_numbers: dict[RecordKind, int] = {}
_lock = threading.RLock()


def number_of_kind(
    op: str, dtype: DType | None = None, algorithm: str = "", route: str = ""
) -> int:
    """Return the number of a kind in this process; 0 ("other") if there are too many kinds."""
    name, itemsize = ("", 0) if dtype is None else (dtype.name, dtype.itemsize)
    kind = RecordKind(op, name, itemsize, algorithm, route)
    with _lock:
        number = _kind_numbers.get(kind)
        if number is None and len(_kinds) < KINDS:
            number = _kind_numbers[kind] = len(_kinds)
            _kinds.append(kind)
        return number or 0


def kind_of(number: int) -> RecordKind:
    """Return the kind of a number."""
    return _kinds[number]
