"""`unisono replay`: recorded calls of a job on another network, with more ranks, or a slow one."""

from __future__ import annotations

import argparse
import importlib
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.errors import InvalidArgumentError
from unisono.workbench.cli.flags import (
    add_json,
    add_parser,
    add_picture,
    add_ranks,
    check_output,
    checked,
    non_negative,
    positive,
    write_json,
    write_text,
)
from unisono.workbench.cli.simulate import machine_of, per_host_of
from unisono.workbench.cli.terminal import plain, working

if TYPE_CHECKING:
    from unisono.workbench.replay.job import Job
    from unisono.workbench.replay.pricing import Simulated
    from unisono.workbench.replay.report import ReplayOutcome

_DESCRIPTION = """\
Replay the recorded calls of a job in virtual time. The time between the calls of a rank is compute
and stays; a call begins when its ranks have come. Without --net, calls take as long as recorded.
The files are those of `unisono trace`, dumps of torch's flight recorder (NCCL, Gloo), or Chakra
traces (FILE.RANK.et).

exposed is the share of time in which ranks do nothing but wait for calls; for a rank is the part
of it in which the last rank had not come."""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command `replay`."""
    parser = add_parser(
        commands,
        "replay",
        "replay a recorded job on another network, with other ranks",
        _DESCRIPTION,
        _replay,
    )
    add = parser.add_argument
    add("files", nargs="+", metavar="FILE", help="files or folders of records, of all ranks")
    add_ranks(parser, "ranks (as recorded); needs --net", "-n", "-p")
    add("--hosts", type=positive, metavar="H", help="number of hosts (what the network has)")
    add("--net", metavar="FILE", help="a shipped network or a TOML file, see `unisono simulate`")
    add("--model", choices=("links", "alpha-beta"), help="(what the network has)")
    names = lambda text: text.split(",")  # noqa: E731
    add(
        "--grow", type=names, default=(), metavar="NAME,NAME",
        help="with -p: groups that get the ranks of new replicas; the first is data-parallel",
    )  # fmt: skip
    add(
        "--keep-blocks", action="store_true",
        help="with -p: blocks of all_gather and reduce_scatter keep their size",
    )  # fmt: skip
    add(
        "--place", type=checked(_places), default="blocks", metavar="HOW",
        help="blocks (default): rank by rank; turn: hosts in turn; or a place per rank, as 0,2,1,3",
    )  # fmt: skip
    factors = checked(_factors)
    add("--compute-scale", type=checked(_factor), default=1.0, metavar="X", help="of all compute")
    add(
        "--slow",
        type=factors,
        default={},
        metavar="RANK=X,..",
        help="compute of a rank takes X times",
    )
    add(
        "--slow-link", type=factors, default={}, metavar="LINK=X,..",
        help="a link takes X times, as 'interface 0 out=4'",
    )  # fmt: skip
    add("--lose-host", type=non_negative, metavar="HOST", help="without replicas of this host")
    add_json(parser)
    add_picture(parser, "a timeline for Perfetto (.json), or a picture (.svg, .png, .pdf, .html)")


def _factor(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise InvalidArgumentError(f"expected a number of 0 or more, got {text!r}")
    return value


def _factors(text: str) -> dict[str, float]:
    """Return the factors of "3=2.5,4=2"."""
    found = {}
    for part in text.split(","):
        name, equals, value = part.rpartition("=")
        if not equals or not name:
            raise InvalidArgumentError(f"expected NAME=FACTOR, got {part!r}")
        found[name] = _factor(value)
    return found


def _places(text: str) -> str | list[int]:
    if text in ("blocks", "turn"):
        return text
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise InvalidArgumentError(f"expected blocks, turn, or numbers with commas, got {text!r}")
    return [int(part) for part in text.split(",")]


def _replay(options: argparse.Namespace) -> int:
    from unisono.workbench.replay.engine import changed, play
    from unisono.workbench.replay.pricing import RecordedTimes
    from unisono.workbench.replay.report import ReplayOutcome, document, lines, timeline

    if options.output:
        check_output("replay", options.output, ".json")
    job = read_job(options.files)
    outcomes = []
    if any(call.ends_ps for call in job.calls):
        outcomes.append(ReplayOutcome.of("recorded", job, play(job, RecordedTimes(job))))
    new, pricing, net = _changed(options, job)
    slow = {_rank(name, new): factor for name, factor in options.slow.items()}
    new = changed(new, options.compute_scale, slow)
    if new != job or pricing is not None:
        with working(f"replay of {len(new.calls)} calls on {len(new.steps)} ranks"):
            outcomes.append(
                ReplayOutcome.of("predicted", new, play(new, pricing or RecordedTimes(new)))
            )
    if not outcomes:
        raise InvalidArgumentError("replay: the files have no times of calls: give --net")
    print(f"# {len(job.calls)} calls of {len(job.groups)} groups; {net}")
    for note in job.notes:
        print(plain(f"# {note}"))
    if pricing is not None:
        taken = "; ".join(f"{op}: {', '.join(sorted(a))}" for op, a in pricing.algorithms.items())
        print(f"# {taken}")
        if not pricing.exact:
            print("# approximate: large calls begin with their last rank; some have no channels")
    print(*(plain(line) for line in lines(outcomes)), sep="\n")
    write_json(options, [document(each) for each in outcomes])
    if options.output and options.output.endswith(".json"):
        write_text(options.output, json.dumps(timeline(outcomes[-1]), separators=(",", ":")))
    elif options.output:
        _draw(outcomes, options.output)
    return 0


def read_job(paths: Sequence[str]) -> Job:
    """Return the job in files.

    Raises:
        InvalidArgumentError: A file cannot be read, or files are of different kinds.
    """
    from unisono.workbench.cli.trace.gather import read_files
    from unisono.workbench.replay import chakra, records
    from unisono.workbench.trace.clocks import align
    from unisono.workbench.trace.joined import by_rank, join, shifted

    files = [
        each
        for path in map(Path, paths)
        for each in (sorted(path.glob("[!.]*")) if path.is_dir() else [path])
    ]
    traces = [each for each in files if each.suffix == ".et"]
    if traces and len(traces) < len(files):
        other = next(each for each in files if each.suffix != ".et")
        raise InvalidArgumentError(
            f"replay: {other} is no Chakra trace (FILE.RANK.et), but {traces[0]} is one"
        )
    if traces:
        found, named = {}, dict[int, Path]()
        for each in traces:
            number = re.search(r"(\d+)\.et$", each.name)
            if number is None:
                raise InvalidArgumentError(f"replay: the name of {each} does not end in RANK.et")
            rank = int(number[1])
            if (other := named.setdefault(rank, each)) is not each:
                raise InvalidArgumentError(f"replay: {other} and {each} are both of rank {rank}")
            try:
                found[rank] = chakra.nodes_of(each.read_bytes())
            except (OSError, InvalidArgumentError) as error:
                text = error.what if isinstance(error, InvalidArgumentError) else error.strerror
                raise InvalidArgumentError(f"replay: cannot read {each}: {text}") from None
        return chakra.job_of(found)
    ranks = by_rank(read_files(paths))
    if not ranks:
        raise InvalidArgumentError("replay: there are no records")
    axis = align(ranks, join(ranks))
    ranks = shifted(ranks, axis.shift_ns)
    job = records.job_of(ranks, join(ranks))
    return replace(job, notes=[str(axis), *job.notes])


def _changed(options: argparse.Namespace, job: Job) -> tuple[Job, Simulated | None, str]:
    """Return the job with other ranks, what says how long calls take, and a text about it."""
    from unisono.workbench.replay.pricing import Simulated
    from unisono.workbench.replay.scale import replicas_of, resized

    n, size = len(job.steps), options.ranks or len(job.steps)
    if options.net is None:
        needs = {
            "-n": size != n, "--hosts": options.hosts, "--slow-link": options.slow_link,
            "--lose-host": options.lose_host is not None, "--place": options.place != "blocks",
            "--model": options.model,
        }  # fmt: skip
        if given := ", ".join(flag for flag, value in needs.items() if value):
            raise InvalidArgumentError(f"replay: {given} needs --net")
        return job, None, "calls take as long as recorded"
    net = machine_of(options.net, options.model)
    if options.hosts:
        net.values["ranks_per_host"] = per_host_of(size, options.hosts)
    per_host = net.values["ranks_per_host"]
    if size != n:
        replicas = replicas_of(job, options.grow)
        inside = n // replicas.number
        if size % inside:
            raise InvalidArgumentError(
                f"replay: -n {size}: a replica has {inside} ranks, expected a multiple"
            )
        chosen = [data % replicas.number for data in range(size // inside)]
        job, _ = resized(job, chosen, replicas, options.grow, blocks=options.keep_blocks)
    places = _place(options.place, size, per_host)
    if options.lose_host is not None:
        job, places = _without(job, places, options, per_host)
    text = f"net {net.name}: {plain(net.values['about'])}"
    return job, Simulated(job, net, size, places, options.slow_link), text


def _place(how: str | list[int], size: int, per_host: int) -> list[int]:
    if how == "blocks":
        return list(range(size))
    if how == "turn":
        return sorted(range(size), key=lambda place: (place % per_host, place // per_host))
    if sorted(how) != list(range(size)):
        raise InvalidArgumentError(
            f"replay: --place has {len(how)} places, expected each of 0 to {size - 1} once"
        )
    return list(how)  # type: ignore[arg-type]


def _without(
    job: Job, places: list[int], options: argparse.Namespace, per_host: int
) -> tuple[Job, list[int]]:
    """Return the job without the replicas that have a rank on the lost host, and the places."""
    from unisono.workbench.replay.scale import replicas_of, resized

    replicas = replicas_of(job, options.grow)
    lost = {
        replicas.data(r) for r, place in enumerate(places) if place // per_host == options.lose_host
    }
    left = [data for data in range(replicas.number) if data not in lost]
    if not lost or not left:
        raise InvalidArgumentError(
            f"replay: --lose-host {options.lose_host}: {len(lost)} of {replicas.number} replicas "
            "have ranks on it, expected some and not all"
        )
    job, origins = resized(job, left, replicas, options.grow, blocks=options.keep_blocks)
    return job, [places[origin] for origin in origins]


def _rank(name: str, job: Job) -> int:
    if not name.isdecimal() or int(name) >= len(job.steps):
        raise InvalidArgumentError(
            f"replay: --slow {name}: expected a rank of 0 to {len(job.steps) - 1}"
        )
    return int(name)


def _draw(outcomes: Sequence[ReplayOutcome], path: str) -> None:
    """Draw the runs above each other on one axis, each with its critical path."""
    from unisono.workbench.bench.plot import save
    from unisono.workbench.cli.trace.picture import COLOURS, OTHER, PALE
    from unisono.workbench.replay.engine import COMPUTE

    matplotlib: Any = importlib.import_module("matplotlib")
    matplotlib.use("agg")
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    most = 64
    rows = [min(most, len(each.job.steps)) for each in outcomes]
    figure, panels = pyplot.subplots(
        len(outcomes), 1, figsize=(12, 2.2 + 0.9 * len(outcomes) + 0.22 * sum(rows)), sharex=True,
        layout="constrained", squeeze=False, height_ratios=[2 + row for row in rows],
    )  # fmt: skip
    ops = list(dict.fromkeys(call.op for each in outcomes for call in each.job.calls))
    colours = dict(zip(ops, (*COLOURS, *[OTHER] * len(ops)), strict=False))
    for (panel,), outcome, row in zip(panels, outcomes, rows, strict=True):
        zero = min(outcome.job.start_ps)
        for rank in range(row):
            bars: dict[tuple[str, float], list[tuple[float, float]]] = {}
            for span in outcome.run.spans[rank]:
                begin, end = (span.begin_ps - zero) / 1e9, (span.end_ps - zero) / 1e9
                if span.call == COMPUTE:
                    bars.setdefault(("#dddddd", 1.0), []).append((begin, end - begin))
                    continue
                colour = colours[outcome.job.calls[span.call].op]
                came = (max(outcome.run.begins[span.call].values()) - zero) / 1e9
                came = min(max(came, begin), end)
                bars.setdefault((colour, PALE), []).append((begin, came - begin))
                bars.setdefault((colour, 1.0), []).append((came, end - came))
            for (colour, alpha), parts in bars.items():
                how = {"color": colour, "alpha": alpha, "linewidth": 0, "rasterized": True}
                panel.broken_barh(parts, (rank - 0.38, 0.76), **how)
        legs = [leg for leg in outcome.path if leg.rank < row]
        x = [at for leg in legs for at in ((leg.begin_ps - zero) / 1e9, (leg.end_ps - zero) / 1e9)]
        y = [leg.rank for leg in legs for _ in range(2)]
        panel.plot(x, y, color="#C00000", linewidth=1.2)
        panel.set_ylim(row - 0.4, -0.6)
        step = max(1, row // 16)
        panel.set_yticks(range(0, row, step), [f"rank {rank}" for rank in range(0, row, step)])
        rest = "" if row == len(outcome.job.steps) else f", ranks 0 to {row - 1}"
        title = f"{outcome.name}: step {outcome.step_ps / 1e9:,.3f} ms, exposed"
        panel.set_title(f"{title} {outcome.share():.1%}{rest}", fontsize=9, loc="left")
        panel.tick_params(labelsize=8)
        panel.spines[["top", "right"]].set_visible(False)
    panels[-1][0].set_xlabel("time (ms)")
    patch, line = matplotlib.patches.Patch, matplotlib.lines.Line2D
    entries = {op: patch(color=colours[op]) for op in ops} | {
        "paler: the last rank has not come": patch(color=COLOURS[0], alpha=PALE),
        "compute": patch(color="#dddddd"),
        "critical path": line([], [], color="#C00000"),
    }
    legend = {"loc": "outside lower center", "ncols": 6, "frameon": False, "fontsize": 8}
    figure.legend(entries.values(), entries.keys(), **legend)
    save(figure, path, dpi=130)
    pyplot.close(figure)
