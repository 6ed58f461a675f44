"""`unisono simulate`: run algorithms in virtual time, on any number of ranks."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.errors import InvalidArgumentError, UnknownNameError
from unisono.workbench.bench.algorithms import HELP, check_hosts, check_root, named, proof_note
from unisono.workbench.bench.plan import OPS, SizeRange
from unisono.workbench.bench.simulated_plot import plot
from unisono.workbench.cli.compress import (
    add_compress,
    check_compress,
    compressed_row,
    phases_text,
)
from unisono.workbench.cli.flags import (
    add_algorithms,
    add_json,
    add_parser,
    add_picture,
    add_ranks,
    add_sizes,
    check_output,
    non_negative,
    operation,
    positive,
    write_json,
    write_text,
)
from unisono.workbench.cli.terminal import plain, working

if TYPE_CHECKING:
    from unisono.core.schedules import Topology
    from unisono.core.schedules.ir import Schedule
    from unisono.workbench.simulate import Machine, Network

SimulatedRow = dict[str, Any]

# The parts of the critical path, as keys of a row.
_COLUMNS = (
    "ranks", "size", "algorithm", "time us", "latency", "sending", "busy", "ends", "pieces",
    "algbw", "busbw", "bound", "ties", "published", "error",
)  # fmt: skip
_PARTS = ("latency_us", "bytes_us", "busy_us", "ends_us")

_DESCRIPTION = """\
Run algorithms in virtual time. The ranks execute the schedules that engines execute, on a network
that is numbers: a shipped one (an unknown name lists them) or a TOML file.

time is when the last rank ends. latency, sending, busy and ends are the parts of the critical path:
latencies of links, bytes on links, waiting for links, and what ranks do. pieces is the pipeline
depth, algbw and busbw are GB/s as nccl-tests print them, bound is the least time of any algorithm
(alpha-beta has none: its messages share no link).
ties are the times in 8 other orders of messages that arrive at the same time, if they differ.
published is a measured time. A time with "~" is approximate: the order of messages on shared links
was approximated, or chunks were padded to one size."""

# Above this number of ranks all algorithms take up to a minute, so `explain` prints each at once.
MANY = 1024
# Of predictions without contention.
SHARE_NO_LINK = (
    "model alpha-beta: messages share no link, so what a rank sends to many ranks at once takes "
    "the time of one message; --model links counts it"
)

_RANKS, _SIZE, _FACTOR = [16], 8, 8

# More messages are not run in other orders.
_TIED_MESSAGES = 20_000
_ORDERS = 8


def depth(text: str) -> int:
    """Return a pipeline depth; 0 for auto."""
    return 0 if text == "auto" else positive(text)


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command `simulate`."""
    parser = add_parser(
        commands,
        "simulate",
        "run algorithms in virtual time, on any number of ranks",
        _DESCRIPTION,
        _simulate,
        algorithms=True,
    )
    add = parser.add_argument
    ops = [op for op in (*OPS, "scan", "exscan") if op != "sendrecv"]
    add("op", type=operation(ops), choices=ops, metavar="OP", help=", ".join(ops))
    counts = lambda text: [positive(number) for number in text.split(",")]  # noqa: E731
    add_ranks(parser, "ranks (16)", "-n", "-p", type=counts, metavar="N,N")
    add("--hosts", type=positive, metavar="H", help="number of hosts (what the network has)")
    nodes = "NUMA nodes of a host (what the network has)"
    add("--nodes", type=positive, default=0, metavar="N", help=nodes)
    add_sizes(parser, "8", "", 8)
    add("-r", "--root", type=non_negative, default=0, metavar="ROOT", help="root rank (0)")
    add("--itemsize", type=positive, default=4, metavar="N", help="bytes per element (4)")
    add_algorithms(parser, f"all (the default), or each a {HELP}", default="all", metavar="A,B")
    add("--pipeline", type=depth, default=0, metavar="N", help="pieces; auto: as a group (auto)")
    add(
        "--net",
        metavar="FILE",
        help="a shipped network or a TOML file (switch; fat-tree with --hosts)",
    )
    add("--model", choices=("links", "loggops", "alpha-beta"), help="(what the network has)")
    add(
        "--against",
        metavar="FILE",
        help="output of nccl-tests or `unisono bench`: compare, and name what explains it",
    )
    add_compress(parser)
    add_json(parser)
    add_picture(parser, "draw time over size, or over ranks")
    add("--goal", metavar="FILE", help="write the last schedule as LogGOPSim's GOAL")
    # Without a value it is known that a flag was not given, see `_against`.
    parser.set_defaults(orders=_ORDERS, ranks=None, minbytes=None, stepfactor=None)


