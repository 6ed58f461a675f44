"""Text for the terminal, from files, jobs and other users."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator


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
