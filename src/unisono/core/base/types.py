"""Value types: reduce operations, element types, and what counts as an array."""

from __future__ import annotations

import enum
import zlib
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeAlias

import numpy as np

from unisono.core.base.text import AbsentName, did_you_mean
from unisono.errors import ArgumentTypeError, InvalidArgumentError, UnsupportedError


class SupportsDLPack(Protocol):
    """An object with DLPack."""

    def __dlpack__(self) -> Any: ...


class SupportsBuffer(Protocol):
    """An object with the buffer protocol; `collections.abc.Buffer` from Python 3.12 on."""

    def __buffer__(self, flags: int, /) -> memoryview: ...


Array: TypeAlias = SupportsDLPack | SupportsBuffer
"""What an operation takes, for type checkers: a NumPy array, a torch tensor, or any object with
DLPack or the buffer protocol (bytearray, memoryview, array.array, mmap)."""
Arrays: TypeAlias = Sequence[Array]
"""A list of arrays, for instance one for each rank."""
Function: TypeAlias = Callable[[Any, Any], Any]
"""Combines two operands, for reductions by a function."""


class RedOpType(enum.IntEnum):
    """The reduce operations, numbered as in torch.distributed 2.13."""

    SUM = 0
    AVG = 1
    PRODUCT = 2
    MIN = 3
    MAX = 4
    BAND = 5
    BOR = 6
    BXOR = 7
    PREMUL_SUM = 8


@dataclass(frozen=True)
class ReduceOp:
    """A reduce operation, which combines the contributions of ranks: SUM, AVG, PRODUCT, MIN, ...

    AVG is SUM divided by the number of ranks (integers: rounded toward zero).
    `ReduceOp.PREMUL_SUM(f)` multiplies every contribution by `f` before the sum.
    Calls take a ReduceOp of torch.distributed, too.
    """

    op: RedOpType
    factor: float | None = None

    SUM: ClassVar[ReduceOp]
    AVG: ClassVar[ReduceOp]
    PRODUCT: ClassVar[ReduceOp]
    MIN: ClassVar[ReduceOp]
    MAX: ClassVar[ReduceOp]
    BAND: ClassVar[ReduceOp]
    BOR: ClassVar[ReduceOp]
    BXOR: ClassVar[ReduceOp]
    PREMUL_SUM: ClassVar[ReduceOp]
    RedOpType: ClassVar[type[RedOpType]]

    @property
    def name(self) -> str:
        return self.op.name

    def __call__(self, factor: float) -> ReduceOp:
        """Return PREMUL_SUM with its factor; no other op takes a factor."""
        if self.op is not RedOpType.PREMUL_SUM:
            raise InvalidArgumentError(f"ReduceOp.{self.name} takes no factor")
        return ReduceOp(RedOpType.PREMUL_SUM, float(factor))

    def __repr__(self) -> str:
        factor = "" if self.factor is None else f"({self.factor!r})"
        return f"ReduceOp.{self.name}{factor}"


ReduceOp.RedOpType = RedOpType
for _op in RedOpType:
    setattr(ReduceOp, _op.name, ReduceOp(_op))
# Names in other libraries.
for _name, _meant in {"MEAN": "AVG", "AVERAGE": "AVG", "ADD": "SUM", "PROD": "PRODUCT"}.items():
    setattr(ReduceOp, _name, AbsentName(_name, f"did you mean {_meant!r}?"))


_TORCH_OPS = ("ReduceOp", "RedOpType")


def as_reduce_op(op: Any) -> ReduceOp:
    """Return a reduce op of this library, of `RedOpType` or of torch.distributed as a ReduceOp.

    Raises:
        ArgumentTypeError: Another object.
    """
    if isinstance(op, ReduceOp):
        return op
    # This module does not import torch, whose classes have these names.
    is_torchs = type(op).__module__.startswith("torch.") and type(op).__name__ in _TORCH_OPS
    if not isinstance(op, RedOpType) and not is_torchs:
        words = {name.lower(): f"ReduceOp.{name}" for name in RedOpType.__members__}
        words |= {"mean": words["avg"], "prod": words["product"]}
        meant = did_you_mean(op, (), words) if isinstance(op, str) else ""
        raise ArgumentTypeError(f"op must be a ReduceOp such as ReduceOp.SUM, got {op!r}{meant}")
    kind = RedOpType(int(getattr(op, "op", op)))
    named: ReduceOp = getattr(ReduceOp, kind.name)
    if kind is not RedOpType.PREMUL_SUM or not hasattr(op, "factor"):
        return named
    return named(float(op.factor))  # a number, or a tensor with one element


