"""The command `unisono`: one sub-command per module of this package."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from unisono.cli import bench, run
from unisono.errors import UnisonoError

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code.

    Args:
        argv: Arguments without the program's name; those of the process if None.
    """
    parser = argparse.ArgumentParser(
        prog="unisono", description="c10d-style collectives for NumPy, torch and friends."
    )
    commands = parser.add_subparsers(required=True, metavar="command")
    run.add_command(commands)
    bench.add_command(commands)
    options = parser.parse_args(argv)
    try:
        code: int = options.handler(options)
    except UnisonoError as error:
        print(f"unisono: error: {error}", file=sys.stderr)
        return 1
    return code
