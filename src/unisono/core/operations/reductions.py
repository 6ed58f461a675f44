"""Reductions that no kernel has: by functions, of NumPy's own types, in float32, exact.

For a function, the arrays of all ranks are gathered. Each rank applies it in the order of ranks, on
equal data, so that all have one result, or one error. Of a function that is said to be commutative,
pairs of ranks exchange their results instead.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dis import get_instructions
from functools import lru_cache, partial, reduce
from hashlib import blake2b
from itertools import pairwise
from math import prod
from types import CodeType, FunctionType, MethodType, NoneType
from typing import Any

import numpy as np

from unisono.core.backends import Pending
from unisono.core.base.buffers import Array, device_of, dtype_name_of, is_torch, view
from unisono.core.base.deadline import Deadline
from unisono.core.base.integers import as_flag
from unisono.core.base.types import Function, RedOpType, ReduceOp, as_reduce_op, dtype_named
from unisono.core.engines.kernels import divide
from unisono.core.operations.exact import exact_sum, sums_exactly, widened
from unisono.core.operations.work import Work
from unisono.errors import ArgumentTypeError, InvalidArgumentError, UnsupportedError

_ALL: dict[RedOpType, Function] = {
    RedOpType.SUM: np.add,
    RedOpType.PRODUCT: np.multiply,
    RedOpType.MIN: np.minimum,
    RedOpType.MAX: np.maximum,
}
# What NumPy can reduce and no kernel.
_OF_NUMPY: dict[Any, str] = {
    np.longdouble: "SUM PRODUCT MIN MAX",
    np.clongdouble: "SUM PRODUCT",
    np.timedelta64: "SUM MIN MAX",
    np.datetime64: "MIN MAX",
}


# Up to so many bytes of all ranks together, one exchange is faster than two of the parts.
_GATHERED_BYTES = 1 << 15


def empty(like: Any, *shape: int) -> Any:
    """Return a new array of the kind and dtype of another one."""
    return like.new_empty(shape) if is_torch(like) else np.empty(shape, like.dtype)


def copied(array: Any) -> Any:
    """Return a contiguous copy; of a tensor without its history."""
    if is_torch(array):
        return array.detach().contiguous().clone()
    return np.array(array, order="C")


def minloc(a: Any, b: Any) -> Any:
    """Return the records with the smaller first field, or the smaller second one if it is equal.

    For `op=`, on NumPy arrays with two fields, such as value and index: MPI's MINLOC.
    """
    return _loc(np.less, a, b)


def maxloc(a: Any, b: Any) -> Any:
    """Return the records with the larger first field, or the smaller second one if it is equal.

    For `op=`, on NumPy arrays with two fields, such as value and index: MPI's MAXLOC.
    """
    return _loc(np.greater, a, b)


def _loc(wins: Function, a: Any, b: Any) -> Any:
    value, index = a.dtype.names
    takes_b = (b[value] == a[value]) & (b[index] < a[index])
    return np.where(wins(b[value], a[value]) | takes_b, b, a)


class commutative:
    """A function for `op=` whose result depends neither on the order of ranks nor on brackets.

        dist.all_reduce(x, dist.commutative(np.gcd))

    all_reduce and reduce then take ceil(log2 p) exchanges of one array between pairs of ranks, and
    no memory for the arrays of all ranks. If the function raises an error on part of the data, the
    other ranks get CollectiveMismatchError with the reason. Other calls keep the order of ranks.
    """

    def __init__(self, function: Function) -> None:
        if not callable(function):
            raise ArgumentTypeError(f"commutative takes a function, got {type(function).__name__}")
        self.function = function
        self.__name__ = getattr(function, "__name__", type(function).__name__)

    def __call__(self, a: Any, b: Any) -> Any:
        """Return the function's result."""
        return self.function(a, b)


