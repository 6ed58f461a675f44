"""Type checkers accept right calls, and report wrong ones."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from unisono.core.groups.process_group import ProcessGroup
from unisono.core.operations.methods import OPS, Operations

ROOT = Path(__file__).parents[2]
CALLS = ROOT / "tests/project/typed_calls.py"
WITH_TORCH = ROOT / "tests/project/typed_torch.py"


def wrong(*files):
    """The lines that a checker must report."""
    lines = {path.name: path.read_text("utf-8").splitlines() for path in files}
    return {
        name: [number for number, line in enumerate(text, 1) if line.endswith("# wrong")]
        for name, text in lines.items()
    }


def run(name, *arguments):
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    command = [sys.executable, "-m", name, *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout


def test_mypy_reports_exactly_the_wrong_calls():
    # With the project's configuration, and hence with the cache of `make check`.
    found = defaultdict(list)
    for line in run("mypy", "--no-error-summary", CALLS).splitlines():
        path, number, kind = re.match(r"(\S+?):(\d+): (\w+):", line).groups()
        if kind == "error" and int(number) not in found[Path(path).name]:
            found[Path(path).name].append(int(number))
    assert found == wrong(CALLS)


def test_pyright_reports_exactly_the_wrong_calls(tmp_path):
    files = [CALLS, *([WITH_TORCH] if importlib.util.find_spec("torch") else [])]
    # Strict: a right call must not have an unknown type.
    options = {"include": [*map(str, files)], "extraPaths": [str(ROOT / "src")]}
    config = tmp_path / "pyrightconfig.json"
    config.write_text(json.dumps({**options, "typeCheckingMode": "strict"}), "utf-8")
    # basedpyright is pyright in a wheel that needs no download when it runs.
    output = run("basedpyright", "-p", config, "--pythonpath", sys.executable, "--outputjson")
    found = defaultdict(set)
    for each in json.loads(output)["generalDiagnostics"]:
        found[Path(each["file"]).name].add(each["range"]["start"]["line"] + 1)
    assert {name: sorted(lines) for name, lines in found.items()} == wrong(*files)


def test_type_checkers_know_the_methods_of_c10d():
    source = Path(sys.modules[Operations.__module__].__file__).read_text("utf-8")
    declared = re.findall(r"^    (\w+) = _form\(\s*\w+, \"(\w+)\"", source, re.MULTILINE)
    assert [(name, text) for name, text in declared if name != text] == []
    names = {name for row in OPS.values() for name in row.c10d_methods} - {*OPS}
    assert {name for name, _ in declared} == names
    assert [name for name in names if getattr(ProcessGroup, name).__name__ != name] == []
