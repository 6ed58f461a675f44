"""Only unisono.core.base.seam decides between C++ and Python."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src/unisono"
SEAM = {"core/base/seam.py", "core/base/extension.py"}
OTHERS = [path for path in SOURCE.rglob("*.py") if str(path.relative_to(SOURCE)) not in SEAM]


def questions(tree):
    """Yield (line, name) for each way to ask whether there is an extension module."""
    names = {"_extension"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "unisono.core.base.seam":
            names |= {each.asname or each.name for each in node.names if each.name == "cpp"}
        elif isinstance(node, ast.ImportFrom):
            for each in node.names:
                if f"{node.module}.{each.name}" in (
                    "unisono._engine",
                    "unisono.core.base.extension",
                ):
                    yield node.lineno, each.name
        elif isinstance(node, ast.Constant) and node.value == "unisono._engine":
            yield node.lineno, node.value
    for node in ast.walk(tree):
        tests = [node.test] if isinstance(node, ast.If | ast.IfExp | ast.While | ast.Assert) else []
        tests += [node.left] if isinstance(node, ast.Compare) else []
        for each in tests:
            if isinstance(each, ast.Name) and each.id in names:
                yield each.lineno, each.id


def test_no_other_module_asks_for_the_extension():
    found = {path: list(questions(ast.parse(path.read_text(encoding="utf-8")))) for path in OTHERS}
    assert not {path: each for path, each in found.items() if each}


@pytest.mark.parametrize(
    "text",
    [
        "from unisono.core.base.seam import cpp as x\nif x is None: pass",
        "from unisono.core.base.seam import cpp\ny = 1 if cpp else 2",
        "from unisono import _engine",
        "import_module('unisono._engine')",
        "from unisono.core.base import extension",
    ],
)
def test_a_question_is_found(text):
    assert list(questions(ast.parse(text)))
