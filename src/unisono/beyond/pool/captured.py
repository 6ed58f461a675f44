"""What functions of a notebook take along by name: what must not be a copy is refused."""

from __future__ import annotations

import dis
import sys
import warnings
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from types import BuiltinMethodType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from unisono.core.base.source.where import is_of_user
from unisono.errors import ArgumentTypeError, UsageError

_GENERATORS = {
    *(("numpy", name) for name in ("Generator", "RandomState", "BitGenerator")),
    *(("random", "Random"), ("torch", "Generator")),
}
"""Package and name of the types that hold the state of random numbers."""

_STORE = dis.opmap["STORE_GLOBAL"]


def operations(code: CodeType) -> Iterator[tuple[str, str]]:
    """Yield the operations of code that have a name, and code inside of it, in their order."""
    for each in dis.get_instructions(code):
        if isinstance(each.argval, str):
            yield each.opname, each.argval
    for inner in code.co_consts:
        if isinstance(inner, CodeType):  # where STORE_NAME is an attribute of a class
            yield from (each for each in operations(inner) if each[0] != "STORE_NAME")


def check_function(fn: Any, call: str) -> None:
    """Raise an error if `fn` cannot be called, or would draw the same numbers in each call."""
    if not callable(fn):
        raise ArgumentTypeError(
            f"{call} takes a function, got {type(fn).__name__}",
            hint=f"{call}(f, x), not {call}(f(x))",
        )
    _check_generator(getattr(fn, "__name__", ""), fn)


def _check_generator(name: str, value: Any) -> None:
    owner = value.__self__ if isinstance(value, (MethodType, BuiltinMethodType)) else value
    types = type(owner).__mro__
    kinds = {(str(each.__module__).partition(".")[0], each.__name__) for each in types}
    if not kinds.isdisjoint(_GENERATORS):
        of = "" if owner is value else "a method of "
        raise UsageError(
            f"each call gets a copy of {name}, {of}a random {type(owner).__name__}, so that all "
            "draw the same numbers",
            hint="seed one in the function, `rng = np.random.default_rng(seed)`, and give each "
            "task a seed: ranks.map(f, np.random.SeedSequence(0).spawn(8)); an argument may be a "
            "generator",
        )


def _check_assigned(function: FunctionType, names: dict[str, Any]) -> None:
    """Refuse a function that reads a name of the notebook before it assigns it."""
    codes = [function.__code__]
    for code in codes:
        codes += [each for each in code.co_consts if isinstance(each, CodeType)]
    if not any(_STORE in code.co_code[::2] for code in codes):
        return
    used = [each for each in operations(function.__code__) if each[1] in names]
    first = dict(reversed([(name, operation) for operation, name in used]))
    for operation, name in used:
        if operation == "STORE_GLOBAL" and first[name] == "LOAD_GLOBAL":
            raise UsageError(
                f"{function.__name__} assigns the global {name}, which is a copy on a rank: the "
                f"{name} of the notebook would stay as it is",
                hint=f"return the value; or to keep one on each rank, `del {name}` in the notebook "
                "and assign it in a cell of %%ranks",
            )


def note_module(error: BaseException) -> None:
    """Note in the error of a rank that it lacks a module which this process has."""
    name = (getattr(error, "name", None) or "") if isinstance(error, ImportError) else ""
    if (file := getattr(sys.modules.get(name), "__file__", None)) is not None:
        error.add_note(
            f"{name} is {file} here. A rank has the sys.path that this process had when it started "
            "the ranks: append to it there, too, in a cell of %%ranks, or start them later"
        )


class CallNames:
    """Checks what calls name: `check` sees each object that is pickled for a call."""

    def __init__(self) -> None:
        self._modules: dict[str, ModuleSpec] = {}

    def check(self, value: Any, reduced: Any) -> None:
        """Check an object.

        Args:
            value: The object.
            reduced: What `reducer_override` of cloudpickle returned for it: NotImplemented for a
                function that is sent by name.

        Raises:
            UsageError: A function reads a random generator of the notebook, or it assigns a name
                that it reads.
        """
        if isinstance(value, ModuleType):
            self._see(value)
        elif isinstance(value, (FunctionType, type)) and reduced is NotImplemented:
            self._see(sys.modules.get(value.__module__))
        elif type(value) is FunctionType:
            names = reduced[2][1]["__globals__"]
            free = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
            inner = {name: getattr(cell, "cell_contents", None) for name, cell in free}
            for name, each in (names | inner).items():
                _check_generator(name, each)
            _check_assigned(value, names)

    def _see(self, module: ModuleType | None) -> None:
        """Warn if this process has reloaded a module since a call named it."""
        spec = getattr(module, "__spec__", None)
        if spec is None or module is None or not is_of_user(getattr(module, "__file__", "") or ""):
            return
        before, self._modules[spec.name] = self._modules.get(spec.name, spec), spec
        if before is not spec:
            # Without a registry each reload has its warning.
            warnings.warn_explicit(
                f"{spec.name} was reloaded here, and the ranks run the code that they have "
                f"imported; reload it there, too: `import importlib, {spec.name}; "
                f"importlib.reload({spec.name})` in a cell of %%ranks",
                *(UserWarning, module.__file__ or "", 1),
            )
