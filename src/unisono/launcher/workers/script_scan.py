"""Scan the own files of a Python program without running them.

A program's own files are its script and the modules that it imports, except those of the standard
library and of site-packages.
"""

from __future__ import annotations

import ast
import functools
import os
import re
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec

_PYTHON = re.compile(r"python[0-9.]*$")
_INSTALLED = re.compile(r"[/\\](site|dist)-packages[/\\]")
_AT_START = ("sitecustomize", "usercustomize")
_MAX_FILES = 200
_READING = {"get", "items", "keys", "values", "copy"}
_COPYING = {"dict", "len", "list", "print", "sorted", "str"}
_TOUCHING = {
    *("putenv", "unsetenv", "setenv", "load_dotenv", "sched_setaffinity", "cpu_affinity"),
    *("run_path", "run_module"),
}
_IMPORTING = {"import_module", "__import__"}


@functools.cache
def is_untouched(*command: str) -> bool:
    """Whether a Python program's own files change neither its environment nor its CPUs.

    False also if the files cannot be found or read.

    Args:
        command: `python [-u] script.py ...` or `python [-u] -m module ...`.
    """
    sources = own_sources(command)
    return bool(sources) and not any(_touches(ast.parse(text)) for text in sources)


def own_sources(command: Sequence[str]) -> list[str]:
    """Return the text of a program's own files.

    Args:
        command: `python [-u] script.py ...` or `python [-u] -m module ...`.

    Returns:
        The texts; empty if the command has another form, a file cannot be read or does not
        compile, or there are more than 200 files.
    """
    folder, waiting = _main_files(command)
    if waiting:
        waiting += [found for name in _AT_START for found in _elsewhere(name)]
    texts: dict[str, str] = {}
    while waiting and len(texts) <= _MAX_FILES:
        path = waiting.pop()
        if path in texts:
            continue
        try:
            with open(path, encoding="utf-8") as file:
                texts[path] = file.read()
            names = list(_imported(ast.parse(texts[path])))
        except (OSError, ValueError, SyntaxError, RecursionError):
            return []
        # Search a relative import without its dots, beside the file and above: this may find too
        # many files, never too few.
        for beside in {folder, os.path.dirname(path), os.path.dirname(os.path.dirname(path))}:
            waiting += [found for name in names for found in _files(beside, name)]
        waiting += [found for name in names for found in _elsewhere(name)]
    return [] if waiting else list(texts.values())


def _touches(tree: ast.AST) -> bool:
    """Whether a file may change the environment or the CPUs, or run code that is not scanned.

    Reading and copying the environment is allowed. A second name for it is not, because code
    could change the environment through that name.
    """
    for parent in ast.walk(tree):
        if isinstance(parent, ast.ImportFrom):
            if any(alias.name == "environ" and alias.asname for alias in parent.names):
                return True
        elif isinstance(parent, ast.Call) and _name_of(parent.func) in _IMPORTING:
            if not _constant(parent):
                return True
        elif _name_of(parent) in _TOUCHING or _is_text(parent, "os.environ"):
            return True
        for node in ast.iter_child_nodes(parent):
            if _name_of(node) in ("environ", "environb") and not _only_reads(parent, node):
                return True
    return False


def _only_reads(parent: ast.AST, environ: ast.AST) -> bool:
    match parent:
        case ast.Subscript(value=value, ctx=ast.Load()):
            return value is environ
        case ast.Attribute(attr=name):
            return name in _READING
        case ast.Call(func=function):
            return function is not environ and _name_of(function) in _COPYING
        case ast.keyword(arg=name):
            return name in (None, "env")
        case ast.Compare() | ast.BinOp() | ast.Dict():
            return True
        case ast.For(iter=iterated) | ast.comprehension(iter=iterated):
            return iterated is environ
    return False


def _name_of(node: ast.AST) -> str:
    """Return the last part of a dotted name; "" for other nodes."""
    return getattr(node, "attr", "") or getattr(node, "id", "")


def _is_text(node: ast.AST, text: str) -> bool:
    return isinstance(node, ast.Constant) and node.value == text


def _constant(call: ast.Call) -> str:
    """Return the first argument of a call if it is a string literal, or ""."""
    first = call.args[0] if call.args else None
    return first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else ""


def _main_files(command: Sequence[str]) -> tuple[str, list[str]]:
    """Return the folder that Python puts on its path, and the files that run first."""
    words = list(command)
    if not words or not _PYTHON.match(os.path.basename(words.pop(0))):
        return "", []
    if words[:1] == ["-u"]:
        words.pop(0)
    if words[:1] == ["-m"] and len(words) > 1:
        folder = os.getcwd()
        return folder, [*_files(folder, words[1]), *_files(folder, f"{words[1]}.__main__")]
    if not words or not os.path.isfile(words[0]):
        return "", []
    path = os.path.realpath(words[0])
    return os.path.dirname(path), [path]


def _imported(tree: ast.AST) -> Iterator[str]:
    """Yield the names of all modules that a file may import, also inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = [node.module] if node.module else []
            yield from (".".join([*base, alias.name]) for alias in node.names)
        elif isinstance(node, ast.Call) and _name_of(node.func) in _IMPORTING:
            yield _constant(node).lstrip(".")


def _files(folder: str, name: str) -> Iterator[str]:
    """Yield the files below a folder that run when the name is imported."""
    parts = name.split(".") if name else []
    for depth in range(1, len(parts) + 1):
        stem = os.path.join(folder, *parts[:depth])
        for path in (os.path.join(stem, "__init__.py"), f"{stem}.py"):
            if os.path.isfile(path):
                yield path


def _elsewhere(name: str) -> Iterator[str]:
    """Yield the files of a user's module that is found on the path of this interpreter."""
    top = name.partition(".")[0]
    if not top or top in sys.stdlib_module_names or top == "unisono":
        return
    try:
        spec = find_spec(top)
    except (ImportError, ValueError):
        return
    origin = spec.origin if spec is not None else None
    if origin is None or not origin.endswith(".py"):
        return
    if _INSTALLED.search(origin) and top not in _AT_START:
        return
    is_package = os.path.basename(origin) == "__init__.py"
    yield from _files(os.path.dirname(os.path.dirname(origin) if is_package else origin), name)