def _digest_of(function: Any) -> str:
    """Return a text that differs for functions with other code, constants or closures.

    It is equal in all processes, so it has no address, and of other objects only the type.
    """
    return blake2b(_described(function, 0, {}).encode(), digest_size=4).hexdigest()


# A longer list is described by its length; the call would wait for the text.
_MOST_ENTRIES = 64


def _described(value: Any, depth: int, known: dict[tuple[int, int], str]) -> str:
    """Return a text; `known` has those of functions by their ids, each for a depth."""
    below = depth + 1
    if depth > 8:  # a function may refer to itself
        return "..."
    if isinstance(value, (bool, int, float, complex, str, bytes, NoneType, np.generic)):
        return f"{type(value).__name__} {value!r}"
    if isinstance(value, (tuple, list)) and len(value) > _MOST_ENTRIES:
        return f"{type(value).__name__} of {len(value)}"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(_described(each, below, known) for each in value)})"
    if isinstance(value, frozenset):
        return f"{{{', '.join(sorted(_described(each, below, known) for each in value))}}}"
    if isinstance(value, CodeType):
        names = *value.co_names, *value.co_freevars
        return f"{value.co_code.hex()} {names} {_described(value.co_consts, below, known)}"
    if isinstance(value, commutative):
        return f"commutative {_described(value.function, below, known)}"
    if isinstance(value, partial):
        given = value.func, value.args, tuple(sorted(value.keywords.items()))
        return f"partial {_described(given, below, known)}"
    if isinstance(value, MethodType):
        return _described((type(value.__self__).__qualname__, value.__func__), below, known)
    if isinstance(value, FunctionType):
        at = id(value), depth
        if at not in known:
            settings = {**_cells_of(value), **(value.__kwdefaults__ or {})}
            words = value.__code__, value.__defaults__, *sorted(settings.items())
            text = _described(words, below, known)
            known[at] = blake2b(text.encode(), digest_size=8).hexdigest()
        return known[at]
    named: Any = value if hasattr(value, "__qualname__") else type(value)
    return f"{type(value).__name__} {named.__qualname__}"


def _cells_of(function: FunctionType) -> dict[str, Any]:
    """Return the values of a closure, but for counters and the like, which the code stores."""
    code, values = function.__code__, dict[str, Any]()
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # not set yet
            if name not in _stored(code):
                values[name] = cell.cell_contents
    return values


@lru_cache(256)
def _stored(code: CodeType) -> frozenset[str]:
    """Return the names in closures that a code, or a code in it, stores."""
    inner = [_stored(each) for each in code.co_consts if isinstance(each, CodeType)]
    found = {each.argval for each in get_instructions(code) if each.opname == "STORE_DEREF"}
    return frozenset(found).union(*inner)


def function_for(tensor: Any, op: Any) -> Function | None:
    """Return the function for a reduction that no kernel has, or None."""
    if isinstance(op, ReduceOp):
        kind = getattr(getattr(tensor, "dtype", None), "type", None)
        return _ALL[op.op] if op.name in _OF_NUMPY.get(kind, "").split() else None
    of_enum = isinstance(op, RedOpType) or type(op).__module__.startswith("torch.")
    return op if callable(op) and not of_enum else None


def reduce_otherwise(
    group: Any,
    name: str,
    op: Any,
    output: Any,
    tensor: Any,
    how: Any,
    special: tuple[str | None, bool] = (None, False),
    root: int = -1,
) -> Work | None:
    """Make a reduction that no kernel has; return None if a kernel has it.

    Args:
        group: The group.
        name: Name of the method.
        op: A reduce op or a function.
        output: What is written.
        tensor: This rank's contribution.
        how: The other keywords of the call.
        special: `accumulate` and `reproducible`.
        root: Rank in the group that gets the result; -1 for all.
    """
    accumulate, is_exact = special
    if is_exact is not False and (is_exact := as_flag(is_exact, "reproducible")):
        # The order of ranks is part of nothing: integers have one sum anyway.
        is_exact = dtype_name_of(tensor)[:3] not in ("int", "uin", "boo")
    function = function_for(tensor, op) if accumulate is None and not is_exact else None
    if accumulate is None and function is None and not is_exact:
        return None
    with nullcontext() if group._hooks is None else group._hooks.parts():
        if is_exact:
            given = {**how, "accumulate": accumulate}
            work = _reduce_exactly(group, name, op, output, tensor, given, root)
        elif function is not None:
            work = reduce_by(group, name, function, output, tensor, how, root)
        else:
            settings = (op,) if root < 0 else (root, op)
            work = reduce_wide(group, name, accumulate, tensor, *settings, how=how)
    work._op = name  # not that of its last part
    return work


