"""The ranks of a test that do not end: their stacks, and the text about them."""

from __future__ import annotations

import contextlib
import faulthandler
import linecache
import os
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from unisono.core.base.grouping import grouped
from unisono.core.base.source.stacks import rows_of_dump
from unisono.core.base.source.where import FrameRow, place_of
from unisono.core.base.text import name_ranks

__all__ = ["StackFiles", "stuck_report"]

_RANKS = os.path.join(os.path.dirname(__file__), "ranks.py")
# Real-time signals and SIGINFO, which other systems have, are for programs. Windows has neither.
_SIGNAL: int | None = (
    signal.SIGRTMAX - 5 if hasattr(signal, "SIGRTMAX") else getattr(signal, "SIGINFO", None)
)
_ANSWER_S = 1.0
_POLL_S = 0.02


class StackFiles(NamedTuple):
    """Files into which the processes of ranks write their stacks when they are asked.

    Python's faulthandler writes, also while the process is in C.
    """

    folder: str

    @contextlib.contextmanager
    def offered(self, rank: int) -> Iterator[None]:
        """Answer for the main thread of this process inside the with block."""
        library: Any = faulthandler
        if _SIGNAL is None:
            yield
            return
        with Path(self.folder, str(rank)).open("w") as file:
            library.register(_SIGNAL, file, all_threads=False)
            try:
                yield
            finally:
                library.unregister(_SIGNAL)

    def ask(self, pids: Mapping[int, int]) -> dict[int, list[FrameRow]]:
        """Return the stack of each rank, innermost frame first; empty if it does not answer.

        Args:
            pids: Process ids by rank.
        """
        # A process without the file has not come so far, and would die of the signal.
        files = {rank: Path(self.folder, str(rank)) for rank in pids}
        asked = {rank: path for rank, path in files.items() if path.exists()}
        for rank in asked:
            with contextlib.suppress(OSError):
                os.kill(pids[rank], _SIGNAL or 0)
        end = time.monotonic() + _ANSWER_S
        texts: dict[int, str] = {}
        while asked and time.monotonic() < end:
            time.sleep(_POLL_S)
            before, texts = texts, {rank: path.read_text() for rank, path in asked.items()}
            if all(texts.values()) and texts == before:
                break
        return {rank: rows_of_dump(texts.get(rank, "")) for rank in pids}


def stuck_report(
    stacks: Mapping[int, list[FrameRow]], world_size: int, timeout: float, limit: str = ""
) -> str:
    """Return the text about the ranks that did not end, with the stack of each.

    Ranks with equal stacks are shown once.

    Args:
        stacks: By rank, innermost frame first.
        world_size: Number of ranks.
        timeout: That of `run`, which waits twice as long.
        limit: Within what they did not end, if it is something else.
    """
    limit = limit or f"within {2 * timeout:g} s, twice timeout={timeout:g}"
    limit = f"of {world_size} did not end {limit}"
    alike = grouped((tuple(_inside(rows)), rank) for rank, rows in stacks.items())
    if len(alike) == 1:
        return f"{name_ranks([*stacks])} {limit}: {_place_and_stack(*alike)}"
    parts = [f"{name_ranks(ranks)}: {_place_and_stack(rows)}" for rows, ranks in alike.items()]
    return "\n".join([f"{name_ranks([*stacks])} {limit}", *parts])


def _inside(rows: list[FrameRow]) -> list[FrameRow]:
    """Return the frames inside the function of a rank."""
    at = next((i for i, row in enumerate(rows) if row[0] == _RANKS and row[2] == "_body"), None)
    return rows[:at]


def _place_and_stack(rows: tuple[FrameRow, ...]) -> str:
    lines = [place_of([*rows]) or "its stack could not be read"]
    for file, number, name, _ in reversed(rows):
        lines.append(f'  File "{file}", line {number}, in {name}')
        if text := linecache.getline(file, number).strip():
            lines.append(f"    {text}")
    return "\n".join(lines)
