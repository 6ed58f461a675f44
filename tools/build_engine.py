"""Compile the C++ engine, install unisono editable, and show how far the compiler is.

Needs the build tools in the environment of this Python, because pip builds without isolation:
every later build then compiles only the files that changed. Without a compiler pip installs the
Python part alone, and a line reports it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time

_INSTALL = "-m pip install -v --disable-pip-version-check --no-build-isolation --no-deps -e ."
# The lines of Ninja, such as "[7/55] Building CXX object ...".
_STEP = re.compile(r"\s*\[(\d+)/(\d+)\] (?!Re-)")
_WARNING = "unisono: the C++ engine was not built"
_BAR = 40


def main() -> int:
    """Run pip; its output is shown only if pip fails."""
    began, lines, on_terminal = time.monotonic(), [], sys.stdout.isatty()
    command = [sys.executable, *_INSTALL.split()]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=os.environ | {"UNISONO_QUIET_BUILD": "1"},
    ) as pip:
        for line in pip.stdout:
            lines.append(line)
            if on_terminal and (step := _STEP.match(line)):
                done, total = map(int, step.groups())
                bar = "━" * (_BAR * done // total)
                print(f"\r    {bar:<{_BAR}} {done} of {total} files", end="", flush=True)
    if on_terminal:
        print("\r\033[K", end="")
    if pip.returncode != 0:
        print("".join(lines), file=sys.stderr)
    elif any(_WARNING in line for line in lines):
        print("    no C++ compiler, or it failed: the reference engine will be used")
    else:
        print(f"    done in {time.monotonic() - began:.0f} s")
    return pip.returncode


if __name__ == "__main__":
    sys.exit(main())
