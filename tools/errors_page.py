"""Write docs/reference/errors.md: the classes of errors and their first lines, from the source.

Run from the repository root: `make docs`. Tests fail when the page is out of date, and when the
first line of an error is asserted by no test.
"""

from __future__ import annotations

import ast
import re
import sys
import textwrap
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

Every error is an `UnisonoError`, which is a `RuntimeError`, as scripts for torch expect. Every
error can be pickled.

An error prints a first line, then `where:`, and `hint:` if there is something to do. The attributes
`what`, `context` and `hint` hold the same facts. `context` has rank, group, op, seq, peers, usable,
...; `context.peers` are the ranks to blame, as global ranks.

After an error a group either stays usable or is broken for good: see `context.usable`, and the
classes below. Every later call of a broken group raises the first reason at once. Make a new group
then (`new_group`, or destroy and init).

The page has the first lines of errors that another rank causes. Variable parts are in braces:
`{call}` is "{op} #{seq} in group '{group}'", and `{here}` is "rank {rank} of {size}".
"""

# The state of the group after an error of a class and its sub-classes, and the advice. Classes
# that are missing here do not concern groups.
AFTERWARDS = {
    "UsageError": ("stays usable", "Change the call; the other ranks raise an error, too"),
    "NotInitializedError": ("does not exist", "Call `init_process_group` first"),
    "AlreadyInitializedError": ("stays usable", "Destroy the default group first"),
    "ClosedError": ("is closed", "Make a new group; in a forked child, after the fork"),
    "CollectiveMismatchError": ("stays usable", "Make the same calls in the same order everywhere"),
    "CollectiveTimeoutError": (
        "is broken after a collective, and usable after a receive, send or wait",
        "Look at the named ranks (`unisono stacks`); raise `timeout=` if they are only slow",
    ),
    "CollectiveAbortedError": ("is broken", "Find the reason of the abort; make a new group"),
    "StepAborted": ("is broken", "Call `reconfigure()`, `sync_state()` and repeat the step"),
    "PeerLostError": ("is broken", "Read the end of that rank's log"),
    "PeerFailedError": ("is broken", "Read that rank's traceback"),
}

# First lines that are composed of parts at run time. {seq} and similar parts are left out if they
# are unknown.
_CALL = "{op} #{seq} in group '{group}'"
_HERE = "rank {rank} of {size}"
_LATE = f"{_CALL} timed out after {{timeout}} s on {_HERE}: "
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
        _CALL + f" does not match on {_HERE}: " + "{ranks} called {what}; {ranks} called {what}",
        _CALL + f" does not match on {_HERE}: " + "{ranks} called {op}, but refused it: {reason}",
    ],
    "CollectiveAbortedError": [
        _CALL + f" was aborted on {_HERE}: " + "{reason} on rank {by}",
        "{op} in group '{group}' cannot run on " + _HERE + ": the group is broken: {reason}",
    ],
    "PeerLostError": [
        _CALL + f" failed on {_HERE}: " + "rank {peer} was lost: {reason}",
        _CALL + f" failed on {_HERE}: " + "rank {peer} was lost: it left: {how}",
    ],
    "PeerFailedError": [
        _CALL + f" failed on {_HERE}: " + "rank {peer} raised {error}",
    ],
    "ClosedError": [
        "{op} on group '{group}', which was destroyed",
        "{op} on group '{group}', which belongs to the parent of this fork",
    ],
}


MISMATCHES = """\
## Ranks that make different calls

Every rank raises a `CollectiveMismatchError` within a second; its first line shows both sides. No
array is changed, and the group's next call works. Tests make calls that differ in

{differences}
"""

REFUSALS = """\
If an argument is wrong on one rank only, such as a root outside the group, that rank raises an
error of a class below. All others raise a `CollectiveMismatchError` that quotes it.
"""


MESSAGES = """\
## Messages that do not fit their receive

`send` and `recv` are matched by peer and tag, without an agreement of the ranks. If a message has
another dtype or size than the receiving array, the receiver raises `CollectiveMismatchError`, which
names the sender and both sides. The message is dropped, the array keeps its values, and the group
stays usable.

