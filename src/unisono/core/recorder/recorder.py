"""The recorder of a group's calls, and the places of the calls in the program."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable
from types import CodeType
from typing import Any

import numpy as np

from unisono.core.base.seam import choose, cpp
from unisono.core.base.source.tracebacks import OWN_FOLDER, is_own, own_folders
from unisono.core.recorder.ring import (
    DROPPED,
    KINDS,
    MOST_WAIT,
    NO_WAIT,
    RECORD,
    RECORDS,
    TOTAL,
    WAIT_SHIFT,
)


class Recorder:
    """The recorder without C++; see native/core/recorder.hpp. Ticks are nanoseconds.

    Args:
        ranks: Number of ranks of the group.
    """

    def __init__(self, ranks: int) -> None:
        self._ring = np.zeros(RECORDS, RECORD)
        self._totals = np.zeros(KINDS, TOTAL)
        self._by_rank = [0] * ranks
        self._waits: dict[int, int] = {}
        self._messages = 0
        self._lock = threading.RLock()
        self.waiting_for = -1
        self._wait_begun = 0
        self.last = 0

    def begin(self, kind: int, seq: int, word: int, count: int, peer: int) -> int:
        """Begin a record of a call of the calling thread; return its number."""
        site, offset = _caller_site()
        now = time.monotonic_ns()
        with self._lock:
            self.last = number = self.last + 1
            self._ring[number % RECORDS] = (
                *(number, seq, word, count, now, 0, 0, 0, kind, peer, -1, site, offset, 0),
            )
        return number

    def start(self, number: int) -> None:
        """Mark a collective as running."""
        self._waits = {}
        self._set(number, started=time.monotonic_ns())

    def note_wait(self, number: int) -> None:
        """Record that the caller of an asynchronous collective waits from now on."""
        record = self._ring[number % RECORDS]
        if record["peer"] == NO_WAIT:
            after = (time.monotonic_ns() - int(record["enqueued"])) >> WAIT_SHIFT
            self._set(number, peer=min(max(after, 1), MOST_WAIT))

    def end(self, number: int, outcome: int) -> None:
        """End the record of a collective."""
        waits = self._waits
        self._finish(
            number, outcome, sum(waits.values()), max(waits, key=waits.__getitem__, default=-1)
        )

    def end_message(self, number: int, outcome: int, peer: int) -> None:
        """End the record of a message: all of its time was a wait for its peer."""
        record = self._ring[number % RECORDS]
        waited = time.monotonic_ns() - int(record["enqueued"])
        if peer >= 0:
            self._by_rank[peer] += waited
        self._set(number, started=record["enqueued"], peer=peer)
        self._finish(number, outcome, waited, peer)

    def count_message(self) -> int:
        """Return the number for the next message."""
        with self._lock:
            self._messages += 1
            return self._messages

    def begin_wait(self, rank: int) -> None:
        """Begin a wait of the collective that runs."""
        self._wait_begun = time.monotonic_ns()
        self.waiting_for = rank

    def end_wait(self) -> None:
        """End the wait, if one was begun."""
        rank, self.waiting_for = self.waiting_for, -1
        if rank >= 0:
            ticks = time.monotonic_ns() - self._wait_begun
            self._waits[rank] = self._waits.get(rank, 0) + ticks
            self._by_rank[rank] += ticks

    def snapshot(self) -> bytes:
        """Return the bytes of the ring."""
        return self._ring.tobytes()

    def totals(self) -> bytes:
        """Return the bytes of the totals by kind."""
        return self._totals.tobytes()

    def waited(self) -> list[int]:
        """Return the ticks that this rank has waited for each rank, up to now."""
        waited, rank = list(self._by_rank), self.waiting_for
        if rank >= 0:
            waited[rank] += time.monotonic_ns() - self._wait_begun
        return waited

    def _set(self, number: int, **columns: int) -> None:
        record = self._ring[number % RECORDS]
        if record["number"] == number:
            for name, value in columns.items():
                record[name] = value

    def _finish(self, number: int, outcome: int, waited: int, waited_for: int) -> None:
        now, record = time.monotonic_ns(), self._ring[number % RECORDS]
        if record["number"] != number:
            return
        self._set(number, ended=now, waited=waited, waited_for=waited_for, outcome=outcome)
        if outcome != DROPPED:
            taken, total = now - int(record["enqueued"]), self._totals[record["kind"]]
            total["calls"] += 1
            total["elements"] += record["count"]
            total["ticks"] += taken
            total["worst"] = max(int(total["worst"]), taken)


# ---- call sites -------------------------------------------------------------------------------

cpp.add_own_folder(OWN_FOLDER)
cpp.add_own_folder(contextlib.__file__)


def skip_folder(folder: str) -> None:
    """Leave out the frames of a library above this library: in call sites and in tracebacks."""
    if folder not in own_folders:
        own_folders.append(folder)
        cpp.add_own_folder(folder)


# A program that makes code objects without end must not fill the memory.
_MOST_CODES = 4096
_codes: list[CodeType | None] = [None]
_code_numbers: dict[CodeType, int] = {}


def _caller_site() -> tuple[int, int]:
    """Return the number of the code object outside this library, and the instruction."""
    frame = sys._getframe(1)
    while is_own(frame.f_code.co_filename):
        if frame.f_back is None:
            return 0, -1
        frame = frame.f_back
    number = _code_numbers.get(frame.f_code)
    if number is None and len(_codes) < _MOST_CODES:
        number = _code_numbers[frame.f_code] = len(_codes)
        _codes.append(frame.f_code)
    return number or 0, frame.f_lasti


def _code_of(site: int) -> CodeType | None:
    return _codes[site] if 0 < site < len(_codes) else None


def place_of(site: int, offset: int) -> tuple[str, int, str]:
    """Return file, line and function of a call site; ("", 0, "") if it is unknown."""
    if (code := _find_code(site)) is None:
        return "", 0, ""
    lines = (line for first, end, line in code.co_lines() if first <= offset < end)
    return code.co_filename, next(lines, None) or code.co_firstlineno, code.co_qualname


make_recorder: Callable[[int], Any] = choose("Recorder", Recorder)
"""Return a recorder for a group; takes its number of ranks."""

read_ticks: Callable[[], tuple[int, int]] = cpp.ticks
"""Return the time in ticks, and on the monotonic clock in nanoseconds."""

_find_code = choose("code_of", _code_of)
