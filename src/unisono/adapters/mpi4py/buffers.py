"""The memory of arrays: buffers, DLPack, CUDA's interface and addresses; and pickled objects."""

from __future__ import annotations

import ctypes
import math
import operator
import pickle as _pickle
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from unisono.core.platform.memory import is_readable
from unisono.errors import UnsupportedError

Bytes = npt.NDArray[np.uint8]


NONE = np.empty(0, np.uint8)


class Constant:
    """BOTTOM, IN_PLACE or BUFFER_AUTOMATIC."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name

    __reduce__ = __repr__

    def __bool__(self) -> bool:
        return self._name != "BOTTOM"

    def __int__(self) -> int:
        return 0 if self._name == "BOTTOM" else -1

    __index__ = __int__


BOTTOM, IN_PLACE, BUFFER_AUTOMATIC = map(Constant, ("BOTTOM", "IN_PLACE", "BUFFER_AUTOMATIC"))


def at_address(address: int, nbytes: int, owner: Any = None) -> Bytes:
    """Return the memory at an address, which the owner keeps or the caller vouches for."""
    if not nbytes:
        return NONE
    memory: Any = (ctypes.c_ubyte * nbytes).from_address(address)
    memory._owner = owner
    data: Bytes = np.frombuffer(memory, np.uint8)
    return data


def _exported(given: Any, writes: bool) -> tuple[Bytes, str]:
    """Return the memory of an array with DLPack or CUDA's array interface."""
    if hasattr(given, "__dlpack__"):
        device, _ = map(operator.index, given.__dlpack_device__())
        if device == 1 or not hasattr(given, "__cuda_array_interface__"):
            return _of_capsule(given, writes, {} if device == 1 else {"stream": -1})
    words = getattr(given, "__cuda_array_interface__", None)
    if words is None:
        raise TypeError(f"expecting a buffer, got {type(given).__name__}")
    (address, is_read_only), text, shape = (words[key] for key in ("data", "typestr", "shape"))
    size, strides, description = int(text[2:]), words.get("strides"), words.get("descr")
    nbytes = math.prod(shape) * size
    if text[0] not in "<>|" or words.get("mask") is not None or nbytes < 0:
        raise BufferError(f"expecting numbers without a mask, got {text!r} and shape {shape}")
    if strides is not None:
        _require_dense(shape, strides, size)
    if writes and is_read_only:
        raise BufferError("memory is not writable")
    if description is not None and [*description] != [("", text)]:
        warnings.warn("__cuda_array_interface__: ignoring 'descr'", RuntimeWarning, stacklevel=2)
    kind = np.dtype(text if text[1] in "biufc" else "B")
    _check_readable(address, nbytes)
    return at_address(address, nbytes, given), kind.char if kind.isnative else ""


def _require_dense(shape: Sequence[int], strides: Sequence[int], unit: int) -> None:
    """Refuse memory with gaps, or in another order than those of C and Fortran."""
    for step in (-1, 1):
        expected, axes = unit, list(zip(shape, strides, strict=True))[::step]
        for count, stride in axes:
            if count > 1 and stride != expected:
                break
            expected *= count
        else:
            return
    raise BufferError("expecting contiguous memory")


def _check_readable(address: int, nbytes: int) -> None:
    """Refuse memory of a GPU, unless the CPU may read it, too (pinned or managed)."""
    if nbytes and not is_readable(address, nbytes):
        raise UnsupportedError("unisono.MPI takes memory of the CPU, and this is on a GPU")


