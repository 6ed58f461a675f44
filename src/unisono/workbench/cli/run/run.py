"""`unisono run`: start a script N times on each node, with one world for all of them."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from unisono.core.base.config import environ
from unisono.core.rendezvous.launchers import LAUNCHERS, find_place
from unisono.errors import RendezvousError
from unisono.launcher.agent import Agent
from unisono.launcher.environment import ERROR_FILE_VARIABLE
from unisono.launcher.guard import fork_launcher
from unisono.launcher.output.colours import has_colours, painted
from unisono.launcher.output.files import LogOptions
from unisono.launcher.ranges import format_ranges
from unisono.launcher.report import error_document, render, signal_name, stopped_lines
from unisono.launcher.spec import GRACE_S, LaunchResult, LaunchSpec, as_document
from unisono.launcher.ssh.hosts import HostsLaunch
from unisono.launcher.ssh.remote import follow, send_result
from unisono.launcher.stats import prepare_stats, take_stats
from unisono.launcher.workers.cpu_binding import MODES
from unisono.workbench.cli.flags import add_flag, add_parser, non_negative, seconds
from unisono.workbench.cli.nodes import add_node_flags, node_options, unknown_conf
from unisono.workbench.cli.run.dry_run import describe
from unisono.workbench.cli.run.hosts import add_hosts_flags, describe_hosts, hosts_spec
from unisono.workbench.cli.run.output import add_output_flags, log_options
from unisono.workbench.cli.run.programs import add_program_flags, worker_commands
from unisono.workbench.cli.run.status_line import make_status_line
from unisono.workbench.cli.run.torchrun import NUMA_BINDINGS, add_torchrun_flags, signals_of

_PREFIX = "unisono run: "
_LOOK_S = 0.1
_LATE_FLAG = re.compile("-np?[0-9]*|--(nproc|nnodes|max[-_]restarts).*")

_DESCRIPTION = """\
Start N workers and give each its RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, ...,
as torchrun does, so that a script runs under both. The system chooses the port, so any number of
launches can run at once. If a worker fails, the others are stopped. The last line names the first
failure, or its traceback follows if other text stands between. The command exits with the exit code
of the worker that failed first (128 + number if a signal killed the worker)."""

_EPILOG = """\
Each option can also be set in the environment, as UNISONO_MAX_RESTARTS=3 or PET_MAX_RESTARTS=3.

examples:
  unisono run -n 4 train.py --epochs 3     four workers on this host
  unisono run -n 2 a.py : -n 1 b.py        one world, two programs
  unisono run --nnodes 2:4 --rdzv-backend c10d --rdzv-endpoint host1 \\
      --max-restarts 3 -n 8 train.py       8 workers on each of 2 to 4 hosts
  unisono run --hosts a:4,b:2 train.py     6 workers on two hosts, through ssh
"""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command `run`."""
    usage = "unisono run [options] script [argument ...]"
    more = {"epilog": _EPILOG, "usage": usage, "allow_abbrev": True}
    parser = add_parser(
        commands, "run", "start a script on N processes", _DESCRIPTION, _run, **more
    )
    add_program_flags(parser)
    add = partial(add_flag, parser)
    add("--dry-run", action="store_true", help="print the launch, and start nothing")
    add(
        "--doctor",
        action="store_true",
        help="before the start, examine the hosts and their network as `unisono doctor` does",
    )
    add(
        "--grace",
        "--shutdown-timeout",
        type=seconds,
        default=environ().get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT") or GRACE_S,
        metavar="SECONDS",
        help=f"time between SIGTERM and SIGKILL to a worker ({GRACE_S:g})",
    )
    add(
        "--error-json",
        "--json",
        metavar="FILE",
        help="write the report at the end as JSON, also after success, to this file",
    )
    add(
        "--stats",
        action="store_true",
        help="at the end, print the calls of this node's workers, and the ranks they waited for",
    )
    add(
        "--bind",
        choices=MODES,
        default="none",
        help="CPUs of each worker: an equal share of the cores (core), a NUMA node (numa), "
        "cores if there are enough (auto), or all (none, the default)",
    )
    add(
        "--warm",
        type=_count,
        default="all",
        metavar="N|all",
        help="if restarts are allowed: keep a half-started interpreter with torch loaded for N "
        "workers of this node that are Python programs and use torch (all; 0: none)",
    )
    add_node_flags(parser)
    add_hosts_flags(parser)
    add_output_flags(parser)
    add_torchrun_flags(parser)


