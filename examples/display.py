"""Output of train_digits.py: with rich on a terminal, in plain lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib.util import find_spec

import numpy as np


def on_terminal() -> bool:
    """Whether there is a terminal, and rich to draw on it."""
    return sys.stdout.isatty() and find_spec("rich") is not None


def with_bar(epochs: Iterable[int], title: str, total: int) -> Iterable[int]:
    """Pass the epochs on, with a progress bar."""
    if not on_terminal():
        return epochs
    from rich.progress import track

    return track(epochs, title, total)


def print_table(rows: dict[str, str]) -> None:
    """Print names and values, in a frame on a terminal."""
    if not on_terminal():
        print("\n".join(f"{name:<36}{value}" for name, value in rows.items()))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False)
    for row in rows.items():
        table.add_row(*row)
    Console().print(table)


def plot(path: str, history: list[tuple[float, float]]) -> None:
    """Draw loss and accuracy by epoch."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3))
    for axes, name, values in zip(
        figure.subplots(1, 2), ["test loss", "test accuracy"], np.transpose(history), strict=True
    ):
        axes.plot(range(1, len(values) + 1), values)
        axes.set(xlabel="epoch", ylabel=name)
    figure.savefig(path, bbox_inches="tight")