def reduce_by(
    group: Any, name: str, function: Function, output: Any, tensor: Any, how: Any, root: int = -1
) -> Work:
    """Reduce by a function; see `unisono.all_reduce` for what it must be.

    Raises:
        UnsupportedError: The call is asynchronous, or names an algorithm or sizes of parts.
        ArgumentTypeError: An array that is neither a NumPy array nor a tensor.
        InvalidArgumentError: The function returns another shape, or a dtype of another kind.
    """
    if how.get("async_op") or how.get("algorithm"):
        raise UnsupportedError(f"{name} by a function takes neither async_op nor algorithm")
    if "input_split_sizes" in how:
        raise UnsupportedError(f"{name} by a function takes no input_split_sizes")
    for each in (tensor, output):
        if not hasattr(each, "shape"):
            raise ArgumentTypeError(f"{name} by a function takes arrays, got {type(each).__name__}")
    label = f"{name} by {getattr(function, '__name__', 'a function')}"
    agreed = f"{label} {_digest_of(function)}"
    mine, rank = copied(tensor), group.rank()
    if root in (-1, rank):
        output = _writable(output)
    # After the exchange some ranks may have written already.
    part = mine[: (*output.shape, 0)[0]] if name.startswith("reduce_sc") else mine
    if part.shape == output.shape:
        with np.errstate(all="ignore"):
            _check(label, function(copied(part), copied(part)), output)
    if isinstance(function, commutative) and name in ("all_reduce", "reduce"):
        made, result = _in_pairs(group, function, mine, label, agreed, how.get("timeout"))
        if root in (-1, rank):
            output[...] = result
        return made
    parts = empty(mine, group.size(), *output.shape)
    move = group.all_to_all_single if name.startswith("reduce_sc") else group.all_gather_into_tensor
    work: Work = move(parts, mine, timeout=how.get("timeout"), _label=agreed)
    last = {"scan": rank + 1, "exscan": rank}.get(name, group.size())
    if last and root in (-1, rank):
        result = reduce(function, list(parts[1:last]), parts[0])
        _check(label, result, output)
        output[...] = result
    return work


def _in_pairs(
    group: Any, function: Function, mine: Any, label: str, agreed: str, timeout: Any
) -> tuple[Work, Any]:
    """Return the reduction of all arrays: pairs of ranks exchange what they have.

    The lower rank's part is the first argument on both ranks, so that they have the same bits.
    """
    rank, size = group.rank(), group.size()
    due = Deadline(group.timeout_s if timeout is None else timeout)
    power = 1 << (size.bit_length() - 1)
    # The ranks from `power` on only give their array, and get the result.
    low, high = range(size - power), range(power, size)
    rounds = [{r: r ^ 1 << k for r in range(power)} for k in range(power.bit_length() - 1)]
    rounds = [dict(zip(high, low, strict=True)), *rounds, dict(zip(low, high, strict=True))]
    rounds = [targets for targets in rounds if targets]
    work = Work(Pending([mine], done=True), label, group)
    for number, targets in enumerate(rounds, 1):
        with _announcing(group, label, is_last=number == len(rounds)):
            to, sources = targets.get(rank), {target: source for source, target in targets.items()}
            source, flat = sources.get(rank), mine.reshape(-1)
            ins = [len(flat) if r == source else 0 for r in range(size)]
            outs = [len(flat) if r == to else 0 for r in range(size)]
            got, give = empty(flat, sum(ins)), flat[: sum(outs)]
            how = {"output_split_sizes": ins, "input_split_sizes": outs, "_label": agreed}
            work = group.all_to_all_single(got, give, timeout=due.remaining(), **how)
            if source is None:
                continue
            got = got.reshape(mine.shape)
            if rank >= power:
                mine = got
                continue
            result = function(mine, got) if rank < source else function(got, mine)
            _check(label, result, mine)
            mine[...] = result
    return work, mine


