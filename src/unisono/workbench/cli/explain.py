"""`unisono explain`: the algorithm that a group takes, why, and what the others cost."""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from unisono.core.base import config
from unisono.errors import InvalidArgumentError
from unisono.workbench.bench.algorithms import HELP, check_root, is_file, named, operation_of
from unisono.workbench.bench.plan import OPS, parse_nbytes
from unisono.workbench.cli.compress import (
    add_compress,
    check_compress,
    phases_text,
)
from unisono.workbench.cli.flags import (
    add_algorithms,
    add_json,
    add_parser,
    add_ranks,
    checked,
    meant,
    non_negative,
    operation,
    positive,
    write_json,
)
from unisono.workbench.cli.simulate import (
    MANY,
    SHARE_NO_LINK,
    coded_row,
    default_net,
    machine_of,
    per_host_of,
    row_of,
    us_text,
)
from unisono.workbench.cli.terminal import plain

if TYPE_CHECKING:
    from unisono.core.schedules import Schedule, Topology
    from unisono.core.schedules.choice.tables import ChoiceTable, GroupShape
    from unisono.workbench.simulate import Machine

_DESCRIPTION = """\
Show which algorithm a group takes for an operation and a size, and why: the built-in rule, a table
that `unisono tune` has measured, or UNISONO_ALGO. UNISONO_TUNING, UNISONO_ENGINE,
UNISONO_SHARED_MEMORY, UNISONO_RANKS_PER_HOST, UNISONO_NODES and UNISONO_DETERMINISTIC count as in a
group.

predicted is the time in virtual time on the network of --net. Ranks of one host share memory, which
is measured and not modelled, unless they are on several NUMA nodes: without --net they have no
prediction. measured is the mean of the
table's passes at the nearest size; simulated, if `unisono tune --net` wrote the table.
"~" marks approximate times, as in `unisono simulate`.

With the name of an algorithm instead of OP and SIZE, show what it does, its cost, and its use."""

# Steps of a round that take about 10 s.
_MOST_STEPS = 50_000_000

