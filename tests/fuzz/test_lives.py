"""Some random lives of jobs whose ranks come and go; `make fuzz-membership` runs more."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.whole("starts 20 processes")
def test_lives_tell_one_story():
    # In the first life hosts are cut off from the store during a commit.
    command = [sys.executable, str(Path(__file__).with_name("membership.py")), "1016", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 lives from seed 1016: " in done.stdout, done.stdout
