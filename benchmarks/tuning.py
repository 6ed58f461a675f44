"""Judge tuning tables on runs that they have not seen: how much slower is a choice than the best?

Run from the repository root: `python benchmarks/tuning.py [--folder F] [--seconds S] [KIND-N ...]`.
A kind is `shm`, `tcp` (one host, no shared memory) or `hosts` (two network namespaces, needs root);
N is the number of ranks. For each, `unisono tune` runs twice, one run after the other. The table of
each run is judged on the times of the other run, so both halves are held out once.

The regret of a choice in a cell (an operation and a size) is its mean time over the passes, divided
by that of the best algorithm in the same run. The figures are geometric means over all cells. The
best of noisy times is too good, so the regret of a perfect choice is above 1, too: the column
`best of other run` has the regret of the fastest algorithm of the other run, without any rule.

With --judge, nothing is measured: the tables in the folder are judged again.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import geometric_mean

from unisono.schedules.select import select
from unisono.schedules.tables import Measured, Table
from unisono.schedules.tuning import mean_us, rules_of, topology_of
from unisono.testing.hosts import Network

WORLDS = [f"{kind}-{ranks}" for kind in ("shm", "tcp", "hosts") for ranks in (2, 4, 8)]
COLUMNS = ("world", "cells", "built-in", "table", "best of other run", "rules")


def main() -> None:
    """Print a line per world."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("worlds", nargs="*", default=WORLDS, metavar="KIND-N")
    parser.add_argument("--folder", type=Path, default=Path("build/tuning"), help="of the tables")
    parser.add_argument("--seconds", type=float, default=60.0, help="limit of each run")
    parser.add_argument("--judge", action="store_true", help="measure nothing")
    flags = parser.parse_args()
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
            print(judged(world, [Table.from_json(f.name, f.read_text()) for f in files]))
            sys.stdout.flush()


def run(kind: str, ranks: int, file: Path, seconds: float) -> None:
    """Measure a table."""
    settings = {"UNISONO_TUNING": str(file), "UNISONO_TOKEN": secrets.token_hex()}
    if kind == "tcp":
        settings["UNISONO_SHARED_MEMORY"] = "0"
    file.unlink(missing_ok=True)
    command = [sys.executable, "-m", "unisono", "run"]
    tune = ["-m", "unisono", "tune", "--seconds", str(seconds)]
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


def judged(world: str, halves: list[Table]) -> str:
    """Return the line of a world: each half is judged on the other."""
    topology = topology_of(halves[0].shape)
    columns: list[list[float]] = [[], [], []]
    rules = 0
    for half, other in (halves, halves[::-1]):
        table = Table(half.shape, "", "", rules_of(half.measured, topology), {})
        rules += len(table.rules)
        choices: list[Callable[[str, int], str]] = [
            lambda op, nbytes: select(op, nbytes, topology).algorithm,
            lambda op, nbytes, table=table: select(op, nbytes, topology, table=table).algorithm,  # type: ignore[misc]
            lambda op, nbytes, half=half: best(half.measured, op, nbytes),  # type: ignore[misc]
        ]
        for column, choice in zip(columns, choices, strict=True):
            column += regrets(other.measured, choice)
    figures = [f"{geometric_mean(column):.3f}" for column in columns]
    return f"| {' | '.join([world, str(len(columns[0])), *figures, str(rules)])} |"


def regrets(measured: Measured, choice: Callable[[str, int], str]) -> Iterator[float]:
    """Yield for each cell the time of the chosen algorithm over the least time."""
    for (op, nbytes), times in measured.items():
        means = {name: mean_us(passes) for name, passes in times.items()}
        # An algorithm without times was more than 3 times as slow as the best.
        yield means.get(choice(op, nbytes), 3 * min(means.values())) / min(means.values())


def best(measured: Measured, op: str, nbytes: int) -> str:
    """Return the fastest algorithm of a cell."""
    times = measured[op, nbytes]
    return min(times, key=lambda name: mean_us(times[name]))


if __name__ == "__main__":
    main()
