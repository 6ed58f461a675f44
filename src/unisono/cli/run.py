"""`unisono run`: start a script N times on this host, with one world for all of them."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

from unisono.elastic.agent import GRACE_S, Agent, LaunchResult, LaunchSpec
from unisono.elastic.report import render, signal_name

__all__ = ["add_command"]

_DESCRIPTION = """\
Start N workers and give each its RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, ...,
as torchrun does, so that scripts for either run under both. The port is chosen by the system:
any number of launches can run at once. If a worker fails, the others are ended; the first
failure's traceback is the last thing printed and its exit code is the command's (128 + number
if a signal killed it)."""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command `run`."""
    parser = commands.add_parser(
        "run",
        help="start a script on N processes",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="unisono run [options] script [argument ...]",
        allow_abbrev=False,
    )
    _add_flag(
        parser, "--nproc-per-node", type=_positive, default=1, metavar="N", help="workers (1)"
    )
    _add_flag(
        parser,
        "--standalone",
        action="store_true",
        help="this host only; always so for now, accepted for torchrun's command lines",
    )
    _add_flag(
        parser,
        "--grace",
        type=_seconds,
        default=GRACE_S,
        metavar="SECONDS",
        help=f"time a worker has to end after SIGTERM, before SIGKILL ({GRACE_S:g})",
    )
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument(
        "-m", "--module", action="store_true", help="run a module, as `python -m` does"
    )
    _add_flag(kind, "--no-python", action="store_true", help="run any program, not a script")
    # One positional for both: argparse would drop a "--" between two.
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.set_defaults(handler=_run, parser=parser)


def _add_flag(target: Any, flag: str, **options: Any) -> None:
    """Add a flag and, unseen in the help, its spelling with underscores."""
    dest = flag.removeprefix("--").replace("-", "_")
    target.add_argument(flag, dest=dest, **options)
    if (alias := "--" + dest) != flag:
        hidden = options | {"help": argparse.SUPPRESS, "default": argparse.SUPPRESS}
        target.add_argument(alias, dest=dest, **hidden)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a number of at least 1, got {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of seconds >= 0, got {text!r}")
    return seconds


def _command(options: argparse.Namespace) -> Sequence[str]:
    """Return the workers' command line, or end with a usage error."""
    command: list[str] = options.command
    if command and command[0] == "--":
        command = command[1:]
    if not command:
        options.parser.error("no script given")
    if options.no_python:
        return command
    # A terminal gets whole lines anyway; elsewhere unbuffered output is not lost with a crash.
    unbuffered = [] if sys.stdout.isatty() else ["-u"]
    python = [sys.executable, *unbuffered]
    if options.module:
        return [*python, "-m", *command]
    if not os.path.exists(command[0]):
        options.parser.error(f"script not found: {command[0]} (in {os.getcwd()})")
    return [*python, *command]


def _run(options: argparse.Namespace) -> int:
    spec = LaunchSpec(
        commands=[_command(options)] * options.nproc_per_node, grace_s=options.grace
    )
    result = Agent(spec).run()
    _print_report(result)
    return result.exit_code


def _print_report(result: LaunchResult) -> None:
    prefix = "unisono run: "
    if result.signum is not None:
        print(f"{prefix}stopped by {signal_name(result.signum)}", file=sys.stderr)
    elif result.failures:
        print(render(result.failures, result.stopped, prefix=prefix), file=sys.stderr)
