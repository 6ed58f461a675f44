"""Measure the simulator: messages per second, and worlds of 24,576 ranks.

Run from the repository root: `python benchmarks/simulate.py [--all] [--links] [--costs]`. Times are
processor seconds, so that other programs on the machine matter less. Nothing here is a test.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from unisono.core.schedules import available, build
from unisono.core.schedules.ir import ROOTED
from unisono.core.schedules.registry import _TABLE
from unisono.errors import InvalidArgumentError
from unisono.workbench.simulate import Costs, Hosts, LinkSpec, LogGOPS, Switch, program_of, simulate
from unisono.workbench.simulate.evaluators.evaluate import all_rows
from unisono.workbench.simulate.evaluators.links import run as run_links
from unisono.workbench.simulate.evaluators.loggops import run as run_loggops
from unisono.workbench.simulate.evaluators.stages import run as run_stages
from unisono.workbench.simulate.evaluators.traffic import Traffic

RANKS = 24_576
PER_HOST = 6


def main() -> None:
    """Print a line per measurement."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true", help="also every algorithm at 24,576 ranks")
    parser.add_argument("--links", action="store_true", help="24,576 ranks: links serve in turn")
    parser.add_argument("--costs", action="store_true", help="24,576 ranks: ranks need time")
    flags = parser.parse_args()
    costs = Costs(100_000, 100_000, reduction=LinkSpec(gbps=10.0)) if flags.costs else Costs()
    for algorithm, ranks in (("ring", 128), ("ring", 256), ("recursive_doubling", 1024)):
        rows = all_rows([Traffic(build("all_reduce", algorithm, ranks), 1 << 20, 4)])
        name = f"all_reduce {algorithm}, {ranks} ranks"
        for network in (
            Switch(ranks, LinkSpec(1_000_000, 12.5)),
            Hosts(ranks, 8, LinkSpec(600_000, 100), LinkSpec(2_200_000, 12.5)),
        ):
            label = f"events on {type(network).__name__}: {name}"
            rate(label, partial(run_links, rows, network, Costs()))
        program = program_of(rows, ranks)
        rate(f"events of LogGOPS: {name}", partial(run_loggops, program, LogGOPS()))
    network = Hosts(16_384, 8, LinkSpec(600_000, 100), LinkSpec(2_200_000, 12.5))
    flat = Switch(16_384, LinkSpec(1_000_000, 12.5))
    for algorithm, depth in (("halving_doubling", 1), ("double_tree", 16), ("tree", 16)):
        schedule = build("all_reduce", algorithm, 16_384, pipeline=depth)
        for where in (flat, network):
            label = f"stages on {type(where).__name__}: all_reduce {algorithm}, 16,384 ranks"
            traffic = Traffic(schedule, 1 << 26, 4)
            rate(label, partial(run_stages, [traffic], where, Costs(), contended=False))
    at_scale(every=flags.all, contended=flags.links, costs=costs)


def rate(label: str, call: Callable[[], Any]) -> None:
    """Print the messages per second of the fastest of 3 calls."""
    best, result = min((timed(call) for _ in range(3)), key=lambda pair: pair[0])
    print(f"{label}: {result.messages / best / 1e3:,.0f} thousand messages/s", flush=True)


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Return the processor time of a call, and its result."""
    start = time.process_time()
    result = call()
    return time.process_time() - start, result


def at_scale(*, every: bool, **options: Any) -> None:
    """Print the time of each algorithm at 24,576 ranks (16,384 where it needs a power of two)."""
    some = {("all_reduce", name) for name in ("ring", "tree", "double_tree", "node_tree")}
    for collective, table in _TABLE.items():
        for algorithm in table:
            if not every and (collective, algorithm) not in some:
                continue
            sizes = ((RANKS, PER_HOST), (16_384, 8))
            fits = [p for p, n in sizes if algorithm in available(collective, p, local=n)]
            if fits:
                one_at_scale(collective, algorithm, fits[0], **options)


def one_at_scale(collective: str, algorithm: str, ranks: int, **options: Any) -> None:
    """Print the time of one algorithm."""
    local = PER_HOST if ranks == RANKS else 8
    root = 0 if collective in ROOTED else -1
    schedule = build(collective, algorithm, ranks, root, 1, local)
    network = Hosts(ranks, local, LinkSpec(600_000, 100), LinkSpec(2_200_000, 12.5))
    label = f"{collective} {algorithm}, {ranks:,} ranks"
    try:
        seconds, result = timed(
            lambda: simulate(schedule, 64 * ranks, network, itemsize=4, **options)
        )
    except InvalidArgumentError as error:
        print(f"{label}: refused: {error.what}", flush=True)
        return
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"{label}: {seconds:.2f} s, {result.messages:,} messages, {result.method}, "
        f"peak so far {peak:,.0f} MiB",
        flush=True,
    )


if __name__ == "__main__":
    main()
