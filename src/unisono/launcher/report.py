"""Which failure came first, and how to tell it: one line per rank, the real traceback last.

Nothing has to be added to the user's code. A Python worker prints its traceback on standard
error; the last part of that stream is all this module needs.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from unisono.base.deadline import Deadline

__all__ = [
    "SETTLE_S",
    "Ends",
    "Failure",
    "error_document",
    "error_text",
    "exception_line",
    "exit_status",
    "extract_traceback",
    "is_consequence",
    "leavers",
    "order",
    "render",
    "signal_name",
]

SETTLE_S = 1.0
"""How long to wait for the original failure after one that only reports a lost peer."""

_HEADER = re.compile(
    r"(\[rank\d+\]: ?)?"
    r"(Traceback \(most recent call last\):|  \+ Exception Group Traceback|Fatal Python error: )"
)
_SYNTAX = re.compile(r'(\[rank\d+\]: ?)?  File ".*", line \d+$')
_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?")
_CHAINED = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
_FATAL = "Fatal Python error: "
_IGNORED = "Exception ignored"
_LAST_LINES = 20

_CONSEQUENCES = re.compile(
    r"(\w+\.)*(PeerLostError|PeerFailedError|CollectiveAbortedError|StoreConnectionError|"
    r"ConnectionResetError|ConnectionAbortedError|BrokenPipeError|DistNetworkError)\b"
    # Gloo raises a plain RuntimeError when the other side of a connection is gone.
    r"|.*(Connection closed by peer|Connection reset by peer|Broken pipe)"
)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """One worker that ended with an error of its own.

    Attributes:
        exit_code: As of `subprocess`: minus the signal's number if a signal killed it.
        time_s: When its end was noticed, in seconds since the epoch.
        text: Its traceback, or the last lines of its standard error, or "".
        host: Where it ran.
        node: Id of the agent that ran it, or "".
        hint: What else is known about its end, or "".
    """

    rank: int
    pid: int
    exit_code: int
    time_s: float
    text: str = ""
    host: str = field(default_factory=lambda: os.uname().nodename)
    node: str = ""
    hint: str = ""

    def who(self) -> str:
        """Return the rank, process and host."""
        return f"rank {self.rank} (pid {self.pid}, host {self.host})"

    def line(self) -> str:
        """Return who failed and how, without a reason."""
        hint = f" ({self.hint})" if self.hint else ""
        return f"{self.who()} {exit_status(self.exit_code)}{hint}"

    def line_with_reason(self) -> str:
        """Return who failed, how, and the exception's first line if there was one."""
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


def _is_noise(lines: Sequence[str], header: int) -> bool:
    """Whether the traceback at `header` is one that Python only mentions, and ignores."""
    return header > 0 and _IGNORED in lines[header - 1]


def _start_of_traceback(lines: Sequence[str]) -> int | None:
    headers = [i for i, line in enumerate(lines) if _HEADER.match(line)]
    headers = [i for i in headers if not _is_noise(lines, i)]
    if not headers:
        # A script that does not compile has no traceback, only its place and the error.
        places = [i for i, line in enumerate(lines) if _SYNTAX.match(line)]
        return places[-1] if places else None
    start = headers.pop()
    for earlier in reversed(headers):
        between = lines[earlier:start]
        if not any(mark in line for mark in _CHAINED for line in between):
            break
        start = earlier
    return start


def extract_traceback(stderr: str) -> str:
    """Return the last traceback in a worker's standard error, with its chained causes.

    Without one: the last 20 lines. What Python merely ignored (`__del__`, weak references)
    does not count.
    """
    lines = stderr.splitlines()
    start = _start_of_traceback(lines)
    if start is None:
        return "\n".join(lines[-_LAST_LINES:])
    of_it = itertools.takewhile(lambda line: not line.startswith(_IGNORED), lines[start:])
    return "\n".join(of_it)


def error_text(stderr: str, error_file: str) -> str:
    """Return what a worker said about its end: a traceback, or whatever there is.

    Standard error comes first. A worker whose standard error went elsewhere may have written
    `error_file`.
    """
    if _start_of_traceback(stderr.splitlines()) is None and (text := _described(error_file)):
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


def error_document(failure: Failure) -> dict[str, Any]:
    """Return a failure in the form of such a file, for the launcher of this launcher."""
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


