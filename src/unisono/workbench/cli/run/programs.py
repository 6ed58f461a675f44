"""The program of each worker: one for all workers, or several separated by colons."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
from collections.abc import Sequence
from functools import partial

from unisono.core.base.config import environ
from unisono.workbench.cli.flags import add_flag
from unisono.workbench.cli.nodes import add_count_flag

_COUNT_FLAGS = ("-n", "-np", "--ranks", "--nproc-per-node", "--nproc_per_node")
_PYTHON = re.compile(r"python[0-9.]*")
_LOCAL_RANK = "${local_rank}"


def add_program_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that each program of a command line may have, and the program itself."""
    add_count_flag(
        parser,
        "workers on this node (1); MIN:MAX with --restart worker: start MAX, and go on with MIN if "
        "workers fail and no restart is left",
        may_vary=True,
    )
    # `_command` checks that only one is given: argparse would not see what the environment gives.
    add = partial(add_flag, parser)
    add("-m", "--module", action="store_true", help="run a module, as `python -m` does")
    add("--no-python", action="store_true", help="run any program, not a script")
    add(
        "--run-path",
        action="store_true",
        help="run a script even with --no-python (torchrun would run it by runpy)",
    )
    add(
        "--mpi",
        action="store_true",
        help="make the workers one MPI world (MPICH, Intel MPI) before the script imports mpi4py",
    )
    # One positional for script and arguments: argparse would drop a "--" between two.
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def worker_commands(
    options: argparse.Namespace, parser: argparse.ArgumentParser, *, unbuffered: bool
) -> list[Sequence[str]]:
    """Return the command line of each worker of this node, or end with a usage error.

    Args:
        options: The parsed flags of `add_program_flags` for the first program.
        parser: The parser of these flags, which reports errors.
        unbuffered: Whether Python must not buffer its output.
    """
    first, *others = _split(options.command)
    programs = [(argparse.Namespace(**vars(options) | {"command": first}), parser)]
    for number, words in enumerate(others, 2):
        following = argparse.ArgumentParser(
            prog=f"{parser.prog} (program {number})",
            usage=f"{parser.prog} [options] script ... : -n N [-m | --no-python] script ...",
            allow_abbrev=False,
        )
        add_program_flags(following)
        programs.append((following.parse_args(words), following))
    commands: list[Sequence[str]] = []
    for program, its_parser in programs:
        command = _command(program, its_parser, unbuffered)
        least, most = program.nproc_per_node
        if least and (others or options.restart != "worker"):
            parser.error("--nproc-per-node MIN:MAX needs --restart worker and one program")
        for _ in range(most):
            local_rank = str(len(commands))
            commands.append([word.replace(_LOCAL_RANK, local_rank) for word in command])
    return commands


def _split(words: Sequence[str]) -> list[list[str]]:
    """Split at each colon that is followed by a number of workers.

    Other colons are arguments of a script. After "--" all arguments belong to the script.
    """
    parts: list[list[str]] = [[]]
    literal = bool(words) and words[0] == "--"
    for i, word in enumerate(words):
        following = words[i + 1].partition("=")[0] if i + 1 < len(words) else ""
        if word == ":" and following in _COUNT_FLAGS and not literal:
            parts.append([])
        else:
            parts[-1].append(word)
    return parts


def _command(
    program: argparse.Namespace, parser: argparse.ArgumentParser, unbuffered: bool
) -> Sequence[str]:
    command: list[str] = program.command
    if command and command[0] == "--":
        command = command[1:]
    if program.module and program.no_python:
        parser.error("argument --no-python: not allowed with argument -m/--module")
    if not command:
        parser.error("no script given")
    if program.no_python and not program.run_path:
        if program.mpi:
            parser.error("--mpi goes with Python programs only, not with --no-python")
        return command
    python = [environ().get("PYTHON_EXEC") or sys.executable, *(["-u"] if unbuffered else [])]
    if program.mpi:
        python += ["-m", "unisono.adapters.mpi.start"]
    if program.module and not program.run_path:
        return [*python, "-m", *command]
    if not os.path.exists(command[0]):
        hint = ""
        if shutil.which(command[0]):
            word = os.path.basename(command[0])
            hint = f"; leave out {word}, or" if _PYTHON.fullmatch(word) else "; for a program,"
            hint += " give --no-python"
        parser.error(f"script not found: {command[0]} (in {os.getcwd()}){hint}")
    return [*python, *command]
