"""Write docs/reference/errors.md: the first line of every error, read from the source.

Run from the repository root: `make docs`. Tests fail when the page is out of date, and when the
first line of an error is asserted by no test.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from unisono import errors

PAGE = Path("docs/reference/errors.md")
SOURCE = Path("src/unisono")

HEAD = """\
# Errors

Written by `tools/errors_page.py` from the source; do not edit.

    from unisono.errors import CollectiveTimeoutError, PeerLostError

Every error is an `UnisonoError`, which is a `RuntimeError`, as scripts written for torch expect;
the classes below also inherit what the standard library calls such a thing. The first line is
enough on its own. `where:` and `hint:` follow, and the same facts are in the attributes `what`,
`context` (rank, group, op, seq, peers, usable, ...) and `hint`. `context.peers` are the ranks to
blame, as global ranks. Every error can be pickled.

A group either stays usable after an error or is broken for good; `context.usable` says which, and
so does the text below. A broken group ends every later call at once with the same reason; make a
new one (`new_group`, or destroy and init). The messages have their variable parts in braces.
"""

# What a class leaves behind, and what to do. The others have nothing to do with groups.
AFTERWARDS = {
    "UsageError": ("stays usable", "change the call; the other ranks have been told, too"),
    "NotInitializedError": ("there is none", "call `init_process_group` first"),
    "AlreadyInitializedError": ("stays usable", "destroy the default group first"),
    "ClosedError": ("is closed", "make a new one; in a forked child, after the fork"),
    "CollectiveMismatchError": ("stays usable", "make the same calls in the same order everywhere"),
    "CollectiveTimeoutError": (
        "is broken, by a collective; usable, by a receive, send or wait",
        "see what the named ranks do (py-spy dump); raise `timeout=` if they are only slow",
    ),
    "CollectiveAbortedError": ("is broken", "see why it was aborted; make a new group"),
    "PeerLostError": ("is broken", "see the end of that rank's own log"),
    "PeerFailedError": ("is broken", "see that rank's own traceback"),
}

# First lines that are put together from parts; {seq} and the like are said where known.
_CALL = "{op} #{seq} in group '{group}'"
_LATE = _CALL + " timed out after {timeout} s on rank {rank} of {size}: "
COMPOSED = {
    "CollectiveTimeoutError": [
        _LATE + "{ranks} never entered it",
        _LATE + "{ranks} had not entered it {ago} s ago and did not answer again",
        _LATE + "{ranks} entered it but did not answer again",
        _LATE + "{ranks} did not answer",
        _LATE + "{ranks} left or died",
        _LATE + "every rank entered it, but the data did not arrive in time",
        "monitored_barrier in group '{group}': {ranks} never entered it",
    ],
    "CollectiveMismatchError": [
        _CALL + " does not match on rank {rank} of {size}: {ranks} called {call}; {ranks} called "
        "{call}",
        _CALL + " does not match on rank {rank} of {size}: {ranks} called {op}, but refused it: "
        "{reason}",
    ],
    "CollectiveAbortedError": [
        _CALL + " was aborted on rank {rank} of {size}: {reason} on rank {by}",
        "{op} in group '{group}' cannot run on rank {rank} of {size}: the group is broken: "
        "{reason}",
    ],
    "PeerLostError": [
        _CALL + " failed on rank {rank} of {size}: rank {peer} was lost: {reason}",
        _CALL + " failed on rank {rank} of {size}: rank {peer} was lost: it left: {how}",
    ],
    "PeerFailedError": [
        _CALL + " failed on rank {rank} of {size}: rank {peer} raised {error}",
    ],
    "ClosedError": [
        "{op} on group '{group}', which was destroyed",
        "{op} on group '{group}', which belongs to the parent of this fork",
    ],
}


MISMATCHES = """\
## Ranks that make different calls

Each of these is a `CollectiveMismatchError` on every rank within a second, with both sides in its
first line. No array is changed, and the group's next call works. Tests make all of them.
"""

REFUSALS = """\
An argument that is wrong on one rank alone is that rank's own error, and on all others, within a
second, a `CollectiveMismatchError` that quotes it. The group's next call works here, too.
"""


MESSAGES = """\
## Messages that do not fit their receive

