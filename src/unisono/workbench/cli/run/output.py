"""The flags of `unisono run` about the workers' output."""

from __future__ import annotations

import argparse
import re
from functools import partial
from typing import Any

from unisono.core.base.config import environ
from unisono.launcher.output.console import check_prefix
from unisono.launcher.output.files import DEFAULT_PREFIX, LogOptions, Screen, StdChoice
from unisono.launcher.ranges import parse_ranges
from unisono.workbench.cli.flags import add_flag, checked

_FOLD = {"auto": None, "always": True, "never": False}
_TORCH_PREFIX = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"
_TORCH_FIELDS = {"role_name": "role", "rank": "rank", "local_rank": "local_rank"}


def add_output_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags; `log_options` reads them."""
    group = parser.add_argument_group("output")
    add = partial(add_flag, group)
    add(
        "--log-dir",
        default="",
        metavar="DIR",
        help="write each worker's output to DIR/<run id>_x/attempt_<n>/<local rank>/std*.log",
    )
    streams = "0: none, 1: stdout, 2: stderr, 3: both; or by local rank, 0:3,1:1"
    for letter, name, effect in (
        ("-r", "--redirects", "write to files only"),
        ("-t", "--tee", "write to files and, with a prefix, to the console"),
    ):
        add(
            letter,
            name,
            type=checked(StdChoice.parse),
            metavar="STREAMS",
            help=f"{effect}; {streams}",
        )
    add(
        "--local-ranks-filter",
        type=checked(parse_ranges),
        metavar="RANKS",
        help="show only these workers of this node on the console, as in 0,4-7",
    )
    for name in ("stdout", "stderr"):
        add(
            f"--duplicate-{name}-filters",
            default="",
            metavar="TEXTS",
            help=f"copy all workers' lines with one of these texts, separated by commas (a double "
            f"comma is a comma), to filtered_{name}.log",
        )
    _add_console_flags(group)


def _add_console_flags(group: Any) -> None:
    add_flag(
        group,
        "--prefix",
        type=checked(check_prefix),
        metavar="TEMPLATE",
        help="put before each line on the console; fields {rank} {local_rank} {host} {role} "
        f"('{DEFAULT_PREFIX}' if lines are teed or folded)",
    )
    add_flag(
        group,
        "--fold",
        choices=sorted(_FOLD),
        default="auto",
        help="show equal lines of several ranks once, with their number (auto: on a terminal)",
    )


def log_options(options: argparse.Namespace, screen: Screen | None) -> LogOptions:
    """Return the options that the flags of `add_output_flags` select."""
    return LogOptions(
        log_dir=options.log_dir,
        redirects=options.redirects,
        tee=options.tee,
        local_ranks=options.local_ranks_filter,
        prefix=options.prefix,
        # A worker keeps its number when `reconfigure` gives it another rank.
        default_prefix=_default_prefix().replace(
            DEFAULT_PREFIX, "[worker {rank}] " if options.restart == "worker" else DEFAULT_PREFIX
        ),
        fold=_FOLD[options.fold],
        stdout_filters=_texts(options.duplicate_stdout_filters),
        stderr_filters=_texts(options.duplicate_stderr_filters),
        screen=screen,
    )


def _texts(text: str) -> tuple[str, ...]:
    parts = text.replace(",,", "\0").split(",")
    return tuple(part.replace("\0", ",") for part in parts if part)


def _default_prefix() -> str:
    """Return torchrun's template from the environment in our syntax, or our default."""
    template = environ().get(_TORCH_PREFIX, "")
    if not template:
        return DEFAULT_PREFIX
    parts = re.split(rf"\$\{{({'|'.join(_TORCH_FIELDS)})\}}", template)
    texts = [text.replace("{", "{{").replace("}", "}}") for text in parts[::2]]
    fields = [f"{{{_TORCH_FIELDS[name]}}}" for name in parts[1::2]]
    return "".join(a + b for a, b in zip(texts, [*fields, ""], strict=True))
