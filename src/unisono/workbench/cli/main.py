"""The command `unisono`: one sub-command per module of this package."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

from unisono import __version__
from unisono.errors import UnisonoError
from unisono.workbench.cli import bench, draw, explain, replay, simulate, synthesize, tune
from unisono.workbench.cli.completion import SHELLS, PrintCompletion
from unisono.workbench.cli.doctor import doctor as doctor
from unisono.workbench.cli.flags import CommandParser, meant
from unisono.workbench.cli.look import look as look
from unisono.workbench.cli.run import run as run
from unisono.workbench.cli.terminal import plain
from unisono.workbench.cli.trace import trace as trace


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code.

    Args:
        argv: Arguments without the program's name; those of the process if None.
    """
    _open_closed_streams()
    try:
        try:
            return _main(argv)
        except UnisonoError as error:
            # It may have words of a file or of a job.
            lines = [plain(line) for line in str(error).split("\n")]
            print("unisono: error:", "\n".join(lines), file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            # `unisono run` has handlers of its own.
            return interrupted()
        finally:
            # At exit Python would report a closed pipe in words of its own.
            sys.stdout.flush()
    except BrokenPipeError:
        # The reader of the output has left (`| head`).
        _discard_output()
        return 128 + 13  # SIGPIPE, which Windows does not name


def interrupted() -> int:
    """Say that a Ctrl-C ends the command, and return its exit code."""
    print("unisono: interrupted", file=sys.stderr)
    return 128 + signal.SIGINT


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line, with those of its sub-commands."""
    parser = CommandParser(
        prog="unisono",
        description="Collective communication: start, look at, measure and simulate processes.",
    )
    parser.add_argument("--version", action="version", version=f"unisono {__version__}")
    parser.add_argument(
        "--print-completion",
        action=PrintCompletion,
        choices=SHELLS,
        help="print a script that completes commands and options in a shell",
    )
    commands: Any = parser.add_subparsers(required=True)
    run.add_command(commands)
    bench.add_command(commands)
    simulate.add_command(commands)
    replay.add_command(commands)
    draw.add_command(commands)
    explain.add_command(commands)
    synthesize.add_command(commands)
    tune.add_command(commands)
    look.add_commands(commands)
    trace.add_command(commands)
    doctor.add_command(commands)
    return parser


def _main(argv: Sequence[str] | None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] in ([], ["help"]):
        words = [*words[1:], "--help"]
    options, unknown = make_parser().parse_known_args(words)
    if unknown:
        options.parser.error(_unknown(unknown[0], options.parser))
    options.stdout = sys.stdout
    with contextlib.ExitStack() as stack:
        if getattr(options, "json", None) == "-":
            # Of a command that takes minutes, the text shows how far it is.
            text = sys.stderr if options.text_too else stack.enter_context(open(os.devnull, "w"))
            stack.enter_context(contextlib.redirect_stdout(text))
        code: int = options.handler(options)
    return code


def _unknown(word: str, parser: argparse.ArgumentParser) -> str:
    """Return an error text for an argument, with the flag that it resembles, if one does."""
    name = word.partition("=")[0]
    # argparse has no public list of options, and the help also shows flags of example scripts.
    flags = [flag for flag in parser._option_string_actions if flag.startswith("--")]
    # Their starts are compared, so that --nprocs resembles --nproc-per-node.
    starts = {flag[: len(name)]: flag for flag in reversed(flags) if "_" not in flag}
    return f"unrecognized arguments: {word}{meant(name, starts)}"


def _discard_output() -> None:
    """Replace each standard stream whose reader has left by /dev/null.

    Otherwise Python would write the rest of its buffer to the stream at exit, and fail again.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, stream.fileno())
            os.close(nothing)


def _open_closed_streams() -> None:
    """Open /dev/null in place of standard streams that were closed (`unisono run ... >&-`).

    Otherwise the next file would get the number of the stream, and programs that
    this command starts would write to it.
    """
    for fd, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            nothing = os.open(os.devnull, os.O_RDWR)
            if nothing != fd:
                os.dup2(nothing, fd)
                os.close(nothing)
            os.set_inheritable(fd, True)
            setattr(sys, name, os.fdopen(fd, mode, closefd=False))
