"""Load a function's module in a rank's process from its file.

pytest (`--import-mode=importlib`) loads test files under names that only its own process can
import. Pickle stores a function as such a name.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

__all__ = ["Modules"]


class Modules:
    """The modules of some functions and objects. Unpickling it makes them importable.

    It must be pickled before the objects, because pickle imports their modules when it meets them.
    """

    def __init__(self, *objects: Any) -> None:
        names = dict.fromkeys(name for each in objects for name in _names(each))
        self._modules = [sys.modules[name] for name in names if name in sys.modules]

    def __reduce__(self) -> tuple[Any, ...]:
        return _load, tuple(
            (
                *(module.__name__, getattr(module, "__file__", None)),
                *([*getattr(module, "__path__", [])], "@pytest_ar" in vars(module)),
            )
            for module in self._modules
        )


def _names(thing: Any) -> Iterator[str]:
    """Name the packages around a function's or object's module, then the module."""
    while isinstance(thing, functools.partial):
        thing = thing.func
    parts = (getattr(thing, "__module__", None) or "__main__").split(".")
    # multiprocessing itself runs the file of `__main__` in each child.
    if parts != ["__main__"]:
        yield from (".".join(parts[:count]) for count in range(1, len(parts) + 1))


def _load(*modules: tuple[str, str | None, list[str], bool]) -> None:
    """Load the modules that an import would not find, or would load from another file.

    Args:
        modules: The name of each module, its file, its folders if it is a package, and whether
            pytest has rewritten its asserts, so that they show their values.
    """
    for name, file, folders, is_rewritten in modules:
        if name in sys.modules or (not is_rewritten and _is_found(name, file)):
            continue
        if file is None:
            sys.modules[name] = types.ModuleType(name)
            sys.modules[name].__path__ = folders
            continue
        spec = importlib.util.spec_from_file_location(
            name, file, submodule_search_locations=folders or None
        )
        assert spec is not None, file
        assert spec.loader is not None, file
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        code = _rewritten(Path(file)) if is_rewritten else None
        if code is None:
            spec.loader.exec_module(module)
        else:
            exec(code, vars(module))


def _rewritten(file: Path) -> types.CodeType | None:
    """Return the code with asserts that show values, as pytest stores it; None: without pytest."""
    try:
        rewrite: Any = importlib.import_module("_pytest.assertion.rewrite")
        stored = rewrite.get_cache_dir(file) / f"{file.stem}{rewrite.PYC_TAIL}"
        if (code := rewrite._read_pyc(file, stored)) is None:
            source = file.read_bytes()
            tree = ast.parse(source, str(file))
            rewrite.rewrite_asserts(tree, source, str(file))
            code = compile(tree, str(file), "exec", dont_inherit=True)
    except (ImportError, AttributeError, TypeError):  # names of another version of pytest
        return None
    return cast("types.CodeType", code)


def _is_found(name: str, file: str | None) -> bool:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):  # the package around it is no package, or has no spec
        return False
    return spec is not None and spec.origin == file
