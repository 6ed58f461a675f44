"""Arrays of a GPU, through torch or CuPy.

Arrays of other libraries (numba, JAX, ...) are taken over by CuPy or torch without a copy. The
addresses of an array stand in a NumPy array without readable memory, a *shadow*. So the checks of
`backends.flat` for overlapping memory hold for arrays of a GPU, too. No code may read a shadow.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np

from unisono.core.base.buffers import Array, BufferView, overlaps_itself
from unisono.core.base.types import DType, RedOpType, dtype_named, dtype_of_numpy
from unisono.errors import ArgumentTypeError, InvalidArgumentError, UnsupportedError

# The names that NumPy, torch and CuPy have in common.
_UFUNCS = {
    **dict.fromkeys((RedOpType.SUM, RedOpType.AVG, RedOpType.PREMUL_SUM), "add"),
    **{RedOpType.PRODUCT: "multiply", RedOpType.MIN: "minimum", RedOpType.MAX: "maximum"},
    **{RedOpType.BAND: "bitwise_and", RedOpType.BOR: "bitwise_or", RedOpType.BXOR: "bitwise_xor"},
}


class ArrayLibrary(Protocol):
    """torch or CuPy; copies and reductions run in the library's current stream."""

    def dtype(self, x: Any) -> DType:
        """Return the element type of an array."""

    def index(self, x: Any) -> int:
        """Return the number of the array's GPU."""

    def shadow(self, x: Any) -> Array:
        """Return the addresses of the elements."""

    def is_lazy(self, x: Any) -> bool:
        """Whether the memory has other values than the array, such as a lazy conjugate."""

    def current_stream(self, index: int) -> int:
        """Return the handle of the current stream of a GPU."""

    def on(self, index: int, handle: int) -> AbstractContextManager[object]:
        """Make a stream current inside the block."""

    def empty(self, x: Any, count: int) -> Any:
        """Return a new flat array of the dtype and GPU of `x`."""

    def at(self, address: int, count: int, dtype: DType, index: int) -> Any:
        """Return the memory at an address as a flat array."""

    def reduce(self, op: RedOpType, into: Any, other: Any) -> None:
        """Set `into` to its reduction with `other`."""

    def scale(self, x: Any, by: float) -> None:
        """Multiply in place."""

    def divide(self, x: Any, by: int) -> None:
        """Divide in place; integers are rounded toward zero."""


class _Interface:
    """Memory at an address, for the array interfaces of NumPy and of CUDA."""

    def __init__(self, address: int, shape: tuple[int, ...], strides: Any, kind: str) -> None:
        parts = {"version": 3, "shape": shape, "strides": strides, "typestr": kind}
        self.__array_interface__ = self.__cuda_array_interface__ = {
            **parts,
            "data": (address, False),
        }


def shadow_at(address: int, shape: tuple[int, ...], strides: Any, dtype: DType) -> Array:
    """Return the addresses of elements of a GPU; strides in bytes, None for C order."""
    if 0 in shape:
        return np.empty(shape, dtype.storage)
    return np.asarray(_Interface(address, shape, strides, dtype.storage.str))


def address_of(shadow: Array) -> int:
    """Return the address of the first element."""
    return int(shadow.__array_interface__["data"][0])


