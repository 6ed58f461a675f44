"""Repeating a call without Python code: what the C++ engine remembers of public functions.

A small collective takes half a microsecond between two processes, and the way through the
groups, the dispatcher, the backend and the engine ten times that. So a public function that is
decorated with `quick` looks, in C++, whether the same call was made before: same function, group,
dtypes, shapes, root, op and algorithm, on contiguous NumPy arrays or lists of such. If so it runs
again what that call has run, or queues it for the progress thread; if not, or if anything is
unusual, the Python function runs, as it does without the C++ engine. What makes a call's meaning
depend on more than its arguments (a wrapper in the dispatcher) suspends this; with an explicit
stream Python has every call.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, TypeVar, cast

from unisono.base.extension import extension as native

__all__ = ["quick", "resume", "set_default", "set_world", "suspend"]

F = TypeVar("F", bound=Callable[..., Any])

_KINDS = {
    "reads": "r",
    "writes": "w",
    "reads_list": "R",
    "writes_list": "W",
    "op": "o",
    "root": "n",
    "group": "g",
    "async_op": "f",
    "sent": "s",
    "received": "v",
    "peer": "p",
    "tag": "t",
}


def quick(**kinds: str) -> Callable[[F], F]:
    """Return a decorator for a function whose calls can be repeated.

    Args:
        **kinds: For each parameter that may be given: "reads" or "writes" for an array,
            "reads_list" or "writes_list" for a list of arrays of one shape, "op", "root", "group"
            or "async_op"; of a message: "sent" or "received" for the array, "peer", "tag" and
            "group". A call that gives another one runs in Python.
    """

    def decorate(function: F) -> F:
        if native is None:
            return function
        names = [
            name
            for name, parameter in inspect.signature(function).parameters.items()
            if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        ]
        letters = "".join(_KINDS[kinds[name]] if name in kinds else "-" for name in names)
        if "async_op" in kinds:  # a collective
            names, letters = [*names, "algorithm"], letters + "a"
        made: Any = native.quick(function, names, letters)
        functools.update_wrapper(made, function)
        return cast(F, made)

    return decorate


def suspend() -> None:
    """Run every call in Python until `resume`; both count."""
    if native is not None:
        native.suspend_quick()


def resume() -> None:
    """Undo one `suspend`."""
    if native is not None:
        native.resume_quick()


def set_world(
    world: ContextVar[Any], stream: ContextVar[Any], group_type: type, work_type: type
) -> None:
    """Say where a call without a group finds its world, and what a group is.

    Args:
        world: Holds an object whose `default` is a group; None: see `set_default`.
        stream: Holds the stream that orders calls; None: they run at once.
        group_type: Its objects have an attribute `calls`: that of their engine, or None.
        work_type: Made of a completion and the name of its function for a call with async_op.
    """
    if native is not None:
        native.set_world(world, stream, group_type, work_type)


def set_default(group: Any) -> None:
    """Use `group`, or none, in calls without one, where the context variable is None."""
    if native is not None:
        native.set_default(group)