def _against(options: argparse.Namespace) -> int:
    """Print each measured time beside its prediction, and what would explain the last gap."""
    from unisono.workbench.cli import against

    if options.op not in OPS or options.op == "barrier":
        raise InvalidArgumentError(f"--against: nccl-tests has no {options.op}")
    file, run = options.against, against.read(options.against, options.op)
    ranks = options.ranks or []
    given = {
        "--json": options.json, "--plot": options.output, "--goal": options.goal,
        "-b": options.minbytes, "-e": options.maxbytes, "-f": options.stepfactor,
        "-n": run.ranks and ranks, "--hosts": run.hosts and options.hosts,
        "a second -n": ranks[1:], "--compress": options.compress,
    }  # fmt: skip
    if unused := ", ".join(flag for flag, value in given.items() if value):
        raise InvalidArgumentError(f"--against {file} makes no use of {unused}")
    if not (run.ranks or ranks):
        raise InvalidArgumentError(f"{file} names no ranks", hint="give their number with -n")
    options.ranks, options.hosts = [run.ranks] if run.ranks else ranks, run.hosts or options.hosts
    options.orders, (p, *_) = 0, options.ranks
    every = options.algorithm == "all"
    names = [] if every else [named(options.op, each) for each in options.algorithm.split(",")]
    columns, net = against.columns(file, run, names), _machine(options)
    print(f"# {options.op} on {p} ranks, {file} against net {net.name}")
    if run.in_shared_memory:
        print(f"# {file} is a run in shared memory, which is not modelled: it is on no network")
    if "" in columns:
        what = "the algorithm that a group takes" if run.group and every else "the best of several"
        what = what if len(names) != 1 else names[0]
        print(f"# {file} does not name its algorithm; predicted is {what}")
    print(f"#{'size':>13}{'measured us':>14}{'busbw':>9}{'predicted':>12}{'busbw':>9}{'ratio':>7}")
    factor, gaps = OPS[options.op].bus_factor(p), []
    for column, times in columns.items():
        best = _predictions(options, net, [column] if column else names, own=bool(run.group))
        for nbytes, us in times.items():
            row = best(net, nbytes)
            busbw, ratio = nbytes / us / 1000 * factor, us / (row["time_us"] or us)
            print(
                f"{nbytes:>14}{us:>14,.1f}{busbw:>9.2f}{row['time_us']:>12,.1f}"
                f"{row['busbw']:>9.2f}{ratio:>7.2f}  {row['algorithm']}", flush=True,
            )  # fmt: skip
        told = [] if ratio <= 1.1 or run.in_shared_memory else list(
            against.causes(net, us, lambda each: float(best(each, nbytes)["time_us"]))  # noqa: B023
        ) or ["nothing that is known here"]  # fmt: skip
        gaps.append((row["algorithm"], ratio, told))
    for name, ratio, told in gaps:
        of = f" of {name}" * (len(gaps) > 1)
        if told:
            longer = f"{ratio:.2f} times the prediction"
            print(f"# the last size{of} takes {longer}; what would explain it:")
            print("\n".join(f"# - {text}" for text in told))
    return 0


