"""The signatures of torch's C++ methods, which only their documentation has."""

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

_SIGNATURE = re.compile(r"^(?:\d+\. )?\w+\((.*)\) -> ", re.MULTILINE)


class Parameter(NamedTuple):
    """One parameter; `kind` is "positional", "keyword" or "both"."""

    name: str
    kind: str
    optional: bool
    type: str


Overload = tuple[Parameter, ...]

_KINDS = {
    inspect.Parameter.POSITIONAL_ONLY: "positional",
    inspect.Parameter.KEYWORD_ONLY: "keyword",
    inspect.Parameter.POSITIONAL_OR_KEYWORD: "both",
}


def overloads(function: Callable[..., Any]) -> list[Overload]:
    """Return the ways in which a method can be called, without self and private parameters."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        texts = _SIGNATURE.findall(function.__doc__ or "")
        return [tuple(parsed(text)) for text in texts if not text.startswith("*args")]
    return [
        tuple(
            Parameter(p.name, _KINDS[p.kind], p.default is not p.empty, str(p.annotation))
            for p in parameters
            if p.kind in _KINDS and p.name != "self" and not p.name.startswith("_")
        )
    ]


def parsed(text: str) -> Iterator[Parameter]:
    """Yield the parameters in a signature as pybind11 writes it."""
    kind = "both"
    for part in split(text):
        if part == "*":
            kind = "keyword"
        name, _, rest = part.partition(":")
        if name in ("self", "*", "/"):
            continue
        unnamed = re.fullmatch(r"arg\d+", name) is not None
        type_, equals, _ = rest.partition(" = ")
        yield Parameter(name, "positional" if unnamed else kind, bool(equals), type_.strip())


def split(text: str) -> Iterator[str]:
    """Yield what the commas outside of brackets separate."""
    depth = start = 0
    for place, character in enumerate(text):
        depth += (character in "([{<") - (character in ")]}>")
        if character == "," and depth == 0:
            yield text[start:place].strip()
            start = place + 1
    if text[start:].strip():
        yield text[start:].strip()


def calls(
    overload: Overload, value: Callable[[Parameter], Any]
) -> Iterator[tuple[list[Any], dict[str, Any]]]:
    """Yield arguments for one overload: all in their places, all by name, the required ones."""
    for by_name, all_of_them in ((False, True), (True, True), (False, False)):
        arguments: list[Any] = []
        keywords: dict[str, Any] = {}
        for parameter in overload:
            if parameter.optional and not all_of_them:
                continue
            if parameter.kind == "keyword" or (by_name and parameter.kind == "both"):
                keywords[parameter.name] = value(parameter)
            else:
                arguments.append(value(parameter))
        yield arguments, keywords
