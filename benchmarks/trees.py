"""Compare two working trees: the same cells of `unisono bench`, by turns.

    python benchmarks/trees.py OTHER [--turns 18] [--flags "all -e 1M -f 8 --rounds 9"]
    UNISONO_THREADS=2 python benchmarks/trees.py . --env UNISONO_THREADS=1 \
        --flags "all_reduce -b 16M -e 16M --hosts 2"

OTHER is another working tree of unisono with its own .venv, for instance of an older commit (`git
worktree add`, `make setup`), or this one with another variable of the environment. Each turn
measures this tree twice and OTHER, by turns in all orders. The figure of a cell is the median over
the turns of the time here divided by the time there, of the fastest rounds. `same` compares this
tree with itself: the noise.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import shlex
import statistics
import subprocess
import tempfile
from collections import defaultdict
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
Cell = tuple[str, int]
# All orders, because the last of a turn was up to 9 % slower than the first.
ORDERS = list(itertools.permutations(("here", "other", "same")))


def measure(tree: Path, flags: list[str], changes: dict[str, str]) -> dict[Cell, float]:
    """Return the time of the fastest round of each cell, in microseconds."""
    env = os.environ | changes
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [tree / ".venv/bin/python", "-m", "unisono", "bench", *flags]
        subprocess.run(
            [*command, "--json", file.name],
            cwd=tree,
            check=True,
            stdout=subprocess.DEVNULL,
            env=env,
        )
        rows = json.loads(Path(file.name).read_text())["rows"]
    return {(row["op"], row["size_bytes"]): row["results"]["unisono"]["best_us"] for row in rows}


def main() -> None:
    """Print a line per cell, and the geometric mean of all."""
    parser = argparse.ArgumentParser()
    parser.add_argument("other", type=Path)
    parser.add_argument("--turns", type=int, default=18)
    parser.add_argument("--flags", default="all -e 1M -f 8 --rounds 9")
    parser.add_argument("--env", metavar="NAME=VALUE", default="", help="for OTHER")
    options = parser.parse_args()
    name, _, value = options.env.partition("=")
    changes = {"here": {}, "other": {name: value} if name else {}, "same": {}}
    flags = shlex.split(options.flags)
    trees = {"here": HERE, "other": options.other.resolve(), "same": HERE}
    ratios: dict[str, dict[Cell, list[float]]] = {name: defaultdict(list) for name in trees}
    for turn in range(options.turns):
        names = ORDERS[turn % len(ORDERS)]
        times = {name: measure(trees[name], flags, changes[name]) for name in names}
        for name in ("other", "same"):
            for cell, time_us in times["here"].items():
                ratios[name][cell].append(time_us / times[name][cell])
    print(f"{'operation':16}{'bytes':>10}{'here/other':>12}{'here/same':>12}")
    middle = {
        name: {cell: statistics.median(found) for cell, found in cells.items()}
        for name, cells in ratios.items()
    }
    for cell in middle["other"]:
        figures = f"{middle['other'][cell]:12.3f}{middle['same'][cell]:12.3f}"
        print(f"{cell[0]:16}{cell[1]:>10}{figures}")
    means = [
        math.exp(statistics.fmean(map(math.log, middle[name].values())))
        for name in ("other", "same")
    ]
    print(f"{'geometric mean':26}{means[0]:12.3f}{means[1]:12.3f}")


if __name__ == "__main__":
    main()
