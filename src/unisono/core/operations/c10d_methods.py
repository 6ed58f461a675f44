"""The forms of c10d's ProcessGroup methods, for scripts that hold a group object.

c10d's methods take lists of one tensor and an options object, or plain tensors and the options
one by one. They are asynchronous unless `asyncOp` is False. With the table of operations each form
becomes one call of our own method:

    pg.allreduce([x], opts)          pg.all_reduce(x, opts.reduceOp, async_op=opts.asyncOp)
    pg.allreduce(x, op, timeout)     pg.all_reduce(x, op, async_op=True, timeout=timeout)
    pg.gather([outs], [x], opts)     pg.gather(x, outs, opts.rootRank, async_op=opts.asyncOp)

Some methods have the same name here and in c10d (`broadcast`, `gather`, ...). Arguments mean c10d's
form in these cases:

    - the first argument is a list
    - the last argument is an options object
    - a keyword is c10d's
    - there are more arguments than ours has: the last is then a time-out

Source: torch._C._distributed_c10d.ProcessGroup (torch 2.13).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from unisono.core.base.types import ReduceOp
from unisono.core.operations.stream_queue import P2P
from unisono.core.operations.table import FIELDS, OPS, OpSchema
from unisono.core.operations.work import Work
from unisono.errors import ArgumentTypeError, InvalidArgumentError

GROUP_DEFAULT = timedelta(milliseconds=-1)
"""The time-out in an options object that stands for the group's time-out."""


@dataclass
class _Options:
    """The fields that all options have.

    Attributes:
        timeout: The group's if it is `GROUP_DEFAULT`.
        asyncOp: Return before the end.
    """

    timeout: timedelta = GROUP_DEFAULT
    asyncOp: bool = True


@dataclass
class BroadcastOptions(_Options):
    """Options of `broadcast`. `rootTensor` counts the tensors of the list, hence is 0."""

    rootRank: int = 0
    rootTensor: int = 0


@dataclass
class AllreduceOptions(_Options):
    """Options of `allreduce`."""

    reduceOp: ReduceOp = ReduceOp.SUM


@dataclass
class AllreduceCoalescedOptions(AllreduceOptions):
    """Options of `allreduce_coalesced`."""


@dataclass
class ReduceOptions(AllreduceOptions):
    """Options of `reduce`. `rootTensor` counts the tensors of the list, hence is 0."""

    rootRank: int = 0
    rootTensor: int = 0


@dataclass
class AllgatherOptions(_Options):
    """Options of `allgather` and its variants."""


@dataclass
class GatherOptions(_Options):
    """Options of `gather`."""

    rootRank: int = 0


@dataclass
class ScatterOptions(_Options):
    """Options of `scatter`."""

    rootRank: int = 0


@dataclass
class ReduceScatterOptions(AllreduceOptions):
    """Options of `reduce_scatter` and its variants."""


@dataclass
class AllToAllOptions(_Options):
    """Options of `alltoall` and `alltoall_base`."""


@dataclass
class BarrierOptions(_Options):
    """Options of `barrier`; a barrier of CPU ranks touches no device."""

    device_ids: list[int] = field(default_factory=list)
    device: Any = None


# Our name of a parameter -> c10d's names.
_KEYWORDS = {
    "output": ("output_tensors", "output_tensor", "outputTensor"),
    "outputs": ("output_tensors", "output_lists"),
    "tensor": ("tensors", "input_tensors", "input_tensor", "input", "inputTensor"),
    "tensors": ("inputs", "input_list"),
    "inputs": ("input_tensors", "input"),
    "peer": ("srcRank", "dstRank"),
}


