"""View any array-like object as flat memory that an engine can use.

Rule 1: the module never imports torch. A tensor exists only if its user imported torch, so
`sys.modules` has it.
Rule 2: an engine gets contiguous elements in C order. An array with another layout (strided,
negative stride, Fortran order, unaligned, foreign byte order) is packed into a copy. The copy is
unpacked when the operation is done. Gloo reads the first `numel` elements of the storage instead,
which gives wrong results for strided tensors.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from unisono.core.base.types import DType, dtype_of_numpy, dtype_of_torch
from unisono.errors import ArgumentTypeError, InvalidArgumentError, UnsupportedError

Array = np.ndarray[Any, Any]

_PANDAS = "pass a writable copy; of a pandas object: values = df.to_numpy(copy=True)"
_OBJECTS = "make it an array first; objects have calls of their own, such as all_reduce_object"
_DLPACK_DEVICES = {1: "cpu", 2: "cuda", 3: "cpu", 8: "metal", 10: "rocm", 13: "cpu", 14: "xpu"}


class BufferView:
    """Flat, contiguous memory of one array, and the copies from and to its owner.

    Attributes:
        array: [count] contiguous; aliases the owner's memory unless `packed`.
        dtype: Element type.
        shape: Shape of the owner.
        owner: The object that the user passed; this view keeps it alive.
        packed: Whether `array` is a copy that `pack` fills and `unpack` writes back.
        memory: [...] the owner's memory in its own layout; `array` itself unless `packed`.
    """

    __slots__ = ("_read", "_write_back", "array", "dtype", "memory", "owner", "packed", "shape")

    def __init__(
        self,
        array: Array,
        dtype: DType,
        shape: tuple[int, ...],
        owner: object,
        read: Callable[[Array], None] | None = None,
        write_back: Callable[[Array], None] | None = None,
        memory: Array | None = None,
    ) -> None:
        self.array = array
        self.memory = array if memory is None else memory
        self.dtype = dtype
        self.shape = shape
        self.owner = owner
        self.packed = read is not None
        self._read = read
        self._write_back = write_back

    @property
    def count(self) -> int:
        """Number of elements."""
        return int(self.array.size)

    @property
    def nbytes(self) -> int:
        return int(self.array.nbytes)

    def pack(self) -> None:
        """Copy the owner's current elements into `array`; do nothing for an alias."""
        if self._read is not None:
            self._read(self.array)

    def unpack(self) -> None:
        """Copy the packed elements back into the owner, if the view was made with `write`."""
        if self._write_back is not None:
            self._write_back(self.array)

    def __repr__(self) -> str:
        kind = "packed " if self.packed else ""
        return f"<BufferView {kind}{self.dtype}{list(self.shape)}>"


