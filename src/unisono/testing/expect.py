"""Helpers of the conformance suites: checks with error texts, and ranks as threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

__all__ = ["PATIENCE_S", "checks_in", "equal", "in_threads", "is_a", "opened", "raises"]

T = TypeVar("T")
E = TypeVar("E", bound=BaseException)
C = TypeVar("C", bound="_Closes")

PATIENCE_S = 20.0
"""Seconds that a check waits for an event that must happen; far more than it takes."""


def checks_in(module: dict[str, Any]) -> tuple[Callable[[Any], None], ...]:
    """Return the checks of a suite: a module's functions `_check_...`, in their order."""
    return tuple(value for name, value in module.items() if name.startswith("_check_"))


def equal(what: str, got: object, expected: object) -> None:
    """Raise AssertionError with both sides unless they are equal."""
    if got != expected:
        raise AssertionError(f"{what}: got {got!r}, expected {expected!r}")


def is_a(what: str, got: object, cls: type[E]) -> E:
    """Return `got`; raise AssertionError if it is not of class `cls`."""
    if not isinstance(got, cls):
        raise AssertionError(f"{what}: got {got!r}, expected {cls.__name__}")
    return got


def raises(what: str, error: type[Exception], call: Callable[[], object], *names: str) -> None:
    """Check that a call raises `error`, with each of `names` in the first line."""
    try:
        result = call()
    except error as caught:
        first_line = str(caught).partition("\n")[0]
        for name in names:
            if name not in first_line:
                raise AssertionError(f"{what}: {name!r} is not named in {first_line!r}") from caught
        return
    raise AssertionError(f"{what}: got {result!r}, expected {error.__name__}")


def in_threads(bodies: Sequence[Callable[[], T]]) -> list[T]:
    """Call every body on a separate thread; return the results, or raise the first error."""
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
    """Make the objects of all ranks of a world, and close all of them at the same time."""
    made = make(size)
    try:
        yield made
    finally:
        in_threads([each.close for each in made])
