"""The command line: `unisono run`."""

from unisono.cli.main import main

__all__ = ["main"]
