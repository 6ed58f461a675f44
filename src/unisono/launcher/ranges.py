"""Lists of numbers as text such as "0-3,8", the kernel's notation for CPUs."""

from __future__ import annotations

from collections.abc import Iterable

from unisono.errors import InvalidArgumentError


def parse_ranges(text: str) -> list[int]:
    """Return the numbers of a list such as "0-3,8"; an empty list for an empty text.

    Raises:
        InvalidArgumentError: The text is not such a list.
    """
    numbers: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or not (last.isdecimal() if dash else True):
            raise InvalidArgumentError(f"{text!r} is not a list of numbers such as 0-3,8")
        numbers.extend(range(int(first), int(last or first) + 1))
    return numbers


def format_ranges(numbers: Iterable[int]) -> str:
    """Return "0-3,8" for these numbers."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
