"""`unisono tune`: measure the algorithms on this machine, and store the choices that win."""

from __future__ import annotations

import argparse
import os
import sys
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from unisono.core.base import config
from unisono.core.platform.machine import load_average, usable_cores
from unisono.errors import InvalidArgumentError
from unisono.workbench.bench.plan import OPS, SizeRange
from unisono.workbench.cli.flags import (
    add_json,
    add_parser,
    add_ranks,
    add_sizes,
    checked,
    operation,
    seconds,
    write_json,
)
from unisono.workbench.cli.terminal import plain, progress_bar

if TYPE_CHECKING:
    from unisono.core.schedules.choice.tables import ChoiceTable
    from unisono.workbench.bench.tuning import TuningPlan

_PREFIX = "unisono tune: "
# The part of the limit in which the ranks start.
_START_S = 5.0

_OPS = [op for op in OPS if op not in ("sendrecv", "barrier")]

_DESCRIPTION = """\
Measure every algorithm on this machine, and store the choices that win over the built-in rule in a
table: one for each machine and shape of the world. Groups of that shape use it from then on, if all
their ranks have the same table.

On one host this starts the ranks itself. For several hosts, or over TCP, run it as the ranks:
    unisono run --nnodes 2 ... --nproc-per-node 4 -m unisono tune
With --net the ranks and the network need not exist: the algorithms run in virtual time, as in
`unisono simulate`, and groups of that shape over TCP take the table on any machine.
The tables are in ~/.cache/unisono. UNISONO_TUNING=FILE names another file to write and to read."""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command `tune`."""
    parser = add_parser(
        commands,
        "tune",
        "measure the algorithms on this machine, and store the best choices",
        _DESCRIPTION,
        _tune,
    )
    add = parser.add_argument
    add("ops", nargs="*", type=checked(_op), metavar="OP", help=f"(6 of {', '.join(_OPS)})")
    add_ranks(parser, "ranks to start (one per core), or of --net", "-n", "-p")
    add_sizes(parser, "1K", "16M", 4)
    add("--seconds", type=seconds, default=60.0, metavar="S", help="limit of the run (60)")
    add("--net", metavar="FILE", help="measure nothing: choose in virtual time on a network")
    add("--show", action="store_true", help="print the stored tables, and measure nothing")
    add("--clear", action="store_true", help="delete the stored tables, and measure nothing")
    add_json(parser)


def _op(text: str) -> str:
    if (name := operation(_OPS)(text)) not in _OPS:
        raise InvalidArgumentError(f"unknown operation {text!r} (known: {', '.join(_OPS)})")
    return name


def _tune(options: argparse.Namespace) -> int:
    from unisono.core.backends import tuning
    from unisono.core.rendezvous.launchers import is_alone
    from unisono.workbench.bench import tuning as measuring

    if options.clear:
        for file in tuning.clear():
            print(f"deleted {file}")
        return 0
    if options.show:
        tables = tuning.read_tables().values()
        if not tables:
            print("# no tables: `unisono tune` measures one")
        for table in tables:
            _show(table)
        write_json(options, f"[{','.join(table.to_json() for table in tables)}]\n")
        return 0
    if options.json:
        raise InvalidArgumentError("tune: --json is for --show")
    sizes = SizeRange(options.minbytes, options.maxbytes, options.stepfactor)
    ops = tuple(dict.fromkeys(options.ops)) or measuring.OPS
    # The last call of a pass begins before the limit.
    limit_s = max(1.0, 0.95 * (options.seconds - _START_S))
    plan = measuring.TuningPlan(ops, sizes, limit_s)
    if note := sizes.note():
        print(f"{_PREFIX}{note}", file=sys.stderr)
    if options.net:
        _tune_in_virtual_time(options, ops, sizes)
        return 0
    if not is_alone(config.environ()):
        if options.ranks:
            raise InvalidArgumentError("tune: this process is a rank already, so it starts none")
        measure_and_save(-1, plan)
        return 0
    from unisono.launcher.spawn import spawn

    ranks = options.ranks or max(2, usable_cores())
    print(
        f"{_PREFIX}{ranks} ranks measure {', '.join(ops)} for {options.seconds:g} s",
        file=sys.stderr,
    )
    spawn(measure_and_save, (plan,), ranks)
    return 0


def _tune_in_virtual_time(
    options: argparse.Namespace, ops: tuple[str, ...], sizes: SizeRange
) -> None:
    """Simulate every algorithm, and write a table that groups of this shape read."""
    import unisono
    from unisono.core.backends import tuning
    from unisono.core.schedules import available, select
    from unisono.core.schedules.choice.tables import VIRTUAL, ChoiceTable, GroupShape
    from unisono.core.schedules.choice.tuning import LEAST_PASSES, rules_of
    from unisono.workbench.cli.simulate import machine_of, row_of, topology_on

    if not options.ranks:
        raise InvalidArgumentError("tune: --net needs -n, the number of ranks")
    p, begun_s = options.ranks, time.perf_counter()
    net = machine_of(options.net)
    topology, local = topology_on(net, p), net.values["ranks_per_host"]
    if p % local or p <= local:
        raise InvalidArgumentError(
            f"tune: -n {p} is not 2 or more full hosts of net {net.name}, which have {local} ranks"
        )
    shape = GroupShape("native", "tcp", p, local, topology.round_trip_us)
    settings = argparse.Namespace(root=0, itemsize=4, goal=None, pipeline=0, orders=0)
    cells = [(op, nbytes) for nbytes in sizes for op in ops]
    measured: dict[tuple[str, int], dict[str, tuple[float, ...]]] = {}
    left_out: dict[str, str] = {}
    with progress_bar(_PREFIX, shown=True) as progress:
        for done, (settings.op, nbytes) in enumerate(cells):
            progress(done, len(cells), f"{settings.op} of {nbytes:,} B")
            built_in = select(settings.op, nbytes, topology).algorithm
            # The built-in choice first, so that a cell that the limit cuts short counts.
            names = available(settings.op, p, local=local)
            times: dict[str, tuple[float, ...]] = {}
            for name in sorted(names, key=lambda name: name != built_in):
                if time.perf_counter() - begun_s > options.seconds:
                    break
                try:
                    us = row_of(settings, net, name, (p, local, nbytes))["time_us"]
                    times[name] = (us,) * LEAST_PASSES
                except InvalidArgumentError as error:
                    left_out[f"{settings.op} ({name})"] = error.what
            if times:
                measured[settings.op, nbytes] = times
    for name, why in left_out.items():
        print(f"{_PREFIX}left out: {name}: {why}", file=sys.stderr)
    about = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"), "net": net.name,
        "model": net.values["model"], "cells": f"{len(measured)} of {len(cells)}",
    }  # fmt: skip
    rules = rules_of(measured, topology)
    table = ChoiceTable(shape, VIRTUAL, unisono.__version__, rules, measured, about)
    print(f"{_PREFIX}wrote {tuning.save(table)}", file=sys.stderr)
    _show(table)


def measure_and_save(rank: int, plan: TuningPlan) -> None:
    """Measure as one rank of a world; the first rank of each host writes the table.

    Args:
        rank: This rank, or -1; the environment has it, too.
        plan: Operations, sizes and duration.

    Raises:
        InvalidArgumentError: The world has one rank, or the file cannot be written.
    """
    import unisono
    from unisono.core.backends import tuning
    from unisono.core.backends.cpu import CPUBackend
    from unisono.core.schedules.choice.tables import ChoiceTable
    from unisono.core.schedules.choice.tuning import rules_of, topology_of
    from unisono.workbench.bench.tuning import PASSES, hosts, measure, quartiles

    start_s, load = time.perf_counter(), load_average()
    # The file may not exist yet, and the measurement must not depend on an older table.
    named = config.get("UNISONO_TUNING")
    os.environ["UNISONO_TUNING"] = "0"
    try:
        unisono.init_process_group()
    finally:
        os.environ["UNISONO_TUNING"] = named
    try:
        group = unisono.group.WORLD
        assert group is not None
        rank, names = group.rank(), hosts()
        if len(names) < 2:
            raise InvalidArgumentError("tune: a world of 1 rank has no algorithms to choose from")
        backend = group.backends["cpu"]
        assert isinstance(backend, CPUBackend)
        shape = backend.shape
        with progress_bar(_PREFIX, shown=rank == 0) as progress:
            measured = quartiles(measure(plan, topology_of(shape), progress))
        took_s = time.perf_counter() - start_s
        about = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "seconds": round(took_s, 1),
            "passes": PASSES,
            "load": round(load, 2),
            "hosts": len(set(names)),
        }
        rules = rules_of(measured, topology_of(shape))
        table = ChoiceTable(shape, tuning.machine(), unisono.__version__, rules, measured, about)
        if names.index(names[rank]) == rank:
            file = tuning.save(table)
            print(f"{_PREFIX}wrote {file} on {names[rank]}", file=sys.stderr)
        if rank == 0:
            _show(table)
            if load > (os.cpu_count() or 1):
                print(f"{_PREFIX}the machine was busy before (load {load:.1f}); the choices of a "
                      "quiet machine may differ", file=sys.stderr)  # fmt: skip
    finally:
        unisono.destroy_process_group()


def _show(table: ChoiceTable) -> None:
    """Print the rules of a table, and what each gains."""
    from unisono.core.schedules.choice.explain import nbytes_text
    from unisono.core.schedules.choice.select import select
    from unisono.core.schedules.choice.tables import VIRTUAL
    from unisono.core.schedules.choice.tuning import LEAST_PASSES, mean_us, topology_of

    about, topology = table.about, topology_of(table.shape)
    shape = table.shape
    far = f", {shape.round_trip_us / 1000:g} ms" if shape.round_trip_us else ""
    over = shape.over.replace("-", " ") + far
    print(f"# table {table.digest}: {shape.ranks} ranks, {shape.local} per host, {over}")
    notes = ", ".join(f"{key} {value}" for key, value in about.items())
    print(plain(f"# {table.machine}; {notes}"))
    for op, least, most, name in table.rules:
        gains = []
        for (measured_op, nbytes), times in table.measured.items():
            built_in = select(op, nbytes, topology).algorithm if measured_op == op else ""
            if least <= nbytes <= most and {name, built_in} <= times.keys():
                gain = mean_us(times[built_in]) / mean_us(times[name])
                gains.append(f"{nbytes_text(nbytes)}: {gain:.2f} x faster than {built_in}")
        print(f"{op:<15}{least:>12,} .. {most:<12,} {name:<22}{'; '.join(gains)}")
    passes = [max(map(len, times.values())) for times in table.measured.values()]
    how = "simulated" if table.machine == VIRTUAL else "measured"
    cells = f"{len(passes)} cells were {how}"
    if few := sum(count < LEAST_PASSES for count in passes):
        cells += f"; {few} of them once, which makes no rule: the time was too short"
    print(f"# the built-in rule stays for all other sizes ({cells})", flush=True)
