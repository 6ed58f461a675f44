"""`unisono doctor`: examine the hosts of a job, and the network between them, before it starts."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import signal
import sys
from collections.abc import Callable, Iterator

from unisono.errors import InvalidArgumentError
from unisono.launcher.output.colours import has_colours, painted
from unisono.workbench.cli.doctor.facts import ERROR, OK, WARNING
from unisono.workbench.cli.flags import (
    add_json,
    add_parser,
    add_picture,
    check_output,
    check_writable,
    write_json,
)
from unisono.workbench.cli.nodes import add_count_flag, add_node_flags, unknown_conf

_PREFIX = "unisono doctor: "
_JOIN_S = "60"
_COLOURS = {ERROR: "red", WARNING: "yellow", OK: "green"}

_DESCRIPTION = """\
Examine this host, or several hosts and the network between them, before a job starts. On several
hosts start the command on each, with the flags of `unisono run`, or with --hosts. Each finding is a
fact, and a fix if it is a fault. The host that comes first prints the findings of all hosts. The
exit code is 1 if a finding would stop a job."""

_EPILOG = """\
examples:
  unisono doctor -n 8                   can this host run 8 ranks?
  unisono doctor --hosts host1,host2    on both: can they run a job together?
  srun unisono doctor --nnodes 4 --rdzv-backend c10d --rdzv-endpoint host1 -n 8
"""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command `doctor`."""
    summary = "examine hosts and network before a job"
    parser = add_parser(commands, "doctor", summary, _DESCRIPTION, _doctor, epilog=_EPILOG)
    add_count_flag(parser, "ranks on this host (1)")
    add = parser.add_argument
    hosts = "the hosts; they meet at the first, at torchrun's port 29400"
    add("--hosts", type=_names, default=(), metavar="NAME,NAME,...", help=hosts)
    add_json(parser)
    add_picture(parser, "draw round trips and rates of all pairs")
    add_node_flags(parser)


def _doctor(options: argparse.Namespace) -> int:
    # `unisono run`, with the same parser, must not load this.
    from unisono.workbench.cli.doctor.session import Session

    if options.hosts and options.nnodes == (1, 1):
        options.nnodes = (len(options.hosts), len(options.hosts))
        if not options.rdzv_endpoint and options.rdzv_backend == "static":
            options.rdzv_backend, options.rdzv_endpoint = "c10d", options.hosts[0]
    if warning := unknown_conf(options):
        print(_PREFIX + warning, file=sys.stderr)
    options.rdzv_conf = {"join_timeout": _JOIN_S, **(options.rdzv_conf or {})}
    if options.output and options.nnodes[1] == 1:
        raise InvalidArgumentError("--plot needs two hosts or more: give --hosts or --nnodes")
    if options.json not in (None, "-"):
        check_writable(options.json)
    if options.output:
        check_output("doctor", options.output)
    with _progress() as show:
        session = Session(options, options.nproc_per_node, show)
        try:
            session.examine()
        except KeyboardInterrupt:
            return 128 + signal.SIGINT
    colours = _COLOURS if has_colours(sys.stdout) else {}
    for line in session.lines():
        word, _, _ = line.partition(":")
        style = colours.get(word)
        print(line.replace(word, painted(word, "bold", style), 1) if style else line)
    write_json(options, session.document())
    if options.output and len(session.facts.hosts) > 1:
        from unisono.workbench.cli.doctor.picture import plot

        plot(session.facts, options.output)
    return session.exit_code


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if not all(names) or len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(f"must be different names, NAME,NAME; got {text!r}")
    return names


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Yield a function that shows a step: in one line that moves, with rich on a terminal."""
    if sys.stderr.isatty() and importlib.util.find_spec("rich"):
        from rich.console import Console

        with Console(stderr=True).status(f"{_PREFIX}examining this host") as status:
            yield lambda text: status.update(_PREFIX + text)
    else:
        yield lambda text: print(_PREFIX + text, file=sys.stderr, flush=True)
