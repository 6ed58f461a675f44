"""Six seconds of nonsense, 30 with --all; `make fuzz-stores` takes ten minutes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_nonsense_does_no_harm(request):
    seconds = "30" if request.config.option.all else "6"
    command = [sys.executable, str(Path(__file__).with_name("fuzz.py")), seconds]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) == 7, done.stdout