def _run(options: argparse.Namespace) -> int:
    if options.error_json == "-":
        options.parser.error("--json -: standard output is that of the workers; name a file")
    terminal = sys.stdout.isatty()
    least, most = options.nproc_per_node
    several = most > 1 or ":" in options.command
    logs = log_options(options, None)
    # Python writes whole lines to a terminal. Elsewhere a crash would lose buffered output.
    unbuffered = not terminal or logs.stdout(1 + several, terminal) != "inherited"
    commands = worker_commands(options, options.parser, unbuffered=unbuffered)
    # Workers that write to the terminal directly would write into the status line.
    through = not terminal or logs.stdout(len(commands), terminal) != "inherited"
    shown = through and not options.dry_run and not options.hosts
    status = make_status_line(len(commands)) if shown else None
    if warning := unknown_conf(options):
        _show(warning)
    nodes = node_options(options)
    nodes["limits"] = replace(nodes["limits"], min_nprocs=least)
    spec = LaunchSpec(
        commands=commands,
        grace_s=options.grace,
        logs=replace(logs, screen=status),
        bind=NUMA_BINDINGS.get(options.numa_binding, options.bind),
        signals=signals_of(options),
        one_gpu_each=options.virtual_local_rank,
        warm=len(commands) if options.warm is None else options.warm,
        **nodes,
    )
    hosts = hosts_spec(options, spec, _run) if options.hosts else None
    if options.dry_run:
        print(describe_hosts(hosts, options) if hosts else describe(spec))
        return 0
    _warn_of_absent_workers(logs, len(commands))
    if not hosts:
        _warn_of_flags(spec, options)
    stats = prepare_stats() if options.stats and not hosts else ""
    descendants = fork_launcher(spec.signals)
    follow()
    late = _LateSignals(spec.signals)
    notify = _show if status is None else partial(_show, write_line=status.write_line)
    agent: Agent | HostsLaunch
    if hosts:
        agent = HostsLaunch(hosts, notify)
    else:
        agent = Agent(spec, notify=notify, descendants=descendants)
        _prepare_examination(agent, options, len(commands))
    with _shown_warnings(agent.notify):
        result = agent.run()
    if stats:
        _show(take_stats(stats))
    if options.error_json is not None:
        _write_json(options.error_json, as_document(result))
    # This launcher may be a worker of another launcher.
    if result.failures and (path := environ().get(ERROR_FILE_VARIABLE)):
        _write_json(path, error_document(result.failures[0]))
    is_read = _report(result, lambda: agent.may_wait and not late.came, options.grace)
    if not is_read or not agent.may_wait or late.came or not _are_flushed():
        # At its end Python would flush again: wait for the same reader, or change the exit code.
        os._exit(result.exit_code)
    return result.exit_code


def _warn_of_flags(spec: LaunchSpec, options: argparse.Namespace) -> None:
    if spec.is_single_node and not options.standalone:
        _warn_of_other_launcher()
    if spec.is_single_node and len(spec.commands) == 1 and not spec.limits.max_restarts:
        _warn_of_late_flag(*options.command)


def _prepare_examination(agent: Agent, options: argparse.Namespace, nprocs: int) -> None:
    if options.doctor:
        # It loads more than a launch needs.
        from unisono.workbench.cli.doctor.session import Session

        session = Session(options, nprocs, lambda line: agent.notify(f"doctor: {line}"))
        agent.examine = session.examine_before_run


def _report(result: LaunchResult, may_wait: Callable[[], bool], limit_s: float) -> bool:
    """Print the report; return whether it was read, which may take at most `limit_s`.

    Args:
        result: The result of the launch.
        may_wait: Function that returns whether the limit does not hold yet.
        limit_s: Time for a reader that does not read.
    """
    report = threading.Thread(target=_print_report, args=(result,), daemon=True)
    try:
        report.start()
        while may_wait() and report.is_alive():
            report.join(_LOOK_S)
        report.join(limit_s)
    except RuntimeError:  # the system allows no further thread
        _print_report(result)
    return not report.is_alive()


