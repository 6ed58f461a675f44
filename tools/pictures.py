"""Draw docs/pictures: the messages of algorithms, as pictures and pages, and the time of a call.

Run from the repository root: `make docs`. A test fails when a picture is out of date. The
algorithms are drawn from the schedules that the engines run, the speeds from benchmarks/results.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from unisono.beyond.boxes import placed_boxes
from unisono.beyond.reshard.plan import Gap, cover, schedule
from unisono.core.schedules import build
from unisono.core.schedules.ir import ROOTED
from unisono.workbench.simulate import machine
from unisono.workbench.simulate.pictures.diagrams import COLOURS, diagram
from unisono.workbench.simulate.pictures.drawing import PALE, Line, Picture
from unisono.workbench.simulate.pictures.pages import page
from unisono.workbench.simulate.pictures.timeline import Timeline, in_rounds, in_time

FOLDER = Path("docs/pictures")
RESULTS = Path("benchmarks/results/2-ranks.json")

RANKS = 8
# One algorithm of each shape. two_level is drawn for 2 hosts of 4 ranks.
DRAWN = {
    "all_reduce": (
        *("ring", "tree", "double_tree", "recursive_doubling", "halving_doubling"),
        *("cube_mesh", "one_shot", "two_shot", "two_level"),
        *("swing", "torus", "recursive_multiplying"),
    ),
    "broadcast": ("binomial", "ring"),
    "all_gather": ("bruck", "far_first"),
    "all_to_all": ("pairwise",),
}
# Simulated runs of all_reduce of 1 MiB: 16 ranks on 4 hosts that share a network interface.
RUNS = ("halving_doubling", "two_level")
# Pages that step through an algorithm, beside its picture.
STEPPED = ("ring", "halving_doubling", "double_tree", "two_level")
TEMPLATE = Path("src/unisono/workbench/simulate/shipped/page.html")
NETWORK = Path("src/unisono/workbench/simulate/shipped/fat-tree.toml")
OPS = ("all_reduce", "all_gather", "all_to_all", "sendrecv")

LIBRARIES = {
    "unisono": ("unisono", COLOURS[0], 2.4),
    "mpi": ("MPICH", COLOURS[2], 1.4),
    "gloo": ("Gloo", COLOURS[1], 1.4),
}


def main() -> None:
    """Write all pictures."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, text in pictures():
        (FOLDER / name).write_text(text, encoding="utf-8")


def pictures() -> Iterator[tuple[str, str]]:
    """Yield (file name, text) of every picture and page."""
    for collective, algorithms in DRAWN.items():
        for algorithm in algorithms:
            yield f"{collective}-{algorithm}.svg", lanes(collective, algorithm)
    template = TEMPLATE.read_text(encoding="utf-8")
    for algorithm in STEPPED:
        yield f"all_reduce-{algorithm}.html", page(timeline("all_reduce", algorithm), template)
    for algorithm in RUNS:
        yield f"run-{algorithm}.svg", run(algorithm)
    yield "reshard.svg", resharded()
    yield "speed.svg", speed(json.loads(RESULTS.read_text(encoding="utf-8")))


def lanes(collective: str, algorithm: str) -> str:
    """Return the picture of a schedule: a line per rank, time to the right, arrows."""
    return diagram(timeline(collective, algorithm)).svg()


def timeline(collective: str, algorithm: str) -> Timeline:
    """Return the messages of a schedule, in rounds."""
    options = {"local": RANKS // 2} if algorithm == "two_level" else {}
    root = 0 if collective in ROOTED else -1
    return in_rounds(build(collective, algorithm, RANKS, root, **options))


def resharded() -> str:
    """Return the picture of a reshard: 4 ranks have rows, 2 others get columns."""
    rows, columns = (
        [
            [box for box, _ in placed_boxes((1000, 1000), np.array(mesh), [dim], rank) or []]
            for rank in range(6)
        ]
        for dim, mesh in enumerate(([0, 1, 2, 3], [4, 5]))
    )
    transfers = cover(rows, columns, [0] * 6, [0] * 6)
    assert not isinstance(transfers, Gap)
    sends = [(each.source, each.target, 4 * each.box.size) for each in transfers]
    return diagram(in_rounds(schedule(sends, 6)[0])).svg()


def run(algorithm: str) -> str:
    """Return the picture of a simulated run, as `unisono draw all_reduce --net fat-tree` does."""
    net = machine("fat-tree", NETWORK.read_text(encoding="utf-8"))
    net.values["ranks_per_host"] = 4
    schedule = build("all_reduce", algorithm, 16, local=4)
    network, costs = net.network(algorithm, 16), net.costs(algorithm)
    timeline = in_time(schedule, 1 << 20, network, costs, itemsize=4)
    return diagram(replace(timeline, about="1 MiB on net fat-tree of 4 hosts")).svg()


def speed(result: dict[str, Any]) -> str:
    """Return the picture of the time per call by size, one panel per operation.

    Two panels stand side by side, so that their letters can be read in a narrow README.
    """
    wide, high, gap, below = 190, 190, 48, 240
    picture = Picture(2 * (wide + gap) + 24, 78 + below * (-(-len(OPS) // 2)))
    for index, op in enumerate(OPS):
        rows = [row for row in result["rows"] if row["op"] == op]
        panel(
            picture, op, rows, (gap + index % 2 * (wide + gap), 52 + index // 2 * below, wide, high)
        )
    host = result["machine"]
    ranks = f"{result['plan']['nprocs']} ranks on one host"
    title = f"time per call in the fastest rounds, {ranks}: lower is better"
    picture.label(8, 20, title, 13, bold=True)
    bottom = picture.height - 12
    picture.label(8, bottom, f"{host['cpu']}, {host['cores']} cores; float32", 10)
    for index, (name, colour, _) in enumerate(LIBRARIES.values()):
        x = gap + 86 * index
        picture.shapes.append(Line(((x, bottom - 22), (x + 22, bottom - 22)), colour, 2.4))
        picture.label(x + 27, bottom - 18, name, 11)
    return picture.svg()


def panel(
    picture: Picture, op: str, rows: Sequence[dict[str, Any]], place: tuple[int, int, int, int]
) -> None:
    """Add one diagram with logarithmic scales: 8 B to 64 MiB, 0.1 us to 100 ms."""
    x, y, wide, high = place

    def across(nbytes: float) -> float:
        return x + wide * (math.log2(nbytes) - 3) / 23

    def up(time_us: float) -> float:
        return y + high * (1 - (math.log10(time_us) + 1) / 6)

    picture.label(x, y - 8, op, 12)
    ticks = ("0.1 µs", "1 µs", "10 µs", "100 µs", "1 ms", "10 ms", "100 ms")
    for power, text in enumerate(ticks, start=-1):
        height = up(10.0**power)
        picture.shapes.append(Line(((x, height), (x + wide, height)), PALE, 0.7))
        picture.label(x - 4, height + 3, text, 9, "end")
    for nbytes, text in ((8, "8 B"), (1 << 10, "1 Ki"), (1 << 18, "256 Ki"), (1 << 26, "64 Mi")):
        picture.label(across(nbytes), y + high + 14, text, 9, "middle")
    for library, (_, colour, thick) in reversed(LIBRARIES.items()):
        points = tuple(
            (across(row["size_bytes"]), up(row["results"][library]["best_us"])) for row in rows
        )
        picture.shapes.append(Line(points, colour, thick))


if __name__ == "__main__":
    main()