class _Torch:
    """torch, which its user has imported."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch

    def dtype(self, x: Any) -> DType:
        return dtype_named(str(x.dtype).removeprefix("torch."))

    def index(self, x: Any) -> int:
        return int(x.device.index)

    def shadow(self, x: Any) -> Array:
        dtype = self.dtype(x)
        strides = tuple(dtype.itemsize * stride for stride in x.stride())
        return shadow_at(x.data_ptr(), tuple(x.shape), strides, dtype)

    def is_lazy(self, x: Any) -> bool:
        return bool(x.is_conj() or x.is_neg())

    def current_stream(self, index: int) -> int:
        return int(self._torch.cuda.current_stream(index).cuda_stream)

    def on(self, index: int, handle: int) -> AbstractContextManager[object]:
        cuda = self._torch.cuda
        made: AbstractContextManager[object] = cuda.stream(cuda.ExternalStream(handle, index))
        return made

    def empty(self, x: Any, count: int) -> Any:
        return x.new_empty(count)

    def at(self, address: int, count: int, dtype: DType, index: int) -> Any:
        # The interface has no bfloat16, so the elements are bytes first.
        memory = _Interface(address, (count * dtype.itemsize,), None, "|u1")
        flat = self._torch.as_tensor(memory, device=f"cuda:{index}")
        return flat.view(getattr(self._torch, dtype.name))

    def reduce(self, op: RedOpType, into: Any, other: Any) -> None:
        # torch computes with signed integers only. They have the same sums, products and bits,
        # and with the top bit flipped the same order.
        torch, ufunc, flip = self._torch, getattr(self._torch, _UFUNCS[op]), 0
        if str(into.dtype) in ("torch.uint16", "torch.uint32", "torch.uint64"):
            signed = getattr(torch, str(into.dtype).removeprefix("torch.u"))
            into, other = into.view(signed), other.view(signed)
            if op in (RedOpType.MIN, RedOpType.MAX):
                flip = torch.iinfo(signed).min
                into.bitwise_xor_(flip)
                other = torch.bitwise_xor(other, flip)
        ufunc(into, other, out=into)
        if flip:
            into.bitwise_xor_(flip)

    def scale(self, x: Any, by: float) -> None:
        x.mul_(by)

    def divide(self, x: Any, by: int) -> None:
        if x.dtype.is_floating_point or x.dtype.is_complex:
            x.div_(by)
        else:
            wide = x.long() if x.element_size() < 8 else x
            x.copy_(self._torch.div(wide, by, rounding_mode="trunc"))


class _CuPy:
    """CuPy."""

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy

    def dtype(self, x: Any) -> DType:
        return dtype_of_numpy(x.dtype)

    def index(self, x: Any) -> int:
        return int(x.device.id)

    def shadow(self, x: Any) -> Array:
        return shadow_at(int(x.data.ptr), tuple(x.shape), tuple(x.strides), self.dtype(x))

    def is_lazy(self, x: Any) -> bool:
        return False

    def current_stream(self, index: int) -> int:
        return int(self._cupy.cuda.get_current_stream(index).ptr)

    def on(self, index: int, handle: int) -> AbstractContextManager[object]:
        made: AbstractContextManager[object] = self._cupy.cuda.ExternalStream(handle, index)
        return made

    def empty(self, x: Any, count: int) -> Any:
        with x.device:
            return self._cupy.empty(count, x.dtype)

    def at(self, address: int, count: int, dtype: DType, index: int) -> Any:
        with self._cupy.cuda.Device(index):
            return self._cupy.asarray(_Interface(address, (count,), None, dtype.storage.str))

    def reduce(self, op: RedOpType, into: Any, other: Any) -> None:
        getattr(self._cupy, _UFUNCS[op])(into, other, out=into)

    def scale(self, x: Any, by: float) -> None:
        self._cupy.multiply(x, by, out=x)

    def divide(self, x: Any, by: int) -> None:
        if x.dtype.kind not in "iu":
            self._cupy.divide(x, by, out=x)
            return
        # Floor division rounds down; a negative number with a remainder is then 1 too small.
        below = (x < 0) & (x % by != 0)
        self._cupy.floor_divide(x, by, out=x)
        self._cupy.add(x, below, out=x, casting="unsafe")


def loaded_libraries(modules: Mapping[str, Any]) -> list[ArrayLibrary]:
    """Return the libraries that a program has imported, and that see a GPU."""
    torch, cupy = modules.get("torch"), modules.get("cupy")
    made: list[ArrayLibrary] = [] if cupy is None else [_CuPy(cupy)]
    return [*made, _Torch(torch)] if torch is not None and torch.cuda.is_available() else made


def taken_over(obj: Any, *, write: bool, name: str) -> tuple[ArrayLibrary, Any]:
    """Return the library of an array, and the array as its library knows it.

    Raises:
        ArgumentTypeError: No array of a GPU.
        InvalidArgumentError: `write`, but the array is read-only.
        UnsupportedError: CuPy or torch is needed to take the array over, and neither is there.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(obj, torch.Tensor):
        return _Torch(torch), obj
    cupy = sys.modules.get("cupy")
    if cupy is not None and isinstance(obj, cupy.ndarray):
        return _CuPy(cupy), obj
    interface = getattr(obj, "__cuda_array_interface__", None)
    if interface is None and not hasattr(obj, "__dlpack__"):
        raise ArgumentTypeError(f"{name} must be an array of a GPU, got {type(obj).__name__}")
    # Arrays of JAX, which have DLPack only, must not be changed.
    if write and (interface is None or interface["data"][1]):
        raise InvalidArgumentError(f"{name} is read-only but the operation writes into it")
    library: ArrayLibrary
    if cupy is None and torch is not None:
        made = torch.from_dlpack(obj) if interface is None else torch.as_tensor(obj, device="cuda")
        library = _Torch(torch)
    else:
        try:
            cupy = importlib.import_module("cupy")
        except ImportError as error:
            raise UnsupportedError(
                f"{name} is a {type(obj).__name__}, which takes CuPy or torch to read: {error}"
            ) from error
        made = cupy.from_dlpack(obj) if interface is None else cupy.asarray(obj)
        library = _CuPy(cupy)
    address = address_of(library.shadow(made))
    if interface is not None and 0 not in made.shape and address != interface["data"][0]:
        # Both libraries copy an array of another GPU; a result would go to the copy.
        raise InvalidArgumentError(f"{name} is not on the current GPU {library.index(made)}")
    return library, made


class GPUView(BufferView):
    """An array of a GPU as flat memory; `array` and `memory` are shadows.

    Attributes:
        library: Of the array.
        index: Number of its GPU.
    """

    __slots__ = ("index", "library", "made")

    def __init__(
        self, library: ArrayLibrary, x: Any, owner: object, *, write: bool, name: str
    ) -> None:
        memory, dtype = library.shadow(x), library.dtype(x)
        self.library, self.index, self.made = library, library.index(x), x
        if write and not memory.flags.c_contiguous and overlaps_itself(memory):
            raise InvalidArgumentError(
                f"{name} overlaps itself (shape {list(memory.shape)}, strides "
                f"{list(memory.strides)}), so it has no single place for a result"
            )
        read: Callable[[Array], None] | None = None
        unpack: Callable[[Array], None] | None = None
        array = memory.reshape(-1) if memory.flags.c_contiguous else memory
        if not memory.flags.c_contiguous or library.is_lazy(x):
            x = getattr(x, "detach", lambda: x)()  # autograd must not see the copies
            copy = library.empty(x, memory.size)
            shaped = copy.reshape(memory.shape)
            self.made, array = (x, copy), library.shadow(copy)

            def read(flat: Array) -> None:
                shaped[...] = x

            def write_back(flat: Array) -> None:
                x[...] = shaped

            unpack = write_back if write else None
        super().__init__(array, dtype, memory.shape, owner, read, unpack, memory)


def view(obj: Any, *, write: bool, name: str = "tensor", pack: bool = True) -> GPUView:
    """Return an array of a GPU as flat memory; the arguments are those of `base.buffers.view`."""
    library, x = taken_over(obj, write=write, name=name)
    return GPUView(library, x, obj, write=write, name=name)