def _predictions(
    options: argparse.Namespace, net: Machine, names: list[str], *, own: bool
) -> Callable[[Machine, int], SimulatedRow]:
    """Return a function that predicts a size on a machine: the fastest of some algorithms.

    Args:
        options: Of the command.
        net: The machine.
        names: The algorithms; [] for those of NCCL, or for what a group takes.
        own: Whether unisono was measured, otherwise NCCL.
    """
    from unisono.core.schedules import available, select
    from unisono.workbench.simulate.machines import REDUCING

    p, every = options.ranks[0], not names
    if every and not own:
        # What NCCL has, without its switches.
        has = available(options.op, p, local=local_of(net, p))
        names = [name for name in ("ring", "node_tree", "pairwise") if name in has]

    def best(machine: Machine, nbytes: int) -> SimulatedRow:
        shape = p, local_of(machine, p), nbytes
        reducing = machine.reducing(options.op, p)
        if every and own:
            has = [select(options.op, nbytes, topology_on(machine, p)).algorithm]
        else:
            # What would explain a gap may be that there are no such switches.
            off = {*REDUCING} - {*reducing}
            has = [name for name in names if machine is net or name not in off]
            has += reducing if every else ()
        rows = [row_of(options, machine, name, shape) for name in has]
        return min(rows, key=lambda row: float(row["time_us"]), default={"time_us": 0.0})

    return best


def _simulate(options: argparse.Namespace) -> int:
    check_root(options.op, options.root)
    if options.against:
        return _against(options)
    check_compress(options)
    options.ranks = options.ranks or _RANKS
    if options.output:
        check_output("simulate", options.output)
    if options.algorithm != "all":
        # A network may have values for an algorithm of a file.
        names = [named(options.op, name) for name in options.algorithm.split(",")]
        options.algorithm = ",".join(names)
    net, least = _machine(options), options.minbytes or _SIZE
    sizes = SizeRange(least, options.maxbytes or least, options.stepfactor or _FACTOR)
    # An algorithm that is wrong ends the command before its output begins.
    for p in options.ranks if options.algorithm != "all" else ():
        for name in options.algorithm.split(","):
            _scheduled(options, net, name, (p, local_of(net, p), least))
    about = f": {plain(net.values['about'])}" * bool(net.values["about"])
    print(f"# {options.op}; net {net.name}{about}")
    shares = "" if net.values["model"] != "alpha-beta" else SHARE_NO_LINK
    most = max(options.ranks)
    far = f"an empty message to the farthest of {most:,} ranks: {net.delay_us(most):g} us"
    far *= net.values["model"] != "loggops"
    for note in (_hosts_note(options, net), sizes.note(), shares, far):
        if note:
            print(f"# {note}")
    if net.values["model"] == "loggops":
        model = net.loggops(max(options.ranks))
        ns = [ps / 1000 for ps in list(vars(model).values())[:5]]
        each = ", ".join(f"{key} {value:g} ns" for key, value in zip("LogGO", ns, strict=True))
        print(f"# LogGOPS, one kind of message: {each}, S {model.eager_bytes} B")
    rows: list[SimulatedRow] = []
    refused: set[str] = set()
    try:
        for p in options.ranks:
            for nbytes in sizes:
                found = _rows(options, net, p, nbytes, refused)
                rows += sorted(found, key=lambda row: float(row["time_us"]))
    finally:
        for note in dict.fromkeys(row["unproved"] for row in rows if "unproved" in row):
            print(f"# {note}")
        _print_table(rows)
    if not rows:
        raise InvalidArgumentError(f"no algorithm of {options.op} runs on net {net.name}")
    write_json(options, {"op": options.op, "net": net.name, "values": net.values, "rows": rows})
    if options.output:
        plot(rows, options)
    return 0


