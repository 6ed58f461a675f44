"""The command line: one module or folder for each command of `unisono`."""

from unisono.workbench.cli.main import main

__all__ = ["main"]
