"""The sub-commands `top` and `stacks`."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.core.base import config
from unisono.errors import LaunchError
from unisono.launcher.output.colours import has_colours, painted
from unisono.workbench.cli.flags import add_json, add_parser, write_json
from unisono.workbench.cli.terminal import plain

if TYPE_CHECKING:
    from unisono.workbench.cli.look.ask import RankState
    from unisono.workbench.cli.look.verdict import JobView

_REFRESH_S = 1.0

_TOP = """\
Show what the ranks of a running job do, and for which rank they wait. The job
needs no preparation. It must have a rank of the same user on this host, or a
token."""

_STACKS = "Print the Python stacks of all ranks of a running job; equal stacks once."

_COLUMNS = (
    "rank", "host", "pid", "call", "for s", "waits for", "wait %", "MB/s", "MiB", "links", "place"
)  # fmt: skip

_WHICH = (
    "process id of a rank or launcher, run id, or address of the job's store (HOST:PORT); all jobs "
    "of this user by default"
)


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-commands."""
    summary = "show what the ranks of a running job do, and for which rank they wait"
    top = add_parser(commands, "top", summary, _TOP, _top)
    _add_job(top)
    top.add_argument("--once", action="store_true", help="print the table once")
    summary = "print the Python stacks of the ranks of a running job"
    _add_job(add_parser(commands, "stacks", summary, _STACKS, _stacks))


