"""The sub-command `trace`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from unisono.errors import InvalidArgumentError, LaunchError
from unisono.launcher.output.colours import has_colours, painted
from unisono.workbench.cli.flags import (
    add_json,
    add_parser,
    add_picture,
    check_output,
    write_json,
    write_text,
)
from unisono.workbench.cli.look.look import add_token_flag, find_jobs, token_of
from unisono.workbench.cli.terminal import plain

if TYPE_CHECKING:
    from unisono.core.recorder.flight_recorder import RankRecords
    from unisono.workbench.trace.clocks import Trip

_DESCRIPTION = """\
Analyse the recorded calls of all ranks: the first call that differs, the rank that is missing,
and the longest waits. With -o, write them on one time axis. The records are those of a running
job of this user, or of files. Files are written by write_trace() or by torch's flight recorder,
with Gloo or NCCL.
"""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command."""
    summary = "analyse or draw the recorded calls of all ranks"
    parser = add_parser(commands, "trace", summary, _DESCRIPTION, _trace)
    parser.add_argument(
        "job",
        nargs="*",
        metavar="FILE",
        help="files or folders of records; or process id of a rank or launcher, run id, or "
        "HOST:PORT of the job's store; the job of this user by default",
    )
    add_json(parser)
    add_picture(parser, "a timeline for Perfetto (.json), or a picture (.svg, .png, .pdf, .html)")
    add_token_flag(parser)


def _trace(options: argparse.Namespace) -> int:
    # These modules import NumPy, which `unisono run`, with the same parser, must not load.
    from unisono.workbench.trace.analysis import report
    from unisono.workbench.trace.chrome import chrome_trace
    from unisono.workbench.trace.clocks import align
    from unisono.workbench.trace.joined import by_rank, join, shifted

    if options.output:
        check_output("trace", options.output, ".json")
    found, trips = _gather(options.job, token_of(options))
    if not found:
        raise InvalidArgumentError("trace: there are no records")
    ranks = by_rank(found)
    axis = align(ranks, join(ranks), trips)
    ranks = shifted(ranks, axis.shift_ns)
    groups = join(ranks)
    lines = [plain(line) for line in report(ranks, groups)]
    if has_colours(sys.stdout):
        lines[0] = painted(lines[0], "bold")
    print(*(lines[:1] if options.output else lines), plain(str(axis)), sep="\n")
    write_json(options, {"ranks": sorted(ranks), "report": lines, "clocks": str(axis)})
    if options.output and options.output.endswith(".json"):
        document = chrome_trace(ranks, groups, axis)
        write_text(options.output, json.dumps(document, separators=(",", ":")))
    elif options.output:
        from unisono.workbench.cli.trace.picture import draw

        draw(ranks, groups, f"{lines[0]}\n{axis}", options.output)
    return 0


def _gather(words: Sequence[str], token: str) -> tuple[list[RankRecords], list[Trip]]:
    """Return the records that the words of the command line name."""
    from unisono.workbench.cli.trace.gather import ask_ranks, read_files

    if len(words) > 1 or any(os.path.exists(word) or os.sep in word for word in words):
        return read_files(words), []
    try:
        jobs = find_jobs(words[0] if words else None, token)
    except LaunchError as error:
        if not words:
            raise
        raise InvalidArgumentError(
            f"trace: there is no file {words[0]!r}, and {error.what}", hint=error.hint
        ) from None
    if len(jobs) > 1:
        names = "; ".join(
            f"{next(iter(job.states.values()))['pid']} is of {plain(job.title)}" for job in jobs
        )
        raise InvalidArgumentError(
            f"trace: this user has {len(jobs)} jobs", hint=f"name one by a process id: {names}"
        )
    return ask_ranks(jobs[0])
