"""Calls that Gloo takes and unisono's methods do not: made of several calls of those methods.

    sparse tensors              all_reduce, by gathers of their parts
    wrapper sub-classes         one call for each inner tensor, such as the values of a quantized
                                weight and their scales
    several tensors per rank    lists for ranks with several devices: all_reduce, broadcast,
                                all_gather

Such a call is done when it returns, also with `async_op`. Otherwise calls of other groups could
come between its parts in another order on another rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from unisono.adapters.torch.sparse import all_reduce_sparse
from unisono.adapters.torch.values import dense
from unisono.core.base.types import RedOpType, ReduceOp
from unisono.core.groups.process_group import ProcessGroup
from unisono.core.operations.c10d_methods import C10dCall
from unisono.errors import ArgumentTypeError, InvalidArgumentError, UnsupportedError

__all__ = ["make_special"]

_PLAIN_KINDS = (torch.Tensor, torch.nn.Parameter)

# AVG divides the sum by the number of ranks, as in Gloo; the call over all ranks divides.
_REDUCE: dict[RedOpType, Callable[..., torch.Tensor]] = {
    RedOpType.SUM: torch.add,
    RedOpType.AVG: torch.add,
    RedOpType.PREMUL_SUM: torch.add,
    RedOpType.PRODUCT: torch.mul,
    RedOpType.MIN: torch.minimum,
    RedOpType.MAX: torch.maximum,
    RedOpType.BAND: torch.bitwise_and,
    RedOpType.BOR: torch.bitwise_or,
    RedOpType.BXOR: torch.bitwise_xor,
}


def make_special(group: ProcessGroup, call: C10dCall) -> list[Any] | None:
    """Make a special call and return the tensors of its result; return None for any other call.

    Raises:
        ArgumentTypeError: No reduce op.
        InvalidArgumentError: Tensors that must be alike are not.
        UnsupportedError: A reduce op that such a call lacks.
    """
    data = call.data
    several = data.get("tensor")
    if type(several) is list and len(several) > 1:
        if call.schema.name in _SEVERAL:
            return _SEVERAL[call.schema.name](group, call, several)
        return None
    for value in data.values():
        for tensor in tensors_of(value):
            if type(tensor) not in _PLAIN_KINDS and _is_wrapper(tensor):
                return _by_parts(group, call, tensor)
            if tensor.is_sparse and call.schema.name == "all_reduce":
                op = call.given.get("op", ReduceOp.SUM)
                all_reduce_sparse(group, tensor, op, call.given.get("timeout"))
                return [tensor]
            break
    return None


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested lists."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from tensors_of(each)


def _make(group: ProcessGroup, call: C10dCall) -> None:
    """Make a call, special or not, and wait for it."""
    if make_special(group, call) is None:
        op = call.given.get("op")
        given = {name: dense(value, op) for name, value in call.arguments().items()}
        getattr(group, call.schema.name)(**given | {"async_op": False})


# ---- wrapper sub-classes ------------------------------------------------------------------


def _is_wrapper(tensor: torch.Tensor) -> bool:
    # `dense` has the tensors with these methods: results of functional collectives, DTensors.
    if hasattr(tensor, "trigger_wait") or hasattr(tensor, "to_local"):
        return False
    return bool(is_traceable_wrapper_subclass(tensor))


def _by_parts(group: ProcessGroup, call: C10dCall, like: Any) -> list[Any]:
    """Make the call for each inner tensor of wrapper tensors.

    The ranks agree on the class first. Otherwise a rank with a plain tensor would make one call
    while the others make several, and its later calls would take part in theirs.
    """
    name, kind = call.schema.name, type(like)
    parts, _ = like.__tensor_flatten__()
    made = [{key: _part(v, part, like) for key, v in call.data.items()} for part in parts]
    text = f"{name} of {kind.__qualname__}({', '.join(parts)})"
    group.agree(text, timeout=call.given.get("timeout"))
    for given in made:
        _make(group, C10dCall(call.schema, call.given | given, call.root_tensor))
    return list(tensors_of(next(iter(call.data.values()))))


def _part(value: Any, part: str, like: Any) -> Any:
    """Return the inner tensors with the name `part` in nested lists."""
    if isinstance(value, (list, tuple)):
        return [_part(each, part, like) for each in value]
    if not isinstance(value, torch.Tensor):
        return value
    if type(value) is not type(like):
        raise InvalidArgumentError(
            f"the tensors of one call are {type(like).__qualname__} and "
            f"{type(value).__qualname__}; expected one class"
        )
    return getattr(value, part)


# ---- several tensors per rank -------------------------------------------------------------


def _all_reduce(group: ProcessGroup, call: C10dCall, tensors: list[torch.Tensor]) -> list[Any]:
    """Replace all tensors of all ranks by the reduction over all of them."""
    op = call.given.get("op", ReduceOp.SUM)
    if not isinstance(op, ReduceOp):
        raise ArgumentTypeError(f"op must be a ReduceOp such as ReduceOp.SUM, got {op!r}")
    _require_alike(tensors)
    total = tensors[0]
    try:
        with torch.no_grad():
            for tensor in tensors[1:]:
                total = _REDUCE[op.op](total, tensor)
    except (RuntimeError, NotImplementedError) as error:
        raise UnsupportedError(f"all_reduce of several {total.dtype} tensors: {error}") from error
    _make(group, C10dCall(call.schema, call.given | {"tensor": total}))
    return _copied(total, tensors)


def _broadcast(group: ProcessGroup, call: C10dCall, tensors: list[torch.Tensor]) -> list[Any]:
    """Copy one tensor of the root into all tensors of all ranks."""
    if not 0 <= call.root_tensor < len(tensors):
        raise InvalidArgumentError(
            f"rootTensor={call.root_tensor} is not the number of a tensor (0..{len(tensors) - 1})"
        )
    _require_alike(tensors)
    source = tensors[call.root_tensor]
    _make(group, C10dCall(call.schema, call.given | {"tensor": source}))
    return _copied(source, tensors)


def _all_gather(group: ProcessGroup, call: C10dCall, tensors: list[torch.Tensor]) -> list[Any]:
    """Copy all tensors of all ranks into each list of outputs, rank by rank."""
    outputs, count = call.data.get("outputs"), len(tensors)
    lengths = [len(row) for row in outputs] if isinstance(outputs, list) else None
    if lengths != [count * group.size()] * count:
        raise InvalidArgumentError(
            f"all_gather of {count} tensors per rank needs {count} lists of "
            f"{count * group.size()} outputs, got {lengths}"
        )
    first, *others = call.data["outputs"]
    rows = [first[at : at + count] for at in range(0, len(first), count)]
    group.all_gather_coalesced(dense(rows), dense(tensors), timeout=call.given.get("timeout"))
    with torch.no_grad():
        for row in others:
            for target, source in zip(row, first, strict=True):
                target.copy_(source)
    return [first, *others]


_SEVERAL: dict[str, Callable[..., list[Any]]] = {
    "all_reduce": _all_reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
}


def _require_alike(tensors: list[torch.Tensor]) -> None:
    kinds = {(str(tensor.dtype), tuple(tensor.shape)) for tensor in tensors}
    if len(kinds) > 1:
        raise InvalidArgumentError(
            f"the tensors of this rank have {len(kinds)} dtypes or shapes, expected one: "
            f"{', '.join(f'{dtype}{list(shape)}' for dtype, shape in sorted(kinds))}"
        )


def _copied(source: torch.Tensor, targets: list[torch.Tensor]) -> list[torch.Tensor]:
    with torch.no_grad():
        for target in targets:
            if target is not source:
                target.copy_(source)
    return targets
