"""Functions of a notebook in the main module of a rank, and the names that both may assign.

A call sends the names that its functions read, for that call alone: otherwise a rank would have
an old copy where the notebook has another value by now. What code of the rank has assigned is the
rank's. A call that would send another value for such a name is refused.
"""

from __future__ import annotations

import ast
import io
import sys
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

from unisono.beyond.pool.captured import operations
from unisono.errors import UsageError
from unisono.launcher.payload import OwnUnpickler

_GONE = object()

_from_start: dict[str, Any] = {}
"""Names that were there at the start and that the rank has not assigned, with their values."""

_sent: dict[str, Any] = {}
"""Names that the call has sent and that the rank has not assigned, with their values."""


def _space() -> dict[str, Any]:
    return vars(sys.modules["__main__"])


def note_start() -> None:
    """Note that no name of the main module is the rank's own yet."""
    _from_start.update(_space())


def note_assigned(names: set[str]) -> None:
    """Note that code of the rank assigns names."""
    for name in names:
        _from_start.pop(name, None)
        _sent.pop(name, None)


def end_call() -> None:
    """Take away the names that a call has sent; what it has assigned stays."""
    space = _space()
    note_assigned({name for name, value in _sent.items() if space.get(name, _GONE) is not value})
    for name in _sent:
        del space[name]
    space.update({name: _from_start[name] for name in _sent.keys() & _from_start.keys()})
    _sent.clear()


def names_of_cell(tree: ast.Module) -> set[str]:
    """Return the names that the source of a cell assigns."""
    code = compile(tree, "<cell>", "exec", dont_inherit=True)
    return set(_names(code, "STORE_NAME", "STORE_GLOBAL"))


def loads_in_main(data: Any, *, buffers: Any = ()) -> Any:
    """Load a pickle of a notebook so that its functions run in this process's main module.

    cloudpickle would give them a new namespace for each call, so that a `global` name would not
    stay.

    Raises:
        UsageError: The rank has assigned a name that the notebook sends, too.
    """
    unpickler = _MainUnpickler(io.BytesIO(data), buffers=buffers)
    value = unpickler.load()
    if unpickler.refused:
        names = ", ".join(sorted(unpickler.refused))
        raise UsageError(
            f"the call uses {names} of the notebook, and this rank has another {names} of its own",
            hint="give one of them another name, or `del` it: in the notebook to use the ranks', "
            "or in a cell of %%ranks to use the notebook's",
        )
    note_assigned(unpickler.assigned)
    return value


class _MainUnpickler(OwnUnpickler):
    """Loads functions into the main module.

    Attributes:
        assigned: Names that the functions assign with `global`.
        refused: Names of the notebook that would replace the rank's own.
    """

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self.assigned: set[str] = set()
        self.refused: set[str] = set()

    def find_class(self, module: str, name: str) -> Any:
        """Return the object of a name."""
        found = super().find_class(module, name)
        if module == "cloudpickle.cloudpickle":
            if name == "_make_function":
                return lambda code, names, *rest: found(code, _in_main(names), *rest)
            if name == "_function_setstate":
                return lambda function, state: found(function, self._state(function, state))
        return found

    def _state(self, function: FunctionType, state: tuple[Any, dict[str, Any]]) -> Any:
        attributes, slots = state
        space = _space()
        if function.__globals__ is not space:
            return state
        read = set(_names(function.__code__, "LOAD_GLOBAL"))
        self.assigned.update(_names(function.__code__, "STORE_GLOBAL", "DELETE_GLOBAL"))
        names = {name: value for name, value in slots["__globals__"].items() if name in read}
        for name, value in list(names.items()):
            mine = space.get(name, _GONE)
            is_own = mine is not _GONE and mine is not _from_start.get(name, _GONE)
            if is_own and mine is not _sent.get(name, _GONE):
                del names[name]
                if not _same(mine, value):
                    self.refused.add(name)
            elif isinstance(value, ModuleType):
                _from_start.pop(name, None)  # an import stays: objects that stay may need it
            else:
                _sent[name] = value
        return attributes, slots | {"__globals__": names}


def _same(mine: Any, other: Any) -> bool:
    kinds = int, float, complex, str, bytes, bool
    return mine is other or (type(mine) is type(other) and type(mine) in kinds and mine == other)


def _in_main(names: dict[str, Any]) -> dict[str, Any]:
    return _space() if names.get("__name__") == "__main__" else names


def _names(code: CodeType, *wanted: str) -> Iterator[str]:
    return (name for operation, name in operations(code) if operation in wanted)
