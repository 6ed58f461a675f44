"""Checks of data: NaN before it spreads, arrays that must be equal on all ranks.

Source: NanCheckHook and FlightRecorderHook of torch's main line (2026).
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Mapping
from typing import Any, Self

import numpy as np

from unisono.beyond.tracing import trace_records
from unisono.core.base.buffers import BufferView, as_bytes, device_of, view
from unisono.core.base.deadline import Timeout
from unisono.core.base.threads.streams import explicit_stream
from unisono.core.c10d.arguments import reporting_bad_arguments
from unisono.core.groups.world import Group, member_group, require_group
from unisono.core.operations.hooks import PreHookArgs
from unisono.core.recorder import TraceRecord
from unisono.errors import CollectiveError, Context, InvalidArgumentError

# Hooks of users have small ids.
_ids = itertools.count(1 << 32)

# Elements that are searched at once, so that the marks stay in the cache.
_SEARCHED = 1 << 16

# Types that are stored as integers: the bits that tell NaN, the first code, how many follow it.
_NAN_CODES = {
    "bfloat16": (0x7FFF, 0x7F81, 0x7E),
    "float8_e4m3fn": (0x7F, 0x7F, 0),
    "float8_e5m2": (0x7F, 0x7D, 2),
    "float8_e4m3fnuz": (0xFF, 0x80, 0),
    "float8_e5m2fnuz": (0xFF, 0x80, 0),
}


class NanCheckHook:
    """Raises an error before a call if this rank's contribution has a NaN: `attach(group)`.

    The error names the rank, the array and the index of the first NaN. In a collective the other
    ranks raise CollectiveMismatchError with its text, no array is changed, and the group stays
    usable. A message is not sent: its receiver waits until its time-out.

    All floats and complex numbers are searched, long doubles and float8 too. Not searched are
    records, complex32, float8_e8m0fnu, dates, arrays on GPUs, and arrays that only receive.
    """

    def __init__(self, group: Group) -> None:
        self._group, self._id = require_group(group), next(_ids)
        rank = self._group.ranks[self._group.rank()]
        self._group.register_pre_hook(self._id, lambda call: _find_nan(rank, call))

    @classmethod
    def attach(cls, group: Group) -> Self:
        """Begin to check the calls of a group."""
        return cls(group)

    def remove(self) -> None:
        """End the checks."""
        self._group.unregister_pre_hook(self._id)


class FlightRecorderHook:
    """Gives the records of a group's calls since `attach(group)`; calls stay as fast as before."""

    def __init__(self, group: Group) -> None:
        self._group = require_group(group)
        self._since = max((each.number for each in trace_records(self._group)), default=0)

    @classmethod
    def attach(cls, group: Group) -> Self:
        """Begin; every call is recorded anyway.

        Raises:
            UnsupportedError: The group keeps no records.
        """
        return cls(group)

    def records(self) -> list[TraceRecord]:
        """Return the records, oldest first, of at most 2,048 calls."""
        return [each for each in trace_records(self._group) if each.number > self._since]

    def remove(self) -> None:
        """Do nothing: records are always kept."""


def _find_nan(rank: int, call: PreHookArgs) -> None:
    if (stream := explicit_stream()) is not None and call.input_tensors:
        stream.synchronize()  # earlier work of the stream may write the arrays
    for number, array in enumerate(call.input_tensors):
        if device_of(array) != "cpu" or (at := _first_nan(seen := view(array, write=False))) < 0:
            continue
        index = [int(i) for i in np.unravel_index(at, seen.shape)]
        raise InvalidArgumentError(
            f"rank {rank} gives NaN to {call.op}: array {number} ({seen.dtype}{list(seen.shape)}) "
            f"has the first one at index {index}"
        )


def _first_nan(data: BufferView) -> int:
    """Return the flat index of the first NaN, or -1."""
    array, codes = data.array, _NAN_CODES.get(data.dtype.name)
    if (opaque := data.dtype.opaque) is not None and opaque.kind in "fc":
        array = array.view(opaque)  # long doubles
    elif data.dtype.kind not in "fc" and codes is None:
        return -1
    for start in range(0, data.count, _SEARCHED):
        part = array[start : start + _SEARCHED]
        if codes is None:
            found = np.isnan(part)
        else:
            mask, first, more = codes
            found = (part & mask) - first <= more  # unsigned: less than `first` is a large number
        if found.any():
            return start + int(found.argmax())
    return -1


def assert_equal(arrays: Any, group: Group = None, *, timeout: Timeout | None = None) -> None:
    """Raise an error on all ranks unless all ranks have equal arrays.

    For replicas: parameters after an update, data that was broadcast. The bits are compared, by
    a hash, so NaN equals NaN and 0.0 is not -0.0.

    Args:
        arrays: An array, a list of arrays, or a mapping from names to arrays.
        group: The default group if None.
        timeout: Of the call; the group's if None.

    Raises:
        CollectiveError: An array differs; names the array and the ranks that differ from most
            ranks. The group stays usable.
        CollectiveMismatchError: Ranks give other numbers of arrays.

    Examples: On rank 1 of 2
        >>> dist.assert_equal({"weight": np.array([7 - rank])})
        Traceback (most recent call last):
            ...
        unisono.errors.CollectiveError: ...
    """
    if (pg := member_group(group, "assert_equal")) is None:
        return
    with reporting_bad_arguments(pg, "assert_equal"):
        named = _named(arrays)
        rows = [_digest(name, view(each, write=False, name=name)) for name, each in named]
        mine = np.array(rows, np.uint64).reshape(-1, 2)
    digests = np.empty((pg.size(), *mine.shape), np.uint64)
    pg.all_gather_into_tensor(digests, mine, timeout=timeout, _label="assert_equal")
    for number, (name, array) in enumerate(named):
        seen = Counter(map(tuple, digests[:, number].tolist()))
        if len(seen) == 1:
            continue
        (most, count), *_ = seen.most_common()
        wrong = [r for r in range(pg.size()) if tuple(digests[r, number].tolist()) != most]
        ranks = tuple(pg.ranks[r] for r in wrong)
        data = view(array, write=False)
        raise CollectiveError(
            f"assert_equal: {name} ({data.dtype}{list(data.shape)} on rank "
            f"{pg.ranks[pg.rank()]}) differs on ranks {list(ranks)} from the other {count}",
            context=Context(
                rank=pg.ranks[pg.rank()], group=pg.name, op="assert_equal", peers=ranks,
                usable=True, group_key=pg.key,
            ),
        )  # fmt: skip


def _named(arrays: Any) -> list[tuple[str, Any]]:
    if isinstance(arrays, Mapping):
        return [(str(name), array) for name, array in arrays.items()]
    if isinstance(arrays, (list, tuple)):
        return [(f"array {number}", array) for number, array in enumerate(arrays)]
    return [("the array", arrays)]


def _digest(name: str, data: BufferView) -> list[int]:
    """Return a hash of a name, a dtype, a shape and elements, as two numbers."""
    found = hashlib.blake2b(f"{name} {data.dtype} {data.shape}".encode(), digest_size=16)
    found.update(as_bytes(data.array))
    return [int(word) for word in np.frombuffer(found.digest(), np.uint64)]