def _add_job(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", nargs="?", metavar="JOB|PID|HOST:PORT", help=_WHICH)
    add_token_flag(parser)
    add_json(parser)


def add_token_flag(parser: argparse.ArgumentParser) -> None:
    """Add the flag for the token of a job, for a job that is named by its store."""
    parser.add_argument(
        "--token-file", metavar="FILE", help="has the job's token; UNISONO_TOKEN by default"
    )


def token_of(options: argparse.Namespace) -> str:
    """Return the token of a job: of the file that was given, or of the environment.

    Raises:
        LaunchError: The file cannot be read.
    """
    if options.token_file is None:
        return config.get("UNISONO_TOKEN")
    try:
        return Path(options.token_file).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise LaunchError(f"cannot read the token in {options.token_file}: {error}") from error


def find_jobs(which: str | None, token: str = "") -> list[JobView]:
    """Return the jobs that answer.

    Args:
        which: As for `ask_job`.
        token: Of the job, for its store.

    Raises:
        LaunchError: There is none.
    """
    # These modules import NumPy, which `unisono run`, with the same parser, must not load.
    from unisono.workbench.cli.look.ask import ask_job
    from unisono.workbench.cli.look.verdict import jobs_of

    jobs = jobs_of(ask_job(which, token))
    if not jobs:
        of = "of this user on this host" if which is None else f"of {which!r}"
        raise LaunchError(
            f"no rank {of} answers",
            hint="give the process id of a rank or launcher, on its host, as its user; or the "
            "address of the ranks' store, MASTER_ADDR:MASTER_PORT in their environment and not "
            "--rdzv-endpoint, and UNISONO_TOKEN",
        )
    return jobs


def _top(options: argparse.Namespace) -> int:
    from unisono.workbench.cli.look.verdict import verdict_of

    jobs = _jobs_of(options)
    if options.json:
        found = [{**_document(job), "verdict": verdict_of(job)} for job in jobs]
        write_json(options, {"jobs": found})
        return 0
    if options.once or not sys.stdout.isatty():
        for job in jobs:
            lines = [plain(line) for line in _text(job)]
            if has_colours(sys.stdout):
                count = len(lines) - job.world_size - 1
                lines[:count] = [painted(line, "bold") for line in lines[:count]]
            print(*lines, sep="\n")
        return 0
    return _live(options.job, token_of(options), jobs)


def _jobs_of(options: argparse.Namespace) -> list[JobView]:
    # `--json` was a switch: what follows it and is no such file is the job.
    path = options.json or "-"
    if options.job is None and path != "-" and not path.endswith(".json"):
        options.job, options.json = options.json, "-"
    return find_jobs(options.job, token_of(options))


def _document(job: JobView) -> dict[str, Any]:
    ranks = [_public(state) for state in job.states.values()]
    return {"job": job.name, "world_size": job.world_size, "ranks": ranks}


def _public(state: RankState) -> RankState:
    # These have tokens, which must not get into a file.
    return {n: value for n, value in state.items() if n not in ("addresses", "endpoint")}


def _live(which: str | None, token: str, jobs: list[JobView]) -> int:
    try:
        from rich.console import Group
        from rich.live import Live
        from rich.text import Text
    except ImportError:
        raise LaunchError(
            "a live table needs rich", hint="pip install 'unisono[cli]', or use --once"
        ) from None

    def render() -> Group:
        parts = []
        for job in jobs:
            lines = [plain(line) for line in _text(job)]
            head = len(lines) - job.world_size - 1
            # The verdict is whole, and rows of the table stay rows.
            parts += [Text("\n".join(lines[:head]), style="bold")]
            parts += [Text("\n".join(lines[head:]), no_wrap=True, overflow="ellipsis")]
        return Group(*parts)

    seen: dict[tuple[Any, ...], float] = {}
    try:
        with Live(render(), screen=True, auto_refresh=False) as live:
            while True:
                began_s = time.monotonic()
                jobs = find_jobs(which, token)
                seen = _note_times(jobs, seen, began_s)
                live.update(render(), refresh=True)
                time.sleep(max(0.0, _REFRESH_S - (time.monotonic() - began_s)))
    except KeyboardInterrupt:
        return 0


def _note_times(
    jobs: list[JobView], seen: dict[tuple[Any, ...], float], now_s: float
) -> dict[tuple[Any, ...], float]:
    """Set since when each call has been seen running; return these times for the next look."""
    times = {}
    for job in jobs:
        for rank, state in job.states.items():
            for group in state["groups"]:
                if group["runs"]:
                    key = (job.name, rank, group["group"], group["seq"])
                    times[key] = seen.get(key, now_s)
                    group["since_s"] = now_s - times[key]
    return times


def _text(job: JobView) -> Iterator[str]:
    """Return the verdict and the table of a job, line by line."""
    from unisono.workbench.cli.look.verdict import verdict_of

    yield job.title
    yield from verdict_of(job)
    rows = [_COLUMNS, *_rows(job)]
    columns = [column for column in zip(*rows, strict=True) if any(column[1:])]
    widths = [max(map(len, column)) for column in columns]
    for row in zip(*columns, strict=True):
        cells = zip(row, widths, strict=True)
        yield "  ".join(cell.ljust(width) for cell, width in cells).rstrip()


def _rows(job: JobView) -> Iterator[tuple[str, ...]]:
    from unisono.workbench.cli.look.verdict import waits_of

    waits = {rank: wait for wait in reversed(waits_of(job)) for rank in wait.waiting}
    for rank in range(job.world_size):
        state, wait = job.states.get(rank), waits.get(rank)
        if state is None:
            yield (str(rank), *("?",) * (len(_COLUMNS) - 2), job.place(rank))
            continue
        last = max(state["groups"], key=lambda group: int(group["seq"]), default=None)
        after = "" if last is None or not last["seq"] else f"after {_name_of(last)}"
        since = "" if wait is None or wait.since_s is None else f"{wait.since_s:.1f}"
        yield (
            str(rank),
            state["host"],
            str(state["pid"]),
            after if wait is None else wait.call,
            since,
            "" if wait is None else ",".join(map(str, wait.missing)),
            *_rates(state["groups"]),
            f"{(state['rss_bytes'] or 0) / (1 << 20):.0f}",
            _links(state),
            state["place"],
        )


def _links(state: RankState) -> str:
    """Return how many connections to other ranks a rank has, by what protects them."""
    counts = Counter(state.get("links", {}).values())
    return ", ".join(f"{count} {protection}" for protection, count in sorted(counts.items()))


def _rates(groups: list[dict[str, Any]]) -> tuple[str, str]:
    """Return the share of the time that a rank has waited, and its bytes per second so far."""
    from unisono.workbench.cli.look.verdict import wait_share

    share = wait_share(groups)
    if share is None:
        return "", ""
    rates = [group["moved_bytes"] / (group["age_s"] or 1.0) for group in groups]
    return f"{100 * share:.0f}", f"{sum(rates) / 1e6:.1f}"


def _name_of(group: dict[str, Any]) -> str:
    return f"{group['call'].partition('(')[0]} #{group['seq']}"


def _stacks(options: argparse.Namespace) -> int:
    from unisono.launcher.ranges import format_ranges

    jobs = _jobs_of(options)
    write_json(options, {"jobs": [_document(job) for job in jobs]})
    for job in jobs if options.json is None else ():
        print(plain(job.title))
        folded: dict[tuple[Any, ...], list[int]] = {}
        for rank, state in job.states.items():
            for stack in state["stacks"]:
                frames = tuple(tuple(frame[:3]) for frame in stack["frames"])
                key = (not stack["calls"], stack["thread"], frames)
                folded.setdefault(key, []).append(rank)
        for (_, thread, frames), ranks in sorted(folded.items(), key=lambda item: item[1]):
            many = "rank" if len(ranks) == 1 else "ranks"
            print(f"\n{many} {format_ranges(ranks)}, thread {plain(thread)}:")
            for file, line, function in reversed(frames):
                print(plain(f'  File "{file}", line {line}, in {function}'))
        for rank in sorted(set(range(job.world_size)) - set(job.states)):
            print(f"\nrank {rank} {plain(job.place(rank))}")
    return 0
