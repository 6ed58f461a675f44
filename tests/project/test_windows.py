"""unisono asks for nothing that Windows lacks, or says by name what is missing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "tests/support/as_windows"


def run(*command):
    path = os.pathsep.join([str(FOLDER), str(ROOT / "src")])
    return subprocess.run(
        [sys.executable, *command],
        env=os.environ | {"PYTHONPATH": path, "UNISONO_ENGINE": "auto"},
        capture_output=True,
        text=True,
        timeout=100,
    )


@pytest.mark.linux("elsewhere the program runs as it is")
def test_every_module_is_imported_and_ranks_are_threads():
    done = run(str(FOLDER / "program.py"))
    assert (done.returncode, done.stdout) == (0, "right on win32\n"), done.stderr


@pytest.mark.linux("elsewhere the launcher runs as it is")
def test_the_launcher_says_what_it_needs():
    done = run("-m", "unisono", "run", "--nproc-per-node", "2", "examples/ring.py")
    assert done.returncode != 0
    assert "unisono run needs a POSIX system, such as Linux or macOS" in done.stderr
