"""The flags that several sub-commands share, and their parser.

Flags of torchrun have two spellings, and a default from the environment.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from unisono.core.base.config import environ
from unisono.errors import InvalidArgumentError
from unisono.workbench.bench.plan import parse_nbytes

PREFIXES = ("UNISONO_", "PET_")
"""Prefixes of variables that set a flag's default, such as UNISONO_MAX_RESTARTS=3.

torchrun reads PET_MAX_RESTARTS; the prefix PET_ is tried second.
"""


_PICTURES = (".svg", ".png", ".pdf", ".html")


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Help in 80 columns: paragraphs are filled, and a value stands after the last spelling."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        # Examples keep their lines.
        kinds = itertools.groupby(text.strip().split("\n"), lambda line: line[:1].strip() != "")
        parts = ["\n".join(lines) if not fills else textwrap.fill(" ".join(lines), width)
                 for fills, lines in kinds]  # fmt: skip
        return "\n".join(parts) + "\n"

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        default = self._get_default_metavar_for_optional(action)
        return f"{', '.join(action.option_strings)} {self._format_args(action, default)}"


class CommandParser(argparse.ArgumentParser):
    """A parser whose errors name what resembles a wrong word, and whose help lists algorithms.

    Args:
        algorithms: Whether the help lists the algorithms.
        mixes: Whether flags may stand before an optional positional argument.
        options: As for ArgumentParser.
    """

    def __init__(self, *, algorithms: bool = False, mixes: bool = False, **options: Any) -> None:
        super().__init__(**options, formatter_class=_HelpFormatter)
        self._algorithms, self._mixes = algorithms, mixes

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse, as ArgumentParser does."""
        if not self._mixes:
            return super().parse_known_args(args, namespace)
        # Its two passes call this method.
        self._mixes = False
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self._mixes = True

    def format_help(self) -> str:
        """Return the help; the algorithms are imported for it only."""
        if self._algorithms:
            from unisono.core.schedules.registry import known_algorithms

            self.epilog = f"algorithms: {', '.join(known_algorithms())}"
        return super().format_help()

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            error.message += meant(str(value), {str(each): each for each in action.choices or ()})
            raise

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        # Spellings of one flag make no abbreviation ambiguous.
        found = super()._get_option_tuples(option_string)
        return list({each[0].dest: each for each in reversed(found)}.values())


def meant(word: str, known: Mapping[str, str]) -> str:
    """Return " (is X meant?)" for the key that a word resembles, with its value as X; or ""."""
    import difflib  # slow to import, and needed for errors only

    like = difflib.get_close_matches(word, known, n=1, cutoff=0.7)
    return "".join(f" (is {known[name]} meant?)" for name in like)


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
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=summary, description=description, **options
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


def add_ranks(target: Any, meaning: str, *short: str, **options: Any) -> None:
    """Add the flag for the number of ranks: `short`, --ranks, and what mpirun and `run` call it."""
    how = {"dest": "ranks", "type": positive, "metavar": "N", **options}
    target.add_argument(*short, "--ranks", help=meaning, **how)
    hidden = how | {"help": argparse.SUPPRESS, "default": argparse.SUPPRESS}
    target.add_argument("-np", "--nproc-per-node", **hidden)


def add_algorithms(target: Any, meaning: str, **options: Any) -> None:
    """Add the flag for one or several algorithms."""
    target.add_argument("--algorithm", action=_AlgorithmsAction, help=meaning, **options)


def add_json(target: Any, *, text_too: bool = False) -> None:
    """Add the flag for results as JSON; `write_json` writes them.

    Args:
        target: Parser.
        text_too: Whether the text goes to standard error if there is no file.
    """
    meaning = "write the results as JSON: to a file, or instead of the text"
    target.add_argument("--json", nargs="?", const="-", metavar="FILE", help=meaning)
    target.set_defaults(text_too=text_too)


def add_picture(
    target: Any, meaning: str, *, short: Sequence[str] = ("-o",), **options: Any
) -> None:
    """Add the flag for a picture, and its old name --plot; `check_output` checks its value."""
    how = {"dest": "output", "metavar": "FILE", **options}
    target.add_argument(*short, "--output", help=meaning, **how)
    if not options.get("required"):
        hidden = how | {"help": argparse.SUPPRESS, "default": argparse.SUPPRESS}
        target.add_argument("--plot", **hidden)


class _AlgorithmsAction(argparse.Action):
    """Join the algorithms of a flag that is repeated, and take "a, b" as "a,b"."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        before = getattr(namespace, self.dest)
        names = ",".join(part.strip() for part in values.split(","))
        setattr(namespace, self.dest, names if before == self.default else f"{before},{names}")


def operation(names: Sequence[str]) -> Callable[[str], str]:
    """Return the type of an operation, which also takes MPI's, NCCL's and nccl-tests' spelling."""
    known = {name.replace("_", ""): name for name in names} | {"bcast": "broadcast"}

    def convert(text: str) -> str:
        name = known.get(re.sub("_perf$|^mpi_|[-_]", "", text.lower()), text)
        return name if name in names else text

    return convert


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


def check_output(command: str, path: str, *more: str) -> None:
    """Check that a picture can be written, before the measurements take minutes.

    Args:
        command: Name of the sub-command.
        path: Of the picture.
        more: Further endings, which need no matplotlib.

    Raises:
        InvalidArgumentError: The ending is another one, the file cannot be written, or matplotlib
            is missing.
    """
    ending, endings = os.path.splitext(path)[1], list(dict.fromkeys((*more, *_PICTURES)))
    if ending not in endings:
        known = ", ".join(endings)
        raise InvalidArgumentError(f"{command}: -o {path}: expected one of {known} at its end")
    check_writable(path)
    if ending not in more:
        from unisono.workbench.bench.launch import check_installed

        check_installed("plot", f"-o {path}")


def write_json(options: argparse.Namespace, document: Any) -> None:
    """Write the results if --json is given: to its file, or to standard output.

    Args:
        options: With `json`, and `stdout`, as `main` sets it.
        document: The results, or their text.
    """
    if options.json is None:
        return
    if not isinstance(document, str):
        # JSON has no infinity.
        document = json.dumps(document, indent=1).replace("Infinity", "null") + "\n"
    if options.json == "-":
        options.stdout.write(document)
    else:
        write_text(options.json, document)


def write_text(path: str, text: str) -> None:
    """Write a file.

    Raises:
        InvalidArgumentError: It cannot be written.
    """
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidArgumentError(f"cannot write {path}: {error.strerror}") from None