class _LateSignals:
    """Signals after the end of the agent: they change no exit code, but end the wait for a reader.

    Args:
        names: The signals that end a launch.

    Attributes:
        came: Whether one came.
    """

    def __init__(self, names: Collection[str]) -> None:
        self.came = False
        for signum in (getattr(signal, name) for name in names):
            # `Signals` takes them over, and gives them back.
            if signal.getsignal(signum) is not signal.SIG_IGN:
                signal.signal(signum, self._note)

    def _note(self, signum: int, frame: object) -> None:
        self.came = True


def _are_flushed() -> bool:
    """Flush the standard streams; return False if their reader has left."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        return False
    return True


@contextlib.contextmanager
def _shown_warnings(notify: Callable[[str], None]) -> Iterator[None]:
    """Show the library's warnings, for example about a client that the store refused."""
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: notify(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("unisono")
    # With UNISONO_LOG the library prints its warnings itself.
    if not environ().get("UNISONO_LOG"):
        logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def _warn_of_other_launcher() -> None:
    """Warn if srun, mpiexec or the like started several launchers, each with a world of its own."""
    try:
        place = find_place(environ())
    except RendezvousError:
        return
    # The first row is `unisono run` itself: a launch inside a launch is intended.
    if place is not None and place.launcher is not LAUNCHERS[0] and place.world_size > 1:
        _show(
            f"{place.launcher.name} started {place.world_size} of this, and each makes a world of "
            f"its own; for one world: --nnodes {place.world_size} --rdzv-backend c10d "
            "--rdzv-endpoint HOST; if this is intended: --standalone"
        )


def _warn_of_absent_workers(logs: LogOptions, nprocs: int) -> None:
    """Warn if a flag names a worker that this node does not have."""
    named = {
        "--local-ranks-filter": logs.local_ranks,
        "--redirects": logs.redirects and logs.redirects.single,
        "--tee": logs.tee and logs.tee.single,
    }
    for flag, ranks in named.items():
        if absent := [rank for rank in ranks or () if rank >= nprocs]:
            _show(
                f"{flag} names local rank {format_ranges(absent)}, but this node has "
                f"{format_ranges(range(nprocs))} only"
            )


def _warn_of_late_flag(script: str, *words: str) -> None:
    """Warn if the script gets what looks like a flag of the launch, and no "--" stands before."""
    if script != "--" and (flag := next(filter(_LATE_FLAG.fullmatch, words), None)):
        _show(f"1 worker; {flag} went to {script}: options of unisono run come before the script")


def _count(text: str) -> int | None:
    return None if text == "all" else non_negative(text)


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _show(text: str, write_line: Callable[[str], None] = _print, prefix: str = _PREFIX) -> None:
    # The launch continues with the right exit code, even if the text cannot be written.
    with contextlib.suppress(OSError, ValueError):
        write_line(f"{prefix}{text}")


def _write_json(path: str, document: Mapping[str, Any]) -> None:
    try:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(document, file, indent=2)
    except OSError as error:
        _show(f"cannot write {path}: {error.strerror}")


def _print_report(result: LaunchResult) -> None:
    if send_result(result):
        return
    if result.signum is not None:
        if result.places and not result.failures:
            for line in stopped_lines(result.stopped, result.places):
                _show(line)
        _show(f"stopped by {signal_name(result.signum)}")
    # `render` reports a failure that ended the job, unless its node could not publish it.
    if result.reason and not any(f.worker_name() in result.reason for f in result.failures):
        _show(result.reason)
    if result.failures:
        report = render(
            result.failures, result.stopped, result.left_s, result.places,
            prefix=_PREFIX, is_shown=result.is_shown,
        )  # fmt: skip
        if has_colours(sys.stderr):
            named = f"{_PREFIX}first failure: {result.failures[0].line()}"
            report = report.replace(named, painted(named, "bold", "red"), 1)
        _show(report, prefix="")
