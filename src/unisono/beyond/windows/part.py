"""One rank's part of a window without C++: its elements, its signals, and the atomic operations.

Only this process has the memory then, and the requests of other ranks come as messages.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from unisono.core.base.seam import cpp
from unisono.core.base.types import DType, RedOpType, ReduceOp, reduce_ops_of
from unisono.core.engines.kernels import reduce_into

LINE_BYTES = 64
"""A line of signals for each rank, as in native/windows/part.hpp."""

Elements = np.ndarray[Any, Any]


class WindowPart:
    """The part without C++; see native/windows/part.hpp. One lock makes each operation atomic.

    Args:
        lines: One line of signals per rank.
        data: [count] elements.
        dtype: Their type.
    """

    def __init__(self, lines: Elements, data: Elements, dtype: DType) -> None:
        self._signals = lines.view(np.uint64)[:, 0]
        self._data = data
        self._dtype = dtype
        self._is_closed = False
        # Reentrant, because a signal handler may run in a thread that holds the lock.
        self._changed = threading.Condition(threading.RLock())

    def put(self, array: Elements, offset: int) -> bool:
        """Copy an array in; return False if it does not fit, or the part is closed."""
        if not self._fits(array, offset):
            return False
        with self._changed:
            self._data[offset : offset + array.size] = array.reshape(-1)
        return True

    def get(self, array: Elements, offset: int) -> bool:
        """Copy elements into an array; return False as `put` does."""
        if not self._fits(array, offset) or not array.flags.writeable:
            return False
        with self._changed:
            array.reshape(-1)[:] = self._data[offset : offset + array.size]
        return True

    def apply(self, array: Elements, old: Elements | None, offset: int, op: int) -> bool:
        """Set each element to element (op) array; `old`, if any, gets the elements before."""
        known = {int(each) for each in reduce_ops_of(self._dtype)}
        if not self._fits(array, offset) or op not in known:
            return False
        with self._changed:
            into = self._data[offset : offset + array.size]
            if old is not None:
                old.reshape(-1)[:] = into
            reduce_into(into, array.reshape(-1), self._dtype, ReduceOp(RedOpType(op)))
        return True

    def compare_and_swap(self, expected: Elements, desired: Elements, offset: int) -> bool:
        """Set an element if it is `expected`, which becomes what it was."""
        if not self._fits(expected, offset):
            return False
        with self._changed:
            before = self._data[offset]
            if before == expected[0]:
                self._data[offset] = desired[0]
            expected[0] = before
        return True

    def signal(self, source: int) -> None:
        """Count one signal of a rank."""
        with self._changed:
            self._signals[source] += np.uint64(1)
            self._changed.notify_all()

    def signals(self, source: int) -> int:
        """Return how often a rank has signalled."""
        return int(self._signals[source])

    def wait_signal(self, source: int, taken: int, timeout_s: float, crowded: bool) -> int:
        """Wait for more signals than `taken`, but not for long; return their number."""
        with self._changed:
            self._changed.wait_for(lambda: self.signals(source) > taken, timeout_s)
            return self.signals(source)

    def close(self) -> None:
        """Take no more requests."""
        self._is_closed = True

    def is_closed(self) -> bool:
        """Whether the owner has closed the part."""
        return self._is_closed

    def _fits(self, array: Elements, offset: int) -> bool:
        return bool(
            type(array) is np.ndarray
            and array.dtype == self._data.dtype
            and array.flags.c_contiguous
            and 0 <= offset <= self._data.size - array.size
            and not self._is_closed
        )


def make_part(lines: Elements, data: Elements, dtype: DType, *, native: bool) -> Any:
    """Return a part in C++, or its twin; `native`: whether the ranks run the C++ engine."""
    if not native:
        return WindowPart(lines, data, dtype)
    return cpp.WindowPart(lines, data, cpp.dtype_codes().get(dtype.name, -1))
