"""The operations of a process group: one row each, and what follows from the rows.

A row (`OpSchema`) holds names, data, settings, the check of arguments, and the reading for C++.
Other code is derived from the rows:

    groups/dispatch.py        kernels, and the error of an operation that a backend lacks
    groups/c10d_methods.py    c10d's methods of `ProcessGroup`
    c10d/collectives.py       calls that C++ runs (`repeat`)
    c10d/coalescing.py        calls that a block records
    torch/operations.py       methods of torch's process group; torch/plain.py: their short way

A new operation needs six things:

    1. a row here
    2. a method of `ProcessGroup`
    3. a function in `c10d/collectives.py`
    4. its name in `unisono/__init__.py`
    5. a method of each backend that supports it
    6. an example in the docstring of the function, or of the method if there is no function

A check gets the group and the arguments of the method. It returns the array whose device selects
the backend (None: the group's first backend) and the arguments of the kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from unisono.base.integers import as_integer, as_splits
from unisono.base.types import as_reduce_op
from unisono.engines.functions import run_in_cpp
from unisono.errors import ArgumentTypeError, InvalidArgumentError
from unisono.groups.protocols import GroupView
from unisono.transports.messages import ANY_TAG, PROC_NULL

Checked = tuple[Any, tuple[Any, ...]]
F = TypeVar("F", bound=Callable[..., Any])


def _broadcast(group: GroupView, tensor: Any, root: int) -> Checked:
    return tensor, (tensor, _member(group, root, "root"))


def _all_reduce(group: GroupView, tensor: Any, op: Any) -> Checked:
    return tensor, (tensor, as_reduce_op(op))


def _reduce(group: GroupView, tensor: Any, root: int, op: Any) -> Checked:
    return tensor, (tensor, _member(group, root, "root"), as_reduce_op(op))


def _all_gather(group: GroupView, outputs: Any, tensor: Any) -> Checked:
    one_each(group, outputs, "tensor_list")
    return tensor, (outputs, tensor)


def _all_gather_coalesced(group: GroupView, outputs: Any, tensors: Any) -> Checked:
    one_each(group, outputs, "output_tensor_lists")
    return _first(tensors, "input_tensor_list"), (outputs, tensors)


def _gather(group: GroupView, tensor: Any, outputs: Any, root: int) -> Checked:
    root = _member(group, root, "root")
    list_on_root(group, outputs, root, "gather_list")
    return tensor, (tensor, outputs, root)


def _scatter(group: GroupView, output: Any, inputs: Any, root: int) -> Checked:
    root = _member(group, root, "root")
    list_on_root(group, inputs, root, "scatter_list")
    return output, (output, inputs, root)


def _reduce_scatter(group: GroupView, output: Any, inputs: Any, op: Any) -> Checked:
    one_each(group, inputs, "input_list")
    return output, (output, inputs, as_reduce_op(op))


def _all_to_all(group: GroupView, outputs: Any, inputs: Any) -> Checked:
    one_each(group, outputs, "output_tensor_list")
    one_each(group, inputs, "input_tensor_list")
    return inputs[0], (outputs, inputs)


def one_each(group: GroupView, tensors: Any, name: str) -> None:
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


def list_on_root(group: GroupView, tensors: Any, root: int, name: str) -> None:
    """Check that a list is there on the root, and only there.

    Raises:
        ArgumentTypeError: Not a list.
        InvalidArgumentError: Missing, in the wrong place, or of the wrong length.
    """
    if group.rank() != root:
        # The truth value of an array is not that of a list.
        if len(tensors) if isinstance(tensors, (list, tuple)) else tensors is not None:
            raise InvalidArgumentError(f"{name} is for the root only, which is rank {root}")
    elif tensors is None:
        raise InvalidArgumentError(f"{name} is required on the root, which is this rank")
    else:
        one_each(group, tensors, name)


def _all_to_all_single(
    group: GroupView, output: Any, tensor: Any, output_rows: Any, input_rows: Any
) -> Checked:
    taken = as_splits(output_rows, "output_split_sizes")
    given = as_splits(input_rows, "input_split_sizes")
    return tensor, (output, tensor, taken, given)


def _member(group: GroupView, rank: Any, what: str, *, or_null: bool = False) -> int:
    number = as_integer(rank, what)
    if or_null and number == PROC_NULL:
        return number
    if not 0 <= number < group.size():
        raise InvalidArgumentError(
            f"{what}={number} is not a rank of group '{group.name}' (0..{group.size() - 1})"
        )
    return number


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


def _tag(tag: Any, *, receives: bool = False) -> int:
    number = as_integer(tag, "tag")
    if not 0 <= number < 2**63 and not (receives and number == ANY_TAG):
        raise InvalidArgumentError(f"tag={number} is outside 0..2**63-1")
    return number


class OpSchema(NamedTuple):
    """One operation: its names here and in c10d, its arguments, and how it is called.

    Attributes:
        name: Name of the method of `ProcessGroup`, of the backend's method and of the function.
        c10d_op: Name in c10d's dispatcher; "" if c10d has no such operation.
        c10d_methods: Names of the methods of c10d's ProcessGroup.
        data: Parameters of our method that hold arrays, in c10d's order. Brackets mark a parameter
            that c10d also takes inside a list of length 1: [tensor], [outputs].
        settings: Parameters that c10d has in an options object, or after the data.
        check: Check of the method's arguments, called as check(group, *arguments).
        repeat: The function's parameters before `group`, in its order, each with its kind for
            `engines.functions.run_in_cpp`. None: Python runs every call of the function.
        coalesced: Operation that replaces several calls of this operation in a coalescing block;
            "" if there is none.
    """

    name: str
    c10d_op: str = ""
    c10d_methods: tuple[str, ...] = ()
    data: str = ""
    settings: str = ""
    check: Callable[..., Checked] = lambda group, *arguments: (None, arguments)
    repeat: str | None = None
    coalesced: str = ""

    @property
    def data_names(self) -> list[str]:
        """The names in `data`, without brackets."""
        return [name.strip("[]") for name in self.data.split()]

    @property
    def parameters(self) -> dict[str, str]:
        """The parameters in `repeat`: our name -> kind for C++."""
        words = [word.partition(":") for word in (self.repeat or "").split()]
        return {name: kind or name for name, _, kind in words}


OPS: dict[str, OpSchema] = {
    schema.name: schema
    for schema in (
        OpSchema(
            "broadcast", "broadcast_", ("broadcast",), "[tensor]", "root", _broadcast,
            repeat="tensor:writes root",
        ),
        OpSchema(
            "all_reduce", "allreduce_", ("allreduce",), "[tensor]", "op", _all_reduce,
            repeat="tensor:writes op", coalesced="all_reduce_coalesced",
        ),
        OpSchema(
            "all_reduce_coalesced", "allreduce_coalesced_", ("allreduce_coalesced",),
            "tensors", "op",
            lambda group, tensors, op: (_first(tensors, "tensors"), (tensors, as_reduce_op(op))),
        ),
        OpSchema(
            "reduce", "reduce_", ("reduce",), "[tensor]", "root op", _reduce,
            repeat="tensor:writes root op",
        ),
        OpSchema(
            "all_gather", "allgather_", ("allgather",), "[outputs] [tensor]", "", _all_gather,
            repeat="outputs:writes_list tensor:reads",
        ),
        OpSchema(
            "all_gather_into_tensor", "_allgather_base_", ("_allgather_base", "all_gather_single"),
            "output tensor", "", lambda group, output, tensor: (tensor, (output, tensor)),
            repeat="output:writes tensor:reads", coalesced="all_gather_into_tensor_coalesced",
        ),
        OpSchema(
            "all_gather_coalesced", "allgather_coalesced_", ("allgather_coalesced",),
            "outputs tensors", "", _all_gather_coalesced,
        ),
        OpSchema(
            "all_gather_into_tensor_coalesced", "allgather_into_tensor_coalesced_",
            ("allgather_into_tensor_coalesced", "all_gather_single_coalesced"),
            "outputs tensors", "",
            lambda group, outputs, tensors: (_paired(outputs, tensors), (outputs, tensors)),
        ),
        OpSchema(
            "gather", "gather_", ("gather",), "[outputs] [tensor]", "root", _gather,
            repeat="tensor:reads outputs:writes_list root",
        ),
        OpSchema(
            "scatter", "scatter_", ("scatter",), "[output] [inputs]", "root", _scatter,
            repeat="output:writes inputs:reads_list root",
        ),
        OpSchema(
            "reduce_scatter", "reduce_scatter_", ("reduce_scatter",), "[output] [inputs]", "op",
            _reduce_scatter, repeat="output:writes inputs:reads_list op",
        ),
        OpSchema(
            "reduce_scatter_tensor", "_reduce_scatter_base_",
            ("_reduce_scatter_base", "reduce_scatter_single"), "output tensor", "op",
            lambda group, output, tensor, op: (output, (output, tensor, as_reduce_op(op))),
            repeat="output:writes tensor:reads op", coalesced="reduce_scatter_tensor_coalesced",
        ),
        OpSchema(
            "reduce_scatter_tensor_coalesced", "reduce_scatter_tensor_coalesced_",
            ("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"),
            "outputs tensors", "op",
            lambda group, outputs, tensors, op: (
                _paired(outputs, tensors), (outputs, tensors, as_reduce_op(op)),
            ),
        ),
        OpSchema(
            "all_to_all", "alltoall_", ("alltoall",), "outputs inputs", "", _all_to_all,
            repeat="outputs:writes_list inputs:reads_list",
        ),
        OpSchema(
            "all_to_all_single", "alltoall_base_", ("alltoall_base", "all_to_all_single"),
            "output tensor output_split_sizes input_split_sizes", "",
            _all_to_all_single,
            repeat="output:writes tensor:reads output_split_sizes input_split_sizes",
        ),
        OpSchema(
            "neighbor_all_to_all", data="outputs inputs", settings="links",
            check=lambda group, outputs, inputs, links: (
                next(iter([*inputs, *outputs]), None), (outputs, inputs, links),
            ),
        ),
        OpSchema("scan", data="tensor", settings="op", check=_all_reduce),
        OpSchema("exscan", data="tensor", settings="op", check=_all_reduce),
        OpSchema("barrier", "barrier", ("barrier",), repeat=""),
        OpSchema("agree"),
        OpSchema(
            "send", "send", ("send",), "[tensor] peer tag", "",
            lambda group, tensor, peer, tag: (
                tensor, (tensor, _member(group, peer, "dst", or_null=True), _tag(tag)),
            ),
            repeat="tensor:sent peer",
        ),
        OpSchema(
            "recv", "recv_", ("recv",), "[tensor] peer tag", "",
            lambda group, tensor, peer, tag: (
                tensor,
                (tensor, _member(group, peer, "src", or_null=True), _tag(tag, receives=True)),
            ),
            repeat="tensor:received peer",
        ),
        OpSchema(
            "recv_any_source", "recv_any_source_", ("recv_anysource",), "[tensor] tag", "",
            lambda group, tensor, tag: (tensor, (tensor, _tag(tag, receives=True))),
        ),
        *(
            OpSchema(
                name, settings="peer tag",
                check=lambda group, peer, tag: (
                    None,
                    (
                        None if peer is None else _member(group, peer, "src", or_null=True),
                        _tag(tag, receives=True),
                    ),
                ),
            )
            for name in ("recv_array", "probe")
        ),
    )
}  # fmt: skip
"""Name of the operation -> its row."""

CHECKS = {name: schema.check for name, schema in OPS.items()}

PEER_AT = {
    name: words.index("peer")
    for name, schema in OPS.items()
    if "peer" in (words := [*schema.data_names, *schema.settings.split()])
}
"""Name of an operation that is one message -> place of the other rank in the arguments."""

_BY_C10D_OP = {schema.c10d_op: schema for schema in OPS.values() if schema.c10d_op}


def schema_of(op: str) -> OpSchema:
    """Return the schema of an operation, given its name here or in c10d's dispatcher.

    Raises:
        InvalidArgumentError: No such operation; lists the known operations.
    """
    found = OPS.get(op) or _BY_C10D_OP.get(op.removeprefix("c10d::"))
    if found is None:
        raise InvalidArgumentError(f"unknown operation {op!r} (known: {', '.join(OPS)})")
    return found


def in_cpp(function: F) -> F:
    """Let C++ run the calls of an operation's function, as `OpSchema.repeat` describes it."""
    code = function.__code__
    names = code.co_varnames[: code.co_argcount]
    kinds = {name: name for name in names if name in ("group", "async_op", "tag")}
    for name, kind in zip(names, OPS[function.__name__].parameters.values(), strict=False):
        if not kind.endswith("split_sizes"):
            kinds[name] = kind

    def prepare(group: Any, arguments: dict[str, Any]) -> object:
        try:
            return function(**arguments, group=group, async_op=True)
        except Exception:
            # Python makes the call: it raises the error again, and reports it to the other ranks.
            return None
        except BaseException as interrupt:
            group.real.refuse(function.__name__, interrupt)
            raise

    return run_in_cpp(function, prepare, kinds)