@dataclass(frozen=True)
class DType:
    """An element type: its name, its kind, and the NumPy dtype that stores it.

    `storage` is the NumPy dtype that the engines use. For bfloat16 and float8, which NumPy lacks,
    it is the unsigned integer of the same width. The bits are moved unchanged.
    `kind` is b(ool), i(nt), u(int), f(loat), c(omplex), or x for types that move but do not
    reduce. `opaque` is the NumPy dtype of elements that move as bytes, such as records and texts.
    """

    name: str
    kind: str
    storage: np.dtype[np.generic]
    opaque: np.dtype[Any] | None = None

    @property
    def itemsize(self) -> int:
        return self.storage.itemsize

    def __str__(self) -> str:
        return self.name


_INTEGERS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
_FLOATS = ["float16", "float32", "float64", "complex64", "complex128"]
_BY_NAME = {
    name: DType(name, np.dtype(name).kind, np.dtype(name))
    for name in ("bool", *_INTEGERS, *_FLOATS)
}
_BY_NAME["bfloat16"] = DType("bfloat16", "f", np.dtype(np.uint16))
for _name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"):
    _BY_NAME[_name] = DType(_name, "x", np.dtype(np.uint8))

# Cache of dtype_of_numpy, because NumPy takes a microsecond to return a name. It is emptied at this
# size, because texts have a dtype per length.
_MOST_CACHED = 4096
_BY_NUMPY: dict[np.dtype[np.generic], DType] = {}
# complex32, float8_e8m0fnu and the like. torch has some dozens of dtypes.
_BY_TORCH: dict[str, DType] = {}

_ARITHMETIC = {RedOpType.SUM, RedOpType.AVG, RedOpType.PRODUCT, RedOpType.PREMUL_SUM}
_ORDER = {RedOpType.MIN, RedOpType.MAX}
_BITWISE = {RedOpType.BAND, RedOpType.BOR, RedOpType.BXOR}
_REDUCE_OPS = {
    # NumPy's rules for bool: + is "or", * is "and". An average or a factor has no meaning for bool.
    "b": {RedOpType.SUM, RedOpType.PRODUCT} | _ORDER | _BITWISE,
    "i": (_ARITHMETIC - {RedOpType.PREMUL_SUM}) | _ORDER | _BITWISE,
    "u": (_ARITHMETIC - {RedOpType.PREMUL_SUM}) | _ORDER | _BITWISE,
    "f": _ARITHMETIC | _ORDER,
    "c": _ARITHMETIC,
    "x": set(),
}


def dtype_named(name: str) -> DType:
    """Return the element type of that name.

    Raises:
        UnsupportedError: The type is unknown. The text lists the known types.
    """
    try:
        return _BY_NAME[name]
    except KeyError:
        known = ", ".join(_BY_NAME)
        raise UnsupportedError(f"dtype {name!r} is not supported (supported: {known})") from None


def all_dtypes() -> tuple[DType, ...]:
    """Return every element type that can be communicated."""
    return tuple(_BY_NAME.values())


def numpy_dtype(dtype: DType) -> np.dtype[Any]:
    """Return NumPy's dtype of that name, or `storage` if NumPy, or ml_dtypes, has no such dtype."""
    try:
        return np.dtype(dtype.name)
    except TypeError:
        return dtype.storage


def dtype_of_numpy(dtype: np.dtype[np.generic]) -> DType:
    """Return the element type of a NumPy array, ml_dtypes' extension types included.

    Raises:
        UnsupportedError: The elements are Python objects, or have no bytes.
    """
    # The name drops the byte order on purpose: '>f4' is float32 and gets packed.
    found = _BY_NUMPY.get(dtype)
    if found is None:
        if len(_BY_NUMPY) >= _MOST_CACHED:
            _BY_NUMPY.clear()
        found = _BY_NUMPY[dtype] = _BY_NAME.get(dtype.name) or _opaque(dtype)
    return found


