"""The atomic operations of the C++ sources, and the memory order of each.

A place is "FILE:FUNCTION", such as "shared/group.cpp:publish".
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

NATIVE = Path(__file__).parents[2] / "native"
METHODS = "store|load|exchange|fetch_add|fetch_sub|compare_exchange_strong|compare_exchange_weak"
HELPERS = (
    "full_fence|fence|futex_wait|futex_wake_all|change_and_wake|ring_bell|copy_bytes|memcpy"
    r"|ring(?=\(\))|end_nap"
)
_OPERATION = re.compile(
    rf"([\w.>()\[\]-]*?)(\w+)(?:\.|->)({METHODS})\(|\b(atomic_thread_fence|{HELPERS})\("
    r"|\b__atomic_(\w+)_n\("
)
_ORDER = re.compile(r"memory_order_(\w+)|__ATOMIC_(\w+)")


class Operation(NamedTuple):
    """An atomic operation, as "WORD.METHOD" or the name of a helper function."""

    name: str
    order: str


@cache
def operations(place: str) -> list[Operation]:
    """Return the operations of a function, and of its overloads, in the order of the source."""
    return _found(_bodies(place))


def operations_of_file(file: str) -> list[Operation]:
    """Return the operations of a whole file."""
    return _found(without_comments((NATIVE / file).read_text(encoding="utf-8")))


def _found(body: str) -> list[Operation]:
    found = []
    for match in _OPERATION.finditer(body):
        _, word, method, helper, builtin = match.groups()
        arguments = _balanced(body, match.end() - 1, "()")
        orders = [first or second.lower() for first, second in _ORDER.findall(arguments)]
        name = f"{word}.{method}" if method else helper or f"__atomic_{builtin}"
        found.append(Operation(name, orders[0] if orders else "seq_cst"))
    return found


def _bodies(place: str) -> str:
    file, _, function = place.partition(":")
    text = without_comments((NATIVE / file).read_text(encoding="utf-8"))
    words = r"^(?! *(?:if|while|for|return|\}))[^\n;{}]*\b"
    head = re.compile(rf"{words}{function}\([^;{{}}]*\)(?: const| override|\s)*\{{", re.MULTILINE)
    bodies = [_balanced(text, match.end() - 1, "{}") for match in head.finditer(text)]
    assert bodies, f"{place} is no function"
    return "\n".join(bodies)


def _balanced(text: str, begin: int, pair: str) -> str:
    """Return the text between a bracket and the one that closes it."""
    depth = 0
    for at in range(begin, len(text)):
        depth += (text[at] == pair[0]) - (text[at] == pair[1])
        if depth == 0:
            return text[begin + 1 : at]
    raise AssertionError(f"no {pair[1]} in {text[begin : begin + 80]!r}")


def without_comments(text: str) -> str:
    return re.sub(r"//[^\n]*", "", text)
