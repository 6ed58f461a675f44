"""Run a program in this process, as `python` does."""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
from collections.abc import Sequence


def run_program(arguments: Sequence[str]) -> None:
    """Run a module (-m NAME), a text (-c TEXT) or a file, with the arguments behind it.

    Raises:
        SystemExit: There is no such module or file; runpy's traceback would hide the reason.
    """
    if arguments[0] == "-m":
        package = arguments[1].partition(".")[0]
        if importlib.util.find_spec(package) is None:
            sys.exit(f"no module named {package}")
        sys.argv = list(arguments[1:])
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
    elif not os.path.exists(arguments[0]):
        sys.exit(f"script not found: {arguments[0]} (in {os.getcwd()})")
    else:
        sys.argv = list(arguments)
        sys.path[0] = os.path.dirname(os.path.abspath(arguments[0]))
        runpy.run_path(arguments[0], run_name="__main__")
