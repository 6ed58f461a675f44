"""The picture of `unisono doctor --plot`: round trips and rates of all pairs of hosts."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from unisono.errors import InvalidArgumentError
from unisono.workbench.bench.plot import save
from unisono.workbench.cli.doctor.facts import Examination, HostLink

_CELL_INCHES = 0.55
_MOST_NUMBERS = 16


def plot(facts: Examination, path: str) -> None:
    """Draw a matrix of the round trips and one of the rates.

    Args:
        facts: Of two hosts or more.
        path: Picture file; its ending chooses the format.

    Raises:
        InvalidArgumentError: There is one host only.
    """
    if len(facts.hosts) < 2:
        raise InvalidArgumentError("--plot needs two hosts or more")
    matplotlib: Any = importlib.import_module("matplotlib")
    # A backend without a display, even if MPLBACKEND names another.
    matplotlib.use("agg")
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    side = max(3.2, _CELL_INCHES * len(facts.hosts) + 1.6)
    figure, panels = pyplot.subplots(1, 2, figsize=(2 * side + 1, side), layout="constrained")
    _draw(panels[0], facts, "round trip (ms)", "viridis_r", _trip_ms)
    _draw(panels[1], facts, "rate (MB/s)", "viridis", _rate_mb)
    figure.suptitle("from the host of the row to that of the column; x: no answer", fontsize=9)
    save(figure, path, bbox_inches="tight")
    pyplot.close(figure)


def _trip_ms(link: HostLink) -> float | None:
    return None if link.rtt_s is None else link.rtt_s * 1e3


def _rate_mb(link: HostLink) -> float | None:
    return None if link.rate_bytes_s is None else link.rate_bytes_s / 1e6


def _draw(
    panel: Any,
    facts: Examination,
    title: str,
    colours: str,
    value: Callable[[HostLink], float | None],
) -> None:
    names = [host.name for host in facts.hosts]
    cells = [[float("nan")] * len(names) for _ in names]
    for link in facts.links:
        shown = value(link)
        row, column = names.index(link.source), names.index(link.target)
        if shown is None:
            panel.text(column, row, "x", ha="center", va="center", color="#D55E00", weight="bold")
        else:
            cells[row][column] = shown
            if len(names) <= _MOST_NUMBERS:
                frame = {"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 1}
                text = f"{shown:.3g}" if shown < 1000 else f"{shown:.0f}"
                panel.text(column, row, text, ha="center", va="center", fontsize=8, bbox=frame)
    image = panel.imshow(cells, cmap=colours)
    panel.figure.colorbar(image, ax=panel, shrink=0.8)
    panel.set_title(title, fontsize=9, loc="left")
    panel.set_xticks(range(len(names)), names, rotation=90, fontsize=8)
    panel.set_yticks(range(len(names)), names, fontsize=8)
