"""Run a program in this process, as `python` does."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence


def run_program(arguments: Sequence[str]) -> None:
    """Run a module (-m NAME), a text (-c TEXT) or a file, with the arguments behind it."""
    if arguments[0] == "-m":
        sys.argv = list(arguments[1:])
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = list(arguments)
        sys.path[0] = os.path.dirname(os.path.abspath(arguments[0]))
        runpy.run_path(arguments[0], run_name="__main__")
