"""Reduction operations, the engine's, NumPy's and the program's own, and the calls with them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np

from unisono.adapters.mpi4py.buffers import Bytes, buffer
from unisono.adapters.mpi4py.collectives import (
    _call,
    _is_in_place,
    _raw,
    _store,
    check_root,
    exchange,
)
from unisono.adapters.mpi4py.datatypes import Datatype, TypeMap
from unisono.adapters.mpi4py.errors import PROC_NULL, ROOT, fail, require
from unisono.adapters.mpi4py.handles import Handle
from unisono.adapters.mpi4py.messages import CommState
from unisono.adapters.mpi4py.packing import Run, simple
from unisono.adapters.mpi4py.requests import Ongoing
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
        if len(parts) == 1 and self.function is None:
            self.apply(result[:0], result[:0], part)  # the datatype may not have the operation
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


# ---- collective calls that reduce ----


def _reduced(state: CommState, mine: Run, output: Run | None, op: Op, last: int) -> Ongoing:
    """Gather all ranks' data, and reduce that of the ranks before `last`, for `output`."""
    data = mine.pack()
    rows = np.empty((state.size, len(data)), np.uint8)
    work = state.group.all_gather_into_tensor(rows, data, async_op=state.is_async)
    reduction = op.live

    def finish() -> None:
        if output is None or last == 0 or not len(data):
            return
        result = reduction.fold(list(rows[:last]), mine)
        output.fill(result)

    return _call([work], finish)


def _pair(sendbuf: Any, recvbuf: Any, blocks: int = 1) -> tuple[Run, Run]:
    """Return input and output of a reduction; both may be one memory."""
    output = simple(recvbuf, True, blocks=blocks)
    if _is_in_place(sendbuf):
        return output, output
    mine = simple(sendbuf, False, blocks=blocks)
    if mine.kind is not output.kind:
        raise ValueError("mismatch in send and receive MPI datatypes")
    if mine.count != output.count:
        raise ValueError(f"mismatch in send count {mine.count} and receive count {output.count}")
    return mine, output


def _kernel(state: CommState, op: Op, part: Run, name: str, *settings: Any, into: Run) -> Ongoing:
    """Reduce in place of the output by a kernel of the engine."""
    if state.rehearses:
        return Ongoing()
    reduce_op = op.live.kernel(part.kind)
    source, target = part.pack(), into.pack()
    if part is not into:
        target[:] = source
    array = part.typed(target)
    work = getattr(state.group, name)(array, *settings, reduce_op, async_op=state.is_async)
    return _call([work], _store([into], [target]))


