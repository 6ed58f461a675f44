"""Draw docs/pictures: the messages of the algorithms, and the time of a call.

Run from the repository root: `make docs`. A test fails when a picture is out of date. The
algorithms are drawn from the schedules that the engines run, the speeds from benchmarks/results.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from unisono.schedules import build
from unisono.schedules.cost import cost
from unisono.schedules.ir import ROOTED, Op

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
OPS = ("all_reduce", "all_gather", "all_to_all", "sendrecv")

# One colour per chunk, from Okabe and Ito's palette for colour-blind readers.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A6A00", "#444444")
INK, PALE, FONT = "#222222", "#d8d8d8", "font-family='Helvetica, Arial, sans-serif'"
LIBRARIES = {
    "unisono": ("unisono", COLOURS[0], 2.4),
    "mpi": ("MPICH", COLOURS[2], 1.4),
    "gloo": ("Gloo", COLOURS[1], 1.4),
}


class Message(NamedTuple):
    """One arrow: a chunk that moves from rank to rank in a round."""

    round: int
    source: int
    target: int
    chunk: int
    reduces: bool


def main() -> None:
    """Write all pictures."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, text in pictures():
        (FOLDER / name).write_text(text, encoding="utf-8")


def pictures() -> Iterator[tuple[str, str]]:
    """Yield (file name, SVG text) of every picture."""
    for collective, algorithms in DRAWN.items():
        for algorithm in algorithms:
            yield f"{collective}-{algorithm}.svg", lanes(collective, algorithm)
    yield "speed.svg", speed(json.loads(RESULTS.read_text(encoding="utf-8")))


def messages(schedule: Any) -> Iterator[Message]:
    """Yield the messages of a schedule; a post is one message to each rank that reads it."""
    receiving = {Op.RECV: False, Op.RECV_REDUCE: True, Op.READ: False, Op.READ_REDUCE: True}
    for k in range(schedule.stages):
        sent: dict[tuple[int, int], list[int]] = {}
        rows = schedule.steps(k, np.arange(schedule.world_size))
        for rank, op, peer, _, chunk, *_ in rows.tolist():
            if op in (Op.SEND, Op.POST):
                others = [r for r in range(schedule.world_size) if r != rank]
                for target in others if peer == -1 else [peer]:
                    sent.setdefault((rank, target), []).append(chunk)
        for rank, op, peer, *_ in rows.tolist():
            if op in receiving:
                chunk = sent[peer, rank].pop(0)
                yield Message(k, peer, rank, chunk, receiving[Op(op)])