_SIZE = "of the whole data: 0, 8, 64K, 1M"
OP_NAMES = [op for op in (*OPS, "scan", "exscan") if op != "sendrecv"]


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command `explain`."""
    summary = "show which algorithm a group takes, and why"
    parser = add_parser(
        commands, "explain", summary, _DESCRIPTION, _explain, algorithms=True, mixes=True
    )
    add = parser.add_argument
    names = f"{', '.join(OP_NAMES)}; or an algorithm: ring, ..."
    add("op", type=operation(OP_NAMES), metavar="OP", help=names)
    add("size", type=checked(_nbytes), nargs="?", metavar="SIZE", help=_SIZE)
    add_ranks(parser, "ranks (2; of an algorithm, few)", "-n", "-p")
    add("--hosts", type=positive, default=1, metavar="H", help="hosts (1)")
    nodes = "NUMA nodes of one host (1; UNISONO_NODES)"
    add("--nodes", type=positive, default=0, metavar="N", help=nodes)
    add("--round-trip", type=positive, metavar="US", help="between hosts (250, or of --net)")
    add("-r", "--root", type=non_negative, default=0, metavar="ROOT", help="root rank (0)")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="where the arrays are (cpu)")
    add_algorithms(parser, f"what the call asks for: {HELP}", metavar="NAME")
    add("--net", metavar="FILE", help="network of the predictions (switch; fat-tree with --hosts)")
    add("--model", choices=("links", "alpha-beta"), help="(what the network has)")
    add_compress(parser)
    add_json(parser)
    parser.set_defaults(itemsize=4, goal=None, orders=0)


def _nbytes(text: str) -> int:
    # A call may be empty, a measurement may not.
    return 0 if text == "0" else parse_nbytes(text)


def _explain(options: argparse.Namespace) -> int:
    from unisono.core.backends.tuning import read_tables
    from unisono.core.schedules import Choice, select
    from unisono.core.schedules.choice.explain import nbytes_text, reason
    from unisono.core.schedules.choice.tuning import topology_of
    from unisono.core.schedules.ir import REDUCING

    if options.op not in OP_NAMES:
        return _one_algorithm(options)
    if options.size is None:
        options.parser.error(f"the following arguments are required: SIZE ({_SIZE})")
    options.ranks = options.ranks or 2
    check_root(options.op, options.root)
    check_compress(options)
    if options.algorithm:
        options.algorithm = named(options.op, options.algorithm)
    if options.device == "cuda":
        return _on_gpus(options)
    shape = _shape(options)
    table, topology = read_tables().get(shape), topology_of(shape)
    override = config.get("UNISONO_ALGO")
    asked = (options.op, options.size, topology, options.algorithm, override)
    ordered = options.op in REDUCING and config.get_flag("UNISONO_DETERMINISTIC")
    choice = select(*asked, table=table, ordered=ordered)
    why = reason(*asked, table=table, ordered=ordered)
    # As in `PreparedCalls`: MPI has collectives of its own.
    if (
        shape.engine == "mpi"
        and options.ranks > 1
        and not (options.algorithm or override or ordered)
    ):
        choice, why = Choice("mpi", 1), "MPI chooses"
    if options.compress:
        choice, why = Choice(f"compress={options.compress}", 1), "the call allows it"
    depth = f" in {choice.pipeline} pieces" if choice.pipeline > 1 else ""
    hosts = f" of {options.hosts} hosts" if options.hosts > 1 else ""
    hosts += f" of {options.nodes} nodes" if options.nodes else ""
    over = shape.over.replace("-", " ")
    print(
        f"{options.op} of {nbytes_text(options.size)} on {options.ranks} ranks{hosts} over {over}"
    )
    print(f"takes {choice.algorithm}{depth}: {why}")
    shown = f"{table.digest}, {_how(table)} {table.about.get('date', '')}" if table else "none"
    print(plain(f"# table for {shape}: {shown}"))
    rows = _print(options, topology, table, choice.algorithm)
    document = {
        "op": options.op, "size_bytes": options.size, "ranks": options.ranks,
        "hosts": options.hosts, "over": shape.over, "algorithm": choice.algorithm,
        "pipeline": choice.pipeline, "reason": why, "table": table and table.digest, "rows": rows,
    }  # fmt: skip
    write_json(options, document)
    return 0


def _on_gpus(options: argparse.Namespace) -> int:
    """Print what moves the data of arrays in the memory of GPUs."""
    from unisono.adapters.nccl.intra_node import MOST_RANKS, VARIABLE, algorithm_of, is_wanted
    from unisono.core.schedules.choice.explain import nbytes_text

    for flag in ("algorithm", "net", "model", "round_trip", "compress"):
        if getattr(options, flag) is not None:
            flag = flag.replace("_", "-")
            options.parser.error(f"--device cuda takes no --{flag}: NCCL chooses")
    near = options.op == "all_reduce" and options.hosts == 1 and 2 <= options.ranks <= MOST_RANKS
    near = near and config.get_flag("UNISONO_SHARED_MEMORY")
    kernel = algorithm_of(options.size, is_cube=False) if near else None
    algorithm, why = "nccl", "NCCL chooses"
    linked = "if every GPU has an NVLink to each other"
    if options.ranks == MOST_RANKS and algorithm_of(options.size, is_cube=True):
        linked += ", or cube_mesh in a hybrid cube mesh"
    if kernel and is_wanted():
        algorithm = kernel
        why = (
            f"IntraNodeComm sums float32, float16 and bfloat16 with it {linked}; else, and for "
            "other calls, NCCL chooses"
        )
    elif kernel:
        why += f"; {VARIABLE}=1: {kernel} {linked}"
    hosts = "1 host" if options.hosts == 1 else f"{options.hosts} hosts"
    print(
        f"{options.op} of {nbytes_text(options.size)} on {options.ranks} ranks of {hosts}, on GPUs"
    )
    print(f"takes {algorithm}: {why}")
    document = {
        "op": options.op, "size_bytes": options.size, "ranks": options.ranks,
        "hosts": options.hosts, "over": "nccl", "algorithm": algorithm, "reason": why,
    }  # fmt: skip
    write_json(options, document)
    return 0


def _one_algorithm(options: argparse.Namespace) -> int:
    from unisono.core.schedules.registry import known_algorithms
    from unisono.workbench.cli.one_algorithm import explain_algorithm

    text = options.op
    if is_file(text):
        options.op = named(operation_of(text), text)
    elif text.replace("-", "_") in known_algorithms():
        text = options.op = text.replace("-", "_")
    else:
        names = known_algorithms()
        known = [*OP_NAMES, *names]
        hint = meant(options.op, dict(zip(known, known, strict=True)))
        options.parser.error(
            f"argument OP: invalid choice: {options.op!r} (choose from {', '.join(known)}){hint}"
        )
    if options.size is not None:
        options.parser.error(f"{options.op} is an algorithm, which has no SIZE")
    where = ("hosts", "round_trip", "root", "device", "net", "model")
    for flag in (*where, "algorithm", "compress"):
        if getattr(options, flag) != options.parser.get_default(flag):
            given = flag.replace("_", "-")
            options.parser.error(f"{options.op} is an algorithm, which has no --{given}")
    explain_algorithm(options.op, text, options.ranks)
    return 0


def _shape(options: argparse.Namespace) -> GroupShape:
    """Return the shape of the group that the flags describe, as `backends.tuning` does."""
    from unisono.core.engines.choice import engine_info, other_engine
    from unisono.core.schedules.choice.far import round_trip_class
    from unisono.core.schedules.choice.tables import GroupShape

    most = per_host_of(options.ranks, options.hosts)
    other_engine(config.get("UNISONO_ENGINE"))
    engine = engine_info().engine
    near = engine == "native" and config.get("UNISONO_SHARED_MEMORY") != "0"
    transport = config.get("UNISONO_TRANSPORT").replace("auto", "tcp")
    # As in `transports.connect`: the reference engine does not know the hosts.
    apart = options.hosts > 1 and engine != "reference"
    least = int(config.get_float("UNISONO_RANKS_PER_HOST")) or most
    sizes = Counter((rank // most, rank // least) for rank in range(options.ranks))
    options.hosts = len(sizes)
    local = max(sizes.values()) if len(set(sizes.values())) == 1 else 1
    fullest = max(sizes.values())
    same = -(-options.ranks // fullest) == options.hosts
    # Of the predictions: the last host may have fewer ranks.
    options.per_host = fullest if near and same else 1
    trip_us = round_trip_class(_round_trip_us(options)) if apart else 0
    over = "shared-memory" if near and options.hosts == 1 else transport
    if over == "shared-memory":
        local = _ranks_per_node(options)
    elif options.nodes:
        raise InvalidArgumentError(
            f"--nodes {options.nodes}: only ranks that share memory use nodes"
        )
    return GroupShape(engine, over, options.ranks, local if near else 1, trip_us)


def _ranks_per_node(options: argparse.Namespace) -> int:
    """Return the ranks of each NUMA node of a host, or all ranks, as the native engine does."""
    from unisono.core.transports.nodes import virtual_size

    size = virtual_size(config.get("UNISONO_NODES"))
    if options.nodes:
        size = per_host_of(options.ranks, options.nodes, "NUMA nodes")
    p = int(options.ranks)
    options.nodes = p // size if 1 < size < p and p % size == 0 else 0
    return size if options.nodes else p


def _round_trip_us(options: argparse.Namespace) -> float:
    from unisono.core.schedules.choice.far import NEAR_US

    if options.round_trip or not options.net:
        return float(options.round_trip or NEAR_US)
    net = machine_of(options.net)
    net.values["ranks_per_host"] = options.per_host
    return 2 * net.delay_us(options.ranks)


def _how(table: ChoiceTable | None) -> str:
    from unisono.core.schedules.choice.tables import VIRTUAL

    return "simulated" if table and table.machine == VIRTUAL else "measured"


def _net(options: argparse.Namespace, topology: Topology) -> Machine | None:
    """Return the network of the predictions, or None if there are none."""
    if options.net is None and topology.shared_memory and not options.nodes:
        print("# predicted: nothing, because shared memory is not modelled (--net NAME does it)")
        return None
    from unisono.core.schedules.choice.far import far_apart

    net = machine_of(options.net or default_net(options.per_host, options.nodes), options.model)
    if options.hosts > 1:
        net.values["ranks_per_host"] = options.per_host
    elif topology.shared_memory and options.nodes:
        net.set_parts(options.ranks, topology.local)
    if options.net is None and far_apart(options.ranks, topology.round_trip_us):
        # A switch has two links.
        links = 2 if net.values["topology"] == "switch" else 1
        net.values["latency_us"] = topology.round_trip_us / 2 / links
    per_host = f"{net.values['ranks_per_host']} per host"
    per_host += f", {topology.local} per node" * (options.nodes > 0)
    print(f"# predicted: net {net.name}, {per_host}, model {net.values['model']}")
    if net.values["model"] == "alpha-beta":
        print(f"# {SHARE_NO_LINK}")
    return net


def _print(
    options: argparse.Namespace, topology: Topology, table: ChoiceTable | None, chosen: str
) -> list[dict[str, Any]]:
    """Print a line per algorithm that serves the call, the fastest first, and return them."""
    from unisono.core.schedules import available, build, select
    from unisono.core.schedules.choice.tuning import mean_us
    from unisono.core.schedules.ir import ROOTED

    op, p, local = options.op, options.ranks, topology.local
    net, measured = _net(options, topology), _measured(table, op, options.size)
    root = options.root if op in ROOTED else -1
    lines: list[tuple[float, str, dict[str, Any]]] = []
    shown = [name for name, has in (("predicted", net), (_how(table), measured)) if has]
    head = f"{'algorithm':<22}{'rounds':>8}{'pieces':>8}"
    head += "".join(f"{name + ' us':>16}" for name in shown)
    # Many ranks take time: each row comes when it is known, the choice first.
    if many := p > MANY:
        print(head, flush=True)
    for name in sorted(available(op, p, local=local), key=lambda name: name != chosen):
        options.pipeline = select(op, options.size, topology, name).pipeline
        schedule = build(op, name, p, root, options.pipeline, local)
        times: dict[str, float | None] = dict.fromkeys(shown)
        about = ""
        if net is not None:
            times["predicted"], about = _predicted(options, net, name, schedule, local)
        if name in measured:
            times[_how(table)] = mean_us(measured[name])
        texts = [
            "-" if us is None else about * (what == "predicted") + us_text(us)
            for what, us in times.items()
        ]
        cells = "".join(f"{text:>16}" for text in texts)
        mark = "  <- taken" if name == chosen else ""
        line = f"{name:<22}{schedule.rounds:>8,}{options.pipeline:>8}{cells}{mark}"
        row = {"algorithm": name, "rounds": schedule.rounds, "pipeline": options.pipeline}
        row |= {f"{what}_us": us for what, us in times.items()}
        # Measured times decide, if there are any.
        lines.append(((times[shown[-1]] if shown else 0.0) or math.inf, line, row))
        if many:
            print(line, flush=True)
    if options.compress and net is not None:
        row = coded_row(options, net, (p, local, options.size))
        print(f"# {phases_text(row)}")
        us, name = row["time_us"], row["algorithm"]
        cells = "".join(f"{us_text(us) if what == 'predicted' else '-':>16}" for what in shown)
        line = f"{name:<22}{row['rounds']:>8,}{row['pipeline']:>8}{cells}  <- taken"
        lines.append((us, line, row | {"predicted_us": us}))
    lines.sort(key=lambda pair: pair[0])
    if many and not measured and net is not None and net.values["model"] == "alpha-beta":
        print("# fastest: not known, because messages share no link here")
    elif many:
        print(f"# fastest: {lines[0][1].split()[0]}")
    else:
        print("\n".join([head, *(line for _, line, _ in lines)]))
    return [row for *_, row in lines]


def _predicted(
    options: argparse.Namespace, net: Machine, name: str, schedule: Schedule, local: int
) -> tuple[float | None, str]:
    """Return the time of an algorithm, and "~" if it is approximate; print why there is none."""
    if options.ranks > MANY and (steps := _steps(schedule)) > _MOST_STEPS:
        print(f"# {name}: {steps:,} steps in a round are left out: they take minutes")
        return None, ""
    try:
        row = row_of(options, net, name, (options.ranks, local, options.size))
    except InvalidArgumentError as error:
        print(f"# {error.what}", flush=True)
        return None, ""
    if "unproved" in row:
        print(f"# {row['unproved']}", flush=True)
    return row["time_us"], "" if row["exact"] else "~"


def _steps(schedule: Schedule) -> int:
    """Return about how many steps the first or the last round has on all ranks."""
    import numpy as np

    last = np.array([schedule.world_size - 1])
    counts = [len(schedule.steps(k, last)) for k in (0, schedule.stages - 1)]
    return schedule.world_size * max(counts)


def _measured(table: ChoiceTable | None, op: str, nbytes: int) -> Mapping[str, tuple[float, ...]]:
    """Return the times of the measured size that is nearest, at most a factor of 4 away."""
    sizes = [size for name, size in table.measured if name == op] if table else []
    near = min(sizes, key=lambda size: abs(math.log2(size / (nbytes or 1))), default=0)
    if table is None or not nbytes / 4 <= near <= nbytes * 4:
        return {}
    if near != nbytes:
        print(f"# {_how(table)}: at {near:,} B")
    return table.measured[op, near]
