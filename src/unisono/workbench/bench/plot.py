"""The plot of `unisono bench`: time and bus bandwidth over size, on logarithmic scales."""

from __future__ import annotations

import importlib
import io
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unisono.core.base.grouping import grouped
from unisono.errors import InvalidArgumentError
from unisono.workbench.bench.algorithms import label
from unisono.workbench.bench.report import bandwidths

# Okabe and Ito's colours, which colour-blind readers can distinguish; the marks differ, too.
_STYLES = {
    "unisono": {"color": "#0072B2", "marker": "o", "linewidth": 2.2, "zorder": 3},
    "gloo": {"color": "#D55E00", "marker": "s", "linewidth": 1.4},
    "mpi": {"color": "#009E73", "marker": "^", "linewidth": 1.4},
}
# Of further algorithms and libraries, in their order.
_OTHERS = [
    {"color": colour, "marker": marker, "linewidth": 1.4}
    for colour, marker in zip(
        ("#E69F00", "#CC79A7", "#444444", "#7A6A00", "#56B4E9"), "vDPX*", strict=True
    )
]
_ROW_INCHES = 2.6
_TICKS = 6


def save(figure: Any, path: str, **how: Any) -> None:
    """Write a figure of matplotlib; a page (.html) has it as SVG."""
    if not path.endswith(".html"):
        figure.savefig(path, **{"dpi": 100, **how})
        return
    text = io.StringIO()
    figure.savefig(text, format="svg", **how)
    svg = text.getvalue()
    page = f'<!doctype html>\n<meta charset="utf-8">\n{svg[svg.index("<svg") :]}'
    Path(path).write_text(page, encoding="utf-8")


def plot(result: dict[str, Any], path: str) -> None:
    """Draw one line of two panels per operation.

    Args:
        result: The document of `unisono bench --json`.
        path: Picture file; its ending chooses the format.

    Raises:
        InvalidArgumentError: There is no operation with more than one size.
    """
    all_rows = grouped((row["op"], row) for row in result["rows"])
    by_op = {op: rows for op, rows in all_rows.items() if len(rows) > 1}
    if not by_op:
        raise InvalidArgumentError("--plot needs an operation with several sizes")
    matplotlib: Any = importlib.import_module("matplotlib")
    # A backend without a display, even if MPLBACKEND names another.
    matplotlib.use("agg")
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    height = _ROW_INCHES * len(by_op) + 1.3
    figure, axes = pyplot.subplots(
        len(by_op), 2, figsize=(10, height), squeeze=False, layout="constrained"
    )
    for pair, (op, rows) in zip(axes, by_op.items(), strict=True):
        for panel, what in zip(pair, ("time", "busbw"), strict=True):
            _draw(panel, rows, what, (op, result["plan"].get("algorithm")))
        sizes = sorted({row["size_bytes"] for row in rows})
        for panel in pair:
            _dress(panel, sizes)
    for panel in axes[-1]:
        panel.set_xlabel("size")
    figure.suptitle(_title(result), fontsize=10)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    save(figure, path)
    pyplot.close(figure)


def _draw(
    panel: Any, rows: Sequence[dict[str, Any]], what: str, of: tuple[str, str | None]
) -> None:
    """Draw one quantity of all libraries; `of` is the operation and unisono's algorithm."""
    op, algorithm = of
    others = itertools.cycle(_OTHERS)
    for library in rows[0]["results"]:
        there = [row for row in rows if row["results"][library]]
        if what == "time":
            values = [row["results"][library]["time_us"] for row in there]
        else:
            values = [bandwidths(row, library)[1] for row in there]
        sizes = [row["size_bytes"] for row in there]
        is_chosen = library == "unisono" and op != "sendrecv"
        name = label((algorithm if is_chosen else None) or library)
        style = _STYLES.get(library) or next(others)
        panel.plot(sizes, values, label=name, markersize=3.5, **style)
    unit = "µs, lower is better" if what == "time" else "GB/s, higher is better"
    name = "time per call" if what == "time" else "bus bandwidth"
    panel.set_title(f"{op}: {name} ({unit})", fontsize=9, loc="left")


def _dress(panel: Any, sizes: Sequence[int]) -> None:
    """Set scales, and ticks at powers of two."""
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    stride = max(1, len(sizes) // _TICKS)
    panel.set_xticks(sizes[::stride], [size_text(n) for n in sizes[::stride]])
    label_times(panel)
    panel.tick_params(labelsize=8)
    panel.grid(True, color="#dddddd", linewidth=0.6)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)


def label_times(panel: Any) -> None:
    """Give the y axis of a panel numbers, which matplotlib has at powers of ten only."""
    values = ticks(*sorted(panel.get_ylim()))
    # Without an exponent: 10,000 stands beside 1,000.
    panel.set_yticks(values, [f"{value:,.10g}" for value in values])
    panel.minorticks_off()


def ticks(low: float, high: float) -> list[float]:
    """Return 3 or more round numbers between two limits above 0, for a logarithmic scale."""
    first, last = (math.floor(math.log10(limit)) for limit in (low, high))
    powers = [10.0**power for power in range(first, last + 1)]
    for marks in ((1,), (1, 2, 5), (1, 2, 3, 5)):
        found = [power * mark for power in powers for mark in marks if low <= power * mark <= high]
        if len(found) >= 3:
            return found
    power = 10.0 ** math.floor(math.log10((high - low) / 3))
    step = power * max(mark for mark in (1, 2, 5) if power * mark <= (high - low) / 3)
    return [step * n for n in range(math.ceil(low / step), math.floor(high / step) + 1)]


def size_text(nbytes: int) -> str:
    """Return a size in binary units."""
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if nbytes >> shift:
            return f"{nbytes / (1 << shift):.4g} {unit}"
    return f"{nbytes} B"


def _title(result: dict[str, Any]) -> str:
    host, plan = result["machine"], result["plan"]
    names = {"unisono": "unisono", "torch": "Gloo in torch", "mpi": ""}
    versions = ", ".join(
        f"{label} {host[name]}".strip() for name, label in names.items() if name in host
    )
    return (
        f"{plan['nprocs']} ranks, {plan['dtype']}, {host['cpu']}, {host['cores']} cores, load "
        f"{host['load_before']} to {host['load_after']}\n{versions}"
    )