class _Tensor(ctypes.Structure):
    """DLPack's DLTensor."""

    _fields_ = [
        *(("data", ctypes.c_void_p), ("device", ctypes.c_int32 * 2), ("ndim", ctypes.c_int32)),
        *(("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)),
        *(("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64))),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Managed(ctypes.Structure):
    """DLPack's DLManagedTensor."""

    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class _Versioned(ctypes.Structure):
    """DLPack's DLManagedTensorVersioned."""

    _fields_ = [
        *(("version", ctypes.c_uint32 * 2), ("context", ctypes.c_void_p)),
        *(("deleter", ctypes.c_void_p), ("flags", ctypes.c_uint64), ("tensor", _Tensor)),
    ]


def _of_capsule(given: Any, writes: bool, how: dict[str, int]) -> tuple[Bytes, str]:
    """Return the memory of an array with DLPack.

    NumPy's own reader lacks the longest types, and says that old exports are read-only.
    """
    try:
        capsule = given.__dlpack__(max_version=(1, 0), **how)
    except TypeError:
        capsule = given.__dlpack__(**how)
    point = ctypes.pythonapi.PyCapsule_GetPointer
    point.restype, point.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    is_new = '"dltensor_versioned"' in repr(capsule)
    try:
        pointer = point(capsule, b"dltensor_versioned" if is_new else b"dltensor")
    except ValueError:
        raise BufferError("expecting a DLPack capsule that was not used") from None
    managed: Any = (_Versioned if is_new else _Managed).from_address(pointer)
    tensor, is_read_only = managed.tensor, is_new and bool(managed.flags & 1)
    if writes and is_read_only:
        raise BufferError("memory is not writable")
    if (
        (is_new and managed.version[0] != 1)
        or tensor.ndim < 0
        or (tensor.ndim and not tensor.shape)
    ):
        raise BufferError(f"expecting a tensor of DLPack 1, got {tensor.ndim} dimensions")
    shape = tensor.shape[: tensor.ndim] if tensor.ndim else []
    if (size := math.prod(shape)) < 0:
        raise BufferError(f"negative shape {shape}")
    if tensor.strides and size > 1:
        _require_dense(shape, tensor.strides[: tensor.ndim], 1)
    # Two lanes of float are a long complex number.
    letter = "c" if tensor.code == 2 and tensor.lanes == 2 else "iuf??cb"[tensor.code]
    nbytes = tensor.bits * tensor.lanes // 8
    # What is neither a number nor a truth value goes as bytes.
    code = "?" if letter == "b" else "B" if letter == "?" else np.dtype(f"{letter}{nbytes}").char
    address = (tensor.data or 0) + tensor.byte_offset
    if tensor.device[0] != 1:
        _check_readable(address, size * nbytes)
    # The capsule frees the tensor, and lives as long as this memory.
    return at_address(address, size * nbytes, (given, capsule)), code


def memory_of(given: Any, writes: bool) -> tuple[Bytes, str]:
    """Return the bytes of an array, in the order of its memory, and the code of its elements.

    The code is empty if they are in the other byte order.
    """
    array = np.asarray(given) if isinstance(given, buffer) else given
    if not isinstance(given, np.ndarray):
        try:
            with memoryview(given) as view:
                code, is_read_only = view.format, view.readonly
                if not view.contiguous:
                    raise BufferError("memory is not contiguous")
                if writes and is_read_only:
                    raise BufferError("memory is not writable")
            return np.frombuffer(given, np.uint8) if view_size(given) else NONE, _code(code)
        except TypeError:
            return _exported(given, writes)
    if not array.flags.c_contiguous:
        array = array.T
        if not array.flags.c_contiguous:
            raise ValueError("ndarray is not contiguous")
    if writes and not array.flags.writeable:
        raise BufferError("buffer source array is read-only")
    kind = array.dtype
    code = f"{kind.char}{kind.itemsize}" if kind.kind == "V" else kind.char
    code = code if kind.isnative else ""
    return array.reshape(-1).view(np.uint8) if array.size else NONE, code


def view_size(given: Any) -> int:
    """Return the bytes of an object with the buffer protocol."""
    with memoryview(given) as view:
        return view.nbytes


def _code(text: str | None) -> str:
    text = text or "B"
    if text[0] in "><!" and text[1:] not in ("b", "B", "c", "?") and text[0] != "<":
        return ""
    return text.lstrip("@=<>!")


class buffer(np.ndarray[Any, Any]):
    """Bytes, as `Alloc_mem` and windows return them."""

    _obj: Any = None

    def __new__(cls, given: Any = None) -> buffer:
        return cls.frombuffer(given) if given is not None else cls._of(NONE)

    @classmethod
    def _of(cls, data: Bytes, obj: Any = None, readonly: bool = False) -> buffer:
        self = data.view(cls)
        self._obj = obj
        if readonly:
            self.flags.writeable = False
        return self

    @staticmethod
    def allocate(nbytes: int, clear: bool = False) -> buffer:
        """Return new memory."""
        size = operator.index(nbytes)
        if size < 0:
            raise ValueError("expecting non-negative size")
        data = np.zeros(size, np.uint8) if clear else np.empty(size, np.uint8)
        return buffer._of(data, data)

    @staticmethod
    def frombuffer(obj: Any, readonly: bool = False) -> buffer:
        """Return the memory of an array."""
        data, _ = memory_of(obj, False)
        return buffer._of(data, obj, readonly)

    @staticmethod
    def fromaddress(address: int, nbytes: int, readonly: bool = False) -> buffer:
        """Return the memory at an address."""
        if nbytes < 0:
            raise ValueError("expecting non-negative buffer length")
        if not address and nbytes:
            raise ValueError("expecting non-NULL address")
        return buffer._of(at_address(address, nbytes), None, readonly)

    address = property(lambda self: self.__array_interface__["data"][0] if len(self) else 0)
    obj = property(lambda self: self._obj)
    readonly = property(lambda self: not self.flags.writeable)
    format = property(lambda self: "B")

    def __bool__(self) -> bool:
        return len(self) > 0

    def __getitem__(self, item: Any) -> Any:
        if isinstance(item, slice):
            if item.step not in (None, 1):
                raise IndexError("slice with step not supported")
            return buffer._of(np.asarray(self)[item], self._obj)
        return int(np.asarray(self)[operator.index(item)])

    def __setitem__(self, item: Any, value: Any) -> None:
        if self.readonly:
            raise TypeError("memory buffer is read-only")
        if not isinstance(item, slice):
            np.asarray(self)[operator.index(item)] = value
            return
        if item.step not in (None, 1):
            raise IndexError("slice with step not supported")
        data = value if isinstance(value, int) else memory_of(value, False)[0]
        target = np.asarray(self)[item]
        if not isinstance(data, int) and len(data) != len(target):
            raise ValueError("slice length does not match buffer")
        target[:] = data

    def cast(self, format: str, *shape: Any) -> memoryview:
        """Return the memory as elements."""
        flat: Any = memoryview(np.asarray(self).data)
        made: memoryview = flat.cast(format, *shape)
        return made

    def tobytes(self, order: Any = None) -> bytes:
        """Return a copy."""
        return np.asarray(self).tobytes()

    def toreadonly(self) -> buffer:
        """Return the memory, not to be written."""
        return buffer._of(np.asarray(self), self._obj, True)

    def release(self) -> None:
        """Forget the owner; the memory lives as long as this object."""
        self._obj = None

    def __eq__(self, other: object) -> Any:
        if other is None or isinstance(other, Constant):
            return False
        return bool(np.array_equal(np.asarray(self), memory_of(other, False)[0]))

    def __ne__(self, other: object) -> Any:
        return not self == other

    __hash__ = None


# ---- objects ----


class Pickle:
    """Makes bytes of objects."""

    PROTOCOL: int | None = _pickle.HIGHEST_PROTOCOL
    _threshold = 1 << 18

    def __init__(self, dumps: Any = None, loads: Any = None, protocol: Any = None) -> None:
        self._dumps, self._loads = dumps or _pickle.dumps, loads or _pickle.loads
        self.PROTOCOL = protocol if dumps or protocol else _pickle.HIGHEST_PROTOCOL

    def dumps(self, obj: Any) -> bytes:
        """Return the bytes of an object."""
        protocol = () if self.PROTOCOL is None else (self.PROTOCOL,)
        made: bytes = self._dumps(obj, *protocol)
        return made

    def loads(self, data: Any) -> Any:
        """Return the object of bytes."""
        return self._loads(data)

    @property
    def THRESHOLD(self) -> int:
        """Bytes from which on a buffer is kept apart; None sets the default."""
        return self._threshold

    @THRESHOLD.setter
    def THRESHOLD(self, value: int | None) -> None:
        self._threshold = 1 << 18 if value is None else value

    def dumps_oob(self, obj: Any) -> tuple[bytes, list[Any]]:
        """Return the bytes of an object, and its large buffers."""
        buffers: list[Any] = []

        def keep(each: Any) -> bool:
            raw = each.raw()
            if raw.nbytes < self.THRESHOLD:
                return True
            buffers.append(buffer.frombuffer(raw))
            return False

        made: bytes = self._dumps(obj, max(self.PROTOCOL or 5, 5), buffer_callback=keep)
        return made, buffers

    def loads_oob(self, data: Any, buffers: Any) -> Any:
        """Return the object of bytes and buffers."""
        return self._loads(data, buffers=buffers)


pickle = Pickle()


class ProgramPickle:
    """The program's pickle, for unisono's calls for objects."""

    name = "mpi4py"

    def dumps(self, obj: Any) -> tuple[bytes, Sequence[memoryview]]:
        """Return the bytes of an object."""
        return pickle.dumps(obj), ()

    def loads(self, header: bytes, buffers: Sequence[Any]) -> Any:
        """Return the object of bytes."""
        return pickle.loads(header)


_own_serializer: Any = ProgramPickle()


def serializer() -> Any:
    """Return the program's pickle if it has changed it; None: unisono's, which copies no array."""
    is_usual = pickle._dumps is _pickle.dumps and pickle._loads is _pickle.loads
    return None if is_usual and pickle.PROTOCOL == _pickle.HIGHEST_PROTOCOL else _own_serializer


def bytes_of(obj: Any) -> Bytes:
    """Return the bytes of an object."""
    return np.frombuffer(pickle.dumps(obj), np.uint8)
