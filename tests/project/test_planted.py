"""The planted faults, which `make planted` runs, fit the sources and cover all of them."""

import os
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
PATCHES = sorted((ROOT / "tests/planted").glob("*.patch"))


def test_every_fault_applies():
    # Without the variable, git would skip all files if this tree lay inside another repository.
    done = subprocess.run(
        ["git", "apply", "--check", *map(str, PATCHES)],
        cwd=ROOT,
        env=os.environ | {"GIT_CEILING_DIRECTORIES": str(ROOT.parent)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_every_fault_says_what_it_is_what_a_user_would_suffer_and_what_catches_it():
    head = re.compile(r"Fault: .+\.\nHarm: .+\.\nCaught by: (tests/.+\.py)::(test_\w+)\n\n--- a/")
    for path in PATCHES:
        match = head.match(path.read_text(encoding="utf-8"))
        assert match, path.name
        tests = (ROOT / match[1]).read_text(encoding="utf-8")
        assert f"def {match[2]}(" in tests, path.name


def test_every_package_and_native_folder_has_a_fault():
    text = "".join(path.read_text(encoding="utf-8") for path in PATCHES)
    changed = set(re.findall(r"^\+\+\+ b/((?:src/unisono|native)/\w+)/", text, re.MULTILINE))
    folders = {
        path.relative_to(ROOT).as_posix()
        for source in ("src/unisono", "native")
        for path in (ROOT / source).iterdir()
        if path.is_dir() and path.name not in ("__pycache__", "tests")
    }
    assert changed == folders
    assert len(PATCHES) >= 40
