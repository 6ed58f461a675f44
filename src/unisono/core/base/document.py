"""Documents: dataclasses as JSON, and back with each value checked. Nothing here does I/O.

A dataclass is an object of its fields, a sequence is a list. A field is a number, a text, a value
of a `StrEnum`, a sequence, a mapping from texts or a dataclass. It may also be None, or `Any`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

MOST_BYTES = 1 << 26
"""Size of the largest text that is read. The records of a rank, 16,384 of some 500 bytes, fit.

With a larger value, a damaged or hostile text takes more memory.
"""

_SCALARS = frozenset({str, int, float, bool, NoneType})

T = TypeVar("T")


def dumps(document: object, **layout: Any) -> str:
    """Return the JSON text of a document; `layout` is for `json.dumps`.

    Raises:
        TypeError: A value is of another type.
    """
    return json.dumps(document, default=_object_of, **layout)


def plain(value: Any) -> Any:
    """Return a document as dicts, lists, numbers and texts.

    Raises:
        TypeError: A value is of another type.
    """
    if isinstance(value, (str, int, float, NoneType)):
        return value
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    found = value if isinstance(value, dict) else _object_of(value)
    # A trace has 300,000 values of such types.
    if _SCALARS.issuperset(map(type, found.values())):
        return found
    return {name: plain(each) for name, each in found.items()}


def loads(
    kind: type[T], text: str | bytes, *, version: int | None = None, exact: bool = False
) -> T:
    """Return the document of a JSON text.

    Args:
        kind: The type of the document.
        text: As `dumps` writes it.
        version: Number that the key "format" must have; None: there need not be such a key.
        exact: Whether an object must have all keys and no others. If not, other keys are left out,
            and an absent key has the default of its field, so that other versions can be read.

    Raises:
        ValueError: The text is too long or is no such document; names the value.
        KeyError: There is no key "format".
    """
    if len(text) > MOST_BYTES:
        raise ValueError(f"{len(text)} bytes, expected at most {MOST_BYTES}")
    try:
        found = json.loads(text)
        if version is not None:
            number = parse(dict[str, Any], found)["format"]
            if type(number) is not int or number != version:
                raise ValueError(f"format {number!r:.50}, expected {version}")
        return parse(kind, found, exact=exact)
    except (RecursionError, OverflowError) as error:
        raise ValueError(str(error)) from None


def parse(kind: type[T], value: Any, *, exact: bool = False, name: str = "the document") -> T:
    """Return the document of a JSON value; see `loads`. `name` is for the error."""
    found: T = _parsed(kind, value, exact, name)
    return found


def _object_of(document: Any) -> dict[str, Any]:
    kind: Any = type(document)
    names = _types(kind)
    if not is_dataclass(kind):
        raise TypeError(f"a document has no place for a {kind.__name__}")
    return {name: getattr(document, name) for name in names}


@functools.cache
def _types(kind: Any) -> dict[str, tuple[Any, frozenset[Any]]]:
    """Return for each field of a dataclass its type and the types of values that it takes as is.

    Nothing for another type.
    """
    hints = get_type_hints(kind) if is_dataclass(kind) else {}
    kinds = {each.name: hints[each.name] for each in fields(kind)} if hints else {}
    return {name: (each, frozenset(_kinds(each))) for name, each in kinds.items()}


def _kinds(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if isinstance(kind, UnionType) else (kind,)


@functools.cache
def _needed(kind: Any) -> set[str]:
    return {each.name for each in fields(kind) if each.default is each.default_factory is MISSING}


def _parsed(kind: Any, value: Any, exact: bool, name: str) -> Any:
    """Return the value of a type that a JSON value stands for."""
    if type(value) is kind or kind is Any:
        return value
    kinds = _kinds(kind)
    if type(value) in kinds:
        return value
    if type(value) is int and float in kinds:
        return float(value)
    origin, args = get_origin(kinds[0]) or kinds[0], get_args(kinds[0])
    if type(value) is dict and (types := _types(origin)):
        if absent := (set(types) if exact else _needed(origin)).difference(value):
            raise ValueError(f"no key {min(absent)!r}")
        if exact and (others := value.keys() - types):
            raise ValueError(f"unknown key {min(others)!r:.50}")
        found = {
            key: each if type(each) in alike else _parsed(kind, each, exact, key)
            for key, (kind, alike) in types.items()
            if (each := value.get(key, MISSING)) is not MISSING
        }
        return origin(**found)
    if type(value) is dict and issubclass(origin, Mapping):
        return {key: _parsed(args[1], each, exact, key) for key, each in value.items()}
    if type(value) is list and origin in (list, tuple, Sequence):
        make = list if origin is list else tuple
        return make(_parsed(args[0], each, exact, name) for each in value)
    if type(value) is str and issubclass(origin, Enum):
        return origin(value)
    expected = kind.__name__ if isinstance(kind, type) else kind
    raise ValueError(f"{name} is {value!r:.50}, expected {expected}")