def lanes(collective: str, algorithm: str) -> str:
    """Return the picture of a schedule: a line per rank, time to the right, arrows."""
    options = {"local": RANKS // 2} if algorithm == "two_level" else {}
    root = 0 if collective in ROOTED else -1
    schedule = build(collective, algorithm, RANKS, root, **options)
    left, top, high = 58, 46, 24
    wide = max(64, min(110, 420 // schedule.stages))
    width, height = left + wide * schedule.stages + 16, top + high * RANKS + 6
    counted = cost(schedule)
    bytes_sent = f"{counted.bytes_sent} n".removeprefix("1 ")
    rounds = "1 round" if counted.rounds == 1 else f"{counted.rounds} rounds"
    title = f"{collective}, {algorithm}: {rounds}, {bytes_sent} sent by the busiest rank"
    parts = [label(12, 18, title, 13, weight="bold")]
    for k in range(schedule.stages):
        parts.append(label(left + wide * (k + 0.5), top - 10, str(k + 1), 10, anchor="middle"))
        if k % 2 == 0:
            parts.append(
                f"<rect x='{left + wide * k}' y='{top - 4}' width='{wide}' "
                f"height='{high * RANKS + 2}' fill='#f5f5f5'/>"
            )
    for rank in range(RANKS):
        y = top + high * (rank + 0.5)
        parts.append(label(12, y + 4, f"rank {rank}", 11))
        parts.append(line(left, y, left + wide * schedule.stages, y, PALE, 1.2))
    for message in messages(schedule):
        begin, end = left + wide * message.round + 5, left + wide * (message.round + 1) - 5
        y0, y1 = (top + high * (rank + 0.5) for rank in (message.source, message.target))
        parts += arrow(begin, y0, end, y1, COLOURS[message.chunk % len(COLOURS)], message.reduces)
    # A title takes up to 9 units for each letter, in the widest fonts.
    return picture(max(width, 24 + 9 * len(title)), height, parts)


def arrow(x0: float, y0: float, x1: float, y1: float, colour: str, full: bool) -> Iterator[str]:
    """Yield an arrow; its head is filled if the receiver reduces, open if it stores."""
    length = math.hypot(x1 - x0, y1 - y0)
    along, across = (x1 - x0) / length, (y1 - y0) / length
    back_x, back_y = x1 - 7 * along, y1 - 7 * across
    yield line(x0, y0, back_x, back_y, colour, 1.5)
    points = " ".join(
        f"{number(x)},{number(y)}"
        for x, y in (
            (x1, y1),
            (back_x - 3.2 * across, back_y + 3.2 * along),
            (back_x + 3.2 * across, back_y - 3.2 * along),
        )
    )
    fill = colour if full else "white"
    yield f"<polygon points='{points}' fill='{fill}' stroke='{colour}' stroke-width='1.3'/>"


def speed(result: dict[str, Any]) -> str:
    """Return the picture of the time per call by size, one panel per operation."""
    wide, high, gap = 190, 190, 44
    parts = []
    for index, op in enumerate(OPS):
        rows = [row for row in result["rows"] if row["op"] == op]
        parts += panel(op, rows, gap + index * (wide + gap), 52, wide, high)
    host = result["machine"]
    ranks = f"{result['plan']['nprocs']} ranks on one host"
    title = f"time per call in the fastest rounds, {ranks}: lower is better"
    parts.append(label(gap, 20, title, 14, weight="bold"))
    parts.append(label(gap, 288, f"{host['cpu']}, {host['cores']} cores; float32", 10))
    for index, (name, colour, _) in enumerate(LIBRARIES.values()):
        x = gap + 3 * (wide + gap) - 60 + 86 * index
        parts += [line(x, 284, x + 22, 284, colour, 2.4), label(x + 27, 288, name, 11)]
    return picture(gap + len(OPS) * (wide + gap), 300, parts)


def panel(
    op: str, rows: Sequence[dict[str, Any]], x: int, y: int, wide: int, high: int
) -> Iterator[str]:
    """Yield one diagram with logarithmic scales: 8 B to 64 MiB, 0.1 us to 100 ms."""

    def across(nbytes: float) -> float:
        return x + wide * (math.log2(nbytes) - 3) / 23

    def up(time_us: float) -> float:
        return y + high * (1 - (math.log10(time_us) + 1) / 6)

    yield label(x, y - 8, op, 12)
    for power, text in enumerate(("0.1 µs", "1", "10", "100", "1 ms", "10", "100"), start=-1):
        yield line(x, up(10.0**power), x + wide, up(10.0**power), PALE, 0.7)
        yield label(x - 4, up(10.0**power) + 3, text, 9, anchor="end")
    for nbytes, text in ((8, "8 B"), (1 << 10, "1 Ki"), (1 << 18, "256 Ki"), (1 << 26, "64 Mi")):
        yield label(across(nbytes), y + high + 14, text, 9, anchor="middle")
    for library, (_, colour, thick) in reversed(LIBRARIES.items()):
        points = " ".join(
            f"{number(across(row['size_bytes']))},{number(up(row['results'][library]['best_us']))}"
            for row in rows
        )
        yield (
            f"<polyline points='{points}' fill='none' stroke='{colour}' stroke-width='{thick}' "
            "stroke-linejoin='round'/>"
        )


def number(value: float) -> str:
    """Return a coordinate with at most one decimal."""
    return f"{value:.1f}".removesuffix(".0")


def line(x0: float, y0: float, x1: float, y1: float, colour: str, width: float) -> str:
    """Return a straight line."""
    ends = " ".join(
        f"{name}='{number(at)}'" for name, at in (("x1", x0), ("y1", y0), ("x2", x1), ("y2", y1))
    )
    return f"<line {ends} stroke='{colour}' stroke-width='{width}'/>"


def label(
    x: float, y: float, text: str, size: int, *, anchor: str = "start", weight: str = "normal"
) -> str:
    """Return a piece of text."""
    return (
        f"<text x='{number(x)}' y='{number(y)}' font-size='{size}' text-anchor='{anchor}' "
        f"font-weight='{weight}' fill='{INK}'>{text}</text>"
    )


def picture(width: float, height: float, parts: Iterable[str]) -> str:
    """Return the SVG document."""
    head = (
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{number(width)}' "
        f"height='{number(height)}' viewBox='0 0 {number(width)} {number(height)}' {FONT}>"
    )
    ground = "<rect width='100%' height='100%' fill='white'/>"
    return "\n".join([head, ground, *parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    main()
