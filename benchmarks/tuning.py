"""Judge tuning tables on runs that they have not seen: how much slower is a choice than the best?

Run from the repository root: `python benchmarks/tuning.py [--folder F] [--seconds S] [KIND-N ...]`.
A kind is `shm`, `tcp` (one host, no shared memory) or `hosts` (two network namespaces, needs root);
N is the number of ranks. For each, the measurement of `unisono tune` runs twice, one run after the
other. The table of each run is judged on the times of the other run, so both are held out once.

A cell is an operation and a size. The regret of a choice is its time divided by the time of the
best algorithm in the same run. A pass gives the median of its rounds, or the fastest round. All
means are geometric. An algorithm that was left out counts by its first pass, or 1.4 without one.

The best of noisy times is too good, so a perfect choice has a regret above 1. Two columns show
that. `best of other run` is the regret of the other run's fastest algorithm. `over held out`
compares the table's choice in each pass with the algorithm that was best in the other passes of
that run. Noise in the pass itself did not choose that algorithm. `differ` is the factor between two
runs' times of a call.

With --judge, nothing is measured: the runs in the folder are judged again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import geometric_mean, median
from typing import NamedTuple

import unisono
from unisono.core.backends.cpu import CPUBackend
from unisono.core.schedules.choice.select import select
from unisono.core.schedules.choice.tables import ChoiceTable, GroupShape, Measured
from unisono.core.schedules.choice.tuning import mean_us, rules_of, topology_of
from unisono.testing.hosts import Network
from unisono.workbench.bench.tuning import OUT_AFTER_PASS, Rounds, TuningPlan, measure, quartile

WORLDS = [f"{kind}-{ranks}" for kind in ("shm", "tcp", "hosts") for ranks in (2, 4, 8)]
COLUMNS = ("world", "statistic", "cells", "built-in", "table", "best of other run",
           "over held out", "differ")  # fmt: skip
STATISTICS: dict[str, Callable[[list[float]], float]] = {"median": median, "fastest": min}


def main() -> None:
    """Print a line per world."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("worlds", nargs="*", default=WORLDS, metavar="KIND-N")
    parser.add_argument("--folder", type=Path, default=Path("build/tuning"), help="of the tables")
    parser.add_argument("--seconds", type=float, default=60.0, help="limit of each run")
    parser.add_argument("--judge", action="store_true", help="measure nothing")
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.rank_of:
        measure_as_rank(flags.rank_of, flags.seconds)
        return
    flags.folder.mkdir(parents=True, exist_ok=True)
    print(f"# load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores; regret, geometric mean")
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    for world in flags.worlds:
        kind, _, ranks = world.partition("-")
        files = [flags.folder.resolve() / f"{world}-{half}.json" for half in "ab"]
        for file in files:
            if not flags.judge:
                run(kind, int(ranks), file, flags.seconds)
        if all(file.exists() for file in files):
            for name in STATISTICS:
                print(judged(world, name, [Half.read(file) for file in files]), flush=True)


class Half(NamedTuple):
    """One run: the shape of its world, and all times."""

    shape: GroupShape
    rounds: Rounds

    def measured(self, statistic: Callable[[list[float]], float]) -> Measured:
        """Return a time per pass; algorithms that were left out have fewer passes."""
        return {
            cell: {name: tuple(map(statistic, passes)) for name, passes in times.items()}
            for cell, times in self.rounds.items()
        }

    @classmethod
    def read(cls, file: Path) -> Half:
        """Return the run of a file."""
        fields = json.loads(file.read_text(encoding="utf-8"))
        return cls(
            GroupShape(*fields["shape"]), {(op, n): times for op, n, times in fields["rounds"]}
        )


def measure_as_rank(file: Path, seconds: float) -> None:
    """Measure as one rank; rank 0 writes the file."""
    unisono.init_process_group()
    group = unisono.group.WORLD
    assert group is not None
    backend = group.backends["cpu"]
    assert isinstance(backend, CPUBackend)
    plan = TuningPlan(limit_s=seconds)
    rounds = measure(plan, topology_of(backend.shape), lambda *_: None)
    if unisono.get_rank() == 0:
        rows = [[op, nbytes, times] for (op, nbytes), times in rounds.items()]
        fields = {"shape": backend.shape, "rounds": rows}
        file.write_text(json.dumps(fields), encoding="utf-8")
    unisono.destroy_process_group()


