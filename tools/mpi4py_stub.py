"""Write src/unisono/MPI/__init__.pyi: the names of unisono.MPI, for type checkers.

Run from the repository root: `make docs`. A test fails when the stub is out of date. The classes
get most of their methods when they are loaded, so the stub follows from the loaded classes. Its
methods have the parameters of the functions that they call.
"""

from __future__ import annotations

import functools
import inspect
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

STUB = Path(__file__).parents[1] / "src/unisono/MPI/__init__.pyi"

HEAD = '''\
"""The names of unisono.MPI, for type checkers; tools/mpi4py_stub.py writes it."""

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, Final, NoReturn, Self
'''
# What an annotation may have besides the classes of the module; all else becomes Any.
_KNOWN = set(re.findall(r"\w+", HEAD.partition("collections.abc")[2])) | {
    *("None", "bool", "bytes", "float", "int", "list", "memoryview", "object", "str", "tuple"),
}
# Public attributes that mpi4py does not have.
# They hide in default values of parameters, too.
_INTERNAL = {"at", "copy_attributes", "delete_attributes", "family", "live", "of", "tohandle"}
_DUNDERS = re.findall(
    r"\w+",
    "__new__ __init__ __bool__ __call__ __int__ __index__ __len__ __iter__ __getitem__ "
    "__setitem__ __delitem__",
)
_WITHOUT_RESULT = {"barrier", "bsend", "send", "ssend"}
# Short functions that have no annotations.
_RESULTS = {
    **dict.fromkeys(("Init", "Pcontrol", "Free_mem", "Flush_buffer"), "None"),
    **dict.fromkeys(("Init_thread", "Query_thread", "Aint_add", "Aint_diff"), "int"),
    **dict.fromkeys(("Is_initialized", "Is_finalized", "Is_thread_main"), "bool"),
    **dict.fromkeys(("Get_version", "Get_abi_version"), "tuple[int, int]"),
    **dict.fromkeys(("Get_library_version", "Get_processor_name"), "str"),
    **dict.fromkeys(("Wtime", "Wtick"), "float"),
    "Alloc_mem": "buffer",
    "Get_hw_resource_info": "Info",
}
_BUFFER = "    def __buffer__(self, flags: int, /) -> memoryview: ..."


def main() -> None:
    """Write the stub, or print it with `--print`."""
    if sys.argv[1:] == ["--print"]:
        print(text(), end="")
    else:
        STUB.write_text(text(), encoding="utf-8")


def text() -> str:
    """Return the stub; loads unisono.MPI, and hence makes a world of one rank."""
    from unisono import MPI

    public = {name: value for name, value in vars(MPI).items() if not name.startswith("_")}
    del public["annotations"]
    classes: dict[type, str] = {}
    for name, value in public.items():
        if isinstance(value, type):
            classes.setdefault(value, name)
    for cls in [*classes]:
        for base in cls.__mro__[::-1]:
            if base.__module__.startswith("unisono."):
                classes.setdefault(base, f"_{base.__name__}")
    stub = _Stub(classes)
    ordered = sorted(classes, key=lambda cls: (len(cls.__mro__), classes[cls]))
    parts = [HEAD, *map(stub.of_class, ordered)]
    lines = []
    for name, value in sorted(public.items()):
        if isinstance(value, type):
            lines += [f"{name} = {classes[value]}"] if classes[value] != name else []
        elif inspect.isroutine(value):
            lines += stub.of_function(name, value, _RESULTS.get(name, ""))
        else:
            kind = "int" if type(value) is int else classes.get(type(value), "Any")
            lines.append(f"{name}: Final[{kind}]")
    format_it = [sys.executable, "-m", "ruff", "format", "--stdin-filename", STUB.name, "-"]
    source = "\n\n".join([*parts, "\n".join(lines)])
    used = set(re.findall(r"\w+", source.removeprefix(HEAD)))
    head = re.sub(r"import (.*)", lambda m: f"import {', '.join(_used(m[1], used))}", HEAD)
    source = head + source.removeprefix(HEAD)
    return subprocess.run(
        format_it, input=source, capture_output=True, text=True, check=True
    ).stdout


def _used(names: str, used: set[str]) -> list[str]:
    return [name for name in names.split(", ") if name in used]


