"""Flags as torchrun has them: two spellings, and a default from the environment."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from unisono.core.base.config import environ
from unisono.errors import InvalidArgumentError
from unisono.workbench.bench.plan import parse_nbytes

PREFIXES = ("UNISONO_", "PET_")
"""Prefixes of variables that set a flag's default, such as UNISONO_MAX_RESTARTS=3.

torchrun reads PET_MAX_RESTARTS; the prefix PET_ is tried second.
"""


_PICTURES = (".svg", ".png", ".pdf")


def add_parser(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    summary: str,
    description: str,
    handler: Callable[[argparse.Namespace], int],
    **options: Any,
) -> argparse.ArgumentParser:
    """Add a sub-command, by default without abbreviated flags, and return its parser."""
    options.setdefault("allow_abbrev", False)
    raw = argparse.RawDescriptionHelpFormatter
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=summary, description=description, formatter_class=raw, **options
    )
    parser.set_defaults(handler=handler, parser=parser)
    return parser


def add_sizes(target: Any, least: str, most: str, factor: int, step: Any = None) -> Any:
    """Add the flags of a range of sizes, and return the type of such a flag.

    Args:
        target: Parser or group.
        least: Default of the first size.
        most: Default of the last size; "" for the first.
        factor: Default of the factor between sizes.
        step: Group of the flag for the factor, if it has another.
    """
    size = {"type": checked(parse_nbytes), "metavar": "SIZE"}
    add, last = target.add_argument, most or "the first"
    add("-b", "--minbytes", default=least, help=f"first size ({least})", **size)
    add("-e", "--maxbytes", default=most or None, help=f"last size ({last})", **size)
    how = {"type": positive, "metavar": "FACTOR", "help": f"size factor ({factor})"}
    (step or target).add_argument("-f", "--stepfactor", default=factor, **how)
    return size["type"]


def add_flag(target: Any, *flags: str, **options: Any) -> None:
    """Add a flag and its spellings with underscores, which the help does not show.

    The environment gives the default if a variable is set whose name is one of `PREFIXES` and a
    long name of the flag in capitals. The value for a switch is "0" or "1". The first long name
    is the name of the option.

    Raises:
        InvalidArgumentError: The value of the variable is none of the flag's choices.
    """
    names = [flag[2:].replace("-", "_") for flag in flags if flag.startswith("--")]
    switch = options.get("action") == "store_true"
    for variable in [prefix + name.upper() for name in names for prefix in PREFIXES]:
        if text := environ().get(variable, ""):
            # argparse does not check that a default is one of the choices.
            choices = ("0", "1") if switch else options.get("choices", (text,))
            if text not in choices:
                raise InvalidArgumentError(
                    f"{variable} must be {' or '.join(choices)}; got {text!r}"
                )
            # argparse converts a default of type str like an argument.
            options["default"] = text == "1" if switch else text
            break
    target.add_argument(*flags, dest=names[0], **options)
    hidden = options | {"help": argparse.SUPPRESS, "default": argparse.SUPPRESS}
    for alias in ["--" + name for name in names if "_" in name]:
        target.add_argument(alias, dest=names[0], **hidden)


def checked(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Wrap a parser so that argparse prints the text of its InvalidArgumentError."""

    def convert(text: str) -> Any:
        try:
            return parse(text)
        except InvalidArgumentError as error:
            raise argparse.ArgumentTypeError(error.what) from None

    return convert


def positive(text: str) -> int:
    """Return a number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a number of at least 1, got {text!r}")
    return int(text)


def non_negative(text: str) -> int:
    """Return a number of at least 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a number of at least 0, got {text!r}")
    return int(text)


def seconds(text: str) -> float:
    """Return a finite number of seconds, 0 included."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of seconds >= 0, got {text!r}")
    return value


def check_writable(path: str) -> None:
    """Check that results can be written, before the measurements take minutes.

    Raises:
        InvalidArgumentError: The folder is missing, or no file can be written in it.
    """
    folder = os.path.dirname(path) or "."
    if not os.access(folder, os.W_OK) or os.path.isdir(path):
        raise InvalidArgumentError(f"cannot write {path}: no such folder, or no permission")


def check_output(command: str, path: str) -> None:
    """Check that a timeline (.json) or a picture can be written.

    Raises:
        InvalidArgumentError: The ending is another one, or it cannot be written.
        DependencyError: matplotlib is missing.
    """
    ending = os.path.splitext(path)[1]
    if ending not in (".json", *_PICTURES):
        endings = ", ".join((".json", *_PICTURES))
        raise InvalidArgumentError(f"{command}: -o {path}: expected one of {endings} at its end")
    check_writable(path)
    if ending in _PICTURES:
        from unisono.workbench.bench.launch import check_installed

        check_installed("plot")


def write_text(path: str, text: str) -> None:
    """Write a file.

    Raises:
        InvalidArgumentError: It cannot be written.
    """
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidArgumentError(f"cannot write {path}: {error.strerror}") from None
