"""The levels of set-up in the Makefile, the checks beside the tests, and the repeat of CI."""

import os
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STAMPS = (".venv/.unisono-demo", ".venv/.unisono-setup")
DEMO, DEVELOPER, TORCH = "tools/build_engine.py", " test dev >", "torch=="

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def without_make():
    """Return the environment without the variables of the make that runs the tests."""
    return {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}


def commands(folder, target):
    command = ["make", "-n", target]
    return subprocess.run(
        command, cwd=folder, env=without_make(), capture_output=True, text=True, check=True
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
    assert len(commands(tmp_path, "demo").splitlines()) == 2  # training, and what to do next
    assert levels(tmp_path, "setup") == []
    assert "next: " in commands(tmp_path, "setup")

    os.utime(tmp_path / "src/unisono/_engine.pyi", (20, 20))
    assert levels(tmp_path, "test") == [DEMO]  # the C++ engine is that of older sources

    os.utime(tmp_path / "pyproject.toml", (21, 21))
    assert levels(tmp_path, "demo") == [DEMO]
    assert levels(tmp_path, "setup") == [DEMO, DEVELOPER, TORCH]


def put(folder, name, script="exit 0"):
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def start(folder, *command, **options):
    return subprocess.Popen(
        command,
        cwd=folder,
        env=without_make(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        **options,
    )


@pytest.fixture
def tree(tmp_path):
    """A folder with the Makefile, in which every tool is a script that does nothing."""
    for name in ("pyproject.toml", "src/unisono/_engine.pyi", *STAMPS):
        put(tmp_path, name)
    for name in ("ruff", "mypy", "lint-imports", "python"):
        put(tmp_path, f".venv/bin/{name}")
    shutil.copy(ROOT / "Makefile", tmp_path)
    return tmp_path


@pytest.mark.parametrize(("fails", "code"), [("nothing", 0), ("mypy", 2), ("python", 2)])
def test_failed_check_or_test_fails_the_run_after_the_output_of_the_tests(tree, fails, code):
    put(tree, ".venv/bin/mypy", f"echo types; test {fails} != mypy")
    tests = f"*pytest*) echo tests; test {fails} != python;;"
    put(tree, ".venv/bin/python", f'case "$*" in *"-m alone") echo alone;; {tests} esac')
    with start(tree, "make", "test") as process:
        lines = process.stdout.read().splitlines()
    assert process.returncode == code
    assert lines[:2] == ["tests", "types"]
    assert ("alone" in lines) == (code == 0)


def test_ctrl_c_ends_the_checks_beside_the_tests(tree):
    source, end = os.pipe()
    for name in ("mypy", "python"):
        put(tree, f".venv/bin/{name}", f"echo {name} >/dev/fd/{end}; exec sleep 60")
    with start(tree, "make", "test", pass_fds=[end]) as process, open(source) as pipe:
        os.close(end)
        assert {pipe.readline(), pipe.readline()} == {"mypy\n", "python\n"}
        os.killpg(process.pid, signal.SIGINT)
        assert select.select([pipe], [], [], 30)[0]  # closed by the last process that ended
    assert process.returncode != 0


def test_ci_lists_what_passed_only_on_repeat(tree):
    put(tree, ".ci/run")
    shutil.copy(ROOT / ".ci/run", tree / ".ci/run")
    put(tree, "bin/make", 'test "$1" != test-all')
    put(tree, ".venv/bin/python", f'test "$1" = -m || test ! "$2" || exec {sys.executable} "$@"')
    cache = tree / ".pytest_cache/v/cache/lastfailed"
    cache.parent.mkdir(parents=True)
    cache.write_text('{"tests/test_x.py::test_y": true}')
    with start(tree, "env", f"PATH={tree}/bin:{os.environ['PATH']}", ".ci/run") as process:
        lines = process.stdout.read().splitlines()
    assert process.returncode == 0
    assert lines[-2:] == ["passed only on repeat:", "tests/test_x.py::test_y"]