def allreduce(state: CommState, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> Ongoing:
    """Make the reduction of all ranks' data, on all ranks."""
    mine, output = _pair(sendbuf, recvbuf)
    if state.is_inter:
        return _reduced_across(state, mine, output, op)
    if op.live.kernel(mine.kind) is None:
        return _reduced(state, mine, output, op, state.size)
    return _kernel(state, op, mine, "all_reduce", into=output)


def _reduced_across(state: CommState, mine: Run, output: Run | None, op: Op) -> Ongoing:
    """Reduce the data of the other side, which it sends to this rank."""
    count = len(state.peers)
    data = mine.pack()
    rows = [np.empty(len(data), np.uint8) for _ in range(count)]
    wanted = {k: [_raw(rows[k])] for k in range(count)} if output is not None else {}
    call = exchange(state, {k: [_raw(data)] for k in range(count)}, wanted)
    reduction = op.live

    def fold() -> None:
        if output is not None and len(data):
            output.fill(reduction.fold(rows, mine))

    return call.then(fold)


def reduce(state: CommState, sendbuf: Any, recvbuf: Any, op: Op = SUM, root: int = 0) -> Ongoing:
    """Make the reduction of all ranks' data, on the root."""
    check_root(state, root)
    if state.is_inter:
        return _reduce_inter(state, sendbuf, recvbuf, op, root)
    if state.rank != root:
        mine = simple(sendbuf, False)
        if op.live.kernel(mine.kind) is None:
            return _reduced(state, mine, None, op, 0)
        array = mine.typed(mine.pack())
        work = state.group.reduce(array, root, op.live.kernel(mine.kind), async_op=state.is_async)
        return _call([work])
    mine, output = _pair(sendbuf, recvbuf)
    if op.live.kernel(mine.kind) is None:
        return _reduced(state, mine, output, op, state.size)
    return _kernel(state, op, mine, "reduce", root, into=output)


def _reduce_inter(state: CommState, sendbuf: Any, recvbuf: Any, op: Op, root: int) -> Ongoing:
    if root == PROC_NULL:
        return Ongoing()
    if root != ROOT:
        return exchange(state, {root: [simple(sendbuf, False)]}, {})
    output = simple(recvbuf, True)
    rows = [np.empty(output.nbytes, np.uint8) for _ in state.peers]
    call = exchange(state, {}, {k: [_raw(row)] for k, row in enumerate(rows)})
    reduction = op.live
    return call.then(lambda: output.fill(reduction.fold(rows, output)) if output.nbytes else None)


def _source(state: CommState, sendbuf: Any, output: Run) -> Run | None:
    """Return the input, None if it is in place: then it may be given as the same memory, too."""
    if _is_in_place(sendbuf):
        return None
    mine = simple(sendbuf, False)
    places = [each.memory.ctypes.data + each.offset for each in (mine, output)]
    return None if places[0] == places[1] and not state.is_inter else mine


def reduce_scatter(
    state: CommState, sendbuf: Any, recvbuf: Any, recvcounts: Any = None, op: Op = SUM
) -> Ongoing:
    """Make the reduction of all ranks' data, a part on each rank."""
    size, output = state.size, simple(recvbuf, True)
    mine = _source(state, sendbuf, output)
    if mine is None:
        mine = output
        if recvcounts is None:
            whole, rest = divmod(mine.count, size)
            counts = [whole + (k < rest) for k in range(size)]
        else:
            counts = [int(n) for n in recvcounts]
        if sum(counts) > mine.count:
            raise ValueError(f"mismatch in receive count {mine.count} and sum(counts)")
        output = mine.slice(0, counts[state.rank])
        mine = mine.slice(0, sum(counts))
    else:
        if recvcounts is None and state.rehearses:
            return Ongoing()  # the counts of the other ranks are not known
        if recvcounts is None:
            rows = np.empty((size, 1), np.int64)
            state.group.all_gather_into_tensor(rows, np.array([output.count]))
            counts = rows[:, 0].tolist()
        else:
            counts = [int(n) for n in recvcounts]
        if mine.kind is not output.kind:
            raise ValueError("mismatch in send and receive MPI datatypes")
        if mine.count != sum(counts):
            raise ValueError(f"mismatch in send count {mine.count} and sum(counts) {sum(counts)}")
        if output.count != counts[state.rank]:
            raise ValueError(f"mismatch in receive count {output.count}")
    return _scattered(state, mine, output, counts, op)


def _scattered(state: CommState, mine: Run, output: Run, counts: Sequence[int], op: Op) -> Ongoing:
    first = sum(counts[: state.rank])
    kernel = op.live.kernel(mine.kind)
    if state.is_inter or kernel is None:
        whole = np.empty(mine.nbytes, np.uint8)
        into = Run(whole, 0, mine.count, _packed(mine))
        if state.is_inter:
            call = _reduced_across(state, mine, into, op)
        else:
            call = _reduced(state, mine, into, op, state.size)
        begin, end = (n * mine.kind.size for n in (first, first + counts[state.rank]))
        return call.then(lambda: output.fill(whole[begin:end]))
    data = mine.typed(mine.pack())
    target = np.empty(counts[state.rank] * mine.kind.size, np.uint8)
    per = len(data) // max(mine.count, 1)
    sizes = [n * per for n in counts]
    how: Any = {} if len(set(sizes)) == 1 else {"input_split_sizes": sizes}
    work = state.group.reduce_scatter_tensor(
        *(mine.typed(target), data, kernel),
        **how,
        async_op=state.is_async,
    )
    return _call([work], lambda: output.fill(target))


def _packed(part: Run) -> Any:
    from unisono.adapters.mpi4py.datatypes import named

    return part.kind if part.is_plain else named["BYTE"].Create_contiguous(part.kind.size).ob


def reduce_scatter_block(state: CommState, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> Ongoing:
    """As reduce_scatter, with equal parts."""
    size, output = state.size, simple(recvbuf, True)
    if _source(state, sendbuf, output) is None:
        output = simple(recvbuf, True, blocks=size)
        mine = output.slice(0, output.count * size)
    else:
        block = simple(sendbuf, False, blocks=size)
        mine = block.slice(0, block.count * size)
        if mine.kind is not output.kind:
            raise ValueError("mismatch in send and receive MPI datatypes")
        if block.count != output.count:
            raise ValueError(f"mismatch in send count {block.count} and count {output.count}")
    return _scattered(state, mine, output, [output.count] * size, op)


def scan(state: CommState, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> Ongoing:
    """Make the reduction of the data of the ranks up to this one."""
    mine, output = _pair(sendbuf, recvbuf)
    if op.live.kernel(mine.kind) is None:
        return _reduced(state, mine, output, op, state.rank + 1)
    return _kernel(state, op, mine, "scan", into=output)


def exscan(state: CommState, sendbuf: Any, recvbuf: Any, op: Op = SUM) -> Ongoing:
    """Make the reduction of the data of the ranks before this one."""
    mine, output = _pair(sendbuf, recvbuf)
    # Rank 0 keeps its output, so the engine must not work in it.
    return _reduced(state, mine, output, op, state.rank)
