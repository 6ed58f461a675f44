"""`unisono run`: start a script N times on each node, with one world for all of them."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from unisono.cli.flags import add_flag, seconds
from unisono.cli.nodes import add_node_flags, node_options
from unisono.cli.output import add_output_flags, log_options
from unisono.cli.plan import describe
from unisono.cli.programs import add_program_flags, worker_commands
from unisono.cli.status import make_status_line
from unisono.elastic.agent import GRACE_S, Agent, LaunchResult, LaunchSpec
from unisono.elastic.bind import MODES
from unisono.elastic.report import is_consequence, render, signal_name
from unisono.elastic.spec import as_document

__all__ = ["add_command"]

_PREFIX = "unisono run: "

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
    add_flag(
        parser,
        "--grace",
        type=seconds,
        default=GRACE_S,
        metavar="SECONDS",
        help=f"time a worker has to end after SIGTERM, before SIGKILL ({GRACE_S:g})",
    )
    add_flag(
        parser,
        "--error-json",
        default=None,
        metavar="PATH",
        help="write the failure report to this file as well, as JSON",
    )
    add_node_flags(parser)
    add_output_flags(parser)
    add_flag(
        parser,
        "--bind",
        choices=MODES,
        default="none",
        help="CPUs of each worker: an equal share of the cores (core), a NUMA node (numa), "
        "cores if there are enough (auto), or all (none, the default)",
    )
    add_flag(parser, "--dry-run", action="store_true", help="print what would be started, and end")
    add_program_flags(parser)
    parser.set_defaults(handler=_run, parser=parser)


def _run(options: argparse.Namespace) -> int:
    terminal = sys.stdout.isatty()
    several = options.nproc_per_node > 1 or ":" in options.command
    logs = log_options(options, None)
    # A terminal gets whole lines anyway; elsewhere unbuffered output is not lost with a crash.
    unbuffered = not terminal or logs.pipes_stdout(1 + several, terminal)
    commands = worker_commands(options, options.parser, unbuffered=unbuffered)
    # Workers that have the terminal themselves would write into the status line.
    shown = not options.dry_run and (not terminal or logs.pipes_stdout(len(commands), terminal))
    status = make_status_line(len(commands)) if shown else None
    spec = LaunchSpec(
        commands=commands,
        grace_s=options.grace,
        logs=replace(logs, screen=status),
        bind=options.bind,
        **node_options(options),
    )
    if options.dry_run:
        print(describe(spec))
        return 0
    result = Agent(spec, notify=_say if status is None else partial(_say, show=status.say)).run()
    if options.error_json is not None and result.exit_code != 0:
        _write_json(options.error_json, result)
    _print_report(result)
    return result.exit_code


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _say(line: str, show: Callable[[str], None] = _print) -> None:
    show(f"{_PREFIX}{line}")


def _write_json(path: str, result: LaunchResult) -> None:
    try:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(as_document(result), file, indent=2)
    except OSError as error:
        _say(f"cannot write {path}: {error.strerror}")


def _print_report(result: LaunchResult) -> None:
    if result.signum is not None:
        _say(f"stopped by {signal_name(result.signum)}")
    elif result.failures:
        if is_consequence(result.failures[0].text) and result.reason:
            _say(result.reason)
        print(render(result.failures, result.stopped, prefix=_PREFIX), file=sys.stderr)
    elif result.reason:
        _say(result.reason)
