"""Write src/unisono/__init__.pyi: for type checkers, the names that are loaded on first use.

Run from the repository root: `make docs`. A test fails when the stub is out of date. The result of
an operation depends on `async_op`, so the stub has several signatures of each operation. They
follow from the signature in the source, where they would hide the code.
"""

from __future__ import annotations

import ast
import copy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import unisono

ROOT = Path(__file__).parents[1]
STUB = ROOT / "src/unisono/__init__.pyi"

HEAD = '''\
"""The names of unisono, for type checkers; tools/stub.py writes it from `_HOMES`."""

from collections.abc import Sequence
from typing import Literal, Unpack, overload

from unisono.core.base.deadline import Timeout
from unisono.core.base.types import Arrays, Function
from unisono.core.operations.keywords import AlgorithmKeywords
from unisono.core.groups.world import Group
'''
MODULES = ("core.c10d.collectives", "core.c10d.p2p")
"""The modules whose functions have several signatures."""


def main() -> None:
    """Write the stub."""
    STUB.write_text(text(), encoding="utf-8")


def text() -> str:
    """Return the stub, with one line per imported name, so that a diff shows each added name."""
    imports, signatures = [], []
    for module, names in sorted(unisono._HOMES.items()):
        typed = dict(definitions(module)) if module in MODULES else {}
        imports += [
            f"from unisono.{module} import {name} as {name}"
            for name in sorted(names.split())
            if name not in typed
        ]
        signatures += typed.values()
    imports += [f"from unisono import {module} as {module}" for module in sorted(unisono._MODULES)]
    listed = "".join(f'    "{name}",\n' for name in unisono.__all__)
    parts = [HEAD + "\n".join(imports), f"__all__ = [\n{listed}]\n__version__: str", *signatures]
    format_it = [sys.executable, "-m", "ruff", "format", "--stdin-filename", STUB.name, "-"]
    done = subprocess.run(
        format_it, input="\n\n".join(parts), capture_output=True, text=True, check=True
    )
    return done.stdout


def definitions(module: str) -> Iterator[tuple[str, str]]:
    """Yield the functions of a module that have several signatures, and their other names."""
    path = ROOT / "src/unisono" / f"{module.replace('.', '/')}.py"
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name in unisono._HOME_OF:
            if found := signatures(node):
                names.add(node.name)
                yield node.name, "\n\n".join(map(ast.unparse, found))
        elif isinstance(node, ast.Assign) and ast.unparse(node.value) in names:
            for target in map(ast.unparse, node.targets):
                yield target, f"{target} = {ast.unparse(node.value)}"


def signatures(function: ast.FunctionDef) -> list[ast.FunctionDef]:
    """Return the signatures of an operation, from the most special to that of the source.

    A synchronous call returns None. An asynchronous call returns None only if `group` is no group,
    because the rank is not a member, or with `wait=False`.
    """
    names = [argument.arg for argument in function.args.args]
    result, _, none = ast.unparse(function.returns or ast.Constant(...)).partition(" | ")
    if none != "None" or "group" not in names:
        return []
    if "async_op" in names:
        at = names.index("async_op")
        member = {"group": "ProcessGroup | None", "async_op": "Literal[True]"}
        by_position = _variant(function, result, **member)
        before, after = _split(by_position.args.defaults, len(names) - at - 1)
        by_position.args.defaults = after
        by_name = _variant(function, result, **member)
        by_name.args.args, by_name.args.kwonlyargs = by_name.args.args[:at], by_name.args.args[at:]
        by_name.args.defaults, by_name.args.kw_defaults = before[:-1], [None, *after]
        special = [_variant(function, "None", async_op="Literal[False]"), by_name, by_position]
    else:
        member = {"group": "ProcessGroup | None", "wait": "Literal[True]"}
        special = [_variant(function, result, **member)]
    special[0].body = function.body[:1]  # the docstring, which editors show
    return [*special, _variant(function, f"{result} | None")]


def _split(items: list[ast.expr], last: int) -> tuple[list[ast.expr], list[ast.expr]]:
    """Cut a list before its `last` last items."""
    return items[: len(items) - last], items[len(items) - last :]


def _variant(function: ast.FunctionDef, returns: str, **types: str) -> ast.FunctionDef:
    """Return the signature with another result and with other types of some parameters."""
    made = copy.deepcopy(function)
    made.decorator_list = [ast.Name("overload")]
    made.body = [ast.Expr(ast.Constant(...))]
    made.returns = ast.Name(returns)
    for argument in [*made.args.args, *made.args.kwonlyargs]:
        if argument.arg in types:
            argument.annotation = ast.Name(types[argument.arg])
    return made


if __name__ == "__main__":
    main()