The sender raises no error: its send ends as if the message had been received. If both sides need
the error, use a collective, for example `all_to_all_single` or `scatter`.

A receive without a matching send raises a time-out error that names the rank. The group stays
usable.
"""


# Errors whose first lines do not explain themselves, because another rank causes them.
LISTED = (errors.CollectiveMismatchError, errors.CollectiveTimeoutError, errors.PeerError)
LISTED += (errors.CollectiveAbortedError, errors.StepAborted)


OTHERS = """\
## Other errors

Their first lines explain themselves: they name the argument, file, key or host, its value and the
values that are allowed. [Rendezvous errors](../howto/rendezvous.md#rendezvous-errors) and
[troubleshooting](../howto/troubleshooting.md#error-messages) have the usual causes. A sub-class of
a class above has its effect on the group, the others have none. [API](api/errors.md): docstrings.

| class | inherits |
|---|---|"""


class Message(NamedTuple):
    """A call in the source that makes an error."""

    cls: str
    text: str
    module: str


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")


def page() -> str:
    """Return the page's text."""
    found = sorted(set(messages()))
    parts = [HEAD, *mismatches()]
    names = errors_by_line()
    for name in [name for name in names if name in AFTERWARDS]:
        parts += section(name, [message for message in found if message.cls == name])
    others = [f"| `{name}` | {bases(name)} |" for name in names if name not in AFTERWARDS]
    return "\n".join([*parts, OTHERS, *others]) + "\n"


def mismatches() -> list[str]:
    """Return what differs in calls that do not match, from the tests that make them."""
    sys.path.insert(0, str(Path().resolve()))
    from tests.core.collectives.test_mismatch import CASES

    differences = textwrap.indent(textwrap.fill(", ".join(CASES), 96), "    ")
    return [MISMATCHES.format(differences=differences), REFUSALS, MESSAGES]


def section(name: str, found: list[Message]) -> list[str]:
    """Return the part of the page about one class."""
    cls = getattr(errors, name)
    summary = (cls.__doc__ or "").partition("\n")[0]
    state, advice = AFTERWARDS[name]
    lines = [f"## {name}", "", textwrap.fill(f"{summary} Inherits {bases(name)}.", 100), ""]
    lines += [textwrap.fill(f"The group {state}. {advice}.", 100), ""]
    # One text may be raised in several places.
    texts = dict.fromkeys([*COMPOSED.get(name, []), *(message.text for message in found)])
    if not issubclass(cls, LISTED):
        texts = {}
    return [*lines, *(f"- {quoted(short(text))}" for text in texts), *([""] if texts else [])]


def bases(name: str) -> str:
    """Return the base classes of a class."""
    return ", ".join(f"`{base.__name__}`" for base in getattr(errors, name).__bases__)


def short(text: str) -> str:
    """Return a first line with the abbreviations that the head of the page explains."""
    return text.replace(_CALL, "{call}").replace(_HERE, "{here}")


def quoted(text: str) -> str:
    """Return text as code."""
    fence = "``" if "`" in text else "`"
    return f"{fence}{text}{fence}"


def errors_by_line() -> list[str]:
    """Return the classes in the order of their definition in errors.py."""
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
                # A text with fewer fixed letters is composed of parts: see COMPOSED.
                if node.func.id in names and len("".join(fixed_parts(text))) >= 8:
                    yield Message(node.func.id, text.partition("\n")[0], module)


def prototype(node: ast.expr) -> str:
    """Return a message with its variable parts in braces, or "" if it is made elsewhere."""
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
    """Return a name for a variable part of a message."""
    if isinstance(value, ast.Attribute):
        return value.attr.strip("_")
    if isinstance(value, ast.Name):
        return value.id.strip("_")
    return "..."


def fixed_parts(text: str) -> list[str]:
    """Return the constant parts of a message, the longest first."""
    parts = [part.strip() for part in re.split(r"\{[^{}]*\}", text)]
    return sorted((part for part in parts if len(part) >= 4), key=len, reverse=True)


if __name__ == "__main__":
    main()
