"""Measure the cost of the agreement: the same calls with and without it, in turns.

    python benchmarks/checks.py [--nproc-per-node 2] [--rounds 41] [--json FILE]

Three groups of the same ranks make the same public calls. In the second group the C++ engine skips
the agreement; everything else is the same. The rounds of the groups take turns, and a ratio is that
of neighbouring rounds, so that the load of the machine affects all groups. A round's time is that
of its slowest rank. The third group equals the first. The ratio of these two shows the error of
the method. The place of memory changes times by some per cent, so groups and arrays are made anew
several times.

The agreement costs more than the comparison, because all ranks must have come. Without it a
broadcast's root runs ahead of the others, and a rank copies its own block of an all_gather while it
waits.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np

import unisono as dist
from unisono.core.base.seam import cpp as extension
from unisono.testing import run

# Shorter: a round depends on chance. Longer: neighbouring rounds see different loads.
ROUND_S = 0.005

# How often groups and arrays are made anew.
PLACES = 5


def let_off(runner: object) -> None:
    """Run all programs of this runner without an agreement."""
    prepared = extension.Prepared

    def unchecked(*arguments: Any, **options: Any) -> Any:
        if arguments[0] is runner:
            options["fingerprint"] = 0
        return prepared(*arguments, **options)

    mock.patch.object(extension, "Prepared", unchecked).start()


def calls(nbytes: int, group: Any) -> dict[str, Callable[[], object]]:
    """Return the calls to be timed."""
    p = dist.get_world_size()
    x, whole = np.ones(nbytes // 4, np.float32), np.ones(p * nbytes // 4, np.float32)
    return {
        "all_reduce": lambda: dist.all_reduce(x, dist.ReduceOp.MAX, group),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(whole, x, group),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(
            x, whole, dist.ReduceOp.MAX, group
        ),
        "broadcast": lambda: dist.broadcast(x, 0, group),
    }


def seconds(call: Callable[[], object], count: int) -> float:
    """Return the time of one call in a loop of `count`, on the slowest rank."""
    dist.barrier()
    began = time.perf_counter()
    for _ in range(count):
        call()
    took = np.array([(time.perf_counter() - began) / count])
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took[0])


def measure(rank: int, sizes: list[int], rounds: int) -> list[dict[str, Any]]:
    """Time all calls of all sizes; the result is the same on every rank."""
    times: dict[tuple[str, int], list[list[float]]] = {}
    for _ in range(PLACES):
        groups = [dist.new_group() for _ in range(3)]
        for group in groups:
            group.barrier()  # the first call makes the shared memory
        engine = groups[1].backends["cpu"]._engine
        if engine.name != "native":
            raise SystemExit(f"this needs the native engine; the group has {engine.name}")
        let_off(engine._group)
        for nbytes in sizes:
            each = [calls(nbytes, group) for group in groups]
            for name in each[0]:
                for one in each:
                    seconds(one[name], 20)
                count = max(1, int(ROUND_S / seconds(each[0][name], 20)))
                rows = times.setdefault((name, nbytes), [])
                for number in range(-(-rounds // PLACES)):
                    order = [(number + k) % 3 for k in range(3)]
                    taken = {k: seconds(each[k][name], count) for k in order}
                    rows.append([taken[k] for k in range(3)])
        for group in groups:
            dist.destroy_process_group(group)
        mock.patch.stopall()
    return [row(name, nbytes, rows) for (name, nbytes), rows in times.items()]


def row(name: str, nbytes: int, times: list[list[float]]) -> dict[str, Any]:
    """Return the figures of rounds with, without, and again with an agreement."""
    ratios = sorted(a / b for a, b, _ in times)
    return {
        "call": name,
        "nbytes": nbytes,
        "checked_us": statistics.median(a for a, _, _ in times) * 1e6,
        "unchecked_us": statistics.median(b for _, b, _ in times) * 1e6,
        "ratio": statistics.median(ratios),
        "ratio_fastest": min(a for a, _, _ in times) / min(b for _, b, _ in times),
        "ratio_of_equals": statistics.median(a / c for a, _, c in times),
        "quartiles": [ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]],
    }


def main() -> None:
    """Print one row per call and size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nproc-per-node", type=int, default=2, help="ranks, all on this host")
    parser.add_argument("--rounds", type=int, default=41, help="rounds of each group per row")
    parser.add_argument("--sizes", default="8,4096,65536,1048576", help="bytes, comma-separated")
    parser.add_argument("--json", help="write the rows there as well")
    arguments = parser.parse_args()
    sizes = [int(size) for size in arguments.sizes.split(",")]
    loads = [os.getloadavg()[0]]
    rows = run(
        measure,
        arguments.nproc_per_node,
        ranks="processes",
        args=(sizes, arguments.rounds),
        timeout=600,
    )[0]
    loads.append(os.getloadavg()[0])
    times = f"{'checked':>10}{'without':>10}{'ratio':>8}"
    print(f"{'call':24}{'bytes':>9}{times}  quartiles    fastest  equals")
    for each in rows:
        low, high = each["quartiles"]
        print(
            f"{each['call']:24}{each['nbytes']:>9}{each['checked_us']:>8.2f}us"
            f"{each['unchecked_us']:>8.2f}us{each['ratio']:>8.3f}  {low:.3f} {high:.3f}"
            f"{each['ratio_fastest']:>9.3f}{each['ratio_of_equals']:>8.3f}"
        )
    print(f"load {loads[0]:.2f} before, {loads[1]:.2f} after")
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump({"nprocs": arguments.nproc_per_node, "load": loads, "rows": rows}, file)


if __name__ == "__main__":
    main()
