"""`unisono draw`: a schedule or a simulated run as SVG, PNG or an HTML page to step through."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.errors import InvalidArgumentError, UnisonoError
from unisono.workbench.bench.algorithms import HELP, check_hosts, check_root, named
from unisono.workbench.bench.plan import parse_nbytes
from unisono.workbench.bench.plot import size_text
from unisono.workbench.cli.explain import OP_NAMES
from unisono.workbench.cli.flags import (
    add_algorithms,
    add_json,
    add_parser,
    add_picture,
    add_ranks,
    check_output,
    checked,
    non_negative,
    operation,
    positive,
    write_json,
    write_text,
)
from unisono.workbench.cli.simulate import (
    depth,
    depth_of,
    local_of,
    machine_of,
    per_host_of,
)

if TYPE_CHECKING:
    from unisono.core.schedules.ir import Schedule
    from unisono.workbench.simulate import Machine
    from unisono.workbench.simulate.pictures.drawing import Picture
    from unisono.workbench.simulate.pictures.timeline import Timeline

_DESCRIPTION = """\
Draw an algorithm: a line per rank, time to the right, an arrow per message. A full head means that
the receiver reduces the message, an open head that it stores the message.

Without --net a column is a round. With --net the schedule runs in virtual time: grey bars are work
of ranks, red is the critical path, and a heat map shows how busy links are. A page (.html) steps
through the schedule and shows the data of each rank; it needs no network and no other file."""

_MOST_RANKS = 128
_SIZE = 1 << 20


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command `draw`."""
    parser = add_parser(
        commands,
        "draw",
        "draw an algorithm: a picture, or an HTML page to step through",
        _DESCRIPTION,
        _draw,
        algorithms=True,
    )
    nbytes = checked(parse_nbytes)
    add = parser.add_argument
    names = ", ".join(OP_NAMES)
    add("op", type=operation(OP_NAMES), choices=OP_NAMES, metavar="OP", help=names)
    add_ranks(parser, "ranks (8)", "-n", "-p", default=8)
    add("--hosts", type=positive, default=0, metavar="H", help="hosts (what the network has)")
    add("--nodes", type=positive, default=0, metavar="N", help="NUMA nodes of one host")
    add_algorithms(parser, HELP, required=True, metavar="NAME")
    add("-r", "--root", type=non_negative, default=0, metavar="ROOT", help="root rank (0)")
    add(
        "--pipeline",
        type=depth,
        metavar="N",
        help="pieces; auto: as a group (with --net auto, otherwise 1)",
    )
    add("-b", "--size", type=nbytes, metavar="SIZE", help="with --net (1M)")
    add("--net", metavar="FILE", help="a shipped network or a TOML file, see `unisono simulate`")
    add(
        "--unproved",
        action="store_true",
        help="draw an algorithm of your own also if it is wrong, and mark the step that fails",
    )
    add_picture(parser, "FILE.svg, .png, .pdf, or the page FILE.html")
    add_json(parser)


def _draw(options: argparse.Namespace) -> int:
    if options.output:
        check_output("draw", options.output, ".svg", ".html")
    elif not options.json:
        options.parser.error("one of the following arguments is required: -o/--output, --json")
    suffix = Path(options.output or "").suffix
    if options.ranks > _MOST_RANKS:
        raise InvalidArgumentError(
            f"-n {options.ranks}: a picture has at most {_MOST_RANKS} ranks",
            hint="`unisono simulate` runs thousands",
        )
    if options.size and options.net is None:
        raise InvalidArgumentError(
            f"-b {options.size}: rounds have no size; it needs a network",
            hint="add --net switch, or another of `unisono simulate`",
        )
    if options.pipeline == 0 and options.net is None:
        raise InvalidArgumentError(
            "--pipeline auto: rounds have no size, which decides; it needs a network",
            hint="add --net switch, or give a number of pieces",
        )
    check_root(options.op, options.root)
    if "," in options.algorithm:
        raise InvalidArgumentError(
            f"--algorithm {options.algorithm}: a picture has one algorithm",
            hint="`unisono simulate` takes a list, and `-o` draws their times",
        )
    if options.unproved and (options.net or suffix == ".html"):
        raise InvalidArgumentError(
            "--unproved draws rounds as .svg, .png or .pdf: what is wrong cannot run"
        )
    from unisono.workbench.simulate.pictures.diagrams import diagram

    timeline = _timeline(options)
    if timeline.fault is not None:
        print(f"draw: {options.algorithm} is WRONG: {timeline.fault.text}", file=sys.stderr)
    if suffix == ".html":
        from importlib import resources

        from unisono.workbench.simulate.pictures.pages import page

        template = resources.files("unisono.workbench.simulate") / "shipped" / "page.html"
        write_text(options.output, page(timeline, template.read_text(encoding="utf-8")))
    elif suffix == ".svg":
        write_text(options.output, diagram(timeline).svg())
    elif options.output:
        _write(options.output, diagram(timeline))
    write_json(options, _document(timeline))
    return 0


def _document(timeline: Timeline) -> dict[str, Any]:
    """Return what is drawn; times are in us, or in rounds without a network."""
    schedule, unit = timeline.schedule, 1 if timeline.result is None else 1e6
    messages = [
        each._asdict() | {"begin": each.begin / unit, "end": each.end / unit}
        for each in timeline.messages
    ]
    return {
        "op": schedule.collective, "algorithm": schedule.algorithm, "ranks": schedule.world_size,
        "rounds": schedule.rounds, "unit": "round" if timeline.result is None else "us",
        "end": timeline.end / unit, "messages": messages,
        "fault": timeline.fault and timeline.fault.text,
    }  # fmt: skip