def _machine(options: argparse.Namespace) -> Machine:
    """Return the machine of --net, with the ranks per host of --hosts, per node of --nodes."""
    per_host = 0
    if options.hosts:
        if len(options.ranks) > 1:
            raise InvalidArgumentError("--hosts needs one number of ranks")
        per_host = per_host_of(options.ranks[0], options.hosts)
    options.net = options.net or default_net(per_host, options.nodes)
    net = machine_of(options.net, options.model)
    own = net.values["ranks_per_host"]
    net.values["ranks_per_host"] = per_host or own
    if options.nodes:
        if len(options.ranks) > 1:
            raise InvalidArgumentError("--nodes needs one number of ranks")
        per_host = per_host or options.ranks[0]
        net.set_parts(per_host, per_host_of(per_host, options.nodes, "NUMA nodes"))
    # What others measured is an all_reduce on the hosts of the file, in its model.
    same = options.op == "all_reduce" and net.values["ranks_per_host"] == own
    if not same or options.model or options.pipeline > 1:
        net.published.clear()
    return net


def default_net(per_host: int, nodes: int = 0) -> str:
    """Return the network of a command without --net; the one for many ranks per host has hosts."""
    if nodes > 1:
        return "two-socket"
    return "fat-tree" if per_host > 1 else "switch"


def _hosts_note(options: argparse.Namespace, net: Machine) -> str:
    """Return what --hosts means here."""
    if not options.hosts:
        return ""
    p, per_host = options.ranks[0], net.values["ranks_per_host"]
    text = f"--hosts {options.hosts}: {per_host} rank{'s' * (per_host > 1)} per host"
    if p % per_host:
        text += f", {p % per_host} on the last; algorithms that need equal hosts do not run"
    if per_host > 1 and net.values["topology"] != "hosts":
        text += f"; net {net.name} has no hosts: its links stay"
    return text


def machine_of(name: str, model: str | None = None) -> Machine:
    """Return the machine of a shipped name or a TOML file.

    Raises:
        UnknownNameError: There is no such machine or file.
    """
    from importlib import resources

    from unisono.workbench.simulate import machine

    shipped = resources.files("unisono.workbench.simulate") / "shipped"
    try:
        if name.endswith(".toml"):
            text = Path(name).read_text(encoding="utf-8")
        else:
            text = (shipped / f"{name}.toml").read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(f"{name} is no text: {error}") from None
    except OSError:
        files = [file.name for file in shipped.iterdir() if file.name.endswith(".toml")]
        known = ", ".join(sorted(name[:-5] for name in files))
        raise UnknownNameError(
            f"no network {name!r} (known: {known}; or a file that ends in .toml)"
        ) from None
    net = machine(name, text)
    return replace(net, values=net.values | {"model": model or net.values["model"]})


def _rows(
    options: argparse.Namespace, net: Machine, p: int, nbytes: int, refused: set[str]
) -> Iterator[SimulatedRow]:
    """Yield a row per algorithm; print each refusal once."""
    from unisono.core.schedules import available

    every, local = options.algorithm == "all", local_of(net, p)
    if every:
        names: Sequence[str] = [
            *available(options.op, p, local=local), *net.reducing(options.op, p),
        ]  # fmt: skip
    else:
        names = options.algorithm.split(",")
    for name in names:
        try:
            row = row_of(options, net, name, (p, local, nbytes))
        except InvalidArgumentError as error:
            if not every:
                raise
            if error.what not in refused:
                print(f"# {error.what}", flush=True)
            refused.add(error.what)
            continue
        row["published_us"] = net.published.get(nbytes, {}).get(name, {}).get(p)
        yield row
    if options.compress:
        row = coded_row(options, net, (p, local, nbytes))
        print(f"# {phases_text(row)}")
        yield row


