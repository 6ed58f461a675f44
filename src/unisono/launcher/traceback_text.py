"""Find the traceback in a standard error, and decide whether it only reports the end of a peer."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

_HEADER = re.compile(
    r"(\[rank\d+\]: ?)?"
    r"(Traceback \(most recent call last\):|  \+ Exception Group Traceback|Fatal Python error: )"
)
_SYNTAX = re.compile(r'(\[rank\d+\]: ?)?  File ".*", line \d+$')
_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?")
_CHAINED = {
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
}
_FATAL = "Fatal Python error: "
_FRAME = '  File "'
_IGNORED = "Exception ignored"
_LAST_LINES = 20


_MEMBER = re.compile(r"( +)(\+-)?\+-{16} (\d+|\.\.\.) -{16}")
"""The line before a member of an exception group, as in "+---------------- 1 ----------------"."""

_MARGIN = re.compile(r"( +)(?:\| ?|\+ (?=Exception Group))")
_INNER_HEADERS = ("Traceback (most recent call last):", "Exception Group Traceback")

_PEERS = r"(PeerLostError|PeerFailedError|CollectiveAbortedError|StoreConnectionError|StepAborted)"
_CALLBACK = "RuntimeError: Got the following error when running the callback: "
# Gloo raises a plain RuntimeError when a peer has closed its connection.
_CLOSED = r"(Connection closed by peer|Connection reset by peer|Broken pipe)"

# unisono.MPI's error names the class of MPI, and the other class only where that says nothing.
_MPI = rf"Exception: MPI_ERR_(PROC_ABORTED|PROC_FAILED|OTHER: {_PEERS})"

_WRAPPED = re.compile(rf"({_CALLBACK})?(\w+\.)*({_PEERS}|{_MPI})\b|.*gloo/.*{_CLOSED}")
"""The line of an exception that reports the end of a peer, at any place of a chain of exceptions.

torch's DDP turns an error of a call into the text of a RuntimeError.
"""

_CONSEQUENCES = re.compile(
    rf"{_WRAPPED.pattern}|(\w+\.)*"
    rf"(ConnectionResetError|ConnectionAbortedError|BrokenPipeError|DistNetworkError)\b|.*{_CLOSED}"
)
"""The line of a last exception that reports the end of a peer.

With other lines between, a closed connection may as well be that of a DataLoader's worker.
"""


def _is_noise(lines: Sequence[str], header: int) -> bool:
    """Whether the traceback at `header` belongs to an exception that Python ignored."""
    return header > 0 and _IGNORED in lines[header - 1]


def _headers(lines: Sequence[str]) -> list[int]:
    """Return where the tracebacks begin.

    A fatal error outside of all Python code comes from the end of the interpreter: after an
    exception Gloo's threads may abort the process there. The exception is the reason of the end.
    """
    found = [i for i, line in enumerate(lines) if _HEADER.match(line) and not _is_noise(lines, i)]
    rest = lines[found[-1] :] if len(found) > 1 else [""]
    if rest[0].startswith(_FATAL) and not any(line.startswith(_FRAME) for line in rest):
        found.pop()
    return found


def _start_of_traceback(lines: Sequence[str]) -> int | None:
    headers = _headers(lines)
    if not headers:
        # A script that does not compile has no traceback, only the line and the error.
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

    Without a traceback, return the last 20 lines. Exceptions that Python ignored (`__del__`, weak
    references) do not count.
    """
    lines = stderr.splitlines()
    start = _start_of_traceback(lines)
    if start is None:
        return "\n".join(lines[-_LAST_LINES:])
    of_it = itertools.takewhile(lambda line: not line.startswith(_IGNORED), lines[start:])
    return "\n".join(of_it)


def has_traceback(stderr: str) -> bool:
    """Return whether a worker's standard error has a traceback."""
    return _start_of_traceback(stderr.splitlines()) is not None


def exception_line(text: str) -> str:
    """Return the line "ValueError: ..." of a traceback, or ""."""
    raised = _exceptions(text)
    return raised[-1].line if raised else ""


def is_consequence(text: str) -> bool:
    """Whether a traceback only reports that another process was lost before.

    It does if one exception of its chain does: the last, its causes, and the exceptions that were
    handled when the next was raised. A group of exceptions does if all its members do.
    """
    return _follow(_exceptions(text))


@dataclass
class _Raised:
    """An exception of a traceback.

    Attributes:
        line: Its class and the first line of its text.
        members: Those of an exception group; each with the exceptions before it.
    """

    line: str
    members: list[list[_Raised]] = field(default_factory=list)


def _follow(raised: Sequence[_Raised]) -> bool:
    return any(
        all(map(_follow, each.members))
        if each.members
        else bool((_CONSEQUENCES if each is raised[-1] else _WRAPPED).match(each.line))
        for each in raised
    )


def _exceptions(text: str) -> list[_Raised]:
    """Return the exceptions of a traceback; the last one ended the program."""
    lines = [_RANK_PREFIX.sub("", line) for line in text.splitlines()]
    headers = _headers(lines) or [i for i, line in enumerate(lines) if _SYNTAX.match(line)]
    # The exceptions of the text, those of the present member of a group in it, and so on.
    chains: list[list[_Raised]] = [[]]
    # A first cause that was never raised has no header.
    awaited = bool(headers) and not _CHAINED.isdisjoint(lines[: headers[0]])
    for i, whole in enumerate(lines):
        depth, line = _unfolded(whole)
        if line is None:
            # Otherwise it is a text that looks like a group.
            if 0 < depth <= len(chains) and chains[depth - 1]:
                chains[depth:] = [[]]
                chains[depth - 1][-1].members.append(chains[depth])
                awaited = True
        elif depth >= len(chains):
            continue
        elif line in _CHAINED or i in headers or (depth and line.startswith(_INNER_HEADERS)):
            del chains[depth + 1 :]
            awaited = not line.startswith(_FATAL)
            chains[depth] += [] if awaited else [_Raised(line)]
        elif awaited and line and not line[0].isspace():
            chains[depth].append(_Raised(line))
            awaited = False
    return chains[0]


def _unfolded(line: str) -> tuple[int, str | None]:
    """Return the depth and the text of a line in exception groups; None begins a member."""
    if member := _MEMBER.fullmatch(line):
        return (len(member[1]) + len(member[2] or "")) // 2 - 1, None
    if margin := _MARGIN.match(line):
        return max(0, len(margin[1]) // 2 - 1), line[margin.end() :]
    return 0, line