def _timeline(options: argparse.Namespace) -> Timeline:
    """Return the schedule over time that the flags describe."""
    from unisono.core.schedules import build
    from unisono.core.schedules.ir import ROOTED
    from unisono.core.schedules.registry import unproved
    from unisono.workbench.simulate.pictures.timeline import (
        MOST_MESSAGES,
        count_messages,
        in_rounds,
    )

    name = named(options.op, options.algorithm)
    net = None if options.net is None else machine_of(options.net)
    p, hosts, nodes = options.ranks, options.hosts, options.nodes
    if hosts and nodes:
        raise InvalidArgumentError("--hosts and --nodes: levels are hosts, or nodes of one host")
    per_host = per_host_of(p, hosts or nodes or p, "NUMA nodes" if nodes else "hosts")
    local = 1 if p % per_host else per_host
    if net is not None:
        if hosts:
            net.values["ranks_per_host"] = per_host
        if nodes:
            net.set_parts(p, per_host)
        local, per_host = local_of(net, p), net.part(p)
        options.size = options.size or _SIZE
    check_hosts(options.op, name, p, per_host, "node" if nodes else "host")
    if net is not None and not options.pipeline:
        options.pipeline = depth_of(options, net, name, (p, local, options.size))
    options.pipeline = options.pipeline or 1
    root = options.root if options.op in ROOTED else -1
    how, error = (options.op, name, p, root, options.pipeline, local), None
    if options.unproved:
        schedule, error = unproved(*how)
    else:
        schedule = build(*how)
    # Messages grow with the ranks. Only the limit of messages makes the largest number useful.
    if count_messages(schedule) > MOST_MESSAGES:
        raise InvalidArgumentError(_too_many(options, name, local))
    return in_rounds(schedule, error) if net is None else _run(options, net, schedule)


def _run(options: argparse.Namespace, net: Machine, schedule: Schedule) -> Timeline:
    """Run a schedule on a network, as `unisono simulate` does."""
    from unisono.workbench.simulate.channels import CHANNELLED
    from unisono.workbench.simulate.pictures.timeline import in_time

    if net.values["model"] == "loggops":
        raise InvalidArgumentError(f"--net {net.name} is for the model loggops, which is not drawn")
    name, p = schedule.algorithm, options.ranks
    timeline = in_time(
        schedule, options.size, net.network(name, p), net.costs(name), itemsize=4,
        padded=net.values["padded"], contended=net.values["model"] == "links",
    )  # fmt: skip
    hosts = -(-p // net.values["ranks_per_host"])
    about = f"{size_text(options.size)} on net {Path(net.name).stem}"
    about += f" of {hosts} hosts" * (1 < hosts < p)
    about += f" of {options.nodes} nodes" * (options.nodes > 1)
    about += f", {options.pipeline} pieces" * (options.pipeline > 1)
    if (channels := net.of(name)["channels"]) > 1 and options.op in CHANNELLED:
        # Each would be a lane of each rank.
        about += f", without its {channels} channels"
    return replace(timeline, about=about)


def _too_many(options: argparse.Namespace, name: str, local: int) -> str:
    """Return an error text with the largest number of ranks that a picture has."""
    from unisono.core.schedules import build
    from unisono.core.schedules.ir import ROOTED
    from unisono.workbench.simulate.pictures.timeline import MOST_MESSAGES, count_messages

    text = f"-n {options.ranks}: {options.op} ({name}) has more than {MOST_MESSAGES:,} messages"
    for p in range(options.ranks - 1, 1, -1):
        root = min(options.root, p - 1) if options.op in ROOTED else -1
        with contextlib.suppress(UnisonoError):
            schedule = build(options.op, name, p, root, options.pipeline, local)
            if count_messages(schedule) <= MOST_MESSAGES:
                return f"{text}; -n {p} is drawn"
    return text


def _write(path: str, picture: Picture) -> None:
    """Draw the shapes with matplotlib, 2 pixels per unit."""
    from unisono.workbench.simulate.pictures.drawing import Label, Line

    matplotlib: Any = importlib.import_module("matplotlib")
    matplotlib.use("agg")
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    figure = pyplot.figure(figsize=(picture.width / 72, picture.height / 72))
    panel = figure.add_axes((0, 0, 1, 1))
    panel.set(xlim=(0, picture.width), ylim=(picture.height, 0))
    panel.axis("off")
    for order, shape in enumerate(picture.shapes):
        if isinstance(shape, Line):
            x, y = zip(*shape.points, strict=True)
            panel.plot(x, y, color=shape.colour, lw=shape.width, zorder=order)
        elif isinstance(shape, Label):
            panel.text(
                *shape.at, shape.text, size=shape.size, color=shape.colour, zorder=order,
                ha={"start": "left", "middle": "center", "end": "right"}[shape.anchor],
                weight="bold" if shape.bold else "normal",
            )  # fmt: skip
        else:
            edge = {"ec": shape.edge, "lw": 1.3} if shape.edge else {"lw": 0}
            panel.add_patch(pyplot.Polygon(shape.points, fc=shape.fill, zorder=order, **edge))
    figure.savefig(path, dpi=144)
    pyplot.close(figure)