def is_torch(obj: object) -> bool:
    """Return whether an object is a tensor of torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(obj, getattr(torch, "Tensor", ()))


def as_bytes(array: Array) -> memoryview:
    """Return the bytes of a flat contiguous array without copying."""
    return array.view(np.uint8).data


def device_of(obj: Any) -> str:
    """Return the device type of an array: "cpu", "cuda", or the name that the array has for it."""
    if isinstance(obj, (np.ndarray, bytearray, memoryview, bytes)):
        return "cpu"
    kind = device_type(getattr(obj, "device", None))
    if kind:
        return kind
    if hasattr(obj, "__dlpack_device__"):
        code = int(obj.__dlpack_device__()[0])
        return _DLPACK_DEVICES.get(code, f"dlpack{code}")
    return "cuda" if hasattr(obj, "__cuda_array_interface__") else "cpu"


def dtype_name_of(array: Any) -> str:
    """Return the name of an array's or tensor's dtype; of anything else that of its type."""
    return str(getattr(array, "dtype", type(array).__name__)).removeprefix("torch.")


def device_type(device: Any) -> str:
    """Return the type of a text such as "cuda:1" or of a torch.device; "" of another object."""
    kind = getattr(device, "type", device)
    return kind.partition(":")[0] if isinstance(kind, str) else ""


def view(obj: Any, *, write: bool, name: str = "tensor", pack: bool = True) -> BufferView:
    """Return `obj` as flat memory.

    Args:
        obj: NumPy array, torch CPU tensor, DLPack CPU array, or anything with the buffer protocol
            (bytearray, memoryview, array.array, mmap).
        write: Whether the operation writes into it.
        name: Name of the argument in errors.
        pack: Whether to fill a copy at once; otherwise the caller must call `BufferView.pack`.

    Raises:
        ArgumentTypeError: The object is not an array.
        InvalidArgumentError: `write`, but the memory is read-only or overlaps itself.
        UnsupportedError: The dtype, layout or device cannot be used.
    """
    made = _view(obj, write, name)
    if pack:
        made.pack()
    return made


def _view(obj: Any, write: bool, name: str) -> BufferView:
    if isinstance(obj, np.ndarray):
        return _view_numpy(obj, dtype_of_numpy(obj.dtype), obj, write, name)
    if is_torch(obj):
        return _view_torch(obj, write, name)
    if isinstance(obj, np.generic):
        raise ArgumentTypeError(
            f"{name} is a NumPy scalar ({obj.dtype}), which cannot be written in place",
            hint="pass a 0-d array: np.asarray(x)",
        )
    if hasattr(obj, "__dlpack__"):
        if (device := device_of(obj)) != "cpu":
            raise UnsupportedError(f"{name} is on device {device!r}; this engine needs CPU memory")
        array = np.from_dlpack(obj)
        return _view_numpy(array, dtype_of_numpy(array.dtype), obj, write, name)
    if hasattr(obj, "__array_interface__"):
        array = np.asarray(obj)
        return _view_numpy(array, dtype_of_numpy(array.dtype), obj, write, name)
    array = _array_of_buffer(obj, name)
    return _view_numpy(array, dtype_of_numpy(array.dtype), obj, write, name)


def _array_of_buffer(obj: Any, name: str) -> Array:
    """Return an object with the buffer protocol (bytearray, array.array, ...) as an array."""
    try:
        buffer = memoryview(obj)
    except TypeError:
        hint = _PANDAS if type(obj).__module__.startswith("pandas.") else None
        raise ArgumentTypeError(
            f"{name} must be an array (NumPy, torch, DLPack, buffer), got {type(obj).__name__}",
            hint=_OBJECTS if isinstance(obj, int | float | list | tuple | dict) else hint,
        ) from None
    try:
        return np.asarray(buffer)
    except ValueError:
        raise UnsupportedError(
            f"{name} is a buffer of format {buffer.format!r}, which NumPy does not know"
        ) from None


def _view_numpy(array: Array, dtype: DType, owner: object, write: bool, name: str) -> BufferView:
    shape, flags = array.shape, array.flags
    if write:
        if not flags.writeable:
            raise InvalidArgumentError(
                f"{name} is read-only but the operation writes into it", hint=_PANDAS
            )
        if not flags.c_contiguous and overlaps_itself(array):
            raise InvalidArgumentError(
                f"{name} overlaps itself (shape {list(shape)}, strides {list(array.strides)}), so "
                "it has no single place for a result"
            )
    plain = array
    if type(array) is not np.ndarray:
        # np.matrix and masked arrays change what reshape returns.
        plain = array.view(np.ndarray)
        if isinstance(array, np.ma.MaskedArray):
            raise UnsupportedError(f"{name} is a masked array; pass its .data and .mask separately")
    if flags.c_contiguous and flags.aligned and plain.dtype.isnative:
        flat = plain if plain.ndim == 1 else plain.reshape(-1)
        if flat.dtype is not dtype.storage:
            flat = flat.view(dtype.storage)
        return BufferView(flat, dtype, shape, owner)
    native = plain.dtype.newbyteorder("=")

    def read(flat: Array) -> None:
        np.copyto(flat.view(native).reshape(shape), plain)

    def write_back(flat: Array) -> None:
        np.copyto(plain, flat.view(native).reshape(shape))

    flat = np.empty(plain.size, dtype.storage)
    return BufferView(flat, dtype, shape, owner, read, write_back if write else None, plain)


def overlaps_itself(array: Array) -> bool:
    """Return whether two elements may share memory; read none.

    They cannot if each stride is at least the extent of all dimensions with smaller strides.
    """
    end = array.itemsize
    for stride, n in sorted(zip(map(abs, array.strides), array.shape, strict=True)):
        if n > 1 and stride < end:
            return True
        end += stride * (n - 1)
    return False


def _view_torch(tensor: Any, write: bool, name: str) -> BufferView:
    torch = sys.modules["torch"]
    if tensor.device.type != "cpu":
        raise UnsupportedError(
            f"{name} is on device {tensor.device.type!r}; this engine needs CPU memory"
        )
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        raise _other_tensor(tensor, name)
    dtype = dtype_of_torch(tensor.dtype)
    if tensor.is_conj() or tensor.is_neg():
        # A lazy conjugate shares its base's memory but not its values.
        data, shape = tensor.detach(), tuple(tensor.shape)

        def read(flat: Array) -> None:
            torch.from_numpy(flat.view(np.uint8)).view(data.dtype).reshape(shape).copy_(data)

        def write_back(flat: Array) -> None:
            data.copy_(torch.from_numpy(flat.view(np.uint8)).view(data.dtype).reshape(shape))

        flat = np.empty(tensor.numel(), dtype.storage)
        return BufferView(flat, dtype, shape, tensor, read, write_back if write else None)
    return _view_numpy(alias_torch(tensor, dtype, name), dtype, tensor, write, name)


def _other_tensor(tensor: Any, name: str) -> UnsupportedError:
    """Return the error for a tensor that is not dense."""
    if tensor.is_nested:
        return UnsupportedError(
            f"{name} is a nested tensor; only dense tensors are supported",
            hint="pass its parts, tensor.unbind(), in calls of their own, or tensor.values()",
        )
    if tensor.is_quantized:
        return UnsupportedError(
            f"{name} is quantized ({str(tensor.dtype).removeprefix('torch.')}); only tensors "
            "without a scale are supported",
            hint="pass tensor.int_repr(), and the scale and zero point in a call of their own",
        )
    return UnsupportedError(f"{name} has layout {tensor.layout}; only dense tensors are supported")


def alias_torch(tensor: Any, dtype: DType, name: str, *, keep: bool = True) -> Array:
    """Return the memory of a dense CPU tensor as an array of its storage type.

    `tensor.numpy()` would forbid torch to resize the memory, but FSDP frees and allocates it again
    in each step. The array keeps the memory if `keep`, also when the tensor gets other memory.
    """
    shape, itemsize = tuple(tensor.shape), dtype.itemsize
    if not tensor.numel():
        return np.empty(shape, dtype.storage)
    strides = [itemsize * stride for stride in tensor.stride()]
    # torch has no negative strides, so the first element has the lowest address.
    nbytes = itemsize + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    # A view of freed memory has its offset as address, and Linux maps no page below 64 KiB.
    if (address := tensor.data_ptr()) < 1 << 16:
        raise InvalidArgumentError(f"{name} has no memory of its own ({type(tensor).__name__})")
    memory: Any = (ctypes.c_char * nbytes).from_address(address)
    if keep:
        memory.owner = tensor.untyped_storage()
    return np.ndarray(shape, dtype.storage, memory, 0, strides)
