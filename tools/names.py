"""Check that a type name has one meaning, and count what readers and users meet.

Run from the repository root: `python tools/names.py`. Classes and aliases of types count, with or
without a leading underscore. A class of C++ may have a twin of the same name in Python, and
`unisono.torch` has the names of torch.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

# name -> why two modules define it.
ALLOWED = {
    "Join": "public in algorithms: torch's name",
    "Network": "public in simulate and in testing.hosts",
    "Group": "public in unisono.ray",
    "Program": "public in schedules, and in simulate as the graph of a GOAL file",
    "Message": "public in unisono.MPI: mpi4py's name",
    "Op": "public in unisono.MPI: mpi4py's name",
    "Request": "public in unisono.MPI: mpi4py's name",
}
_CPP = re.compile(
    r"^(?:class|struct|enum(?: class)?)\s+(?:alignas\([^)]*\)\s+)?(\w+)\b(?!::)[^;]*$", re.MULTILINE
)


def main() -> int:
    """Print each name with two meanings, or one line that gives the number of names."""
    python: dict[str, list[str]] = defaultdict(list)
    for path in sorted(Path("src").rglob("*.py")):
        if "torch" not in path.parts:
            for name in names_in(path):
                python[name.lstrip("_")].append(str(path))
    cpp: dict[str, list[str]] = defaultdict(list)
    for path in sorted(Path("native").rglob("*.hpp")):
        if "tests" not in path.parts:
            for name in _CPP.findall(path.read_text(encoding="utf-8")):
                cpp[name].append(str(path))
    problems = [
        f"{name} is defined in {', '.join(where)}"
        for known in (python, cpp)
        for name, where in sorted(known.items())
        if len(where) > 1 and name not in ALLOWED
    ]
    print(
        "\n".join(problems) or f"names: {len(python)} types in Python, {len(cpp)} in C++; {users()}"
    )
    return 1 if problems else 0


def users() -> str:
    """Return how many names a user meets, and how many functions and files a call passes."""
    variables = literal(Path("src/unisono/core/base/config.py"), "VARIABLES")
    calls = literal(Path("tests/core/collectives/test_call_counts.py"), "CEILINGS")
    flags: set[str] = set()
    for path in Path("src/unisono/workbench/cli").rglob("*.py"):
        flags |= set(re.findall(r'"(--[a-z][\w-]*)"', path.read_text(encoding="utf-8")))
    first, new = (
        "/".join(map(str, ast.literal_eval(calls[kind])))
        for kind in ("first of the group", "new shape")
    )
    return (
        f"{len(variables)} environment variables, {len(flags)} flags; Python calls/files: first "
        f"call of a group {first}, new shape {new}"
    )


def literal(path: Path, name: str) -> dict[str, ast.expr]:
    """Return the values of a table that a module assigns to a name."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        target = node.target if isinstance(node, ast.AnnAssign) else None
        if isinstance(node, ast.Assign):
            target = node.targets[0]
        if isinstance(target, ast.Name) and target.id == name and isinstance(node.value, ast.Dict):
            keys = [ast.literal_eval(key) for key in node.value.keys if key is not None]
            return dict(zip(keys, node.value.values, strict=True))
    raise LookupError(f"{path} has no table {name}")


def names_in(path: Path) -> Iterator[str]:
    """Yield the names of the types that a module defines."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign) and isinstance(node.value, (ast.Subscript, ast.BinOp)):
            yield from (
                target.id
                for target in node.targets
                if isinstance(target, ast.Name) and re.match(r"_?[A-Z][a-z]", target.id)
            )


if __name__ == "__main__":
    sys.exit(main())
