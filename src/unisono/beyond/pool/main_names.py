"""Functions of a notebook in the main module of a rank, and the names that both may assign.

A rank counts as the owner of a name that its own code has assigned. A call never replaces such a
value: it keeps it if the notebook has not assigned the name since, and otherwise raises.
"""

from __future__ import annotations

import ast
import io
import itertools
import pickle
import sys
import weakref
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any, NamedTuple

from unisono.errors import UsageError

# ---- the notebook ------------------------------------------------------------------------------

_VERSIONS = "_unisono_versions"
_GONE = object()
_numbers = itertools.count(1)
_sent: dict[str, tuple[dict[str, Any], Callable[[], Any], int]] = {}
"""By name: the namespace, the value that was last sent, and its version. Several threads submit."""


def _version(name: str, space: dict[str, Any], value: Any) -> int:
    """Return a number that is new if the name has another object than at the last call."""
    sent = _sent.get(name)
    if sent is None or sent[1]() is not value:
        sent = _sent[name] = space, _reference(value), next(_numbers)
    return sent[2]


def _reference(value: Any) -> Callable[[], Any]:
    """Return a function that returns the value, or `_GONE` if it has gone."""
    try:
        weak = weakref.ref(value)
    except TypeError:  # a list, a number; without a reference a new object could have its address
        return lambda: value
    return lambda: _GONE if (found := weak()) is None else found


def forget_replaced() -> None:
    """Let values go that the notebook no longer has."""
    for name, (space, held, _) in list(_sent.items()):
        if space.get(name, _GONE) is _GONE or space[name] is not held():
            _sent.pop(name, None)


def with_versions(function: FunctionType, reduced: Any) -> Any:
    """Add the versions of the names that a function uses to its reduction by cloudpickle."""
    if isinstance(reduced, tuple) and len(reduced) > 2 and isinstance(reduced[2], tuple):
        _, slots = reduced[2]
        names = slots.get("__globals__", {})
        space = function.__globals__
        versions = {name: _version(name, space, value) for name, value in names.items()}
        slots[_VERSIONS] = versions
    return reduced


# ---- the rank ----------------------------------------------------------------------------------

_OWN = object()


class _ReceivedName(NamedTuple):
    """What the notebook sent for a name.

    Attributes:
        value: The value, or `_OWN` if the rank has assigned the name since.
        version: See `_version`; None for a value that was there at the start.
    """

    value: Any
    version: int | None


_received: dict[str, _ReceivedName] = {}


def _space() -> dict[str, Any]:
    return vars(sys.modules["__main__"])


def note_start() -> None:
    """Note that no name of the main module is the rank's own yet."""
    _received.update({name: _ReceivedName(value, None) for name, value in _space().items()})


def note_assigned(names: set[str]) -> None:
    """Note that code of the rank assigns names."""
    for name in names & _received.keys():
        _received[name] = _received[name]._replace(value=_OWN)


def note_changes() -> None:
    """Note names that a call has assigned; drop the values that they had before."""
    space = _space()
    note_assigned({name for name, each in _received.items() if space.get(name) is not each.value})


def names_of_cell(tree: ast.Module) -> set[str]:
    """Return the names that the source of a cell assigns."""
    return set(_stored(compile(tree, "<cell>", "exec", dont_inherit=True), "STORE_NAME"))


def loads_in_main(data: Any, *, buffers: Any = ()) -> Any:
    """Load a pickle of a notebook so that its functions run in this process's main module.

    cloudpickle would give them a new namespace for each call, so that a `global` name would not
    stay.

    Raises:
        UsageError: The notebook and the rank have both assigned a name.
    """
    unpickler = _MainUnpickler(io.BytesIO(data), buffers=buffers)
    value = unpickler.load()
    if unpickler.refused:
        names = ", ".join(sorted(unpickler.refused))
        raise UsageError(
            f"the call uses {names} of the notebook, and this rank has assigned another {names}",
            hint="give one of them another name, or `del` it: in the notebook to use the ranks', "
            "or in a cell of %%ranks to use the notebook's",
        )
    note_assigned(unpickler.assigned)
    return value


class _MainUnpickler(pickle.Unpickler):
    """Loads functions into the main module.

    Attributes:
        assigned: Names that the functions assign with `global`.
        refused: Names of the notebook that would replace the rank's own.
    """

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self.assigned: set[str] = set()
        self._unknown: set[str] = set()
        self._changed: set[str] = set()

    @property
    def refused(self) -> set[str]:
        return self._changed | self._unknown - self.assigned

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        if module == "cloudpickle.cloudpickle":
            if name == "_make_function":
                return lambda code, names, *rest: found(code, _in_main(names), *rest)
            if name == "_function_setstate":
                return lambda function, state: found(function, self._state(function, state))
        return found

    def _state(self, function: FunctionType, state: tuple[Any, dict[str, Any]]) -> Any:
        attributes, slots = state
        versions, space = slots.pop(_VERSIONS, {}), _space()
        if function.__globals__ is not space:
            return state
        self.assigned.update(_stored(function.__code__, "STORE_GLOBAL", "DELETE_GLOBAL"))
        names = {}
        for name, value in slots["__globals__"].items():
            version, before = versions.get(name), _received.get(name)
            is_own = name in space and (before is None or space[name] is not before.value)
            if not is_own or _same(space[name], value):
                names[name] = value
                _received[name] = _ReceivedName(value, version)
            elif before is None or before.version is None:
                self._unknown.add(name)
                if version is not None and name in self.assigned:
                    _received[name] = _ReceivedName(_OWN, version)
            elif before.version != version:
                self._changed.add(name)
        return attributes, slots | {"__globals__": names}


def _same(mine: Any, other: Any) -> bool:
    kinds = int, float, complex, str, bytes, bool
    return mine is other or (type(mine) is type(other) and type(mine) in kinds and mine == other)


def _in_main(names: dict[str, Any]) -> dict[str, Any]:
    return _space() if names.get("__name__") == "__main__" else names


def _stored(code: CodeType, *operations: str) -> Iterator[str]:
    """Yield the names that code, or a function inside of it, assigns; there with `global`."""
    import dis

    for each in dis.get_instructions(code):
        if each.opname in operations:
            yield each.argval
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _stored(inner, "STORE_GLOBAL", "DELETE_GLOBAL")
