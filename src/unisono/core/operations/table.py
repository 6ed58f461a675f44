"""The table of operations. `core/operations/methods.py` fills it: one row for each method there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from unisono.errors import InvalidArgumentError

KINDS = {
    **{"op": "o", "root": "n", "group": "g", "async_op": "f"},
    **{"peer": "p", "tag": "t", "partial": "h"},
    **{"algorithm": "a", "deterministic": "e", "timeout": "d"},
}
"""The kinds of parameters by name; `Kind` in native/bindings/arguments.hpp has those of arrays."""

FIELDS = {"root": "rootRank", "op": "reduceOp"}
"""The settings: our name of a parameter -> c10d's name in an options object."""


class OpSchema(NamedTuple):
    """One operation: its names here and in c10d, its arguments, and how it is called.

    Attributes:
        name: Name of the method of `ProcessGroup`, of the backend's method and of the function.
        c10d_op: Name in c10d's dispatcher; "" if c10d has no such operation.
        c10d_methods: Names of the methods of c10d's ProcessGroup.
        data: Parameters of our method but the settings, in c10d's order. Brackets mark a parameter
            that c10d also takes inside a list of length 1: [tensor], [outputs].
        settings: Parameters that c10d has in an options object, or after the data.
        check: Checks the method's arguments and calls the backend, as check(group, *arguments).
        repeat: The kinds of the method's parameters for C++, a letter of each; see `KINDS`.
        coalesced: Operation that replaces several calls of this operation in a coalescing block;
            "" if there is none.
        keywords: Names of the method's parameters.
    """

    name: str
    c10d_op: str = ""
    c10d_methods: tuple[str, ...] = ()
    data: str = ""
    settings: str = ""
    check: Callable[..., Any] = lambda group, *arguments: (None, arguments)
    repeat: str | None = None
    coalesced: str = ""
    keywords: frozenset[str] = frozenset()

    @property
    def data_names(self) -> list[str]:
        """The names in `data`, without brackets."""
        return [name.strip("[]") for name in self.data.split()]

    @property
    def parameters(self) -> dict[str, str]:
        """The parameters in `repeat`: our name -> kind for C++."""
        code = self.check.__code__
        return dict(zip(code.co_varnames[1 : code.co_argcount], self.repeat or "", strict=True))


def row_of(check: Callable[..., Any], c10d_op: str, *, in_lists: bool) -> OpSchema:
    """Return the row of a method, made of the names and types of its parameters.

    An array is written if its name begins with "output", or if no name does.
    """
    op, code, types = check.__name__.strip("_"), check.__code__, check.__annotations__
    names = code.co_varnames[1 : code.co_argcount]
    arrays = [name for name in names if types[name].startswith("Array")]
    written = [name for name in arrays if name.startswith("output")] or arrays
    kinds = {name: KINDS.get(name, "-") for name in names}
    for name in arrays:
        kind = {"send": "s", "recv": "v"}.get(op, "w" if name in written else "r")
        kinds[name] = kind.upper() if types[name].startswith("Arrays") else kind
    settings = [name for name in names if name in FIELDS]
    # c10d has the outputs first.
    data = sorted([name for name in names if name not in FIELDS], key=lambda n: n != "outputs")
    shown = [f"[{name}]" if in_lists and name in arrays else name for name in data]
    repeat = "".join(kinds.values())
    data_and_settings = " ".join(shown), " ".join(settings)
    keywords = frozenset(code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount])
    return OpSchema(op, c10d_op, (), *data_and_settings, check, repeat, keywords=keywords)


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
