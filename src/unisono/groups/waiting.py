"""Waiting for several works at once."""

from __future__ import annotations

from collections.abc import Sequence

from unisono.base.completion import Completion
from unisono.base.deadline import Deadline, Timeout
from unisono.errors import ArgumentTypeError, CollectiveTimeoutError, InvalidArgumentError
from unisono.groups.work import Work

__all__ = ["wait_all", "wait_any"]


def wait_all(works: Sequence[Work | None], timeout: Timeout | None = None) -> None:
    """Block until all works have ended; raise the first error in their order.

    Args:
        works: None among them, as calls on other groups' ranks return it, counts as done.
        timeout: Of the whole wait; None for no limit but the works' own.

    Raises:
        CollectiveTimeoutError: Not all ended in time; says how many. They go on.
    """
    limit = None if timeout is None else Deadline(timeout)
    calls = [work._pending for work in _checked(works)]
    for call in calls:
        if not call.wait_or_expire(limit):
            left = sum(not other.done() for other in calls)
            assert limit is not None
            raise CollectiveTimeoutError(
                f"{left} of {len(calls)} works were not done after {limit.timeout_s:g} s of "
                "waiting; they go on"
            )
    error = next((call.error for call in calls if call.error is not None), None)
    if error is not None:
        raise error


def wait_any(works: Sequence[Work], timeout: Timeout | None = None) -> int:
    """Block until one of the works has ended; return its index, or raise its error.

    If several have ended, the first in the list counts. A work that ended before counts too, so
    a loop has to take those it has seen out of the list.

    Args:
        works: At least one.
        timeout: None for no limit but the works' own.

    Raises:
        CollectiveTimeoutError: None ended in time. They go on.
        InvalidArgumentError: The list is empty.
    """
    limit = None if timeout is None else Deadline(timeout)
    calls = [work._pending for work in _checked(works)]
    if not calls:
        raise InvalidArgumentError("works is empty; expected at least one")
    one_ended = Completion()
    for call in calls:
        call.add_callback(lambda ended: one_ended.finish())
    # Works whose own time-out nobody watches but who waits for them.
    watched = [call for call in calls if call.deadline is not None]
    while not one_ended.done():
        for call in calls:
            call.require_other_thread()
        nearest = min(watched, key=lambda call: _left(call.deadline), default=None)
        if nearest is not None and _left(nearest.deadline) <= _left(limit):
            if not one_ended.wait_until(nearest.deadline):
                watched.remove(nearest)
                nearest.expire()
        elif not one_ended.wait_until(limit):
            assert limit is not None
            raise CollectiveTimeoutError(
                f"none of {len(calls)} works was done after {limit.timeout_s:g} s of waiting; "
                "they go on"
            )
    index = next(i for i, call in enumerate(calls) if call.done())
    error = calls[index].error
    if error is not None:
        raise error
    return index


def _left(deadline: Deadline | None) -> float:
    return float("inf") if deadline is None else deadline.remaining()


def _checked(works: Sequence[Work | None]) -> list[Work]:
    """Return the works of a list without the Nones."""
    if not isinstance(works, (list, tuple)) or not all(
        work is None or isinstance(work, Work) for work in works
    ):
        raise ArgumentTypeError("works must be a list of Work")
    return [work for work in works if work is not None]
