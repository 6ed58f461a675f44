"""What the ranks show in a notebook: pictures and tables of a cell, and the bar of `map`."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

from unisono.core.base.deadline import Deadline

_LINE_S = 0.1

Shown = dict[str, Any]
"""An object by MIME type, as IPython displays it."""


def shown(value: Any) -> Shown:
    """Return the picture or the table that a notebook would show for a value; {} if it has none."""
    found: Shown = {}
    if hasattr(value, "savefig"):
        file = io.BytesIO()
        value.savefig(file, format="png", bbox_inches="tight")
        found["image/png"] = file.getvalue()
    for kind, name in (
        ("image/png", "_repr_png_"),
        ("image/svg+xml", "_repr_svg_"),
        ("text/html", "_repr_html_"),
    ):
        if callable(make := getattr(type(value), name, None)) and (data := make(value)) is not None:
            found[kind] = data
    if found:
        found["text/plain"] = repr(value)
    return found


_displayed: list[Shown] = []


def show(*objects: Any) -> None:
    """Show objects in the notebook when the call ends, as `display` of IPython does."""
    _displayed.extend(shown(each) or {"text/plain": repr(each)} for each in objects)


def take_displayed() -> list[Shown]:
    """Return what the call has shown, and forget it."""
    found = [*_displayed]
    _displayed.clear()
    return found


def show_figures() -> None:
    """Show the open figures of pyplot, and close them, as a notebook does after a cell."""
    if (plt := sys.modules.get("matplotlib.pyplot")) is not None:
        show(*(plt.figure(number) for number in plt.get_fignums()))
        plt.close("all")


def display(rank: int, objects: list[Shown]) -> None:
    """Show what the cell of a rank has shown; outside of IPython, its text."""
    shell = sys.modules.get("IPython")
    for each in objects:
        if shell is None or shell.get_ipython() is None or len(each) == 1:
            for line in each["text/plain"].splitlines():
                print(f"[rank {rank}] {line}")
            continue
        print(f"[rank {rank}]", flush=True)
        shell.display.display(each, raw=True)


@contextlib.contextmanager
def progress_bar(total: int | None, wanted: bool | None) -> Iterator[Callable[[int], object]]:
    """Show a bar, or a line that counts; yield a function that takes how many tasks have ended.

    Args:
        total: Number of tasks, if it is known.
        wanted: None: on a terminal, and in a notebook.
    """
    is_notebook = "ipykernel" in sys.modules
    if not (wanted if wanted is not None else sys.stdout.isatty() or is_notebook):
        yield lambda count: None
    elif find_spec("rich") is None or (is_notebook and find_spec("ipywidgets") is None):
        yield from _line(total)
    else:
        from rich.progress import Progress

        # In a notebook each line that goes through rich would be an output of its own.
        with Progress(redirect_stdout=not is_notebook, redirect_stderr=not is_notebook) as bar:
            task = bar.add_task("tasks", total=total)
            yield lambda count: bar.update(task, advance=count)


def _line(total: int | None) -> Iterator[Callable[[int], object]]:
    done, due = 0, Deadline(0.0)
    of_total = "" if total is None else f" of {total}"

    def advance(count: int) -> None:
        nonlocal done, due
        done += count
        if due.expired() or done == total:
            due = Deadline(_LINE_S)
            print(f"\rtasks: {done}{of_total}", end="", flush=True)

    try:
        yield advance
    finally:
        print(f"\rtasks: {done}{of_total}")
