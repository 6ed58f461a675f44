"""Find the failure that came first, and report it: a line per rank, then its traceback.

User code needs no addition. A Python worker prints its traceback on standard error, and the
launcher reads the end of that stream (see `unisono.launcher.traceback_text`).
"""

from __future__ import annotations

import json
import signal
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from unisono.core.base.deadline import Deadline
from unisono.core.base.grouping import grouped
from unisono.launcher.traceback_text import (
    exception_line,
    extract_traceback,
    has_traceback,
    is_consequence,
)

SETTLE_S = 1.0
"""How long to wait for the original failure after a failure that only reports a lost peer."""

_ENDS_S = 5.0
"""How much longer, if a rank has printed an error of its own and has not ended."""

_FOLLOWS_S = 10.0
"""How long after the failure of a replaced worker a failure may be its consequence."""


@dataclass(frozen=True, kw_only=True)
class WorkerFailure:
    """A worker that failed by itself, that is, before the launcher stopped it.

    Attributes:
        rank: Rank of the worker.
        pid: Its process number.
        exit_code: As in `subprocess`: minus the signal's number if a signal killed it.
        time_s: Time at which the launcher detected the end, in seconds since the epoch.
        text: Traceback, or the last lines of standard error, or "".
        host: Host of the worker.
        node: Id of the agent of the worker, or "".
        hint: Further information about the end, or "".
    """

    rank: int
    pid: int
    exit_code: int
    time_s: float
    text: str = ""
    host: str = field(default_factory=socket.gethostname)
    node: str = ""
    hint: str = ""

    def worker_name(self) -> str:
        """Return the rank, process and host."""
        return f"rank {self.rank} (pid {self.pid}, host {self.host})"

    def line(self) -> str:
        """Return the worker and how it ended, without a reason."""
        hint = f" ({self.hint})" if self.hint else ""
        return f"{self.worker_name()} {exit_status(self.exit_code)}{hint}"

    def line_with_reason(self) -> str:
        """Return the worker, how it ended, and the exception's first line if there was one."""
        reason = exception_line(self.text)
        return f"{self.line()}: {reason}" if reason else self.line()


def signal_name(signum: int) -> str:
    """Return "SIGTERM" for 15, "signal 99" for a number without a name."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


def exit_status(exit_code: int) -> str:
    """Return an exit code in words."""
    if exit_code >= 0:
        return f"exited with code {exit_code}"
    return f"was killed by {signal_name(-exit_code)}"


def error_text(stderr: str, error_file: str) -> str:
    """Return a worker's traceback, or the last lines of its standard error.

    A traceback in standard error comes first, then the traceback in `error_file`.
    """
    if not has_traceback(stderr) and (text := _described(error_file)):
        return text
    return extract_traceback(stderr)


def _described(error_file: str) -> str:
    """Return the traceback in a file that torch's `record` wrote, or "".

    Source: torch 2.13, torch/distributed/elastic/multiprocessing/errors/error_handler.py.
    """
    try:
        with open(error_file, encoding="utf-8", errors="replace") as file:
            message = json.load(file)["message"]
        if isinstance(message, str):
            return message
        return str(message["extraInfo"].get("py_callstack") or message["message"]).rstrip()
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return ""


def error_document(failure: WorkerFailure) -> dict[str, Any]:
    """Return a failure in the format of torch's `record`, for the launcher of this launcher."""
    return {
        "message": {
            "message": exception_line(failure.text) or failure.line(),
            "extraInfo": {
                "py_callstack": failure.text,
                "timestamp": str(int(failure.time_s)),
            },
            "errorCode": failure.exit_code,
        }
    }