class _Stub:
    """Writes the parts; `classes` has the name of each class."""

    def __init__(self, classes: dict[type, str]) -> None:
        self._classes = classes
        self._known = _KNOWN | set(classes.values())

    def of_class(self, cls: type) -> str:
        bases = [self._classes.get(base, "") for base in cls.__bases__]
        if issubclass(cls, RuntimeError):
            bases = ["RuntimeError"]
        if self._classes[cls] == "Info":
            bases.append("MutableMapping[str, str]")
        named = ", ".join(filter(None, bases))
        lines = [
            f"class {self._classes[cls]}({named}):" if named else f"class {self._classes[cls]}:"
        ]
        if issubclass(cls, self._array()):
            lines.append(_BUFFER)
        for name, value in vars(cls).items():
            if name in _DUNDERS or not (name.startswith("_") or name in _INTERNAL):
                lines += [f"    {line}" for line in self._of_member(name, value)]
        return "\n".join(lines if len(lines) > 1 else [*lines, "    ..."])

    @staticmethod
    def _array() -> type:
        import numpy as np

        return np.ndarray

    def _of_member(self, name: str, value: Any) -> Iterator[str]:
        if isinstance(value, property):
            result = self._result(inspect.signature(value.fget)) if value.fget else "Any"
            yield "@property"
            yield f"def {name}(self) -> {result}: ..."
            if value.fset is not None:
                yield f"@{name}.setter"
                yield f"def {name}(self, value: {result}) -> None: ..."
        elif isinstance(value, classmethod | staticmethod):
            is_new = name == "__new__"
            if not is_new:
                yield f"@{type(value).__name__}"
            is_bound = is_new or isinstance(value, classmethod)
            yield from self.of_function(name, value.__func__, is_bound=is_bound)
        elif isinstance(value, types.FunctionType | functools.partial):
            yield from self.of_function(name, value, is_bound=True)

    def of_function(
        self, name: str, function: Any, result: str = "", *, is_bound: bool = False
    ) -> Iterator[str]:
        """Yield the definition.

        Args:
            name: Of the function.
            function: The function.
            result: Type of the result, if the function has no annotations.
            is_bound: Whether its first parameter is self or cls.
        """
        try:
            shape = inspect.signature(function)
        except ValueError:  # a builtin
            shape = inspect.Signature()
        result = result or self._result(shape)
        parameters = [each for each in shape.parameters.values() if each.name not in _INTERNAL]
        nonlocals = getattr(function, "__closure__", None) and inspect.getclosurevars(function)
        if nonlocals and "function" in nonlocals.nonlocals:
            # One of the forms of a call: at once, as a Request, as a Prequest.
            called = inspect.signature(nonlocals.nonlocals["function"])
            own = [each for each in parameters if each.kind == each.KEYWORD_ONLY]
            is_now = result == "Any"
            inner = [*called.parameters.values()][1:]
            parameters = [
                parameters[0],
                *(each for each in inner if is_now or each.name != "status"),
                *(each.replace(kind=each.POSITIONAL_OR_KEYWORD) for each in own),
            ]
            if is_now and (name[0].isupper() or name in _WITHOUT_RESULT):
                result = "None"
        shown, is_keyword = [], False
        for at, each in enumerate(parameters):
            if each.kind == each.KEYWORD_ONLY and not is_keyword:
                is_keyword = True
                if not any("*" in one for one in shown):
                    shown.append("*")
            shown.append(self._parameter(each, is_self=is_bound and at == 0))
            if each.kind == each.POSITIONAL_ONLY and (
                at + 1 == len(parameters) or parameters[at + 1].kind != each.kind
            ):
                shown.append("/")
        yield f"def {name}({', '.join(shown)}) -> {result}: ..."

    def _parameter(self, each: inspect.Parameter, *, is_self: bool) -> str:
        if is_self and each.kind == each.POSITIONAL_OR_KEYWORD:
            return each.name
        stars = {each.VAR_POSITIONAL: "*", each.VAR_KEYWORD: "**"}.get(each.kind, "")
        default = "" if each.default is each.empty else " = " + _default(each.default)
        named = self._annotation(each.annotation)
        return f"{stars}{each.name}: {named}{default}"

    def _result(self, shape: inspect.Signature) -> str:
        return self._annotation(shape.return_annotation)

    def _annotation(self, found: Any) -> str:
        if found is None:
            return "None"
        if not isinstance(found, str):
            return "Any"
        return found if set(re.findall(r"\w+", found)) <= self._known else "Any"


def _default(value: Any) -> str:
    return repr(value) if value is None or type(value) in (bool, int, str) else "..."


if __name__ == "__main__":
    main()