def exception_line(text: str) -> str:
    """Return the line "ValueError: ..." of a traceback, or ""."""
    lines = [_RANK_PREFIX.sub("", line) for line in text.splitlines()]
    headers = [i for i, line in enumerate(lines) if _HEADER.match(line) or _SYNTAX.match(line)]
    if not headers:
        return ""
    if lines[headers[-1]].startswith(_FATAL):
        return lines[headers[-1]]
    for line in lines[headers[-1] + 1 :]:
        if line and not line[0].isspace():
            return line
    return ""


def is_consequence(text: str) -> bool:
    """Whether a traceback only says that another process went away first."""
    return _CONSEQUENCES.match(exception_line(text)) is not None


class Ends:
    """How workers ended by themselves, and when it is known which failure was the first.

    That is at once, or `SETTLE_S` after one that is a consequence.

    Args:
        text_of: Returns what a rank said about its end, as far as it is known now.

    Attributes:
        left_s: By rank that ended with exit code 0, when; seconds since the epoch.
    """

    def __init__(self, text_of: Callable[[int], str]) -> None:
        self.left_s: dict[int, float] = {}
        self._text_of = text_of
        self._failures: list[Failure] = []
        self._known: Deadline | None = None

    def note(self, rank: int, pid: int, exit_code: int, hint: str = "") -> None:
        """Take note of an end that was just seen."""
        if exit_code == 0:
            self.left_s[rank] = time.time()
            return
        self._failures.append(
            Failure(rank=rank, pid=pid, exit_code=exit_code, time_s=time.time(), hint=hint)
        )
        if not is_consequence(self._text_of(rank)):
            self._known = Deadline(0.0)
        elif self._known is None:
            # The rank that failed first may need longer to end; let it say why.
            self._known = Deadline(SETTLE_S)

    def known_in_s(self) -> float:
        """Return in how many seconds the first failure is known; infinity if there was none."""
        return float("inf") if self._known is None else self._known.remaining()

    def failures(self) -> list[Failure]:
        """Return the failures, the root cause first."""
        return order([replace(each, text=self._text_of(each.rank)) for each in self._failures])


def order(failures: Sequence[Failure], *, first: str = "") -> list[Failure]:
    """Return the failures with the root cause first.

    That is the earliest one which does not merely report the end of another rank; if all
    do, the earliest of them.

    Args:
        failures: In any order.
        first: Id of the node that was the first to report one. It comes before others, whose
            clocks may be wrong.
    """

    def key(failure: Failure) -> tuple[bool, bool, float, int]:
        return is_consequence(failure.text), failure.node != first, failure.time_s, failure.rank

    return sorted(failures, key=key)


def leavers(first: Failure, left_s: Mapping[int, float]) -> str:
    """Return which ranks left before the first failure, and how long before, or "".

    Others may have waited for them.

    Args:
        first: The root cause.
        left_s: By rank that ended with exit code 0, when; seconds since the epoch.
    """
    early = sorted((ended_s, rank) for rank, ended_s in left_s.items() if ended_s < first.time_s)
    told = [f"rank {rank} {first.time_s - ended_s:.1f} s" for ended_s, rank in early[:8]]
    if len(early) > len(told):
        told.append("...")
    return f"left with exit code 0 before the first failure: {', '.join(told)}" if told else ""


def render(
    failures: Sequence[Failure],
    stopped: Sequence[int],
    left_s: Mapping[int, float],
    *,
    prefix: str = "",
) -> str:
    """Return a report of one line per rank; the first failure's own text comes last.

    Args:
        failures: In the order of `order`, at least one.
        stopped: Ranks that the launcher ended because of them.
        left_s: See `leavers`.
        prefix: Put before each line of the launcher's own.
    """
    first, *others = failures
    lines = [failure.line_with_reason() for failure in reversed(others)]
    if stopped:
        ranks = ", ".join(map(str, stopped))
        lines.append(f"rank{'s' if len(stopped) > 1 else ''} {ranks} stopped by the launcher")
    if told := leavers(first, left_s):
        lines.append(told)
    lines.append(f"first failure: {first.line()}")
    report = "\n".join(prefix + line for line in lines)
    return f"{report}\n{first.text}" if first.text else report
