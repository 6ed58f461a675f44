"""Tasks that wait for a worker, pickled when they were submitted."""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from unisono.beyond.pool.captured import CallNames
from unisono.beyond.pool.memory import Region, dumps_with
from unisono.launcher.launch import pickling
from unisono.launcher.payload import Payload

_LARGE = 1 << 16

# By address and size: the last copy of large memory, while a task has it.
_copies: weakref.WeakValueDictionary[tuple[int, int], np.ndarray[Any, Any]] = (
    weakref.WeakValueDictionary()
)


class TaskSnapshot:
    """A call as it is now: later changes of its arguments have no effect.

    It holds no file, so any number of tasks may wait. Tasks with the same large array, unchanged,
    share one copy.

    Args:
        fn: The function.
        args: Its arguments.
        keywords: Its keyword arguments.
        names: What earlier calls have named.
        is_local: Whether the worker is a process of this host, which can have shared arrays.

    Attributes:
        shared: The memory of arrays that the task shares with this process.

    Raises:
        InvalidArgumentError: They cannot be pickled.
        UsageError: See `CallNames`.
    """

    def __init__(
        self, fn: Any, args: Any, keywords: dict[str, Any], names: CallNames, is_local: bool
    ) -> None:
        task = fn, args, keywords
        self._buffers: list[Any] = []
        self.shared: list[Region] = []
        self._held: list[Any] = []
        how = partial(dumps_with, {}, share=self._share if is_local else None, check=names.check)
        with pickling(task, "the function or its arguments", how) as dumps:
            # The buffers stay out of the pickle, because `_copy` returns None.
            self._stream = bytes(dumps(task, protocol=5, buffer_callback=self._copy))

    def _share(self, region: Region) -> None:
        self.shared.append(region)
        self._held.append(region.base())

    def _copy(self, buffer: Any) -> None:
        view = buffer.raw()
        now = np.frombuffer(view, np.uint8)
        key = now.ctypes.data, now.nbytes
        copy = _copies.get(key) if now.nbytes >= _LARGE else None
        if copy is None or copy.flags.writeable == view.readonly or not _equal(copy, now):
            copy = now.copy()
            copy.flags.writeable = not view.readonly
            if now.nbytes >= _LARGE:
                _copies[key] = copy
        self._buffers.append(copy)

    def payload(self) -> Payload:
        """Return the call for a worker."""
        return Payload(None, self._dumps)

    def _dumps(self, value: object, *, protocol: int, buffer_callback: Callable[..., Any]) -> bytes:
        for copy in self._buffers:
            buffer_callback(pickle.PickleBuffer(copy))
        return self._stream


def _equal(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> bool:
    """Whether bytes are equal; words are compared where they can be, which is faster."""
    if a.nbytes % 8 == 0 and b.ctypes.data % 8 == 0:
        a, b = a.view(np.uint64), b.view(np.uint64)
    return bool(np.array_equal(a, b))
