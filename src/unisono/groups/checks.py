"""What a process group checks before a call goes to a backend: ranks, lists, reduce ops, tags.

One function per operation: it gets the group and the arguments of the method, and returns the
array that says which device is meant (None for none) and the arguments for the kernel.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from unisono.base.types import ReduceOp
from unisono.errors import ArgumentTypeError, InvalidArgumentError

if TYPE_CHECKING:
    from unisono.groups.process_group import ProcessGroup

__all__ = ["CHECKS", "as_integer", "list_on_root", "one_each"]

Checked = tuple[Any, tuple[Any, ...]]


def _broadcast(group: ProcessGroup, tensor: Any, root: int) -> Checked:
    return tensor, (tensor, _member(group, root, "root"))


def _all_reduce(group: ProcessGroup, tensor: Any, op: Any) -> Checked:
    return tensor, (tensor, _reduce_op(op))


def _reduce(group: ProcessGroup, tensor: Any, root: int, op: Any) -> Checked:
    return tensor, (tensor, _member(group, root, "root"), _reduce_op(op))


def _all_gather(group: ProcessGroup, outputs: Any, tensor: Any) -> Checked:
    one_each(group, outputs, "tensor_list")
    return tensor, (outputs, tensor)


def _all_gather_coalesced(group: ProcessGroup, outputs: Any, tensors: Any) -> Checked:
    one_each(group, outputs, "output_tensor_lists")
    return _first(tensors, "input_tensor_list"), (outputs, tensors)


def _gather(group: ProcessGroup, tensor: Any, outputs: Any, root: int) -> Checked:
    root = _member(group, root, "root")
    list_on_root(group, outputs, root, "gather_list")
    return tensor, (tensor, outputs, root)


def _scatter(group: ProcessGroup, output: Any, inputs: Any, root: int) -> Checked:
    root = _member(group, root, "root")
    list_on_root(group, inputs, root, "scatter_list")
    return output, (output, inputs, root)


def _reduce_scatter(group: ProcessGroup, output: Any, inputs: Any, op: Any) -> Checked:
    one_each(group, inputs, "input_list")
    return output, (output, inputs, _reduce_op(op))


def _reduce_scatter_tensor_coalesced(
    group: ProcessGroup, outputs: Any, tensors: Any, op: Any
) -> Checked:
    return _paired(outputs, tensors), (outputs, tensors, _reduce_op(op))


def _all_to_all(group: ProcessGroup, outputs: Any, inputs: Any) -> Checked:
    one_each(group, outputs, "output_tensor_list")
    one_each(group, inputs, "input_tensor_list")
    return inputs[0], (outputs, inputs)


CHECKS: dict[str, Callable[..., Checked]] = {
    "broadcast": _broadcast,
    "scan": _all_reduce,
    "exscan": _all_reduce,
    "all_reduce": _all_reduce,
    "all_reduce_coalesced": lambda group, tensors, op: (
        _first(tensors, "tensors"),
        (tensors, _reduce_op(op)),
    ),
    "reduce": _reduce,
    "all_gather": _all_gather,
    "all_gather_into_tensor": lambda group, output, tensor: (tensor, (output, tensor)),
    "all_gather_coalesced": _all_gather_coalesced,
    "all_gather_into_tensor_coalesced": lambda group, outputs, tensors: (
        _paired(outputs, tensors),
        (outputs, tensors),
    ),
    "gather": _gather,
    "scatter": _scatter,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_tensor": lambda group, output, tensor, op: (
        output,
        (output, tensor, _reduce_op(op)),
    ),
    "reduce_scatter_tensor_coalesced": _reduce_scatter_tensor_coalesced,
    "all_to_all": _all_to_all,
    "all_to_all_single": lambda group, *arguments: (arguments[1], arguments),
    "barrier": lambda group: (None, ()),
    "agree": lambda group, text: (None, (text,)),
    "send": lambda group, tensor, peer, tag: (
        tensor,
        (tensor, _member(group, peer, "dst"), _tag(tag)),
    ),
    "recv": lambda group, tensor, peer, tag: (
        tensor,
        (tensor, _member(group, peer, "src"), _tag(tag)),
    ),
    "recv_any_source": lambda group, tensor, tag: (tensor, (tensor, _tag(tag))),
}


def one_each(group: ProcessGroup, tensors: Any, name: str) -> None:
    """Check that a list has one entry for each rank.

    Raises:
        ArgumentTypeError: Not a list.
        InvalidArgumentError: More or fewer entries.
    """
    if not isinstance(tensors, (list, tuple)):
        raise ArgumentTypeError(f"{name} must be a list, got {type(tensors).__name__}")
    if len(tensors) != group.size():
        raise InvalidArgumentError(
            f"{name} has {len(tensors)} entries, expected one for each of {group.size()} ranks"
        )


def list_on_root(group: ProcessGroup, tensors: Any, root: int, name: str) -> None:
    """Check that a list is there on the root, and only there.

    Raises:
        ArgumentTypeError: Not a list.
        InvalidArgumentError: Missing, in the wrong place, or of the wrong length.
    """
    if group.rank() != root:
        if tensors:
            raise InvalidArgumentError(f"{name} is for the root only, which is rank {root}")
    elif tensors is None:
        raise InvalidArgumentError(f"{name} is required on the root, which is this rank")
    else:
        one_each(group, tensors, name)


def as_integer(value: Any, what: str) -> int:
    """Return a rank, tag or size as an int; NumPy's integers are fine, floats and bools not.

    Raises:
        ArgumentTypeError: Not an integer.
    """
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise ArgumentTypeError(f"{what} must be an integer, got {value!r}")


def _member(group: ProcessGroup, rank: Any, what: str) -> int:
    number = as_integer(rank, what)
    if not 0 <= number < group.size():
        raise InvalidArgumentError(
            f"{what}={number} is not a rank of group '{group.name}' (0..{group.size() - 1})"
        )
    return number


def _reduce_op(op: Any) -> ReduceOp:
    if not isinstance(op, ReduceOp):
        raise ArgumentTypeError(f"op must be a ReduceOp such as ReduceOp.SUM, got {op!r}")
    return op


def _first(tensors: Any, name: str) -> Any:
    if not isinstance(tensors, (list, tuple)):
        raise ArgumentTypeError(f"{name} must be a list, got {type(tensors).__name__}")
    if not tensors:
        raise InvalidArgumentError(f"{name} is empty; expected at least one array")
    return tensors[0]


def _paired(outputs: Any, tensors: Sequence[Any]) -> Any:
    """Check that two lists have as many entries; return the first of `tensors`."""
    first = _first(tensors, "inputs")
    _first(outputs, "outputs")
    if len(outputs) != len(tensors):
        raise InvalidArgumentError(
            f"outputs has {len(outputs)} entries and inputs {len(tensors)}; expected as many"
        )
    return first


def _tag(tag: Any) -> int:
    number = as_integer(tag, "tag")
    if not 0 <= number < 2**63:
        raise InvalidArgumentError(f"tag={number} is outside 0..2**63-1")
    return number
