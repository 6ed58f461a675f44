"""The command line: a module or folder per command of `unisono`, and what they share."""

from unisono.workbench.cli.main import main

__all__ = ["main"]
