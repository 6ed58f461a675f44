"""The command line: `unisono run` and `unisono bench`."""

from unisono.cli.main import main

__all__ = ["main"]