def run(kind: str, ranks: int, file: Path, seconds: float) -> None:
    """Measure one run."""
    settings = {"UNISONO_TUNING": "0", "UNISONO_TOKEN": secrets.token_hex()}
    if kind == "tcp":
        settings["UNISONO_SHARED_MEMORY"] = "0"
    file.unlink(missing_ok=True)
    command = [sys.executable, "-m", "unisono", "run"]
    tune = [os.path.abspath(__file__), "--rank-of", str(file), "--seconds", str(seconds)]
    with contextlib.ExitStack() as stack:
        if kind == "hosts":
            hosts = stack.enter_context(Network(2)).hosts
            words = [*command, "--nnodes", "2", "--master-addr", "host1"]
            commands = [
                host.inside(*words, "--node-rank", str(index), "--nproc-per-node",
                            str(ranks // 2), *tune)
                for index, host in enumerate(hosts)
            ]  # fmt: skip
        else:
            commands = [[*command, "--nproc-per-node", str(ranks), *tune]]
        env = os.environ | settings
        started = [
            subprocess.Popen(words, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
            for words in commands
        ]
        for process in started:
            _, errors = process.communicate()
            if process.returncode:
                raise SystemExit(errors.decode())


def judged(world: str, statistic: str, halves: list[Half]) -> str:
    """Return a line of a world: each half is judged on the other."""
    topology = topology_of(halves[0].shape)
    columns: list[list[float]] = [[], [], [], [], []]
    for half, other in (halves, halves[::-1]):
        trained, tested = half.measured(quartile), other.measured(STATISTICS[statistic])
        table = ChoiceTable(half.shape, "", "", rules_of(trained, topology))
        same = half.measured(STATISTICS[statistic])
        for op, nbytes in tested.keys() & trained.keys():  # a run may be out of time
            cell, seen = Cell(tested[op, nbytes]), Cell(trained[op, nbytes])
            names = (
                select(op, nbytes, topology).algorithm,
                select(op, nbytes, topology, table=table).algorithm,
                seen.best,
            )
            for column, name in zip(columns, names, strict=False):
                column.append(cell.regret(name))
            columns[3] += cell.held_out(names[1])
            both = seen.full.keys() & cell.full.keys()
            factors = [mean_us(same[op, nbytes][name]) / cell.full[name] for name in both]
            columns[4] += [max(factor, 1 / factor) for factor in factors]
    figures = [f"{geometric_mean(column):.3f}" for column in columns]
    return f"| {' | '.join([world, statistic, str(len(columns[0])), *figures])} |"


class Cell:
    """The times of an operation and a size, by algorithm and pass."""

    def __init__(self, times: Mapping[str, tuple[float, ...]]) -> None:
        self.times, self.passes = times, max(map(len, times.values()))
        self.full = {
            name: mean_us(passes) for name, passes in times.items() if len(passes) == self.passes
        }
        self.best = min(self.full, key=self.full.__getitem__)

    def regret(self, name: str) -> float:
        """Return the time of an algorithm over that of the best algorithm."""
        if name in self.full:
            return self.full[name] / self.full[self.best]
        if name in self.times:
            return self.times[name][0] / self.times[self.best][0]
        return OUT_AFTER_PASS

    def held_out(self, name: str) -> list[float]:
        """Return the time of an algorithm in each pass over that of the others' best algorithm."""
        if name not in self.full or self.passes < 2:
            return [self.regret(name)]
        factors = []
        for turn in range(self.passes):
            rest = {
                other: mean_us(self.times[other][:turn] + self.times[other][turn + 1 :])
                for other in self.full
            }
            best = min(rest, key=rest.__getitem__)
            factors.append(self.times[name][turn] / self.times[best][turn])
        return factors


if __name__ == "__main__":
    main()
