"""The levels of set-up in the Makefile, by the commands that make would run."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STAMPS = (".venv/.unisono-demo", ".venv/.unisono-setup")
DEMO, DEVELOPER, TORCH = "tools/build_engine.py", "[test,dev]", "torch=="

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def commands(folder, target):
    env = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    return subprocess.run(
        ["make", "-n", target], cwd=folder, env=env, capture_output=True, text=True, check=True
    ).stdout


def levels(folder, target):
    """The levels that make would install for a target."""
    text = commands(folder, target)
    return [level for level in (DEMO, DEVELOPER, TORCH) if level in text]


def test_levels_of_set_up(tmp_path):
    sources = ("Makefile", "pyproject.toml", "src/unisono/_engine.pyi")
    for index, name in enumerate((*sources, *STAMPS)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        if name in sources:
            shutil.copy(ROOT / name, tmp_path / name)
            os.utime(tmp_path / name, (index, index))

    assert levels(tmp_path, "demo") == [DEMO]
    assert levels(tmp_path, "setup") == [DEMO, DEVELOPER, TORCH]
    for target in ("test", "check", "docs", "site"):
        assert levels(tmp_path, target) == [DEMO, DEVELOPER, TORCH]

    for index, stamp in enumerate(STAMPS, start=10):
        (tmp_path / stamp).touch()
        os.utime(tmp_path / stamp, (index, index))
    assert len(commands(tmp_path, "demo").splitlines()) == 1  # training
    assert levels(tmp_path, "setup") == []

    os.utime(tmp_path / "src/unisono/_engine.pyi", (20, 20))
    assert levels(tmp_path, "test") == [DEMO]  # the C++ engine is that of older sources

    os.utime(tmp_path / "pyproject.toml", (21, 21))
    assert levels(tmp_path, "demo") == [DEMO]
    assert levels(tmp_path, "setup") == [DEMO, DEVELOPER, TORCH]