class ExitLog:
    """The workers that ended by themselves.

    The first failure is known at once. If it is a consequence, it is known `SETTLE_S` later (after
    `settle_again`, `_ENDS_S` later) or when an original failure is added.

    Args:
        text_of: Function that returns the traceback of a rank, as far as it has been read.

    Attributes:
        left_s: Time of the end, in seconds since the epoch, by rank with exit code 0.
        places: Where the other ranks were when the first failure was known, or their own error.
    """

    def __init__(self, text_of: Callable[[int], str]) -> None:
        self.left_s: dict[int, float] = {}
        self.places: dict[int, str] = {}
        self._text_of = text_of
        self._failures: list[WorkerFailure] = []
        self._replaced: list[WorkerFailure] = []
        self._known: Deadline | None = None
        self._settled = False

    def settle_again(self) -> bool:
        """Wait longer for the original failure, once; return whether that makes sense."""
        if self._settled or not all(is_consequence(self._text_of(f.rank)) for f in self._failures):
            return False
        self._known, self._settled = Deadline(_ENDS_S), True
        return True

    def add(self, rank: int, pid: int, exit_code: int, hint: str = "") -> None:
        """Add the end of a worker that was just detected."""
        if exit_code == 0:
            self.left_s[rank] = time.time()
            return
        self._failures.append(self.failure(rank, pid, exit_code, hint))
        if not is_consequence(self._text_of(rank)):
            self._known = Deadline(0.0)
        elif self._known is None:
            # The rank that failed first may take longer to end and to print its traceback.
            self._known = Deadline(SETTLE_S)

    def failure(self, rank: int, pid: int, exit_code: int, hint: str = "") -> WorkerFailure:
        """Return the failure of a worker that has ended just now."""
        text = self._text_of(rank)
        return WorkerFailure(
            rank=rank, pid=pid, exit_code=exit_code, time_s=time.time(), text=text, hint=hint
        )

    def printed(self, ranks: Iterable[int]) -> dict[int, str]:
        """Return "after it printed ValueError: x" by rank, of ranks with an error of their own."""
        texts = {rank: self._text_of(rank) for rank in ranks}
        lines = {rank: exception_line(text) for rank, text in texts.items()}
        return {
            rank: f"after it printed {line}"
            for rank, line in lines.items()
            if line and not is_consequence(texts[rank])
        }

    def replaced(self, failure: WorkerFailure) -> None:
        """Add a failure after which the worker was replaced, so that the others could go on."""
        self._replaced.append(failure)

    def known_in_s(self) -> float:
        """Return in how many seconds the first failure is known; infinity without a failure."""
        return float("inf") if self._known is None else self._known.remaining()

    def failures(self, *, stopped_by_signal: bool = False) -> list[WorkerFailure]:
        """Return the failures, the root cause first."""
        found = [replace(each, text=self._text_of(each.rank)) for each in self._failures]
        # Workers that do not call `reconfigure` end because of the replaced worker.
        # They may be on another node, whose report then stops the workers here.
        if all(is_consequence(each.text) for each in found) and not stopped_by_signal:
            since_s = min((each.time_s for each in found), default=time.time()) - _FOLLOWS_S
            found += [each for each in self._replaced if each.time_s >= since_s]
        return root_cause_first(found)


def root_cause_first(failures: Iterable[WorkerFailure], *, first: str = "") -> list[WorkerFailure]:
    """Return the failures with the root cause first.

    The root cause is the earliest failure that does not merely report the end of another rank.
    If all failures do, it is the earliest of them.

    Args:
        failures: In any order.
        first: Id of the node that was the first to report a failure. Its failures come before
            those of other nodes, because clocks of different nodes cannot be compared.
    """

    def key(failure: WorkerFailure) -> tuple[bool, bool, float, int]:
        return is_consequence(failure.text), failure.node != first, failure.time_s, failure.rank

    return sorted(failures, key=key)


def leavers(first: WorkerFailure, left_s: Mapping[int, float]) -> str:
    """Return which ranks left, and how long before or after the first failure, or "".

    The rank that failed may have waited for them. After the failure only those count that may be
    its cause: a rank that leaves is away before its process ends.

    Args:
        first: The root cause.
        left_s: Time of the end, in seconds since the epoch, by rank with exit code 0.
    """
    until_s = first.time_s + SETTLE_S * is_consequence(first.text)
    gone = sorted((ended_s, rank) for rank, ended_s in left_s.items() if ended_s < until_s)
    found = []
    for when, early in ("before", True), ("after", False):
        some = [each for each in gone if (each[0] < first.time_s) is early]
        listed = [f"rank {rank} {abs(first.time_s - at_s):.1f} s" for at_s, rank in some[:8]]
        if listed:
            more = ", ..." * (len(some) > len(listed))
            found.append(f"{when} the first failure: {', '.join(listed)}{more}")
    return f"left with exit code 0 {'; '.join(found)}" if found else ""


def stopped_lines(stopped: Iterable[int], places: Mapping[int, str]) -> Iterator[str]:
    """Yield a line for each place where ranks were stopped; arguments as for `render`."""
    for place, ranks in grouped((places.get(rank, ""), rank) for rank in stopped).items():
        named = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
        yield f"{named} stopped by the launcher{place and ', ' + place}"


def render(
    failures: Sequence[WorkerFailure],
    stopped: Sequence[int],
    left_s: Mapping[int, float],
    places: Mapping[int, str],
    *,
    prefix: str = "",
    is_shown: bool = False,
) -> str:
    """Return a report of one line per rank; the first failure's own text comes last.

    Args:
        failures: At least one, in the order of `root_cause_first`.
        stopped: Ranks that the launcher stopped because of the failures.
        left_s: See `leavers`.
        places: Where stopped ranks were, or what they had printed, as far as that is known.
        prefix: Text before each line that the launcher adds.
        is_shown: Whether the first failure's text stands right above the report already.
    """
    first, *others = failures
    lines = [failure.line_with_reason() for failure in reversed(others)]
    lines += stopped_lines(stopped, places)
    if left := leavers(first, left_s):
        lines.append(left)
    lines.append(f"first failure: {first.line()}")
    if is_shown:
        found = "traceback is" if has_traceback(first.text) else "last lines are"
        reason = exception_line(first.text)
        lines[-1] += f"; its {found} above{reason and ': '}{reason}"
    report = "\n".join(prefix + line for line in lines)
    return f"{report}\n{first.text}" if first.text and not is_shown else report
