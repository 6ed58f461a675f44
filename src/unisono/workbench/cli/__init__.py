"""The command line: `unisono run` and `unisono bench`."""

from unisono.workbench.cli.main import main

__all__ = ["main"]
