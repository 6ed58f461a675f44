"""Reductions that no kernel has: by functions, of NumPy's own types, in float32, exact.

For a function, the arrays of all ranks are gathered. Each rank applies it in the order of ranks, on
equal data, so that all have one result, or one error. Of a function that is said to be commutative,
pairs of ranks exchange their results instead.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext, suppress
from dis import get_instructions
from functools import lru_cache, partial, reduce
from hashlib import blake2b
from types import CodeType, FunctionType, MethodType, NoneType
from typing import Any

import numpy as np

from unisono.core.backends import Pending
from unisono.core.base.buffers import device_of, dtype_name_of, is_torch, view
from unisono.core.base.deadline import Deadline
from unisono.core.base.integers import as_flag
from unisono.core.base.threads.streams import explicit_stream
from unisono.core.base.types import Function, RedOpType, ReduceOp, as_reduce_op
from unisono.core.operations.sums.exact import sums_exactly
from unisono.core.operations.sums.exact_exchange import announcing, exact_over_ranks
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
        is_exact = not _is_whole(tensor)  # integers have one sum in any order
    function = function_for(tensor, op) if accumulate is None and not is_exact else None
    if accumulate is None and function is None and not is_exact:
        return None
    if explicit_stream() is not None:
        raise UnsupportedError(
            f"{name} of this kind takes no stream",
            hint="functions, accumulate and reproducible read their arrays at once; call it "
            "outside the block, after stream.synchronize()",
        )
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
    agreed = f"{label} {_digest_of(function)}" + _to(group, root)
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
        with announcing(group, label, is_last=number == len(rounds)):
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


def _is_whole(array: Any) -> bool:
    """Whether the elements are integers or booleans."""
    on_host = device_of(array) == "cpu"
    name = view(array, write=False, pack=False).dtype.name if on_host else dtype_name_of(array)
    return name.startswith(("int", "uint", "bool"))


def _to(group: Any, root: int) -> str:
    """Return the words about a root that ranks must agree on."""
    return f" to rank {group.ranks[root]}" if root >= 0 else ""


def _reduce_exactly(
    group: Any, name: str, op: Any, output: Any, tensor: Any, how: Any, root: int
) -> Work:
    """Reduce floats by an exact sum, which is rounded once.

    Raises:
        UnsupportedError: The call is asynchronous, names an algorithm, a type to sum in or sizes
            of parts; or it is no sum of floats.
        InvalidArgumentError: The output has another dtype, or is no part of the input.
    """
    for taken in ("async_op", "algorithm", "accumulate", "input_split_sizes"):
        if how.get(taken) not in (None, False):
            raise UnsupportedError(f"{name} with reproducible takes no {taken}")
    kind = as_reduce_op(op) if function_for(tensor, op) is None else None
    mine = view(tensor, write=False)
    dtype = mine.dtype.name
    if kind is None or kind not in (ReduceOp.SUM, ReduceOp.AVG) or not sums_exactly(dtype):
        shown = getattr(kind or op, "name", type(op).__name__)
        raise UnsupportedError(
            f"{name} with reproducible of {shown} on {dtype}: only SUM and AVG of float16, "
            "bfloat16, float32, float64 and complex numbers",
            hint="MIN and MAX depend on the order only in the sign of zero and the bits of NaN",
        )
    scatters, size = name.startswith("reduce_sc"), group.size()
    made = view(output, write=True, pack=False) if root in (-1, group.rank()) else None
    if (
        scatters
        and made is not None
        and (made.dtype.name, made.count * size) != (dtype, mine.count)
    ):
        raise InvalidArgumentError(
            f"{name}: the output is {made.dtype.name} of {made.count} elements, expected {dtype} "
            f"of 1/{size} of the input's {mine.count}"
        )
    shape = "" if scatters else list(mine.shape)
    label = f"{name}, reproducible {kind.name} of {dtype}{shape}{_to(group, root)}"
    divisor = size if kind == ReduceOp.AVG else 1
    how = {"timeout": how.get("timeout"), "root": root, "scatters": scatters, "divisor": divisor}
    result = exact_over_ranks(group, mine.array.reshape(1, -1), (dtype, dtype), label, **how)
    if made is not None and result is not None:
        made.array[:] = result
        made.unpack()
    return Work(Pending([output], done=True), name, group)
