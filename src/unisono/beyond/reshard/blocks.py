"""int8 in blocks: how floating elements move if a reshard is asked for int8; no I/O.

A block is up to 128 elements of the last dimension: the columns between two borders. These are the
multiples of 128 and the sides of the boxes of all sources. So a rank that has an element of a block
has the block, and each element becomes the same value on all ranks, whoever sends it.

The codes are those of `core.engines.block_codes`. What float32 cannot hold becomes infinite.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from unisono.beyond.boxes import IndexBox
from unisono.core.engines.block_codes import BLOCK, BLOCK_CODES
from unisono.core.engines.kernels import widen
from unisono.core.schedules.ir import IntArray

_INT8 = BLOCK_CODES["int8"]
_MOST = np.finfo(np.float32).max


def borders_of(n: int, boxes: Sequence[IndexBox]) -> IntArray:
    """Return the borders between the blocks of a last dimension of n, from 0 to n."""
    return borders_from(n, [side for box in boxes for side in (box.begins[-1], box.ends[-1])])


def borders_from(n: int, sides: Sequence[int]) -> IntArray:
    """Return the borders between the blocks of a last dimension of n that has these sides."""
    every = np.arange(0, n, BLOCK, dtype=np.int64)
    borders: IntArray = np.concatenate((every, np.array([*sides, n], np.int64)))
    # Not np.unique, which takes seconds for millions.
    borders.sort(kind="stable")
    is_last = np.append(borders[:-1] != borders[1:], True)
    return np.asarray(borders[is_last], np.int64)


class BlockedBox(NamedTuple):
    """A box and its blocks.

    Attributes:
        shape: Of the box.
        wide: The box, with all elements of its blocks.
        starts: Where the blocks begin in a row of the wide box.
        inner: Where the box is in such a row.
        counts: The elements of the box in each block of a row.
    """

    shape: tuple[int, ...]
    wide: IndexBox
    starts: IntArray
    inner: slice
    counts: IntArray

    @classmethod
    def of(cls, box: IndexBox, borders: IntArray) -> BlockedBox:
        """Return the blocks of a box."""
        begin, end = box.begins[-1], box.ends[-1]
        first = int(np.searchsorted(borders, begin, "right")) - 1
        edges = borders[first : int(np.searchsorted(borders, end)) + 1]
        low, high = int(edges[0]), int(edges[-1])
        wide = IndexBox((*box.begins[:-1], low), (*box.ends[:-1], high))
        inside: IntArray = np.clip(edges, begin, end)
        counts = inside[1:] - inside[:-1]
        return cls(box.shape, wide, edges[:-1] - low, slice(begin - low, end - low), counts)

    @property
    def nbytes(self) -> int:
        """Size of the scales and codes."""
        rows = int(np.prod(self.shape[:-1], dtype=np.int64))
        return rows * (4 * len(self.starts) + self.shape[-1])

    def split(self, memory: Any) -> tuple[Any, Any]:
        """Return the scales and the codes in the memory of a packed box."""
        scales = np.ndarray((*self.shape[:-1], len(self.starts)), np.float32, memory)
        return scales, np.ndarray(self.shape, np.int8, memory, scales.nbytes)

    def pack(self, is_bfloat16: bool, into: Any, source: Any) -> None:
        """Write scales and codes; `source` is the memory of the wide box."""
        scales, codes = self.split(into)
        with np.errstate(all="ignore"):
            values = widen(source) if is_bfloat16 else source
            if values.dtype == np.float16:
                values = values.astype(np.float32)
            sizes = np.abs(values)
            finite = sizes <= _MOST
            sizes[~finite] = 0
            scales[...] = _INT8.scales(np.maximum.reduceat(sizes, self.starts, axis=-1))
            quotients = values[..., self.inner] / np.repeat(scales, self.counts, axis=-1)
            quotients[~finite[..., self.inner]] *= np.inf
            _INT8.encode(quotients, codes, False)

    def unpack(self, convert: Any, into: Any, packed: Any) -> None:
        """Fill the memory of the box; `convert` makes its dtype from float32."""
        scales, codes = self.split(packed)
        values = np.empty(self.shape, np.float32)
        with np.errstate(all="ignore"):
            _INT8.decode(codes, values)
            values *= np.repeat(scales, self.counts, axis=-1)
        convert(into, values)
