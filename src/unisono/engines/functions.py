"""Public functions that C++ runs, as far as it can.

A small collective takes half a microsecond between two processes. The way through the groups, the
dispatcher, the backend and the engine takes ten times that. So a function of `run_in_cpp` looks in
C++ for the prepared call of its arguments: function, group, dtypes, shapes, root, op, algorithm and
order. A number as time-out is for this call only. The arrays must be NumPy arrays, plain tensors of
torch, or lists of them; C++ packs arrays that are not contiguous. C++ runs the prepared call at
once, or queues it for the progress thread. In all other cases the Python function runs, as it does
without the C++ engine. If the arguments are new, C++ learns the prepared call from it.

A wrapper in the dispatcher suspends this, because the meaning of a call then depends on more than
its arguments. With an explicit stream, Python runs every call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, TypeVar, cast

from unisono.base.extension import extension as native

F = TypeVar("F", bound=Callable[..., Any])

KINDS = {
    **{"op": "o", "root": "n", "group": "g", "async_op": "f"},
    **{"peer": "p", "tag": "t", "partial": "h"},
    **{"algorithm": "a", "deterministic": "e", "timeout": "d"},
}
"""The kinds of parameters by name; `Kind` in native/bindings/arguments.hpp has those of arrays."""


def run_in_cpp(function: F, kinds: str) -> F:
    """Return a function that C++ runs if it can; `function` itself without the C++ engine.

    Args:
        function: It runs every other call. If the arguments of a collective are new, it gets one
            more keyword, `_learn`: a function for what `Engine.prepare` returns for the call.
        kinds: The kinds of the parameters before `group`. C++ knows the others by their names. A
            call that gives a parameter without a kind runs in Python.
    """
    if native is None:
        return function
    code = getattr(function, "__wrapped__", function).__code__
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    # A message has neither an algorithm nor an order of reduction.
    how = ("algorithm", "deterministic", "timeout") if "async_op" in names else ("timeout",)
    names = tuple(dict.fromkeys(names + how))
    letters = kinds[: names.index("group")]
    for name in names[len(letters) :]:
        letters += KINDS.get(name, "-")
    made: Any = native.make_function(function, names, letters, code.co_argcount)
    functools.update_wrapper(made, function)
    return cast(F, made)


def suspend() -> None:
    """Run every call in Python until `resume` was called as often as `suspend`."""
    if native is not None:
        native.suspend_calls()


def resume() -> None:
    """Undo one `suspend`."""
    if native is not None:
        native.resume_calls()


def set_world(
    world: ContextVar[Any],
    stream: ContextVar[Any],
    group_type: type,
    work_type: type,
) -> None:
    """Define where a call without a group finds its world, and the types of groups and works.

    Args:
        world: Holds an object whose `default` is a group. If it holds None: see `set_default`.
        stream: Holds the stream that orders calls. If it holds None, calls run at once.
        group_type: Its objects have a slot `calls`, which is that of their engine or None.
        work_type: Made from a completion and the name of its function, for a call with async_op.
    """
    if native is not None:
        native.set_world(world, stream, group_type, work_type)


def set_default(group: Any) -> None:
    """Use `group` (None: no group) in calls without a group if the context variable is None."""
    if native is not None:
        native.set_default(group)