@contextmanager
def _announcing(group: Any, label: str, *, is_last: bool) -> Iterator[None]:
    """Report an error of the block to the other ranks, which wait in its exchange or the next."""
    since = group.place()
    try:
        yield
    except BaseException as error:
        has_ended = is_last and group.place() > since
        if not has_ended and not group.is_known_to_all(error, since):
            group.refuse(label, error)
        raise


def _writable(array: Any) -> Any:
    """Return the array, or the tensor without its history; raise an error if it is read-only."""
    if device_of(array) == "cpu":
        view(array, write=True, pack=False)
    return array.detach() if is_torch(array) else array


def _check(label: str, result: Any, output: Any) -> None:
    """Check that the result of a function has the shape, and the kind of dtype, of the output."""
    if np.shape(result) != tuple(output.shape):
        raise InvalidArgumentError(
            f"{label} returned the shape {list(np.shape(result))} for {list(output.shape)}"
        )
    if is_torch(output):
        fits = sys.modules["torch"].can_cast(result.dtype, output.dtype)
    else:
        fits = np.can_cast(np.asarray(result).dtype, output.dtype, "same_kind")
    if not fits:
        raise InvalidArgumentError(
            f"{label} returned {result.dtype} for {output.dtype}, which is of another kind"
        )


def reduce_wide(
    group: Any, name: str, accumulate: str | None, tensor: Any, *settings: Any, how: Any
) -> Work:
    """Reduce float16 or bfloat16 in float32, and round once.

    Raises:
        InvalidArgumentError: `accumulate` is not "float32", or the array has another dtype.
        UnsupportedError: The call is asynchronous.
    """
    dtype = dtype_name_of(tensor)
    if accumulate != "float32" or dtype not in ("float16", "bfloat16"):
        raise InvalidArgumentError(
            f"accumulate={accumulate!r} on {dtype}: only 'float32' on float16 and bfloat16"
        )
    if how.get("async_op"):
        raise UnsupportedError(f"{name} with accumulate takes no async_op")
    is_written = name == "all_reduce" or settings[0] == group.rank()
    tensor = _writable(tensor) if is_written else tensor
    wide = tensor.float() if is_torch(tensor) else tensor.astype(np.float32)
    how = {**how, "_label": f"{name} in float32"}
    how.pop("_learn", None)
    work: Work = getattr(group, name)(wide, *settings, **how)
    if is_written:
        tensor[...] = wide
    return work


