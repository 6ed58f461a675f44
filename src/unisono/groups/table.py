"""The table of operations. `groups/operations.py` fills it: one row for each method there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from unisono.errors import InvalidArgumentError


class OpSchema(NamedTuple):
    """One operation: its names here and in c10d, its arguments, and how it is called.

    Attributes:
        name: Name of the method of `ProcessGroup`, of the backend's method and of the function.
        c10d_op: Name in c10d's dispatcher; "" if c10d has no such operation.
        c10d_methods: Names of the methods of c10d's ProcessGroup.
        data: Parameters of our method that hold arrays, in c10d's order. Brackets mark a parameter
            that c10d also takes inside a list of length 1: [tensor], [outputs].
        settings: Parameters that c10d has in an options object, or after the data.
        check: Checks the method's arguments and calls the backend, as check(group, *arguments).
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
    check: Callable[..., Any] = lambda group, *arguments: (None, arguments)
    repeat: str | None = None
    coalesced: str = ""

    @property
    def data_names(self) -> list[str]:
        """The names in `data`, without brackets."""
        return [name.strip("[]") for name in self.data.split()]

    @property
    def parameters(self) -> dict[str, str]:
        """The parameters in `repeat`: our name -> kind for C++."""
        kinds = {}
        for word in (self.repeat or "").split():
            kinds[word.partition(":")[0]] = word.rpartition(":")[2]
        return kinds


OPS: dict[str, OpSchema] = {}
"""Name of the operation -> its row."""


def schema_of(op: str) -> OpSchema:
    """Return the schema of an operation, given its name here or in c10d's dispatcher.

    Raises:
        InvalidArgumentError: No such operation; lists the known operations.
    """
    name = op.removeprefix("c10d::")
    for schema in OPS.values():
        if op == schema.name or (schema.c10d_op and name == schema.c10d_op):
            return schema
    raise InvalidArgumentError(f"unknown operation {op!r} (known: {', '.join(OPS)})")
