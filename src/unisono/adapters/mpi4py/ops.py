"""Reduction operations: those of the engine, others by NumPy, and the program's own."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np

from unisono.adapters.mpi4py.buffers import Bytes, Run, buffer, simple
from unisono.adapters.mpi4py.datatypes import Datatype, TypeMap
from unisono.adapters.mpi4py.errors import fail, require
from unisono.adapters.mpi4py.handles import Handle
from unisono.core.base.types import ReduceOp, dtype_of_numpy, reduce_ops_of
from unisono.core.operations.reductions import maxloc, minloc

_MOST = 32
_own: list[Combiner] = []


class Combiner:
    """What an operation does.

    Attributes:
        of_objects: Function of two Python objects.
        of_arrays: Function of two arrays, also for dtypes without a kernel.
        engine: The engine's operation, or None.
        function: The program's: (in, in and out, datatype).
    """

    def __init__(self, of_objects: Any, of_arrays: Any, engine: ReduceOp | None = None) -> None:
        self.of_objects, self.of_arrays, self.engine = of_objects, of_arrays, engine
        self.function: Callable[..., Any] | None = None
        self.commutes = True

    def kernel(self, kind: TypeMap) -> ReduceOp | None:
        """Return the engine's operation if it has one for a datatype."""
        if self.engine is None or kind.dtype is None or kind.dtype.names:
            return None
        has = kind.dtype.char in "bBhHiIlLqQefdFD"
        has = has and self.engine.op in reduce_ops_of(dtype_of_numpy(kind.dtype))
        return self.engine if has else None

    def fold(self, parts: Sequence[Bytes], part: Run) -> Bytes:
        """Return the reduction of packed data, in the order of the list."""
        result = parts[-1].copy()
        for data in reversed(parts[:-1]):
            self.apply(data, result, part)
        return result

    def apply(self, data: Bytes, result: Bytes, part: Run) -> None:
        """Set `result` to data (op) result, both packed."""
        if self.function is not None:
            # Of packed memory, which a datatype without gaps describes.
            kind = Datatype.of(part.kind)
            self.function(buffer.frombuffer(data), buffer.frombuffer(result), kind)
            return
        first, second = part.typed(data), part.typed(result)
        if part.kind.dtype is not None and part.kind.dtype.names and part.kind.size:
            first, second = (_pairs(each, part.kind) for each in (data, result))
        if first is None:
            fail("ERR_OP", "the operation is not defined on this datatype")
        try:
            with np.errstate(all="ignore"):
                value = self.of_arrays(first, second)
        except TypeError:
            fail("ERR_OP", "the operation is not defined on this datatype")
        if part.kind.dtype is not None and part.kind.dtype.names:
            out = np.empty(len(second), part.kind.dtype)
            out[:] = value
            whole = Run(out.view(np.uint8), 0, len(second), part.kind)
            result[:] = whole.pack()
        else:
            second[...] = value


def _pairs(data: Bytes, kind: TypeMap) -> Any:
    count = len(data) // kind.size
    out = np.zeros(count, kind.dtype)
    Run(out.view(np.uint8), 0, count, kind).store(data)
    return out.view(kind.dtype) if not kind.is_plain else data.view(kind.dtype)


def _logical(function: Any) -> Any:
    return lambda a, b: function(a.astype(bool), b.astype(bool))


def _loc(better: Any) -> Any:
    def choose(x: Any, y: Any) -> Any:
        (u, i), (v, j) = x, y
        if better(u, v):
            return x[0], x[1]
        if better(v, u):
            return y[0], y[1]
        return (u, i) if i <= j else (v, j)

    def of_objects(x: Any, y: Any) -> Any:
        chosen = choose(x, y)
        return type(x)(chosen) if isinstance(x, list) else chosen

    return of_objects


class Op(Handle, root=True):
    """A reduction operation."""

    error = "ERR_OP"

    def __call__(self, x: Any, y: Any) -> Any:
        if self.ob is None:
            raise ValueError("cannot call null operation")
        return self.ob.of_objects(x, y)

    @classmethod
    def Create(cls, function: Callable[..., Any], commute: bool = False) -> Self:
        """Make an operation of a function (in, in and out, datatype)."""
        if len(_own) >= _MOST:
            raise RuntimeError(f"cannot create more than {_MOST} user-defined operations")
        made = Combiner(lambda x, y: function(x, y, None), None)
        made.function, made.commutes = function, bool(commute)
        _own.append(made)
        return cls.of(made)

    def Free(self) -> None:
        """Forget the operation."""
        _ = self.live
        require(not self.is_predefined, "ERR_OP", "predefined")
        if self.ob in _own:
            _own.remove(self.ob)
        self.ob = None

    def Is_commutative(self) -> bool:
        """Return whether the order does not matter."""
        return bool(self.live.commutes)

    is_commutative = property(Is_commutative)
    is_predefined = property(lambda self: self.ob is None or self.ob.function is None)

    def Reduce_local(self, inbuf: Any, inoutbuf: Any) -> None:
        """Set the second array to first (op) second."""
        first, second = simple(inbuf, False), simple(inoutbuf, True)
        if first.kind is not second.kind or first.count != second.count:
            raise ValueError("mismatch in the counts or datatypes of the two buffers")
        result = second.pack()
        self.live.apply(first.pack(), result, second)
        second.store(result)

    def __reduce__(self) -> str | tuple[Any, ...]:
        if self.ob is not None and self.ob.function is not None:
            return Op.Create, (self.ob.function, self.ob.commutes)
        return Handle.__reduce__(self)


def _made() -> dict[str, Op]:
    r = ReduceOp
    rows = {
        "MAX": (lambda x, y: x if y < x else y if x < y else x, np.maximum, r.MAX),
        "MIN": (lambda x, y: x if x < y else y if y < x else x, np.minimum, r.MIN),
        "SUM": (operator.add, np.add, r.SUM),
        "PROD": (operator.mul, np.multiply, r.PRODUCT),
        "LAND": (lambda x, y: bool(x) & bool(y), _logical(np.logical_and), None),
        "BAND": (operator.and_, np.bitwise_and, r.BAND),
        "LOR": (lambda x, y: bool(x) | bool(y), _logical(np.logical_or), None),
        "BOR": (operator.or_, np.bitwise_or, r.BOR),
        "LXOR": (lambda x, y: bool(x) ^ bool(y), _logical(np.logical_xor), None),
        "BXOR": (operator.xor, np.bitwise_xor, r.BXOR),
        "MAXLOC": (_loc(operator.gt), lambda a, b: maxloc(a, b), None),
        "MINLOC": (_loc(operator.lt), lambda a, b: minloc(a, b), None),
        "REPLACE": (lambda x, y: y, lambda a, b: a, None),
        "NO_OP": (lambda x, y: x, lambda a, b: b, None),
    }
    return {name: Op.of(Combiner(*row)) for name, row in rows.items()}


OPS = _made()
SUM = OPS["SUM"]