`send` and `recv` are matched by peer and tag, not by an agreement. If a message has another dtype
or size than the array that receives it, the receiver raises `CollectiveMismatchError`, which names
the sender and both sides. The message is dropped, the array keeps its values, the group and the
order of later messages are as before. The sender is not told: a small send has returned long ago,
and a large one that still waits ends as if its message had been taken, when the receiver has seen
it. Who needs both sides to know uses a collective, for example `all_to_all_single` or `scatter`. A
receive from a rank that sends nothing, or with a tag that nobody uses, ends with its time-out and
names the rank; the group stays usable.
"""


class Message(NamedTuple):
    """One place that makes an error."""

    cls: str
    text: str
    module: str
    hint: str


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")


def page() -> str:
    """Return the page's text."""
    found = sorted(set(messages()))
    parts = [HEAD, *mismatches()]
    for name in errors_by_line():
        parts += section(name, [message for message in found if message.cls == name])
    return "\n".join(parts)


def mismatches() -> list[str]:
    """Return the table of calls that do not fit together, from the tests that make them."""
    sys.path.insert(0, str(Path("tests/groups").resolve()))
    sys.path.insert(0, str(Path().resolve()))
    from mismatch_bodies import CASES as DIFFERENT
    from refusal_bodies import CASES as REFUSED

    lines = [MISMATCHES, "| what differs | one rank | the others |", "|---|---|---|"]
    lines += [f"| {name} | `{one}` | `{other}` |" for name, (_, _, one, other) in DIFFERENT.items()]
    lines += ["", REFUSALS, "| what is wrong | the error on that rank | its text has |"]
    lines += ["|---|---|---|"]
    lines += [f"| {name} | `{e.__name__}` | {text} |" for name, (_, _, e, text) in REFUSED.items()]
    return [*lines, "", MESSAGES]


def section(name: str, found: list[Message]) -> list[str]:
    """Return what the page says of one class."""
    cls = getattr(errors, name)
    bases = ", ".join(f"`{base.__name__}`" for base in cls.__bases__)
    summary = (cls.__doc__ or "").partition("\n")[0]
    lines = [f"## {name}", "", f"{summary} Inherits {bases}.", ""]
    known = [AFTERWARDS[base.__name__] for base in cls.__mro__ if base.__name__ in AFTERWARDS]
    if known:
        lines += [f"The group {known[0][0]}. What to do: {known[0][1]}.", ""]
    texts = [(text, "any call", "") for text in COMPOSED.get(name, [])]
    texts += [(m.text, m.module, m.hint) for m in found]
    if texts:
        lines += ["| first line | raised in | hint |", "|---|---|---|"]
        lines += [f"| {cell(text)} | {where} | {cell(hint)} |" for text, where, hint in texts]
        lines.append("")
    return lines


def cell(text: str) -> str:
    """Return text that may stand in a table."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def errors_by_line() -> list[str]:
    """Return the classes in the order of their definition: as the tree in errors.py has them."""
    tree = ast.parse((SOURCE / "errors.py").read_text(encoding="utf-8"))
    classes = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
    return [name for name in classes if name in errors.__all__ and name != "Context"]


def messages() -> Iterator[Message]:
    """Yield every error that the source makes with a text of its own."""
    names = set(errors_by_line())
    for path in sorted(SOURCE.rglob("*.py")):
        module = path.relative_to(SOURCE).with_suffix("").as_posix()
        if module.startswith("testing/"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args:
                text = prototype(node.args[0])
                # What has next to nothing fixed is composed of parts: see COMPOSED.
                if node.func.id in names and len("".join(fixed_parts(text))) >= 8:
                    hints = [prototype(k.value) for k in node.keywords if k.arg == "hint"]
                    line = text.partition("\n")[0]
                    yield Message(node.func.id, line, module, "".join(hints))


def prototype(node: ast.expr) -> str:
    """Return a message with its variable parts in braces; "" for what is made elsewhere."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(prototype(value) for value in node.values)
    if isinstance(node, ast.FormattedValue):
        return f"{{{named(node.value)}}}"
    if isinstance(node, ast.BinOp):
        return prototype(node.left) + prototype(node.right)
    return ""


def named(value: ast.expr) -> str:
    """Return a name for what is put into a message."""
    if isinstance(value, ast.Attribute):
        return value.attr.strip("_")
    if isinstance(value, ast.Name):
        return value.id.strip("_")
    return "..."


def fixed_parts(text: str) -> list[str]:
    """Return the parts of a message that are the same every time, the longest first."""
    parts = [part.strip() for part in re.split(r"\{[^{}]*\}", text)]
    return sorted((part for part in parts if len(part) >= 4), key=len, reverse=True)


if __name__ == "__main__":
    main()