def _reduce_exactly(
    group: Any, name: str, op: Any, output: Any, tensor: Any, how: Any, root: int
) -> Work:
    """Reduce floats by an exact sum, which is rounded once.

    Raises:
        UnsupportedError: The call is asynchronous, names an algorithm, a type to sum in or sizes
            of parts; or it is no sum of floats.
    """
    for taken in ("async_op", "algorithm", "accumulate", "input_split_sizes"):
        if how.get(taken) not in (None, False):
            raise UnsupportedError(f"{name} with reproducible takes no {taken}")
    kind = as_reduce_op(op) if function_for(tensor, op) is None else None
    dtype = dtype_name_of(tensor)
    if kind is None or kind not in (ReduceOp.SUM, ReduceOp.AVG) or not sums_exactly(dtype):
        shown = getattr(kind or op, "name", type(op).__name__)
        raise UnsupportedError(
            f"{name} with reproducible of {shown} on {dtype}: only SUM and AVG of float16, "
            "bfloat16, float32, float64 and complex numbers",
            hint="MIN and MAX depend on the order only in the sign of zero and the bits of NaN",
        )
    scatters = name.startswith("reduce_sc")
    if root in (-1, group.rank()):
        output = _writable(output)
    label, limit = f"{name}, reproducible {kind.name}", how.get("timeout")
    mine = copied(tensor).reshape(1, -1)
    count, expected = prod(mine.shape), group.size() * prod(output.shape)
    if scatters and count != expected:
        raise InvalidArgumentError(
            f"{name}: the input has {count} elements, expected {expected}: "
            "the output's for each rank"
        )
    work, result = exact_over_ranks(group, mine, label, limit, root=root, scatters=scatters)
    if result is not None:
        if kind == ReduceOp.AVG:
            divide(result, dtype_named(dtype), group.size())
        made = empty(output, len(result))
        view(made, write=True).array[:] = result
        output[...] = made.reshape(output.shape)
    return work


def exact_over_ranks(
    group: Any,
    rows: Any,
    label: str,
    timeout: Any,
    *,
    root: int = -1,
    scatters: bool = False,
    dtype: str | None = None,
) -> tuple[Work, Array | None]:
    """Return the exact sum over all ranks and rows, rounded once to a type: [n].

    Args:
        group: The group.
        rows: [k, n] floats, an array or tensor; equal k and n on all ranks.
        label: Name of the call in errors; equal on all ranks.
        timeout: Seconds for all exchanges; None for the group's.
        root: Rank that gets the result; -1 for all. Other ranks get None.
        scatters: Whether each rank gets its part of the result instead.
        dtype: Name of the type; None for that of the rows.

    Cost: up to 32 KiB of all ranks one all_gather; beyond it an all_to_all of the parts, and an
        all_gather of the sums: 2(p-1)/p of the rows' bytes sent per rank.
    """
    rank, size, dtype = group.rank(), group.size(), dtype or dtype_name_of(rows)
    due, (count, n) = Deadline(group.timeout_s if timeout is None else timeout), rows.shape

    def summed(parts: Any) -> Array:
        made = exact_sum(widened(parts).reshape(size * count, -1), dtype)
        return made.view(dtype) if dtype.startswith("complex") else made

    def exchange(output: Any, array: Any, outs: list[int], ins: list[int]) -> Work:
        how = {"output_split_sizes": outs, "input_split_sizes": ins, "_label": label}
        made: Work = group.all_to_all_single(output, array, timeout=due.remaining(), **how)
        return made

    if not scatters and size * rows.nbytes <= _GATHERED_BYTES:
        parts = empty(rows, size * count, n)
        how = {"timeout": due.remaining(), "_label": label}
        work: Work = group.all_gather_into_tensor(parts, rows, **how)
        return work, summed(parts) if root in (-1, rank) else None
    starts = [n * r // size for r in range(size + 1)]
    own = [end - begin for begin, end in pairwise(starts)]
    with _announcing(group, label, is_last=scatters):
        if count > 1:
            rows = np.concatenate([each.reshape(-1) for each in np.split(rows, starts[1:-1], 1)])
        parts = empty(rows, size * count * own[rank])
        mine, given = count * own[rank], [count * each for each in own]
        work = exchange(parts, rows.reshape(-1), [mine] * size, given)
        part = summed(parts)
    if scatters:
        return work, part
    with _announcing(group, label, is_last=True):
        if root < 0:
            result = np.empty(n, part.dtype)
            how = {"timeout": due.remaining(), "_label": label, "output_split_sizes": own}
            return group.all_gather_into_tensor(result, part, **how), result
        result = np.empty(n if rank == root else 0, part.dtype)
        ins = [own[rank] if r == root else 0 for r in range(size)]
        work = exchange(result, part, own if rank == root else [0] * size, ins)
    return work, result if rank == root else None
