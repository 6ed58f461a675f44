"""What the conformance suites share: checks that explain themselves, and ranks as threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeVar

__all__ = ["PATIENCE_S", "equal", "in_threads", "is_a", "opened"]

T = TypeVar("T")
E = TypeVar("E", bound=BaseException)
C = TypeVar("C", bound="_Closes")

PATIENCE_S = 20.0
"""How long a check waits for what must happen: far more than it takes."""


def equal(what: str, got: object, expected: object) -> None:
    """Raise AssertionError with both sides unless they are equal."""
    if got != expected:
        raise AssertionError(f"{what}: got {got!r}, expected {expected!r}")


def is_a(what: str, got: object, cls: type[E]) -> E:
    """Return `got` as an error of that class; AssertionError if it is none."""
    if not isinstance(got, cls):
        raise AssertionError(f"{what}: got {got!r}, expected {cls.__name__}")
    return got


def in_threads(bodies: Sequence[Callable[[], T]]) -> list[T]:
    """Call every body on a thread of its own; return the results, or raise the first error."""
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def call(index: int, body: Callable[[], T]) -> None:
        try:
            results[index] = body()
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(target=call, args=pair, name=f"rank-{pair[0]}", daemon=True)
        for pair in enumerate(bodies)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * PATIENCE_S)
    if errors:
        raise errors[0]
    stuck = [thread.name for thread in threads if thread.is_alive()]
    equal("threads that did not end", stuck, [])
    return [results[index] for index in range(len(bodies))]


class _Closes(Protocol):
    def close(self) -> None: ...


@contextmanager
def opened(make: Callable[[int], Sequence[C]], size: int) -> Iterator[Sequence[C]]:
    """Make the ends of a world, and close all of them at the same time."""
    ends = make(size)
    try:
        yield ends
    finally:
        in_threads([end.close for end in ends])
