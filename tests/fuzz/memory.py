"""Arrays in memory of all layouts, each with what the whole memory must be after a call."""

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
AROUND = 0xA5


class Memory:
    """An array somewhere in a memory whose other bytes nobody may touch.

    Attributes:
        handed: What the call gets.
    """

    def __init__(self, draw: np.random.Generator, before: Array, after: Array, shape: str) -> None:
        plain = draw.random() < 0.4
        self.dtype, self.count = before.dtype, before.size
        self.offset = 0 if plain else int(draw.choice([0, 1, self.dtype.itemsize, 64]))
        self.step = 1 if plain else int(draw.choice([1, 1, 2, -1]))
        self.swapped = not plain and draw.random() < 0.15
        self.shape: tuple[int, ...] = (self.count,)
        if shape == "2d":
            self.shape = (1, self.count) if self.count % 2 else (2, self.count // 2)
        self.order = str(draw.choice(["C", "F"]))
        room = self.offset + self.count * self.dtype.itemsize * abs(self.step) + 64
        self.memory = np.full(room, AROUND, np.uint8)
        self.handed: Any = self._array_in(self.memory)
        self.handed[...] = before.reshape(self.shape)
        self.wanted = self.memory.copy()
        self._array_in(self.wanted)[...] = after.reshape(self.shape)
        native = not self.swapped and self.offset % self.dtype.itemsize == 0
        if native and self.dtype.kind in "iu" and draw.random() < 0.1:
            self.handed = memoryview(self.handed)

    def _array_in(self, memory: Array) -> Any:
        """Return the array of this layout that lies in `memory`."""
        nbytes = self.count * self.dtype.itemsize * abs(self.step)
        dtype = self.dtype.newbyteorder("S") if self.swapped else self.dtype
        flat = memory[self.offset : self.offset + nbytes].view(dtype)[:: self.step]
        return flat.reshape(self.shape, order=self.order)  # type: ignore[call-overload]

    def check(self) -> None:
        """Compare every byte.

        Raises:
            AssertionError: With the first elements that differ, or what was written around them.
        """
        if np.array_equal(self.memory, self.wanted):
            return
        got, wanted = (
            np.asarray(self._array_in(each)).ravel() for each in (self.memory, self.wanted)
        )
        at = np.flatnonzero(got != wanted)
        where = f"{self.dtype} offset {self.offset} step {self.step} {self.shape} {self.order}"
        if not at.size:
            raise AssertionError(f"bytes around the array were written: {where}")
        raise AssertionError(
            f"{at.size} of {self.count} elements differ, the first at {at[0]}: "
            f"got {got[at[:4]]}, expected {wanted[at[:4]]}; {where}"
        )
