"""Text for the terminal, from files, jobs and other users."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import threading
import time
from collections.abc import Callable, Iterator


def plain(line: str) -> str:
    """Return a line without control characters, with which a job could write to the terminal."""
    return "".join(each if each.isprintable() else "?" for each in line)


@contextlib.contextmanager
def working(text: str, every_s: float = 8.0) -> Iterator[None]:
    """Write a line to stderr every `every_s` seconds until the block ends: nobody waits blindly."""
    ended, begun = threading.Event(), time.monotonic()

    def tell() -> None:
        while not ended.wait(every_s):
            spent_s = time.monotonic() - begun
            print(f"# {text}: {spent_s:.0f} s so far", file=sys.stderr, flush=True)

    teller = threading.Thread(target=tell, daemon=True, name="unisono working")
    teller.start()
    try:
        yield
    finally:
        ended.set()
        teller.join()


@contextlib.contextmanager
def progress_bar(prefix: str, *, shown: bool) -> Iterator[Callable[[int, int, str], None]]:
    """Yield a function that shows how far a command is: a bar with rich on a terminal."""
    if not shown:
        yield lambda done, count, text: None
    elif sys.stderr.isatty() and importlib.util.find_spec("rich"):
        from rich.console import Console
        from rich.progress import Progress

        with Progress(console=Console(stderr=True)) as bar:
            task = bar.add_task(prefix.strip(": "), total=None)
            yield lambda done, count, text: bar.update(
                task, completed=done, total=count, description=prefix + text
            )
    else:

        def line(done: int, count: int, text: str) -> None:
            # One line for each tenth.
            if done == count or 10 * done // count > 10 * (done - 1) // count:
                print(f"{prefix}{100 * done // count} % {text}".rstrip(), file=sys.stderr)

        yield line
