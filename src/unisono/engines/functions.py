"""Public functions that C++ runs, as far as it can.

A small collective takes half a microsecond between two processes. The way through the groups, the
dispatcher, the backend and the engine takes ten times that. So a function of `in_cpp` looks in
C++ for the prepared call of its arguments: function, group, dtypes, shapes, root, op, algorithm and
order. A number as time-out is for this call only. The arrays must be NumPy arrays, plain tensors of
torch, or lists of them; C++ packs arrays that are not contiguous. C++ runs the prepared call at
once, or queues it for the progress thread. In all other cases the Python function runs, as it does
without the C++ engine. If the arguments are new, C++ learns the prepared call from it.

A wrapper in the dispatcher suspends this, because the meaning of a call then depends on more than
its arguments. With an explicit stream, Python runs every call.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

from unisono.base.extension import extension as native


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
