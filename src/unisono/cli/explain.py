"""`unisono explain`: the algorithm that a group takes, why, and what the others cost."""

from __future__ import annotations

import argparse
import math
from typing import TYPE_CHECKING, NamedTuple

from unisono.base import config
from unisono.bench.plan import OPS, parse_nbytes
from unisono.cli.flags import checked, non_negative, positive
from unisono.cli.simulate import machine_of
from unisono.errors import InvalidArgumentError

if TYPE_CHECKING:
    from unisono.schedules import Topology
    from unisono.schedules.tables import Shape, Table
    from unisono.simulate import Machine

_DESCRIPTION = """\
Show which algorithm a group takes for an operation and a size, and why: the built-in rule, a table
that `unisono tune` has measured, or UNISONO_ALGO. UNISONO_TUNING, UNISONO_ENGINE and
UNISONO_SHARED_MEMORY count as in a group.

predicted is the time in virtual time on the network of --net. Ranks of one host share memory, which
is measured and not modelled: without --net they have no prediction. measured is the mean of the
table's passes at the nearest size."""

OP_NAMES = [op for op in (*OPS, "scan", "exscan") if op != "sendrecv"]


_MANY = 1024


class _World(NamedTuple):
    """The group that is asked for, and its table."""

    topology: Topology
    shape: Shape
    table: Table | None


class _Line(NamedTuple):
    """One algorithm."""

    name: str
    rounds: int
    predicted_us: float | None
    measured_us: float | None


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command `explain`."""
    parser = commands.add_parser(
        "explain",
        help="show which algorithm a group takes, and why",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("op", choices=OP_NAMES, metavar="OP", help=", ".join(OP_NAMES))
    add("size", type=checked(parse_nbytes), metavar="SIZE", help="of the whole data: 8, 64K, 1M")
    add("-p", "--ranks", type=positive, default=2, metavar="N", help="ranks (2)")
    add("--hosts", type=positive, default=1, metavar="H", help="hosts (1)")
    add("-r", "--root", type=non_negative, default=0, metavar="ROOT", help="root rank (0)")
    add("--algorithm", metavar="NAME", help="the algorithm that the call asks for")
    add("--net", metavar="FILE", help="network of the predictions (switch; fat-tree with --hosts)")
    add("--model", choices=("links", "alpha-beta"), help="(alpha-beta above 1,024 ranks)")
    parser.set_defaults(handler=_explain, parser=parser)


def _explain(options: argparse.Namespace) -> int:
    from unisono.schedules import select
    from unisono.schedules.explain import nbytes_text, reason

    world = _world(options)
    override = config.get("UNISONO_ALGO")
    asked = (options.op, options.size, world.topology, options.algorithm, override)
    choice = select(*asked, table=world.table)
    depth = f" in {choice.pipeline} pieces" if choice.pipeline > 1 else ""
    hosts = f" of {options.hosts} hosts" if options.hosts > 1 else ""
    over = world.shape.over.replace("-", " ")
    print(
        f"{options.op} of {nbytes_text(options.size)} on {options.ranks} ranks{hosts} over {over}"
    )
    print(f"takes {choice.algorithm}{depth}: {reason(*asked, table=world.table)}")
    table, net = world.table, _net(options, world)
    shown = f"{table.digest}, measured {table.about.get('date', '')}" if table else "none"
    print(f"# table for {world.shape}: {shown}".rstrip())
    if net is not None:
        per_host = net.values["ranks_per_host"]
        print(f"# predicted: net {net.name}, {per_host} per host, model {net.values['model']}")
    else:
        print("# predicted: nothing, because shared memory is not modelled (--net NAME does it)")
    _print(_lines(options, world, net), choice.algorithm)
    return 0


def _world(options: argparse.Namespace) -> _World:
    """Return the group that the flags describe, as `backends.tuning.shape_of` would."""
    from unisono.backends.tuning import read_tables
    from unisono.engines.choice import engine_info
    from unisono.schedules import Topology
    from unisono.schedules.tables import Shape

    if options.ranks % options.hosts:
        raise InvalidArgumentError(f"-p {options.ranks} does not fill {options.hosts} hosts")
    engine = engine_info().engine
    near = engine == "native" and config.get("UNISONO_SHARED_MEMORY") != "0"
    shared = near and options.hosts == 1
    local = options.ranks // options.hosts if near else 1
    transport = config.get("UNISONO_TRANSPORT").replace("auto", "tcp")
    over = "shared-memory" if shared else transport
    shape = Shape(engine, over, options.ranks, local)
    return _World(Topology(options.ranks, shared, local), shape, read_tables().get(shape))


def _net(options: argparse.Namespace, world: _World) -> Machine | None:
    """Return the network of the predictions, or None if there are none."""
    if options.net is None and world.topology.shared_memory:
        return None
    local = world.topology.local
    # Where links are shared, thousands of ranks take minutes for all algorithms.
    model = options.model or ("alpha-beta" if options.ranks > _MANY else None)
    net = machine_of(options.net or ("fat-tree" if local > 1 else "switch"), model)
    if options.hosts > 1:
        net.values["ranks_per_host"] = local
    if net.values["model"] == "loggops":
        raise InvalidArgumentError(f"--net {net.name} is for --model loggops, which is not shown")
    return net


def _lines(options: argparse.Namespace, world: _World, net: Machine | None) -> list[_Line]:
    """Return a line per algorithm that serves the call, the fastest first."""
    from unisono.schedules import available, build, select
    from unisono.schedules.ir import ROOTED
    from unisono.schedules.tuning import mean_us
    from unisono.simulate import simulate

    topology, op = world.topology, options.op
    measured = _measured(world.table, op, options.size)
    root = options.root if op in ROOTED else -1
    lines = []
    for name in available(op, options.ranks, local=topology.local):
        depth = select(op, options.size, topology, name).pipeline
        schedule = build(op, name, options.ranks, root, depth, topology.local)
        predicted = None
        if net is not None:
            network, costs = net.network(name, options.ranks), net.costs(name)
            contended = net.values["model"] == "links"
            try:
                predicted = simulate(
                    schedule, options.size, network, costs, itemsize=4,
                    padded=net.values["padded"], contended=contended,
                ).last_us  # fmt: skip
            except InvalidArgumentError as error:
                print(f"# {error.what}")
        times = measured.get(name)
        lines.append(_Line(name, schedule.rounds, predicted, mean_us(times) if times else None))
    by = "measured_us" if measured else "predicted_us"
    return sorted(lines, key=lambda line: getattr(line, by) or math.inf)


def _measured(table: Table | None, op: str, nbytes: int) -> dict[str, tuple[float, ...]]:
    """Return the times of the measured size that is nearest, at most a factor of 4 away."""
    sizes = [size for name, size in table.measured if name == op] if table else []
    near = min(sizes, key=lambda size: abs(math.log2(size / nbytes)), default=0)
    if table is None or not nbytes / 4 <= near <= nbytes * 4:
        return {}
    if near != nbytes:
        print(f"# measured: at {near:,} B")
    return dict(table.measured[op, near])


def _print(lines: list[_Line], chosen: str) -> None:
    print(f"{'algorithm':<20}{'rounds':>8}{'predicted us':>16}{'measured us':>16}")
    for name, rounds, *times in lines:
        cells = "".join(f"{'-' if us is None else f'{us:,.1f}':>16}" for us in times)
        print(f"{name:<20}{rounds:>8,}{cells}{'  <- taken' if name == chosen else ''}")
