"""Lists of arrays that stand for their concatenation, as INPUT or OUTPUT of a program."""

from __future__ import annotations

import numpy as np

from unisono.core.base.buffers import Array

ArrayOrList = Array | list[Array] | None
"""[count] contiguous, or several such arrays of one dtype; None: the program has no such buffer."""


def are_even(memory: ArrayOrList) -> bool:
    """Whether the memory is not a list, or a list of arrays of equal size."""
    return not isinstance(memory, list) or all(each.size == memory[0].size for each in memory)


def concatenated(memory: ArrayOrList) -> Array | None:
    """Return a list as one array: its own memory if its arrays are adjacent, else a copy."""
    if not isinstance(memory, list):
        return memory
    together = adjacent(memory)
    return np.concatenate(memory) if together is None else together


def copy_back(array: Array | None, memory: ArrayOrList) -> None:
    """Copy the array that `concatenated` returned into the list, unless they share memory."""
    if array is None or not isinstance(memory, list):
        return
    at = 0
    for part in memory:
        if not np.may_share_memory(part, array):
            part[:] = array[at : at + part.size]
        at += part.size


def adjacent(parts: list[Array]) -> Array | None:
    """Return adjacent arrays as one array, or None if they are not adjacent."""
    full = [part for part in parts if part.size]
    if not full:
        return None
    end = None
    for array in full:
        start = array.__array_interface__["data"][0]
        if end not in (None, start):
            return None
        end = start + array.nbytes
    first, count = full[0], sum(array.size for array in full)
    return np.lib.stride_tricks.as_strided(first, (count,), (first.itemsize,))