def dtype_of_torch(dtype: Any) -> DType:
    """Return the element type of a dtype of torch; one that NumPy lacks moves as bytes."""
    name = str(dtype).removeprefix("torch.")
    found = _BY_NAME.get(name) or _BY_TORCH.get(name)
    if found is None:
        found = _BY_TORCH[name] = DType(name, "x", np.dtype((np.void, dtype.itemsize)))
    return found


def _opaque(dtype: np.dtype[np.generic]) -> DType:
    """Return the type of elements that move as bytes."""
    if dtype.hasobject or dtype.kind == "T" or not dtype.itemsize:
        raise UnsupportedError(
            f"dtype {str(dtype)!r} is not supported: its elements are no plain bytes",
            hint="use the calls for objects, such as broadcast_object_list",
        )
    native = dtype.newbyteorder("=")
    name = str(native)
    if _has_long_double(native):
        # x86-64 and aarch64 have other bits in as many bytes, so ranks must not exchange them.
        name += f" ({np.finfo(np.longdouble).nmant} mantissa bits)"
    return DType(name, "x", np.dtype((np.void, dtype.itemsize)), native)


def _has_long_double(dtype: np.dtype[Any]) -> bool:
    base = dtype.base
    return base.char in "gG" or any(_has_long_double(base[name]) for name in base.names or ())


def _instead_of_reducing(dtype: np.dtype[Any]) -> str:
    """Return a hint for a reduction of an opaque dtype."""
    if dtype.names is not None:
        fields = ((name, _BY_NAME.get(dtype[name].base.name)) for name in dtype.names)
        usable = [f"array[{name!r}]" for name, of in fields if of is not None and of.kind != "x"]
        if usable:
            return f"reduce the fields one by one: {', '.join(usable)}"
        return "no field can be reduced; gather the arrays, and combine them on each rank"
    if dtype.kind in "mM":
        return "reduce the numbers: array.view(np.int64)"
    if dtype.kind in "fc":
        return f"convert it: array.astype(np.{'float64' if dtype.kind == 'f' else 'complex128'})"
    return "gather the arrays, and combine them on each rank"


def reduce_ops_of(dtype: DType) -> Set[RedOpType]:
    """Return the reduce ops that are defined on an element type."""
    return _REDUCE_OPS[dtype.kind]


def require_reducible(dtype: DType, op: ReduceOp) -> None:
    """Check that `op` is defined on `dtype`.

    Raises:
        InvalidArgumentError: PREMUL_SUM has no factor.
        UnsupportedError: `op` is not defined. The text lists the reduce ops of this dtype.
    """
    if op.op is RedOpType.PREMUL_SUM and op.factor is None:
        raise InvalidArgumentError(
            "PREMUL_SUM needs its factor", hint="write ReduceOp.PREMUL_SUM(factor)"
        )
    if op.op not in reduce_ops_of(dtype):
        has = ", ".join(sorted(o.name for o in reduce_ops_of(dtype))) or "none: it only moves"
        raise UnsupportedError(
            f"reduce op {op.name} is not defined on {dtype} (defined: {has})",
            hint=None if dtype.opaque is None else _instead_of_reducing(dtype.opaque),
        )


PARTIAL = 1 << 31
"""Added to the number of a dtype by a receive that takes shorter messages, too."""

RAW = 2 * PARTIAL - 1
"""In place of that sum: a receive that takes shorter messages, of any dtype."""


def code_of(dtype: DType) -> int:
    """Return the number that stands for a dtype in a message; equal in every process."""
    return zlib.crc32(dtype.name.encode()) & ~PARTIAL


def word_of(dtype: DType, partial: bool | str) -> int:
    """Return the word of a receive into memory of a dtype."""
    return RAW if partial == "raw" else code_of(dtype) | (PARTIAL if partial else 0)


_BY_CODE = {code_of(dtype): dtype for dtype in _BY_NAME.values()}


def dtype_of_code(code: int) -> DType | None:
    """Return the dtype of a message, or None if the number stands for none."""
    return _BY_CODE.get(code)