@dataclass
class C10dCall:
    """The arguments of a call in c10d's form, by our names.

    Attributes:
        schema: The operation.
        given: Data as they were given, then settings and keywords.
        root_tensor: `rootTensor` of the options object, 0 without one.
    """

    schema: OpSchema
    given: dict[str, Any]
    root_tensor: int = 0

    @property
    def data(self) -> dict[str, Any]:
        """The arrays that were given, by our names."""
        return {name: self.given[name] for name in self.schema.data_names if name in self.given}

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of our method.

        Raises:
            ArgumentTypeError: A list of tensors whose length must be 1 and is not.
            InvalidArgumentError: `rootTensor` is not the number of a tensor.
        """
        given = dict(self.given)
        for shown, name in zip(self.schema.data.split(), self.schema.data_names, strict=True):
            if shown != name and name in given:
                given[name] = _unwrapped(given[name], name)
            elif name.endswith("split_sizes"):
                given.setdefault(name, None)
        if self.root_tensor:
            raise InvalidArgumentError(
                f"rootTensor={self.root_tensor} is not the number of a tensor (0..0)"
            )
        return given


def read_c10d_form(schema: OpSchema, arguments: tuple[Any, ...], how: dict[str, Any]) -> C10dCall:
    """Return what the arguments of a method of c10d mean.

    Args:
        schema: The operation.
        arguments: In c10d's order: the data, then an options object, or settings and time-out.
        how: Keyword arguments; `opts` is an options object, the rest is for our method.

    Raises:
        ArgumentTypeError: More arguments than the operation has.
    """
    names, settings = schema.data_names, schema.settings.split()
    how = dict(how)
    opts = how.pop("opts", None)
    given: dict[str, Any] = {}
    expected = [*names, *settings, "timeout"]
    if len(arguments) > len(expected):
        raise ArgumentTypeError(
            f"{schema.name} takes {len(expected)} arguments in c10d's form "
            f"({', '.join(expected)}), got {len(arguments)}"
        )
    for number, (name, value) in enumerate(zip(expected, arguments, strict=False)):
        if hasattr(value, "asyncOp"):
            # An options object stands in place of all settings.
            opts = value
            break
        if value is not None or number < len(names):
            given[name] = value
    for name in names:
        for keyword in _KEYWORDS.get(name, ()):
            if keyword in how and name not in given:
                given[name] = how.pop(keyword)
    given |= how
    if opts is None:
        given.setdefault("async_op", True)
        return C10dCall(schema, given)
    for named in ("asyncOp", "timeout", *(FIELDS[name] for name in settings)):
        if not hasattr(opts, named):
            raise ArgumentTypeError(
                f"the options of {schema.name} have no {named}: {type(opts).__name__}"
            )
    given.setdefault("async_op", opts.asyncOp)
    given |= {name: getattr(opts, FIELDS[name]) for name in settings}
    given["timeout"] = None if opts.timeout == GROUP_DEFAULT else opts.timeout
    return C10dCall(schema, given, getattr(opts, "rootTensor", 0))


def call_c10d_form(
    group: Any, schema: OpSchema, arguments: tuple[Any, ...], how: dict[str, Any]
) -> Work:
    """Make the call that c10d's arguments mean.

    Args:
        group: Group whose method was called.
        schema: The operation.
        arguments: See `read_c10d_form`, as also for `how`.
        how: Keyword arguments.

    Raises:
        ArgumentTypeError: More arguments than the operation has, or a list of tensors whose
            length must be 1 and is not. Ranks in a collective call raise CollectiveMismatchError.
    """
    with refusing(group, schema, arguments):
        given = read_c10d_form(schema, arguments, how).arguments()
    work: Work = group._call(schema, (), given)
    return work


@contextlib.contextmanager
def refusing(group: Any, schema: OpSchema, arguments: Sequence[Any]) -> Iterator[None]:
    """Report an error of the arguments to the other ranks if the call is a collective."""
    since = group.place()
    try:
        yield
    except BaseException as error:
        if schema.name not in P2P and not group.is_known_to_all(error, since):
            caller = group.take_guard(schema.name)
            try:
                group.refuse(schema.name, error, arguments)
            finally:
                group.release_guard(caller)
        raise


def gather_rows(group: Any, *arguments: Any, **how: Any) -> Work:
    """`unisono.gather_into_tensor` in c10d's form; asynchronous unless `asyncOp` is False."""
    schema, label = OPS["gather"], "gather_into_tensor"
    with refusing(group, schema._replace(name=label), arguments):
        names = {"output": "outputs", "input": "tensor"}
        given = {names.get(name, name): value for name, value in how.items()}
        given = read_c10d_form(schema, arguments, given).given
        if missing := [name for name, its in names.items() if its not in given]:
            raise ArgumentTypeError(f"{label}: missing argument {missing[0]}")
        is_root = given.get("root", 0) == group.rank()
        given["outputs"] = rows_of(given["outputs"], group.size()) if is_root else []
    work: Work = group._call(schema, (), given | {"_label": label})
    return work


def rows_of(array: Any, count: int) -> list[Any]:
    """Return `count` equal parts of an array along its first dimension; they share its memory."""
    if not getattr(array, "shape", ()):
        raise ArgumentTypeError(
            f"output_tensor must be an array with rows, got {type(array).__name__}"
        )
    rows, rest = divmod(array.shape[0], count)
    if rest:
        raise InvalidArgumentError(
            f"output_tensor has {array.shape[0]} rows, which {count} ranks cannot share equally"
        )
    return [array[rows * part : rows * (part + 1)] for part in range(count)]


def _unwrapped(value: Any, name: str) -> Any:
    """Return the entry of a list of length 1: a tensor, or a list of tensors."""
    nested = name in ("outputs", "inputs")
    if not isinstance(value, (list, tuple)):
        return value
    if nested and not (value and isinstance(value[0], (list, tuple))):
        return value
    if len(value) != 1:
        what = "a list of arrays" if nested else "an array"
        raise ArgumentTypeError(
            f"{name} must be {what}, or in c10d's form a list of one such; got a list of "
            f"{len(value)}"
        )
    return value[0]


def test_of_form(schema: OpSchema) -> Callable[[Sequence[Any], dict[str, Any]], bool]:
    """Return a test for c10d's form of the arguments, for a method that takes ours, too."""
    names = schema.data_names
    in_lists = schema.data.startswith("[")
    known = {"opts", *(word for name in names for word in _KEYWORDS.get(name, ()))} - {*names}
    most = schema.check.__code__.co_argcount - 1

    def is_c10d_form(arguments: Sequence[Any], how: dict[str, Any]) -> bool:
        if how and not known.isdisjoint(how):
            return True
        if not arguments:
            return False
        listed = in_lists and type(arguments[0]) is list
        return listed or len(arguments) > most or hasattr(arguments[-1], "asyncOp")

    return is_c10d_form
