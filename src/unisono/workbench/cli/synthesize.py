"""`unisono synthesize`: search for an algorithm for a machine, a size and an operation."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.errors import InvalidArgumentError
from unisono.workbench.bench.plan import parse_nbytes
from unisono.workbench.cli.explain import OP_NAMES
from unisono.workbench.cli.flags import (
    add_json,
    add_parser,
    add_ranks,
    check_writable,
    checked,
    non_negative,
    operation,
    positive,
    seconds,
    write_json,
    write_text,
)
from unisono.workbench.cli.simulate import (
    default_net,
    local_of,
    machine_of,
    per_host_of,
    topology_on,
    us_text,
)
from unisono.workbench.cli.terminal import plain, progress_bar, working

if TYPE_CHECKING:
    from unisono.workbench.synthesize.search import Candidate

_DESCRIPTION = """\
Search for the schedule that takes the least virtual time on a network. The search changes the
levels, their radix, order and way, the depth of the pipeline, and, where ranks have links of their
own, trees over these links. Each candidate is proved. The shipped algorithms are candidates, so the
result is not slower than they are in the simulator, unless --seconds ends the search before them.

The same flags and seed give the same candidates in the same order. --seconds ends the search early,
and the output shows it. -o writes the best as FILE.py, which all commands take as FILE.py:FUNCTION,
or as MSCCL-XML."""

_SHOWN = 5


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command `synthesize`."""
    parser = add_parser(
        commands, "synthesize", "search for an algorithm for a network", _DESCRIPTION, _synthesize
    )
    add = parser.add_argument
    names = ", ".join(OP_NAMES)
    add("op", type=operation(OP_NAMES), choices=OP_NAMES, metavar="OP", help=names)
    add_ranks(parser, "ranks (8)", "-n", "-p", default=8)
    add("--hosts", type=positive, default=0, metavar="H", help="hosts (what the network has)")
    nbytes = checked(parse_nbytes)
    add("-b", "--size", type=nbytes, default="1M", metavar="SIZE", help="of the whole data (1M)")
    add("-r", "--root", type=non_negative, default=0, metavar="ROOT", help="root rank (0)")
    add(
        "--net",
        metavar="FILE",
        help="a shipped network or a TOML file (switch; fat-tree with --hosts)",
    )
    add("--model", choices=("links", "alpha-beta"), help="(what the network has)")
    add("--seconds", type=seconds, default=60.0, metavar="S", help="limit of the search (60)")
    add("--candidates", type=positive, default=300, metavar="N", help="to try at most (300)")
    add("--seed", type=non_negative, default=0, metavar="N", help="of the random changes (0)")
    add("-o", "--output", action="append", default=[], metavar="FILE", help="FILE.py or FILE.xml")
    add_json(parser, text_too=True)


