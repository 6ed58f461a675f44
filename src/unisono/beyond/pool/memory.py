"""Memory that a notebook shares with its ranks, and the pickles that refer to it.

The memory is a file without a name. The ranks get its descriptor once. A pickle has only a
reference to an array, or a part of one, that lies in such memory.
"""

from __future__ import annotations

import mmap
import os
import uuid
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np

from unisono.core.platform.memory import available_memory_bytes, new_memory_file
from unisono.errors import ArgumentTypeError, InvalidArgumentError
from unisono.launcher.payload import dumps_by, pickler_of


@dataclass
class Region:
    """Memory that a process has mapped.

    Attributes:
        key: Its name in all processes.
        fd: Its file, in the process that made it.
        nbytes: Size.
        address: Where this process has mapped it.
        base: [nbytes] bytes; the base of all arrays in it. A rank keeps it until it is dropped.
    """

    key: str
    fd: int
    nbytes: int
    address: int
    base: Callable[[], np.ndarray[Any, Any] | None]


_ShareRegion = Callable[[Region], object]

_regions: dict[str, Region] = {}

attached: dict[str, Region] = {}
"""The memory of the parent that this rank has."""

# NumPy 2 has moved it.
_byte_bounds: Any = getattr(np.lib, "array_utils", np).byte_bounds


def _map(fd: int, nbytes: int) -> np.ndarray[Any, Any]:
    return np.frombuffer(mmap.mmap(fd, nbytes), np.uint8)


def new_array(shape: Any, dtype: Any) -> tuple[Region, np.ndarray[Any, Any]]:
    """Return new memory, and an array of zeros in it; the last array in it frees the memory."""
    if getattr(shape, "shape", ()):
        raise ArgumentTypeError(
            f"a shape is an int or a sequence of ints, got an array of shape {shape.shape}",
            hint="to share its values: x = ranks.shared_array(a.shape, a.dtype); x[:] = a",
        )
    try:
        kind = np.dtype(dtype)
        empty = np.broadcast_to(np.empty((), kind), shape)
    except (TypeError, ValueError, OverflowError) as error:
        kinds = ArgumentTypeError if isinstance(error, TypeError) else InvalidArgumentError
        raise kinds(
            f"no array has shape={shape!r}, dtype={dtype!r}: {error}",
            hint=f"sizes are one tuple: ranks.shared_array(({shape}, {dtype}))"
            if isinstance(dtype, int)
            else None,
        ) from None
    if kind.hasobject:
        raise InvalidArgumentError(f"a shared array cannot have the dtype {kind}: it holds objects")
    nbytes = max(empty.nbytes, 1)
    free = available_memory_bytes()
    if free is not None and nbytes > free:
        # The kernel would grant the memory, and later kill a process.
        raise MemoryError(f"a shared array of {nbytes} bytes: {free} bytes are available")
    fd = new_memory_file("unisono-pool")
    try:
        os.ftruncate(fd, nbytes)
        base = _map(fd, nbytes)
    except BaseException:
        os.close(fd)
        raise
    region = Region(uuid.uuid4().hex, fd, nbytes, base.ctypes.data, weakref.ref(base))
    _regions[region.key] = region
    weakref.finalize(base, _forget, region)
    return region, base[: empty.nbytes].view(kind).reshape(empty.shape)


def _forget(region: Region) -> None:
    _regions.pop(region.key, None)
    os.close(region.fd)


def attach(key: str, fd: int, nbytes: int) -> None:
    """Map memory of another process, and close the descriptor."""
    base = _map(fd, nbytes)
    os.close(fd)
    region = Region(key, -1, nbytes, base.ctypes.data, lambda: base)
    _regions[key] = attached[key] = region


def drop(key: str) -> None:
    """Let memory of another process go with the last array in it."""
    _regions.pop(key, None)
    attached.pop(key, None)


def _array(
    key: str, offset: int, shape: Any, strides: Any, dtype: Any, writeable: bool
) -> np.ndarray[Any, Any]:
    base = None if (region := _regions.get(key)) is None else region.base()
    if base is None:
        raise InvalidArgumentError("a shared array belongs to the pool that made it")
    # A view of `base`, not of its buffer, so that `base` lives as long as the array.
    array = np.ndarray(shape, dtype, base, offset, strides)
    array.flags.writeable = writeable
    return array


def _reference(
    array: np.ndarray[Any, Any], regions: dict[str, Region], share: _ShareRegion | None
) -> Any:
    """Return how another process finds an array, or NotImplemented if it is not shared."""
    if _regions and array.size:
        first, last = _byte_bounds(array)
        for region in list(_regions.values()):
            end = region.address + region.nbytes
            if region.address <= first and last <= end and region.base() is not None:
                if region.key not in regions:
                    if share is None or region.fd < 0:
                        continue
                    share(region)
                offset = array.ctypes.data - region.address
                how = array.shape, array.strides, array.dtype, array.flags.writeable
                return _array, (region.key, offset, *how)
    return NotImplemented


def dumps_with(
    regions: dict[str, Region],
    module: Any,
    share: _ShareRegion | None = None,
    check: Callable[[Any, Any], object] = lambda value, reduced: None,
) -> Callable[..., Any]:
    """Return a function like `pickle.dumps` that refers to shared memory.

    Args:
        regions: The memory that the process that loads the pickle has, too.
        module: pickle or cloudpickle.
        share: Gives it other memory that this process has made; None if that must be copied.
        check: Called with each object, and how it is reduced.
    """
    return dumps_by(partial(_pickler(module), regions, share, check))


@cache
def _pickler(module: Any) -> Any:
    # A class is part of a circle, so one for each call would keep what the call has.
    class Pickler(pickler_of(module)):  # type: ignore[misc]
        def __init__(self, regions: Any, share: Any, check: Any, *args: Any, **keywords: Any):
            super().__init__(*args, **keywords)
            self._regions, self._share, self._check = regions, share, check

        def reducer_override(self, value: Any) -> Any:
            if type(value) is np.ndarray:
                how = _reference(value, self._regions, self._share)
                if how is not NotImplemented:
                    return how
            above = getattr(super(), "reducer_override", None)
            reduced = NotImplemented if above is None else above(value)
            self._check(value, reduced)
            return reduced

    return Pickler
