"""The default group and the groups made from it: the library's only mutable module state.

A process has one world. Threads that act as ranks (see `unisono.testing.run`) have one each:
`use` installs a world for the current context only.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, TypeVar

from unisono.base.streams import stream_variable
from unisono.engines import repeat
from unisono.errors import ArgumentTypeError, NotInitializedError
from unisono.groups.process_group import ProcessGroup
from unisono.groups.work import Work

__all__ = [
    "GroupMember",
    "World",
    "current",
    "group",
    "member_group",
    "process_world",
    "resolve",
    "use",
]

T = TypeVar("T")


class World:
    """One default group, and the groups made from it, by key."""

    def __init__(self) -> None:
        self._default: ProcessGroup | None = None
        self.groups: dict[str, ProcessGroup] = {}
        self.made = 0
        self.made_local: Counter[tuple[int, ...]] = Counter()
        self.on_close: list[Callable[[], None]] = []
        self.passed: Counter[str] = Counter()  # how often each `breakpoint` was come by

    @property
    def default(self) -> ProcessGroup | None:
        """The group that calls without one mean."""
        return self._default

    @default.setter
    def default(self, group: ProcessGroup | None) -> None:
        self._default = group
        if self is process_world:
            repeat.set_default(group)

    def close(self, *, only: ProcessGroup | None = None) -> None:
        """Close one sub-group, or everything, newest group first."""
        if only is not None and only is not self.default:
            del self.groups[only.key]
            only.close()
            return
        groups, self.groups, self.default = list(self.groups.values()), {}, None
        for group in reversed(groups):
            group.close()
        self.made = 0
        self.made_local.clear()
        callbacks, self.on_close = self.on_close, []
        for callback in callbacks:
            callback()

    def replace_default(self, group: ProcessGroup) -> None:
        """Close every group and go on with `group`, over the same store."""
        callbacks, self.on_close = self.on_close, []
        self.close()
        self.on_close = callbacks
        self.default = self.groups[group.key] = group
        self.made = 1


class _Members(type):
    @property
    def WORLD(cls) -> ProcessGroup | None:
        """The default group, or None."""
        return current().default


class GroupMember(metaclass=_Members):
    """Names of special groups.

    `WORLD` is the default group; `NON_GROUP_MEMBER` is what `new_group` returns on a rank that
    does not belong to the new group.
    """

    NON_GROUP_MEMBER = -100


group = GroupMember
"""torch's other name for it: `dist.group.WORLD`."""


process_world = World()
"""The world of this process, unless `use` says otherwise."""

_context_world: ContextVar[World | None] = ContextVar("unisono_world", default=None)
repeat.set_world(_context_world, stream_variable, ProcessGroup, Work)


def current() -> World:
    """Return the world of the current thread or task."""
    return _context_world.get() or process_world


@contextlib.contextmanager
def use(world: World) -> Iterator[World]:
    """Make `world` the current one inside the with block."""
    token = _context_world.set(world)
    try:
        yield world
    finally:
        _context_world.reset(token)


def resolve(group: Any = None) -> ProcessGroup | None:
    """Return the group meant by an argument; None if this rank is not a member.

    Raises:
        NotInitializedError: None was given and there is no default group.
        ArgumentTypeError: Not a group.
    """
    if group is None:
        default = current().default
        if default is None:
            raise NotInitializedError("the default process group has not been initialized")
        return default
    if isinstance(group, ProcessGroup):
        return group
    if isinstance(group, int) and group == GroupMember.NON_GROUP_MEMBER:
        return None
    raise ArgumentTypeError(f"group must be a ProcessGroup, got {type(group).__name__}")


def member_group(group: Any, call: str) -> ProcessGroup | None:
    """As `resolve`, with torch's warning on ranks that are not members."""
    found = resolve(group)
    if found is None:
        warnings.warn(
            f"running {call} on a rank that does not belong to the given group does nothing",
            stacklevel=3,
        )
    return found