def _print_table(rows: Sequence[SimulatedRow]) -> None:
    """Print the rows, without columns in which no row has a value."""
    cells = [*zip(*map(_cells, rows), strict=True)]
    columns = [
        (head, *column) for head, column in zip(_COLUMNS, cells, strict=False) if {*column} != {"-"}
    ]
    widths = [max(map(len, column)) for column in columns]
    # The first line is a comment, the column of names is aligned to the left.
    for number, line in enumerate(zip(*columns, strict=True)):
        texts = [
            text.ljust(width) if at == 2 else text.rjust(width)
            for at, (text, width) in enumerate(zip(line, widths, strict=True))
        ]
        print(("  " if number else "# ") + " ".join(texts).rstrip())


def _cells(row: SimulatedRow) -> list[str]:
    """Return the texts of a row, "-" for what it lacks."""
    least, most = map(us_text, row.get("range_us", (0.0, 0.0)))
    measured = row["published_us"]
    return [
        str(row["ranks"]), str(row["size_bytes"]),
        row["algorithm"] + " (not proved)" * ("unproved" in row),
        ("" if row["exact"] else "~") + us_text(row["time_us"]),
        *(us_text(row[part]) if part in row else "-" for part in _PARTS),
        str(row["pipeline"]), f"{row['algbw']:.2f}", f"{row['busbw']:.2f}",
        "-" if row["bound_us"] is None else us_text(row["bound_us"]),
        f"{least}-{most}" if least != most else "-",
        us_text(measured) if measured else "-",
        f"{100 * row['time_us'] / measured - 100:+.1f} %" if measured else "-",
    ]  # fmt: skip


def row_of(
    options: argparse.Namespace, net: Machine, name: str, shape: tuple[int, int, int]
) -> SimulatedRow:
    """Run an algorithm; `shape` is the ranks, the ranks per host and the bytes."""
    from unisono.core.schedules.ir import ROOTED
    from unisono.workbench.simulate import Traffic, program_of, simulate, to_goal
    from unisono.workbench.simulate.bounds import least_us
    from unisono.workbench.simulate.evaluators import loggops

    p, local, nbytes = shape
    root = options.root if options.op in ROOTED else -1
    schedule, switched, depth = _scheduled(options, net, name, shape)
    row: SimulatedRow = {
        "ranks": p, "size_bytes": nbytes, "algorithm": name, "rounds": schedule.rounds,
        "pipeline": depth,
    }  # fmt: skip
    if switched is None and (note := proof_note(options.op, name, p, root, local)):
        row["unproved"] = note
    if options.goal or net.values["model"] == "loggops":
        program = program_of(Traffic(schedule, nbytes, options.itemsize, work=False).all_rows(), p)
        if options.goal:
            write_text(options.goal, to_goal(program))
    factor = OPS[options.op].bus_factor(p) if options.op in OPS else 1.0
    costs = net.costs(name)
    # The bytes of several messages share a link in the bound, but not in this model.
    bound_us = None if net.values["model"] == "alpha-beta" else least_us(
        options.op, nbytes, net.network(name, p), costs, root=root, itemsize=options.itemsize,
        switched=bool(net.reducing(options.op, p)),
    )  # fmt: skip

    def timed(time_us: float) -> SimulatedRow:
        algbw = nbytes / time_us / 1000 if time_us and options.op != "barrier" else 0.0
        return row | {
            "time_us": time_us, "algbw": algbw, "busbw": algbw * factor, "bound_us": bound_us,
        }  # fmt: skip

    if net.values["model"] == "loggops":
        done = loggops.run(program, net.loggops(p))
        return timed(max(done.finish_ps) / 1e6) | {"exact": True, "method": "LogGOPS"}
    schedule, network = (schedule, switched) if switched else net.in_channels(schedule, local)
    with working(f"{options.op}, {name}, {p} ranks, {nbytes} B"):
        result = simulate(
            schedule, nbytes, network, costs, itemsize=options.itemsize,
            padded=net.values["padded"], contended=net.values["model"] == "links",
        )  # fmt: skip
        orders = options.orders if result.messages <= _TIED_MESSAGES else 0
        row["range_us"] = [ps / 1e6 for ps in result.range_ps(orders)]
    busiest = [[link, ps / 1e6] for link, ps in result.busiest(5)]
    row |= {part: ps / 1e6 for part, ps in zip(_PARTS, result.causes_ps.values(), strict=True)}
    return timed(result.last_us) | {
        "first_us": result.first_ps / 1e6, "hops": result.hops,
        "path": result.path, "messages": result.messages, "bytes": result.nbytes,
        "busiest_us": busiest, "exact": result.exact, "method": result.method,
    }  # fmt: skip


