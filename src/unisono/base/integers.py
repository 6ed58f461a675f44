"""Integers as arguments: of Python, of NumPy, and of every other class with `__index__`."""

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
