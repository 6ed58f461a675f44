"""Integers as arguments: ranks, tags, sizes, and lists of them, of every integer type; flags."""

from __future__ import annotations

import operator
from typing import Any

from unisono.errors import ArgumentTypeError


def as_integer(value: Any, what: str) -> int:
    """Return a rank, tag or size as an int; NumPy's integers are fine, floats and bools not.

    Raises:
        ArgumentTypeError: Not an integer.
    """
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise ArgumentTypeError(f"{what} must be an integer, got {value!r}")


def as_integers(values: Any, what: str) -> tuple[int, ...]:
    """Return a list of ranks or sizes as ints: a sequence, an array, a tensor or an iterator.

    Raises:
        ArgumentTypeError: Not such a list, or an entry is no integer; see `as_integer`.
    """
    if isinstance(values, (str, bytes, bytearray, dict, set, frozenset)) or not hasattr(
        values, "__iter__"
    ):
        raise ArgumentTypeError(f"{what} must be a list of integers, got {values!r}")
    # A tensor or an array of integers is converted much faster as a whole.
    if hasattr(values, "tolist"):
        values = values.tolist()
        if not isinstance(values, list):
            raise ArgumentTypeError(f"{what} must be a list of integers, got {values!r}")
    return tuple([as_integer(value, f"{what}[{at}]") for at, value in enumerate(values)])


def as_splits(rows: Any, what: str) -> tuple[int, ...] | None:
    """Return split sizes as ints; None, for equal parts, if they are None or empty."""
    return None if rows is None else as_integers(rows, what) or None


def as_flag(value: Any, what: str) -> bool:
    """Return whether a flag is set.

    Raises:
        ArgumentTypeError: It is neither true nor false, as an array of several elements.
    """
    try:
        return bool(value)
    except Exception:  # of the value's class
        raise ArgumentTypeError(f"{what} must be a bool, got {type(value).__name__}") from None