def coded_row(
    options: argparse.Namespace, net: Machine, shape: tuple[int, int, int]
) -> SimulatedRow:
    """Run what a call with `compress=` makes; otherwise as `row_of`."""
    from unisono.core.schedules import select

    p, local, nbytes = shape

    def exchange(op: str, coded: int) -> SimulatedRow:
        name = select(op, coded, topology_on(net, p)).algorithm
        given = vars(options) | {"op": op, "itemsize": 1, "pipeline": 1, "goal": None}
        return row_of(argparse.Namespace(**given), net, name, (p, local, coded))

    return compressed_row(options, (p, nbytes), exchange)


def _scheduled(
    options: argparse.Namespace, net: Machine, name: str, shape: tuple[int, int, int]
) -> tuple[Schedule, Network | None, int]:
    """Return a schedule, its network if switches reduce in it, and its pipeline depth."""
    from unisono.core.schedules import build
    from unisono.core.schedules.ir import ROOTED
    from unisono.core.schedules.registry import known_algorithms
    from unisono.workbench.simulate.machines import REDUCING

    p, local, nbytes = shape
    if options.op == "all_reduce" and name in REDUCING and name not in known_algorithms():
        if options.goal:
            raise InvalidArgumentError(f"--goal: {name} has switches that reduce, GOAL has none")
        return net.in_switches(name, p, nbytes, options.pipeline)
    part = net.part(p)
    kind = "host" if part == net.values["ranks_per_host"] else "node"
    check_hosts(options.op, name, p, part, kind)
    depth = depth_of(options, net, name, shape)
    root = options.root if options.op in ROOTED else -1
    return build(options.op, name, p, root, depth, local), None, depth


def depth_of(
    options: argparse.Namespace, net: Machine, name: str, shape: tuple[int, int, int]
) -> int:
    """Return the pipeline depth of an algorithm; without --pipeline, that of a group."""
    from unisono.core.schedules import select
    from unisono.core.schedules.registry import entry

    p, _, nbytes = shape
    if not entry(options.op, name).pipelined:
        return 1
    return options.pipeline or select(options.op, nbytes, topology_on(net, p), name).pipeline


def per_host_of(p: int, hosts: int, parts: str = "hosts") -> int:
    """Return the ranks per host; the last host may have fewer. Or those of other parts.

    Raises:
        InvalidArgumentError: A host has no rank.
    """
    per_host = -(-p // hosts)
    if -(-p // per_host) != hosts:
        raise InvalidArgumentError(f"-n {p} does not fill {hosts} {parts}")
    return per_host


def local_of(net: Machine, p: int) -> int:
    """Return the ranks per host, or 1 if the last host has fewer; see `Topology.local`."""
    local = net.part(p)
    return local if p % local == 0 else 1


def topology_on(net: Machine, p: int) -> Topology:
    """Return the world of `p` ranks on a network, as a group finds it."""
    from unisono.core.schedules import Topology
    from unisono.core.schedules.choice.far import round_trip_class

    apart, has_nodes = p > net.values["ranks_per_host"], net.values["ranks_per_node"]
    if has_nodes and not apart:  # The ranks share memory.
        part = net.part(p)
        return Topology(p, True, p if p % part else part)
    return Topology(
        p, False, local_of(net, p), round_trip_class(2 * net.delay_us(p)) if apart else 0
    )


def us_text(us: float) -> str:
    """Return microseconds as the tables show them."""
    return f"{us:,.1f}" if us < 10_000 else f"{us:,.0f}"