def _synthesize(options: argparse.Namespace) -> int:
    from unisono.core.schedules import select
    from unisono.core.schedules.ir import ROOTED
    from unisono.workbench.simulate.bounds import least_us
    from unisono.workbench.synthesize.plans import Problem
    from unisono.workbench.synthesize.search import ITEMSIZE, STALE, SearchLimits, search

    for output in options.output:
        if Path(output).suffix not in (".py", ".xml"):
            raise InvalidArgumentError(f"-o {output}: expected .py or .xml")
        check_writable(output)
    if options.json not in (None, "-"):
        check_writable(options.json)
    op, p, nbytes = options.op, options.ranks, options.size
    per_host = per_host_of(p, options.hosts) if options.hosts else 0
    options.net = options.net or default_net(per_host)
    net = machine_of(options.net, options.model)
    if net.values["model"] == "loggops":
        raise InvalidArgumentError(f"--net {net.name} is for the model loggops, without links")
    net.values["ranks_per_host"] = per_host or net.values["ranks_per_host"]
    root = options.root if op in ROOTED else -1
    if root >= p:
        raise InvalidArgumentError(f"-r {root}: expected a rank below {p}")
    network, topology = net.network("", p), topology_on(net, p)
    problem = Problem(op, p, local_of(net, p), root, nbytes, net, network)
    print(f"# {op} of {nbytes:,} B on {p} ranks; net {net.name}: {plain(net.values['about'])}")
    with working("search"), progress_bar("unisono synthesize: ", shown=True) as told:
        found = search(
            problem,
            SearchLimits(options.candidates, options.seconds, options.seed),
            lambda name: select(op, nbytes, topology, name).pipeline,
            told,
        )
    bound_us = least_us(op, nbytes, network, net.costs(""), root=root, itemsize=ITEMSIZE)
    limit = {
        "seconds": f"the limit of {options.seconds:g} s ended the search: more time may find more",
        "candidates": f"after {options.candidates} plans, seed {options.seed}",
        "plans": f"the last {STALE:,} changes gave no plan that was not tried",
    }[found.ended]
    refused = f"{found.refused} more refused by the network; " if found.refused else ""
    print(f"# {len(found.best)} candidates, each proved; {refused}{limit}")
    print(f"{'time us':>12} {'of bound':>9} {'rounds':>7} {'sent':>9}  schedule")
    _print(found.best[:_SHOWN], bound_us)
    if found.shipped and found.shipped not in found.best[:_SHOWN]:
        print("# the best shipped algorithm:")
        _print((found.shipped,), bound_us)
    print(f"# {us_text(bound_us)} us is the least time of any algorithm without reducing switches")
    for output in options.output:
        _write(options, output, found.best[0], net.name)
    document = {
        "op": op, "size_bytes": nbytes, "ranks": p, "net": net.name, "bound_us": bound_us,
        "ended": found.ended, "refused": found.refused,
        "candidates": [_row(each) for each in found.best],
        "shipped": found.shipped and _row(found.shipped), "files": options.output,
    }  # fmt: skip
    write_json(options, document)
    return 0


def _row(candidate: Candidate) -> dict[str, Any]:
    from unisono.core.schedules.cost import cost

    counted = cost(candidate.schedule)
    sent = float(counted.bytes_sent)
    row = {"time_us": candidate.us, "rounds": counted.rounds, "bytes_sent_per_byte": sent}
    return row | {"schedule": str(candidate.plan)}


def _print(candidates: Sequence[Candidate], bound_us: float) -> None:
    """Print a line for each candidate."""
    for each in candidates:
        row = _row(each)
        times = f"{each.us / bound_us:>9.2f}" if bound_us else f"{'-':>9}"
        sent = f"{row['bytes_sent_per_byte']:.3g} n"
        print(f"{us_text(each.us):>12} {times} {row['rounds']:>7} {sent:>9}  {each.plan}")


def _write(options: argparse.Namespace, output: str, best: Candidate, net: str) -> None:
    """Write the best schedule, and print the command that runs it."""
    from dataclasses import replace

    from unisono.core.schedules.msccl import to_msccl
    from unisono.workbench.synthesize.written import name_of, to_python

    path = Path(output)
    name = name_of(path.stem)
    what = f"{options.op} of {options.size:,} B on {options.ranks} ranks, net {net}"
    if path.suffix == ".xml":
        write_text(output, to_msccl(replace(best.schedule, algorithm=name)))
        algorithm = output
    else:
        about = f"{what}: {us_text(best.us)} us.\n\n{best.plan}; seed {options.seed}."
        write_text(output, to_python(best.schedule, name, about))
        algorithm = f"{output}:{name}"
    words = ["unisono", "simulate", options.op, "-n", options.ranks, "-b", options.size]
    words += ["--hosts", options.hosts] if options.hosts else []
    words += ["-r", best.schedule.root] if best.schedule.root >= 0 else []
    words += ["--net", options.net, *(["--model", options.model] if options.model else [])]
    print(f"wrote {output}: {shlex.join(map(str, [*words, '--algorithm', algorithm]))}")
