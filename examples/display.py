"""Output of train_digits.py: with rich on a terminal, in plain lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from typing import NamedTuple

import numpy as np
from perceptron import Images

WIDTH = 80
IMAGES_IN_A_ROW = 8
MAX_MISREAD = 6


class Epoch(NamedTuple):
    """Results of an epoch, as rank 0 has them.

    Attributes:
        loss: Mean loss of the test images.
        accuracy: Share of the test images that the network reads right.
        step_s: Mean time of a step.
        waiting: Share of that time in which rank 0 communicated or waited.
    """

    loss: float
    accuracy: float
    step_s: float
    waiting: float


def on_terminal() -> bool:
    """Whether there is a terminal, and rich to draw on it."""
    return sys.stdout.isatty() and find_spec("rich") is not None


def with_bar(epochs: Iterable[int], title: str, total: int) -> Iterable[int]:
    """Pass the epochs on, with a progress bar."""
    if not on_terminal():
        return epochs
    from rich.progress import track

    return track(epochs, title, total)


def print_epoch(number: int, epoch: Epoch) -> None:
    """Print a line for an epoch that is over."""
    print(
        f"epoch {number:2}  test loss {epoch.loss:.4f}  test accuracy {epoch.accuracy:7.2%}  "
        f"step {1e3 * epoch.step_s:6.2f} ms  waiting {epoch.waiting:3.0%}"
    )


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


# A line is a list of texts with a style of rich each.
Line = list[tuple[str, str]]


def print_lines(lines: Iterable[Line]) -> None:
    """Print lines, with their styles on a terminal."""
    if not on_terminal():
        print("\n".join("".join(text for text, _ in line).rstrip() for line in lines))
        return
    from rich.console import Console
    from rich.text import Text

    console = Console()
    for line in lines:
        console.print(Text.assemble(*line), soft_wrap=True)


def in_colour() -> bool:
    """Whether the terminal can show levels of grey."""
    if not on_terminal():
        return False
    from rich.console import Console

    return Console().color_system in ("256", "truecolor") and not Console().no_color


def chart(values: list[float], low: float, width: int, height: int = 5) -> list[str]:
    """Return the lines of a column chart from `low` to the largest value, top line first."""
    between = np.interp(np.linspace(0, len(values) - 1, width), range(len(values)), values)
    parts = (between - low) / max(max(values) - low, 1e-12)
    eighths = np.rint(1 + parts * (8 * height - 1)).astype(int)
    return [
        "".join(" ▁▂▃▄▅▆▇█"[min(max(n - 8 * line, 0), 8)] for n in eighths)
        for line in reversed(range(height))
    ]


def charts(history: list[Epoch]) -> Iterator[Line]:
    """Yield the lines of two charts, loss and accuracy by epoch, side by side."""
    losses = [epoch.loss for epoch in history]
    accuracies = [epoch.accuracy for epoch in history]
    width = WIDTH // 2 - 9
    low = min(accuracies)
    loss, accuracy = chart(losses, 0.0, width), chart(accuracies, low, width)
    left = [f"{max(losses):6.3f} ", *[" " * 7] * 3, f"{0:6.3f} "]
    right = [f"{max(accuracies):6.1%} ", *[" " * 7] * 3, f"{low:6.1%} "]
    yield [
        (f"{'test loss by epoch':^{WIDTH // 2}}{'test accuracy by epoch':^{WIDTH // 2}}", "bold")
    ]
    for label, bars, other_label, other_bars in zip(left, loss, right, accuracy, strict=True):
        yield [(label, ""), (bars, "red"), ("  " + other_label, ""), (other_bars, "green")]


def shares(ranks: list[float]) -> Iterator[Line]:
    """Yield a bar for each rank, with its share of time for communicating and waiting."""
    width = WIDTH - 36
    yield [("computing █   communicating and waiting ░", "bold")]
    for rank, waiting in enumerate(ranks):
        cells = round(width * min(waiting, 1.0))
        yield [
            (f"rank {rank:<3}", ""),
            ("█" * (width - cells), "green"),
            ("░" * cells, "yellow"),
            (f"  computing {1 - waiting:4.0%}, waiting {waiting:4.0%}", ""),
        ]


def picture(pixels: np.ndarray, colour: bool) -> list[Line]:
    """Return 4 lines of 8 characters; a character is 2 of the 64 pixels, one above the other."""

    def cell(upper: float, lower: float) -> tuple[str, str]:
        if colour:
            grey = [
                f"rgb({level},{level},{level})" for level in (int(255 * upper), int(255 * lower))
            ]
            return "▀", f"{grey[0]} on {grey[1]}"
        return " ▄▀█"[2 * (upper >= 0.5) + (lower >= 0.5)], ""

    rows = pixels.reshape(4, 2, 8)
    return [[cell(*pair) for pair in zip(upper, lower, strict=True)] for upper, lower in rows]


def caption(read: int, digit: int) -> tuple[str, str]:
    """Return the text below an image, as wide as an image and the gap after it."""
    if read == digit:
        return f"{f'{read}':^8}  ", "green"
    return f"{f'{read} (is {digit})':^8}  ", "bold red"


def gallery(images: Images, read: np.ndarray) -> Iterator[Line]:
    """Yield misread images, then an image of each digit that the network reads right."""
    misread = np.flatnonzero(read != images.digits)
    right = np.flatnonzero(read == images.digits)
    of_each_digit = right[np.unique(read[right], return_index=True)[1]]
    shown = [*misread[:MAX_MISREAD], *of_each_digit]
    colour = in_colour()
    yield [(f"{len(misread)} of {len(read)} test images are misread", "bold")]
    for start in range(0, len(shown), IMAGES_IN_A_ROW):
        row = shown[start : start + IMAGES_IN_A_ROW]
        pictures = [picture(images.pixels[i], colour) for i in row]
        for parts in zip(*pictures, strict=True):
            yield [piece for part in parts for piece in (*part, ("  ", ""))]
        yield [caption(read[i], images.digits[i]) for i in row]


def plot(path: str, history: list[Epoch]) -> None:
    """Draw loss and accuracy by epoch with matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3))
    for axes, name in zip(figure.subplots(1, 2), ["loss", "accuracy"], strict=True):
        values = [getattr(epoch, name) for epoch in history]
        axes.plot(range(1, len(values) + 1), values)
        axes.set(xlabel="epoch", ylabel=f"test {name}")
    figure.savefig(path, bbox_inches="tight")
