"""Judge the simulator as a model of this machine: what does its choice cost over TCP?

Run from the repository root, after `benchmarks/tuning.py tcp-2 tcp-4 tcp-8` has measured:
`python benchmarks/model.py [--folder F] [--seed N] [WORLD ...]`. Nothing is measured here.

A cell is an operation, a size and an algorithm. For each number of ranks, the constants of the
model are fitted on 28 random cells of one run. Then the model chooses an algorithm for each
operation and size. The choice costs its time in the other run over that of the best algorithm
there; see `benchmarks/tuning.py` for the regret and for `over held out`.

The model: ranks take turns on the cores of this machine. Each pays for its messages, their bytes,
its copies and reductions. A message takes a latency more. 3 calls follow one another, each with an
agreement, as in the loops that are measured. A choice replaces the built-in choice if its
predicted time is 20 % less, because most predictions are within 25 %.
"""

from __future__ import annotations

import argparse
import math
import os
import random
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import numpy as np
from tuning import Cell, Half, mean_us, topology_of

from unisono.core.schedules import Topology, available, build, select
from unisono.core.schedules.ir import ROOTED
from unisono.workbench.simulate import Costs, LinkSpec, Switch, Traffic
from unisono.workbench.simulate.evaluators.evaluate import all_rows
from unisono.workbench.simulate.evaluators.links import run

CELLS = 28
MARGIN = 0.8
CALLS = 3
STEPS = 14
# Microseconds and GB/s to begin with.
START = {
    "call": 5.0, "send": 4.0, "receive": 4.0, "switch": 3.0, "wake": 3.0, "latency": 5.0,
    "message": 4.0, "copy": 10.0, "reduce": 5.0,
}  # fmt: skip

Name = tuple[str, int, str]


def main() -> None:
    """Print a line per world."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("worlds", nargs="*", default=["tcp-2", "tcp-4", "tcp-8"])
    parser.add_argument("--folder", type=Path, default=Path("build/tuning"), help="of the runs")
    parser.add_argument("--seed", type=int, default=1, help="of the fitted cells (1)")
    flags = parser.parse_args()
    columns = ("world", "cells", "within 25 %", "built-in", "model", "over held out")
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for world in flags.worlds:
        halves = [Half.read(flags.folder / f"{world}-{half}.json") for half in "ab"]
        print(judged(world, halves, random.Random(flags.seed)), flush=True)


def judged(world: str, halves: list[Half], choose: random.Random) -> str:
    """Return a line of a world: the model of each run is judged on the other run."""
    topology = topology_of(halves[0].shape)
    calls = Calls(topology.world_size)
    regrets: list[list[float]] = [[], [], []]
    near = []
    for half, other in (halves, halves[::-1]):
        known = times_of(half)
        constants = calls.fit({cell: known[cell] for cell in choose.sample(sorted(known), CELLS)})
        near += [
            abs(math.log(calls.us(cell, constants) / us)) < math.log(1.25)
            for cell, us in times_of(other).items()
        ]
        for (op, nbytes), times in other.measured(median).items():
            names = available(op, topology.world_size, local=topology.local)
            predicted = {name: calls.us((op, nbytes, name), constants) for name in names}
            built_in = select(op, nbytes, topology).algorithm
            chosen = min(predicted, key=predicted.__getitem__)
            if predicted[chosen] > MARGIN * predicted[built_in]:
                chosen = built_in
            cell = Cell(times)
            regrets[0].append(cell.regret(built_in))
            regrets[1].append(cell.regret(chosen))
            regrets[2] += cell.held_out(chosen)
    figures = [f"{geometric_mean(column):.3f}" for column in regrets]
    share = f"{100 * sum(near) / len(near):.0f} %"
    return f"| {' | '.join([world, str(len(regrets[0])), share, *figures])} |"


def times_of(half: Half) -> dict[Name, float]:
    """Return the mean time of each cell whose algorithm was measured in all passes."""
    return {
        (op, nbytes, name): mean_us(passes)
        for (op, nbytes), times in half.measured(median).items()
        for name, passes in times.items()
        if len(passes) == max(map(len, times.values()))
    }


class Calls:
    """Calls of one number of ranks in virtual time; rows are kept for the next constants."""

    def __init__(self, ranks: int) -> None:
        self.ranks, self.rows = ranks, dict[Name, Any]()

    def us(self, cell: Name, constants: dict[str, float]) -> float:
        """Return the predicted microseconds of a call."""
        if cell not in self.rows:
            op, nbytes, name = cell
            depth = select(op, nbytes, Topology(self.ranks), name).pipeline
            schedule = build(op, name, self.ranks, 0 if op in ROOTED else -1, depth)
            agreement = Traffic(build("barrier", "dissemination", self.ranks), 0, message_bytes=8)
            self.rows[cell] = all_rows([agreement, Traffic(schedule, nbytes, 4)] * CALLS)
        ps = {name: round(1e6 * value) for name, value in constants.items()}
        costs = Costs(
            ps["send"], ps["receive"], 0, LinkSpec(0, constants["copy"]),
            LinkSpec(0, constants["reduce"]), cores=os.cpu_count() or 1, switch_ps=ps["switch"],
            messages=LinkSpec(0, constants["message"]), wake_ps=ps["wake"],
        )  # fmt: skip
        network = Switch(self.ranks, LinkSpec(ps["latency"] // 2))
        network.period = self.ranks  # one host
        result = run(self.rows[cell], network, costs)
        return constants["call"] + result.last_us / CALLS

    def fit(self, measured: dict[Name, float]) -> dict[str, float]:
        """Return the constants with the least squares of logarithms (Levenberg-Marquardt)."""
        names, damping = list(START), 0.1
        point = np.log([START[name] for name in names])
        errors = self.errors(point, measured)
        for _ in range(STEPS):
            slopes = [
                (self.errors(point + 0.3 * unit, measured) - errors) / 0.3
                for unit in np.eye(len(names))
            ]
            matrix = np.array(slopes)
            normal = matrix @ matrix.T + damping * np.eye(len(names))
            trial = point - np.clip(np.linalg.solve(normal, matrix @ errors), -1, 1)
            found = self.errors(trial, measured)
            better = found @ found < errors @ errors
            damping *= 0.4 if better else 4
            if better:
                point, errors = trial, found
        return dict(zip(names, np.exp(point).tolist(), strict=True))

    def errors(self, point: Any, measured: dict[Name, float]) -> Any:
        """Return the logarithms of predicted over measured times."""
        constants = dict(zip(START, np.exp(point).tolist(), strict=True))
        return np.array([math.log(self.us(cell, constants) / us) for cell, us in measured.items()])


if __name__ == "__main__":
    main()
