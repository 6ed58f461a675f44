"""The picture of `unisono simulate`: time over size or over ranks, a line per algorithm."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from typing import Any

from unisono.core.base.grouping import grouped
from unisono.workbench.bench.plot import label_times, save, size_text


def plot(rows: Sequence[dict[str, Any]], options: argparse.Namespace) -> None:
    """Draw a line per algorithm, and the published times as crosses.

    Colours are in the order of --algorithm, so that two pictures have the same.
    """
    matplotlib: Any = importlib.import_module("matplotlib")
    matplotlib.use("agg")
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    figure, panel = pyplot.subplots(figsize=(8, 5), layout="constrained")
    texts = {"ranks": lambda p: f"{p:,} ranks", "size_bytes": size_text}
    over, fixed = ("ranks", "size_bytes")[:: 1 if len(options.ranks) > 1 else -1]
    names = sorted({row["algorithm"] for row in rows})
    if options.algorithm != "all":
        names = list(dict.fromkeys(options.algorithm.split(",")))
    lines = grouped(((names.index(row["algorithm"]), row[fixed]), row) for row in rows)
    values = sorted({row[over] for row in rows})
    others = sorted({row[fixed] for row in rows})
    # matplotlib has 10 colours.
    styles = ("-", "--", ":", "-.")
    for (number, other), mine in sorted(lines.items()):
        label = names[number] + f", {texts[fixed](other)}" * (len(others) > 1)
        style = styles[(number // 10 + others.index(other)) % len(styles)]
        colour = f"C{number % 10}"
        x, measured = [row[over] for row in mine], [row["published_us"] for row in mine]
        times = [row["time_us"] for row in mine]
        # Each line is thinner than those below it, so that equal lines are seen.
        wide = 1.2 + 3 * (1 - number / len(names))
        size = {"linewidth": wide, "markersize": 3 + wide}
        panel.plot(x, times, style, color=colour, marker="o", label=label, **size)
        if any(measured):
            mark = {"color": colour, "markersize": 10, "markeredgewidth": 2}
            panel.plot(x, measured, "x", label=f"{label}, published", **mark)
    panel.set(xscale="log", yscale="log", xlabel=over.split("_")[0], ylabel="time (us)")
    labels = [f"{value:,}" if over == "ranks" else size_text(value) for value in values]
    panel.set_xticks(values, labels, rotation=30 * (len(values) > 6))
    label_times(panel)
    title = [f"{options.op} in virtual time", *map(texts[fixed], others[:1] * (len(others) == 1))]
    hosts = [f"{options.hosts} hosts"] * bool(options.hosts)
    panel.set_title(", ".join([*title, *hosts, f"net {options.net}"]), loc="left")
    panel.grid(True, color="#dddddd")
    panel.legend(frameon=False)
    save(figure, options.output)
    pyplot.close(figure)
