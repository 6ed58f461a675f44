"""`unisono --print-completion SHELL`: complete commands, options, their values and file names."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

from unisono.errors import InvalidArgumentError

SHELLS = ("bash", "zsh", "fish")

_FILES = ("FILE", "PATH")


class PrintCompletion(argparse.Action):
    """Print the completion script of a shell, and exit; needs shtab, which the extra `cli` has."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        """Print the script.

        Raises:
            InvalidArgumentError: shtab is not installed.
        """
        try:
            import shtab
        except ImportError:
            raise InvalidArgumentError(
                "--print-completion needs the package shtab", hint="pip install 'unisono[cli]'"
            ) from None
        for action in _actions(parser):
            # The words of a worker: a script, then its arguments. The help shows them as its usage.
            is_command = action.nargs == argparse.REMAINDER
            if is_command:
                action.help = "a script and its arguments"
            if is_command or action.metavar in _FILES:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
            elif action.metavar == "DIR":
                action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
            if isinstance(action.metavar, str):
                # In zsh a colon ends the name of a value, and shtab does not escape it.
                action.metavar = action.metavar.replace(":", "-")
        print(shtab.complete(parser, shell=str(values)))
        parser.exit()


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield the options and arguments of a parser and of its sub-commands."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _actions(command)
