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
import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

from unisono.base.seam import cpp

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
    "sent_soon": "S",
    "received_soon": "V",
    "peer": "p",
    "tag": "t",
    "partial": "h",
    "algorithm": "a",
    "deterministic": "e",
    "timeout": "d",
}


def run_in_cpp(function: F, kinds: Iterable[str]) -> F:
    """Return a function that C++ runs if it can; `function` itself without the C++ engine.

    Args:
        function: It runs every other call. If the arguments of a collective are new, it gets one
            more keyword, `_learn`: a function for what `Engine.prepare` returns for the call.
        kinds: The kinds of the first parameters. For an array "reads" or "writes", for a list of
            arrays of one shape "reads_list" or "writes_list", otherwise "op" or "root". For a
            message: "sent" or "received" for the array, with "_soon" if the call does not wait for
            its end, and "peer". C++ knows the parameters "group", "async_op", "tag" and "timeout"
            by their names. A call that gives any other parameter runs in Python.
    """
    parameters = inspect.signature(function).parameters
    names = tuple(n for n, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD)
    positional = len(names)
    # A message has neither an algorithm nor an order of reduction.
    shared: tuple[str, ...] = ("algorithm", "deterministic", "timeout")
    if "async_op" not in names:
        shared = ("partial", "timeout") if "partial" in parameters else ("timeout",)
    names = tuple(dict.fromkeys(names + shared))
    kind_of = dict(zip(names, kinds, strict=False))
    letters = "".join([_KINDS.get(kind_of.get(name, name), "-") for name in names])
    made: Any = cpp.make_function(function, names, letters, positional)
    if made is not function:
        functools.update_wrapper(made, function)
    return cast(F, made)
